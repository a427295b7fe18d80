"""The resources a run needs (``crrl train --dry-run``): memory per GPU, and seconds per step.

GPU speeds are assumptions; memory is tested (tests/assembly/test_memory.py).
"""

from coderepairrl.assembly.sizing.architecture import Architecture
from coderepairrl.assembly.sizing.estimate import GB, Estimate, estimate, learner_alone
from coderepairrl.assembly.sizing.fit import DoesNotFit, require
from coderepairrl.assembly.sizing.learner import LearnerMemory, learner_memory
from coderepairrl.assembly.sizing.published import KNOWN, PUBLISHED

__all__ = [
    "GB",
    "KNOWN",
    "PUBLISHED",
    "Architecture",
    "DoesNotFit",
    "Estimate",
    "LearnerMemory",
    "estimate",
    "learner_alone",
    "learner_memory",
    "require",
]
