"""What a run will need, by arithmetic: memory on each GPU, and about how long a step takes (``crrl train --dry-run``).

Nothing here loads a model or torch. Memory is compared with what small models take (tests/assembly/test_memory.py);
times are estimates that were never checked on a GPU.
"""

from coderepairrl.assembly.sizing.architecture import KNOWN, Architecture
from coderepairrl.assembly.sizing.estimate import GB, Estimate, estimate, learner_alone
from coderepairrl.assembly.sizing.fit import DoesNotFit, require
from coderepairrl.assembly.sizing.learner import LearnerMemory, learner_memory

__all__ = [
    "GB",
    "KNOWN",
    "Architecture",
    "DoesNotFit",
    "Estimate",
    "LearnerMemory",
    "estimate",
    "learner_alone",
    "learner_memory",
    "require",
]
