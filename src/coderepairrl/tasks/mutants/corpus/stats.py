"""Summaries of a list of numbers."""


def mean(xs: list[float]) -> float:
    """Arithmetic mean."""
    total = 0.0
    for x in xs:
        total = total + x
    return total / len(xs)


def median(xs: list[float]) -> float:
    """Middle value, or the mean of the middle two."""
    ys = sorted(xs)
    mid = len(ys) // 2
    if len(ys) % 2 == 1:
        return ys[mid]
    return (ys[mid - 1] + ys[mid]) / 2


def spread(xs: list[int]) -> int:
    """Largest minus smallest value; 0 for an empty list."""
    if not xs:
        return 0
    return max(xs) - min(xs)


def variance(xs: list[float]) -> float:
    """Mean squared distance from the mean."""
    mid = sum(xs) / len(xs)
    total = 0.0
    for x in xs:
        total += (x - mid) ** 2
    return total / len(xs)


def count_above(xs: list[int], limit: int) -> int:
    """Number of values greater than `limit`."""
    count = 0
    for x in xs:
        if x > limit:
            count += 1
    return count


def weighted(xs: list[float], ys: list[float]) -> float:
    """Mean of `xs` with weights `ys`."""
    total = 0.0
    for i in range(len(xs)):
        total += xs[i] * ys[i]
    return total / sum(ys)
