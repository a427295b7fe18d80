"""``crrl check``: prerequisites, and exams of implementations of interfaces."""
