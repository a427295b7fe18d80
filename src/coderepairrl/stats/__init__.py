"""Statistics: no number is printed without its interval."""

from coderepairrl.stats.intervals import (
    TOO_FEW,
    Interval,
    is_share,
    mean_interval,
    paired_difference,
    sign_flip_test,
    tango,
    wilson,
)
from coderepairrl.stats.ranking import Ranking, interval, rank_correlation

__all__ = [
    "TOO_FEW",
    "Interval",
    "Ranking",
    "interval",
    "is_share",
    "mean_interval",
    "paired_difference",
    "rank_correlation",
    "sign_flip_test",
    "tango",
    "wilson",
]
