"""Checks of `stock`."""

from coderepairrl.tasks.mutants.corpus.stock import boxes, days_left, fits, heaviest, missing, reorder, total_price

assert boxes(10, 4) == 3
assert boxes(8, 4) == 2
assert boxes(1, 5) == 1
assert reorder(3, 5, 10) == 7
assert reorder(6, 5, 10) == 0
assert reorder(5, 5, 8) == 3
assert total_price([2, 3], [4, 1]) == 11
assert total_price([5], [2]) == 10
assert total_price([1, 2, 6], [3, 4, 1]) == 17
assert missing([1, 2, 3], [2]) == [1, 3]
assert missing([4], [4]) == []
assert fits(2, 3, 3) is True
assert fits(4, 3, 3) is False
assert fits(2, 5, 4) is False
assert fits(4, 4, 4) is True
assert days_left(10, 3) == 3
assert days_left(7, 0) == -1
assert days_left(5, 1) == 5
assert heaviest([3, 9, 5], 6) == 5
assert heaviest([8], 4) == 0
assert heaviest([2, 4, 3], 4) == 4
