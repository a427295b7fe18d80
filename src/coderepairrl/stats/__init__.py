"""Statistics: no number is printed without its interval."""

from coderepairrl.stats.intervals import Interval, bootstrap_mean, paired_difference, sign_flip_test, wilson
from coderepairrl.stats.ranking import Ranking, interval, rank_correlation

__all__ = [
    "Interval",
    "Ranking",
    "bootstrap_mean",
    "interval",
    "paired_difference",
    "rank_correlation",
    "sign_flip_test",
    "wilson",
]
