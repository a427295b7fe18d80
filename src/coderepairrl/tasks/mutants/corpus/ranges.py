"""Intervals from `lo` to `hi`, `hi` not included."""


def overlaps(a: int, b: int, x: int, y: int) -> bool:
    """Whether ``a..b`` and ``x..y`` share a point."""
    return a < y and x < b


def contains(lo: int, hi: int, x: int) -> bool:
    """Whether `x` lies in the interval."""
    return lo <= x and x < hi


def shared(a: int, b: int, x: int, y: int) -> int:
    """Length of the overlap of two intervals."""
    start = max(a, x)
    end = min(b, y)
    return max(0, end - start)


def gap(a: int, b: int, x: int, y: int) -> int:
    """Distance between two intervals, 0 if they touch."""
    if b < x:
        return x - b
    if y < a:
        return a - y
    return 0


def steps(lo: int, hi: int, step: int) -> list[int]:
    """The points of the interval, `step` apart."""
    out = []
    while lo < hi:
        out.append(lo)
        lo += step
    return out


def scale(x: float, lo: float, hi: float) -> float:
    """Position of `x` in the interval, from 0 to 1."""
    if hi == lo:
        return 0.0
    return (x - lo) / (hi - lo)
