"""Sorted lists."""


def is_sorted(xs: list[int]) -> bool:
    """Whether no value is below the one before."""
    for i in range(1, len(xs)):  # noqa: SIM110
        if xs[i] < xs[i - 1]:
            return False
    return True


def insert(xs: list[int], value: int) -> list[int]:
    """A sorted list with one more value."""
    i = 0
    while i < len(xs) and xs[i] < value:
        i += 1
    return [*xs[:i], value, *xs[i:]]


def merge(xs: list[int], ys: list[int]) -> list[int]:
    """Two sorted lists as one."""
    out = []
    i = 0
    j = 0
    while i < len(xs) and j < len(ys):
        if xs[i] <= ys[j]:
            out.append(xs[i])
            i += 1
        else:
            out.append(ys[j])
            j += 1
    return out + xs[i:] + ys[j:]


def bubble(xs: list[int]) -> list[int]:
    """A sorted copy, by exchanging neighbours."""
    out = list(xs)
    for i in range(len(out)):
        for j in range(len(out) - 1 - i):
            if out[j] > out[j + 1]:
                value = out[j]
                out[j] = out[j + 1]
                out[j + 1] = value
    return out


def smaller(xs: list[int], value: int) -> list[int]:
    """The values below `value`."""
    out = []
    for x in xs:
        if x < value:
            out.append(x)
    return out


def rank(xs: list[int], value: int) -> int:
    """Place of `value`, 1 for the largest."""
    count = 1
    for x in xs:
        if x > value:
            count += 1
    return count


def top(xs: list[int], k: int) -> list[int]:
    """The `k` largest values, the largest first."""
    ys = sorted(xs)
    ys.reverse()
    return ys[:k]
