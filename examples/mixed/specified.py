"""Functions to write from their docstrings."""


def runs(values: list[int]) -> list[tuple[int, int]]:
    """Shorten a list to its runs of equal values. Each run becomes a pair of the value and its length. The runs come in
    the order of the list.

    >>> runs([3, 3, 5])
    [(3, 2), (5, 1)]
    >>> runs([])
    []
    """
    found: list[tuple[int, int]] = []
    for value in values:
        if found and found[-1][0] == value:
            found[-1] = (value, found[-1][1] + 1)
        else:
            found.append((value, 1))
    return found


def clamp_all(values: list[int], low: int, high: int) -> list[int]:
    """Bring all values into the range from low to high. Values below it become low, values above it become high. The
    others stay as they are.

    >>> clamp_all([1, 5, 9], 2, 8)
    [2, 5, 8]
    """
    result = []
    for value in values:
        if value < low:
            value = low
        elif value > high:
            value = high
        result.append(value)
    return result


def initials(name: str) -> str:
    """Give the initials of a name, as capital letters. Words are separated by blanks. A name without words has no
    initials.

    >>> initials("ada lovelace")
    'AL'
    >>> initials("")
    ''
    """
    letters = ""
    for word in name.split():
        letters += word[0].upper()
    return letters


def digit_sum(number: int) -> int:
    """Add up the decimal digits of a number. The sign does not count. The sum of zero is zero.

    >>> digit_sum(-407)
    11
    """
    number = abs(number)
    total = 0
    while number:
        total += number % 10
        number //= 10
    return total


def middle(values: list[int]) -> int:
    """Find the value in the middle of the sorted list. Of an even number of values it is the lower one of both in the
    middle. The list has at least one value.

    >>> middle([9, 1, 5])
    5
    >>> middle([4, 2])
    2
    """
    ordered = sorted(values)
    half = (len(ordered) - 1) // 2
    if half < 0:
        raise ValueError("no values")
    return ordered[half]
