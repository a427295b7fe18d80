"""Judging a patch by the task's checks in a fresh sandbox.

`checks` applies, restores and runs; `reports` parses test runners' output; `witness` guards runs in Python against
early exits; `harness` judges by a benchmark's rules.
"""

from coderepairrl.grading.checks import (
    CANNOT,
    Verdict,
    apply_patch,
    grade_apart,
    grade_patch,
    judge,
    judged_in,
    restore,
    try_command,
)
from coderepairrl.grading.harness import RULES, rules_of
from coderepairrl.grading.reports import RESULTS, Outcome, lacking
from coderepairrl.grading.witness import results_of

__all__ = [
    "CANNOT",
    "RESULTS",
    "RULES",
    "Outcome",
    "Verdict",
    "apply_patch",
    "grade_apart",
    "grade_patch",
    "judge",
    "judged_in",
    "lacking",
    "restore",
    "results_of",
    "rules_of",
    "try_command",
]
