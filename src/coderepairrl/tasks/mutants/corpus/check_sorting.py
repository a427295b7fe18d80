"""Checks of `sorting`."""

from coderepairrl.tasks.mutants.corpus.sorting import bubble, insert, is_sorted, merge, rank, smaller, top

assert is_sorted([1, 2, 2]) is True
assert is_sorted([2, 1]) is False
assert is_sorted([1, 3, 2]) is False
assert is_sorted([]) is True
assert insert([1, 3], 2) == [1, 2, 3]
assert insert([1, 3], 4) == [1, 3, 4]
assert insert([], 5) == [5]
assert insert([2, 6], 1) == [1, 2, 6]
assert merge([1, 3], [2, 4]) == [1, 2, 3, 4]
assert merge([1], []) == [1]
assert merge([], [7]) == [7]
assert merge([5, 6], [1]) == [1, 5, 6]
assert bubble([3, 1, 2]) == [1, 2, 3]
assert bubble([4, 3, 2, 1]) == [1, 2, 3, 4]
assert bubble([5]) == [5]
assert smaller([1, 5, 3], 4) == [1, 3]
assert smaller([4], 4) == []
assert smaller([9, 2], 5) == [2]
assert rank([5, 9, 7], 7) == 2
assert rank([5, 9, 7], 9) == 1
assert rank([4, 4], 4) == 1
assert rank([8, 6, 3], 1) == 4
assert top([3, 9, 5], 2) == [9, 5]
assert top([1], 1) == [1]
assert top([4, 7, 6], 1) == [7]
