"""Judging a patch by the task's checks in a fresh sandbox.

`checks` applies, restores and runs; `reports` reads what test runners say of single tests; `witness` sees to it that a
run in Python cannot end early and be taken for one that passed; `harness` judges by a
benchmark's own rules instead.
"""

from coderepairrl.grading.checks import CANNOT, Verdict, apply, grade, grade_apart, judge, judged_in, tried
from coderepairrl.grading.harness import RULES, rules_of
from coderepairrl.grading.reports import RESULTS, Outcome, Outcomes, lacking
from coderepairrl.grading.witness import results_of

__all__ = [
    "CANNOT",
    "RESULTS",
    "RULES",
    "Outcome",
    "Outcomes",
    "Verdict",
    "apply",
    "grade",
    "grade_apart",
    "judge",
    "judged_in",
    "lacking",
    "results_of",
    "rules_of",
    "tried",
]
