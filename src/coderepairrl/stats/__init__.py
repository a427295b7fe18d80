"""Statistics: no number is printed without its interval."""

from coderepairrl.stats.intervals import Interval, bootstrap_mean, paired_difference, sign_flip_test, wilson

__all__ = ["Interval", "bootstrap_mean", "paired_difference", "sign_flip_test", "wilson"]
