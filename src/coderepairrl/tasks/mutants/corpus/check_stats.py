"""Checks of `stats`."""

from coderepairrl.tasks.mutants.corpus.stats import count_above, mean, median, spread, variance, weighted

assert mean([1, 2, 3]) == 2
assert mean([4]) == 4
assert mean([5, 8, 2, 1]) == 4
assert median([3, 1, 2]) == 2
assert median([4, 1, 3, 2]) == 2.5
assert median([9, 7]) == 8
assert median([5, 5, 1, 9, 8]) == 5
assert spread([4, 9, 2]) == 7
assert spread([]) == 0
assert spread([3]) == 0
assert variance([1, 3]) == 1
assert variance([2, 2, 2]) == 0
assert variance([0, 4, 8, 0]) == 11
assert count_above([1, 5, 9], 4) == 2
assert count_above([4, 4], 4) == 0
assert count_above([7, 2, 8, 3], 2) == 3
assert weighted([2, 4], [1, 3]) == 3.5
assert weighted([5], [2]) == 5
assert weighted([1, 2, 6], [2, 1, 1]) == 2.5
