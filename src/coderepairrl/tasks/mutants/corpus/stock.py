"""Stock on shelves."""


def boxes(n: int, size: int) -> int:
    """Boxes needed for `n` things."""
    return (n + size - 1) // size


def reorder(count: int, limit: int, size: int) -> int:
    """Number to order to fill the shelf."""
    if count > limit:
        return 0
    return size - count


def total_price(prices: list[int], counts: list[int]) -> int:
    """Total price of an order."""
    total = 0
    for i in range(len(prices)):
        total += prices[i] * counts[i]
    return total


def missing(xs: list[int], ys: list[int]) -> list[int]:
    """Values of `xs` that `ys` lacks."""
    out = []
    for x in xs:
        if x not in ys:
            out.append(x)
    return out


def fits(width: int, height: int, size: int) -> bool:
    """Whether a box fits through a square hole."""
    return width <= size and height <= size


def days_left(count: int, rate: int) -> int:
    """Full days until the shelf is empty, -1 for never."""
    if rate == 0:
        return -1
    return count // rate


def heaviest(xs: list[int], limit: int) -> int:
    """The largest value up to `limit`, or 0."""
    best = 0
    for x in xs:
        if x <= limit and x > best:
            best = x
    return best
