"""Scores and boards."""


def winner(a: int, b: int) -> str:
    """Player with more points."""
    if a > b:
        return "a"
    if b > a:
        return "b"
    return "none"


def score(hits: int, misses: int) -> int:
    """Three points a hit, one off for a miss, never below 0."""
    total = hits * 3 - misses
    return max(total, 0)


def level(points: int, size: int) -> int:
    """Level reached with `points`, from 1."""
    return points // size + 1


def streak(xs: list[int]) -> int:
    """Wins (1) at the end of the list."""
    count = 0
    for x in reversed(xs):
        if x != 1:
            break
        count += 1
    return count


def move(x: int, step: int, size: int) -> int:
    """Position of a piece after `step` on a ring."""
    return (x + step) % size


def best_of(xs: list[int], ys: list[int]) -> int:
    """Rounds that the first player won minus those that the second won."""
    total = 0
    for i in range(len(xs)):
        if xs[i] > ys[i]:
            total += 1
        elif xs[i] < ys[i]:
            total -= 1
    return total


def nim(n: int, k: int) -> bool:
    """Whether the first player wins, taking 1 to `k` of `n`."""
    return n % (k + 1) != 0
