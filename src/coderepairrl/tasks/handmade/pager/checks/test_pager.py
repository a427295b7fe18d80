from pager import Pager

letters = Pager("abcdefg", size=3)
assert letters.count == 3
assert letters.page(1) == ["a", "b", "c"]
assert letters.page(3) == ["g"]
assert letters.has_next(2) and not letters.has_next(3)
assert Pager([], size=3).page(1) == []

full = Pager(range(20), size=10)
assert full.count == 2, full.count
assert not full.has_next(2)
assert full.page(2) == list(range(10, 20))
assert Pager(range(1), size=1).count == 1
for n in range(1, 30):
    pager = Pager(range(n), size=4)
    assert sum(len(pager.page(i + 1)) for i in range(pager.count)) == n
    assert pager.page(pager.count), f"{n} items end with an empty page"
