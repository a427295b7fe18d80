"""Lists of numbers."""


def index_of(xs: list[int], value: int) -> int:
    """Index of the first `value`, or -1."""
    for i in range(len(xs)):
        if xs[i] == value:
            return i
    return -1


def last_index(xs: list[int], value: int) -> int:
    """Index of the last `value`, or -1."""
    result = -1
    for i in range(len(xs)):
        if xs[i] == value:
            result = i
    return result


def rotate(xs: list[int], k: int) -> list[int]:
    """The list turned left by `k`."""
    if not xs:
        return []
    k = k % len(xs)
    return xs[k:] + xs[:k]


def chunks(xs: list[int], size: int) -> list[list[int]]:
    """Consecutive pieces of at most `size`."""
    out = []
    for i in range(0, len(xs), size):
        out.append(xs[i : i + size])
    return out


def unique(xs: list[int]) -> list[int]:
    """Each value once, in order."""
    out: list[int] = []
    for x in xs:
        if x not in out:
            out.append(x)
    return out


def flatten(xs: list[list[int]]) -> list[int]:
    """All inner values in one list."""
    out = []
    for ys in xs:
        for y in ys:
            out.append(y)
    return out


def every_other(xs: list[int]) -> list[int]:
    """The values at even places."""
    out = []
    for i in range(len(xs)):
        if i % 2 == 0:
            out.append(xs[i])
    return out


def interleave(xs: list[int], ys: list[int]) -> list[int]:
    """Alternate values of both, up to the shorter."""
    out = []
    for i in range(min(len(xs), len(ys))):
        out.append(xs[i])
        out.append(ys[i])
    return out
