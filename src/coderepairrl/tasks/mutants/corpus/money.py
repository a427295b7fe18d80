"""Amounts in whole cents."""


def discount(price: int, rate: int) -> int:
    """`price` less `rate` percent."""
    return price - price * rate // 100


def with_tax(price: int, rate: int) -> int:
    """`price` and `rate` percent more."""
    return price + price * rate // 100


def split_bill(total: int, n: int) -> list[int]:
    """`total` in `n` parts, the first ones a cent larger."""
    size = total // n
    rest = total % n
    out = []
    for i in range(n):
        if i < rest:
            out.append(size + 1)
        else:
            out.append(size)
    return out


def savings(total: int, rate: int, years: int) -> int:
    """`total` after some years of interest."""
    for _ in range(years):
        total += total * rate // 100
    return total


def change(total: int, coins: list[int]) -> list[int]:
    """Coins that make up `total`, the largest first."""
    out = []
    for coin in coins:
        while total >= coin:
            out.append(coin)
            total -= coin
    return out


def fee(price: int, limit: int) -> int:
    """A tenth of what lies above `limit`."""
    if price <= limit:
        return 0
    return (price - limit) // 10


def cheapest(prices: list[int], limit: int) -> int:
    """The lowest price of at least `limit`, or -1."""
    best = -1
    for price in prices:
        if price >= limit and (best == -1 or price < best):
            best = price
    return best
