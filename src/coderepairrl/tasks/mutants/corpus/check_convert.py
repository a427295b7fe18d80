"""Checks of `convert`."""

from coderepairrl.tasks.mutants.corpus.convert import (
    digits,
    fahrenheit,
    from_binary,
    from_digits,
    letter,
    percent,
    to_binary,
    yes_no,
)

assert to_binary(5) == "101"
assert to_binary(0) == "0"
assert to_binary(6) == "110"
assert to_binary(1) == "1"
assert from_binary("101") == 5
assert from_binary("0") == 0
assert from_binary("110") == 6
assert digits(123) == [1, 2, 3]
assert digits(40) == [4, 0]
assert digits(7) == [7]
assert from_digits([1, 2], 10) == 12
assert from_digits([1, 0, 1], 2) == 5
assert from_digits([], 8) == 0
assert fahrenheit(100) == 212
assert fahrenheit(0) == 32
assert fahrenheit(-40) == -40
assert yes_no(" Yes") is True
assert yes_no("y") is True
assert yes_no("no") is False
assert percent(1, 4) == 25
assert percent(3, 0) == 0
assert percent(5, 5) == 100
assert letter(0) == "a"
assert letter(27) == "b"
assert letter(3) == "d"
