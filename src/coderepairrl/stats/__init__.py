"""Statistics: intervals, tests, and measures and accounts of episodes."""

from coderepairrl.stats.intervals import (
    TOO_FEW,
    Interval,
    mean_interval,
    paired_difference,
    sign_flip_test,
    tango_interval,
    wilson_interval,
)
from coderepairrl.stats.measures import (
    COUNTS,
    NAMES,
    Notes,
    RewardNotes,
    Summary,
    measure_episode,
    pair_measures,
    paired_changes,
    summarise,
)
from coderepairrl.stats.outcomes import is_resolved, summarise_outcomes

__all__ = [
    "COUNTS",
    "NAMES",
    "TOO_FEW",
    "Interval",
    "Notes",
    "RewardNotes",
    "Summary",
    "is_resolved",
    "mean_interval",
    "measure_episode",
    "pair_measures",
    "paired_changes",
    "paired_difference",
    "sign_flip_test",
    "summarise",
    "summarise_outcomes",
    "tango_interval",
    "wilson_interval",
]
