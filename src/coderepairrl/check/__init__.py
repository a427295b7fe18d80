"""``crrl check``: what this machine has and lacks, and the exams that every implementation of a seam sits."""

from coderepairrl.check.exams import KINDS, examine
from coderepairrl.check.report import Entry, machine, table

__all__ = ["KINDS", "Entry", "examine", "machine", "table"]
