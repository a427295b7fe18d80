"""Statistics: intervals, tests, and measures and accounts of episodes."""

from coderepairrl.stats.intervals import (
    TOO_FEW,
    Interval,
    mean_interval,
    paired_difference,
    sign_flip_test,
    tango,
    wilson,
)
from coderepairrl.stats.measures import COUNTS, NAMES, Noted, Notes, Summary, measures, pair, paired_changes, summarise
from coderepairrl.stats.outcomes import is_resolved, outcomes

__all__ = [
    "COUNTS",
    "NAMES",
    "TOO_FEW",
    "Interval",
    "Noted",
    "Notes",
    "Summary",
    "is_resolved",
    "mean_interval",
    "measures",
    "outcomes",
    "pair",
    "paired_changes",
    "paired_difference",
    "sign_flip_test",
    "summarise",
    "tango",
    "wilson",
]
