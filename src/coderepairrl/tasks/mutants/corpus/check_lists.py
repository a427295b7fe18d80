"""Checks of `lists`."""

from coderepairrl.tasks.mutants.corpus.lists import (
    chunks,
    every_other,
    flatten,
    index_of,
    interleave,
    last_index,
    rotate,
    unique,
)

assert index_of([5, 3, 5], 5) == 0
assert index_of([5, 3, 5], 3) == 1
assert index_of([1, 2], 9) == -1
assert index_of([1, 2, 6], 6) == 2
assert last_index([5, 3, 5], 5) == 2
assert last_index([5, 3, 5], 3) == 1
assert last_index([1, 2], 9) == -1
assert last_index([7], 7) == 0
assert rotate([1, 2, 3], 1) == [2, 3, 1]
assert rotate([1, 2, 3], 5) == [3, 1, 2]
assert rotate([], 2) == []
assert rotate([4, 5], 0) == [4, 5]
assert chunks([1, 2, 3], 2) == [[1, 2], [3]]
assert chunks([1, 2, 3, 4], 2) == [[1, 2], [3, 4]]
assert chunks([], 3) == []
assert unique([1, 2, 1, 3]) == [1, 2, 3]
assert unique([4, 4]) == [4]
assert unique([]) == []
assert flatten([[1], [2, 3]]) == [1, 2, 3]
assert flatten([[], [4]]) == [4]
assert every_other([1, 2, 3]) == [1, 3]
assert every_other([7, 8]) == [7]
assert every_other([9, 6, 4, 1, 5]) == [9, 4, 5]
assert interleave([1, 2], [3, 4]) == [1, 3, 2, 4]
assert interleave([1, 2], [5]) == [1, 5]
assert interleave([6], [7, 8]) == [6, 7]
