"""How what ships with the package was made. Not part of the wheel."""
