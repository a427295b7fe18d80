"""Conversions of numbers and text."""


def to_binary(n: int) -> str:
    """`n` in binary digits."""
    if n == 0:
        return "0"
    out = ""
    while n > 0:
        out = str(n % 2) + out
        n = n // 2
    return out


def from_binary(text: str) -> int:
    """The number that binary digits stand for."""
    total = 0
    for char in text:
        total = total * 2 + int(char)
    return total


def digits(n: int) -> list[int]:
    """Decimal digits, the highest first."""
    out: list[int] = []
    while n > 0:
        out.insert(0, n % 10)
        n = n // 10
    return out


def from_digits(xs: list[int], base: int) -> int:
    """The number that digits of a base stand for."""
    total = 0
    for x in xs:
        total = total * base + x
    return total


def fahrenheit(x: float) -> float:
    """Celsius to Fahrenheit."""
    return x * 9 / 5 + 32


def yes_no(text: str) -> bool:
    """Whether an answer means yes."""
    text = text.strip().lower()
    return text == "yes" or text == "y"


def percent(x: int, total: int) -> int:
    """`x` in percent of `total`; 0 if `total` is 0."""
    if total == 0:
        return 0
    return 100 * x // total


def letter(i: int) -> str:
    """The `i`-th letter, from 0 and around the alphabet."""
    return chr(ord("a") + i % 26)
