"""What tests ask of intervals."""

from __future__ import annotations

from coderepairrl.stats import Interval


def ends(interval: Interval | None) -> tuple[float, float]:
    """Both ends, which there are."""
    assert interval is not None and interval.low is not None and interval.high is not None
    return interval.low, interval.high


def width(interval: Interval) -> float:
    low, high = ends(interval)
    return high - low


def within(value: float, interval: Interval) -> bool:
    low, high = ends(interval)
    return low <= value <= high
