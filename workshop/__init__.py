"""Scripts that make the shipped policy and the generated documentation. Not part of the wheel."""
