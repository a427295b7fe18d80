"""Judging a patch by the task's checks in a fresh sandbox.

`checks` applies, restores and runs; `reports` reads what test runners say of single tests; `witness` sees to it that a
run in Python cannot end early and be taken for one that passed; `harness` asks a benchmark's own harness instead.
"""

from coderepairrl.grading.checks import Verdict, apply, grade, judge, reported
from coderepairrl.grading.harness import PREFIX as HARNESS
from coderepairrl.grading.reports import RESULTS, Outcome, Outcomes, lacking
from coderepairrl.grading.witness import results_of

__all__ = [
    "HARNESS",
    "RESULTS",
    "Outcome",
    "Outcomes",
    "Verdict",
    "apply",
    "grade",
    "judge",
    "lacking",
    "reported",
    "results_of",
]
