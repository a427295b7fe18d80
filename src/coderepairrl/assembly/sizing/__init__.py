"""What a run will need (``crrl train --dry-run``): memory on each GPU, and seconds of a step by its tokens.

Nothing here loads a model or torch. Memory is compared with what small models take (tests/assembly/test_memory.py);
the speeds that a GPU is taken to have are assumptions.
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
