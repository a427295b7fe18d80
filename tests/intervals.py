"""Ends and widths of intervals."""

from __future__ import annotations

from coderepairrl.stats.intervals import Interval


def read_ends(interval: Interval | None) -> tuple[float, float]:
    """Both ends; fails if the interval has none."""
    assert interval is not None and interval.low is not None and interval.high is not None
    return interval.low, interval.high


def compute_width(interval: Interval) -> float:
    low, high = read_ends(interval)
    return high - low


def is_within(value: float, interval: Interval) -> bool:
    low, high = read_ends(interval)
    return low <= value <= high
