"""Whole numbers."""


def clamp(x: int, lo: int, hi: int) -> int:
    """The value nearest to `x` between `lo` and `hi`."""
    if x < lo:
        return lo
    if x > hi:
        return hi
    return x


def gcd(a: int, b: int) -> int:
    """Greatest common divisor."""
    while b > 0:
        rest = a % b
        a = b
        b = rest
    return a


def factorial(n: int) -> int:
    """Product of the numbers up to `n`."""
    result = 1
    for i in range(2, n + 1):
        result = result * i
    return result


def power(x: int, n: int) -> int:
    """`x` multiplied `n` times."""
    result = 1
    while n > 0:
        if n % 2 == 1:
            result = result * x
        x = x * x
        n = n // 2
    return result


def is_prime(n: int) -> bool:
    """Whether `n` has no divisor but itself and 1."""
    if n < 2:
        return False
    i = 2
    while i * i <= n:
        if n % i == 0:
            return False
        i += 1
    return True


def digit_sum(n: int) -> int:
    """Sum of the decimal digits."""
    total = 0
    while n > 0:
        total += n % 10
        n = n // 10
    return total


def sign(x: int) -> int:
    """-1, 0 or 1."""
    if x > 0:
        return 1
    if x < 0:
        return -1
    return 0


def count_divisors(n: int) -> int:
    """Number of divisors of `n`."""
    count = 0
    for i in range(1, n + 1):
        if n % i == 0:
            count += 1
    return count
