"""The resources a run needs (``crrl train --dry-run``): memory per GPU, and seconds per step.

GPU speeds are assumptions; memory is tested (tests/plan/test_memory.py).
"""

from coderepairrl.plan.sizing.architecture import Architecture
from coderepairrl.plan.sizing.estimate import GB, Estimate, estimate, learner_alone
from coderepairrl.plan.sizing.fit import DoesNotFit, require
from coderepairrl.plan.sizing.learner import LearnerMemory, learner_memory
from coderepairrl.plan.sizing.published import KNOWN, PUBLISHED

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
