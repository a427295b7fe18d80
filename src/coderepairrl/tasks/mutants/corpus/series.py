"""Sequences of numbers."""


def fibonacci(n: int) -> int:
    """The `n`-th Fibonacci number, from 0."""
    a = 0
    b = 1
    for _ in range(n):
        c = a + b
        a = b
        b = c
    return a


def triangle(n: int) -> int:
    """Sum of the numbers up to `n`."""
    return n * (n + 1) // 2


def collatz(n: int) -> int:
    """Steps until the Collatz rule reaches 1."""
    count = 0
    while n != 1:
        if n % 2 == 0:  # noqa: SIM108
            n = n // 2
        else:
            n = 3 * n + 1
        count += 1
    return count


def running_max(xs: list[int]) -> list[int]:
    """The largest value so far, at each place."""
    out = []
    best = xs[0]
    for x in xs:
        best = max(best, x)
        out.append(best)
    return out


def running_sum(xs: list[int]) -> list[int]:
    """The sum so far, at each place."""
    out = []
    total = 0
    for x in xs:
        total += x
        out.append(total)
    return out


def deltas(xs: list[int]) -> list[int]:
    """Each value less the one before."""
    out = []
    for i in range(1, len(xs)):
        out.append(xs[i] - xs[i - 1])
    return out


def longest_run(xs: list[int]) -> int:
    """Length of the longest run of equal values in a non-empty list."""
    best = 1
    count = 1
    for i in range(1, len(xs)):
        if xs[i] == xs[i - 1]:
            count += 1
        else:
            count = 1
        best = max(best, count)
    return best


def squares(n: int) -> list[int]:
    """The first `n` square numbers."""
    out = []
    for i in range(1, n + 1):
        out.append(i * i)
    return out
