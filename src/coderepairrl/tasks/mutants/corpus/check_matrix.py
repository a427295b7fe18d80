"""Checks of `matrix`."""

from coderepairrl.tasks.mutants.corpus.matrix import column, count_cells, dot, identity, row_sums, trace, transpose

assert transpose([[1, 2], [3, 4]]) == [[1, 3], [2, 4]]
assert transpose([[1, 2, 3]]) == [[1], [2], [3]]
assert transpose([[1], [2]]) == [[1, 2]]
assert row_sums([[1, 2], [3, 4]]) == [3, 7]
assert row_sums([[5]]) == [5]
assert trace([[1, 2], [3, 4]]) == 5
assert trace([[7]]) == 7
assert trace([[2, 0, 1], [1, 3, 1], [5, 6, 4]]) == 9
assert identity(2) == [[1, 0], [0, 1]]
assert identity(1) == [[1]]
assert identity(3) == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
assert column([[1, 2], [3, 4]], 0) == [1, 3]
assert column([[1, 2], [3, 4]], 1) == [2, 4]
assert dot([1, 2], [3, 4]) == 11
assert dot([2], [5]) == 10
assert dot([1, 0, 2], [4, 5, 6]) == 16
assert count_cells([[1, 2], [2, 3]], 2) == 2
assert count_cells([[1]], 5) == 0
assert count_cells([[4, 4], [1, 4]], 4) == 3
