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
    Pairs,
    RewardNotes,
    Summary,
    measure_episode,
    pair_measures,
    summarise,
)
from coderepairrl.stats.outcomes import estimate_pass_rates, is_resolved

__all__ = [
    "COUNTS",
    "NAMES",
    "TOO_FEW",
    "Interval",
    "Notes",
    "Pairs",
    "RewardNotes",
    "Summary",
    "estimate_pass_rates",
    "is_resolved",
    "mean_interval",
    "measure_episode",
    "pair_measures",
    "paired_difference",
    "sign_flip_test",
    "summarise",
    "tango_interval",
    "wilson_interval",
]
