"""Statistics: intervals, tests, and measures and accounts of episodes."""

from coderepairrl.stats.intervals import Interval, mean_interval, wilson_interval

__all__ = ["Interval", "mean_interval", "wilson_interval"]
