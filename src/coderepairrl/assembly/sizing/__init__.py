"""What a run will need (``crrl train --dry-run``): memory on each GPU by arithmetic, and time by a simulated loop.

Nothing here loads a model or torch. Memory is compared with what small models take (tests/assembly/test_memory.py),
the loop with the real one on a clock of its own (tests/assembly/test_simulation.py) and with short runs on a CPU
(benchmarks/loop.py); the speeds that a GPU is taken to have are assumptions.
"""

from coderepairrl.assembly.sizing.architecture import Architecture
from coderepairrl.assembly.sizing.estimate import GB, Estimate, estimate, learner_alone
from coderepairrl.assembly.sizing.fit import DoesNotFit, require
from coderepairrl.assembly.sizing.learner import LearnerMemory, learner_memory
from coderepairrl.assembly.sizing.loop import Evaluation
from coderepairrl.assembly.sizing.published import KNOWN, PUBLISHED

__all__ = [
    "GB",
    "KNOWN",
    "PUBLISHED",
    "Architecture",
    "DoesNotFit",
    "Estimate",
    "Evaluation",
    "LearnerMemory",
    "estimate",
    "learner_alone",
    "learner_memory",
    "require",
]
