from pager import Pager

letters = Pager("abcdefg", size=3)
assert letters.count == 3
assert letters.page(1) == ["a", "b", "c"]
assert letters.page(3) == ["g"]
assert letters.has_next(2) and not letters.has_next(3)
assert Pager([], size=3).page(1) == []
