"""Searches in lists."""


def binary_search(xs: list[int], value: int) -> int:
    """Index of `value` in a sorted list, or -1."""
    lo = 0
    hi = len(xs) - 1
    while lo <= hi:
        mid = (lo + hi) // 2
        if xs[mid] == value:
            return mid
        if xs[mid] < value:
            lo = mid + 1
        else:
            hi = mid - 1
    return -1


def lower_bound(xs: list[int], value: int) -> int:
    """First place at which `value` may be inserted into a sorted list."""
    lo = 0
    hi = len(xs)
    while lo < hi:
        mid = (lo + hi) // 2
        if xs[mid] < value:
            lo = mid + 1
        else:
            hi = mid
    return lo


def argmax(xs: list[int]) -> int:
    """Index of the first largest value."""
    best = 0
    for i in range(1, len(xs)):
        if xs[i] > xs[best]:
            best = i
    return best


def argmin(xs: list[int]) -> int:
    """Index of the first smallest value."""
    best = 0
    for i in range(1, len(xs)):
        if xs[i] < xs[best]:
            best = i
    return best


def second(xs: list[int]) -> int:
    """The second largest of at least two values."""
    best = max(xs[0], xs[1])
    prev = min(xs[0], xs[1])
    for x in xs[2:]:
        if x > best:
            prev = best
            best = x
        elif x > prev:
            prev = x
    return prev


def peak(xs: list[int]) -> int:
    """Index of the first value above both its neighbours, or -1."""
    for i in range(1, len(xs) - 1):
        if xs[i] > xs[i - 1] and xs[i] > xs[i + 1]:
            return i
    return -1
