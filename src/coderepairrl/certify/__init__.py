"""``crrl check``: what this machine has and lacks, and the exams that every implementation of a seam sits."""

from coderepairrl.certify.exams import KINDS, examine, examine_sandboxes
from coderepairrl.certify.machine import Entry, line, machine

__all__ = ["KINDS", "Entry", "examine", "examine_sandboxes", "line", "machine"]
