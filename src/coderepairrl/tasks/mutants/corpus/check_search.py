"""Checks of `search`."""

from coderepairrl.tasks.mutants.corpus.search import argmax, argmin, binary_search, lower_bound, peak, second

assert binary_search([1, 3, 5, 7], 3) == 1
assert binary_search([1, 3, 5, 7], 7) == 3
assert binary_search([1, 3, 5], 4) == -1
assert binary_search([1, 3, 5], 1) == 0
assert binary_search([], 1) == -1
assert binary_search([2], 2) == 0
assert lower_bound([1, 3, 5], 3) == 1
assert lower_bound([1, 3, 5], 4) == 2
assert lower_bound([1, 3, 5], 9) == 3
assert lower_bound([2, 2, 2], 2) == 0
assert lower_bound([1, 2, 4, 8], 0) == 0
assert argmax([3, 9, 2]) == 1
assert argmax([4, 4]) == 0
assert argmax([1, 2, 7]) == 2
assert argmax([8, 5]) == 0
assert argmin([3, 9, 2]) == 2
assert argmin([4, 4]) == 0
assert argmin([5, 1, 7]) == 1
assert argmin([1, 5]) == 0
assert second([3, 9, 5]) == 5
assert second([9, 3]) == 3
assert second([1, 2, 8, 7]) == 7
assert second([4, 6, 5, 1]) == 5
assert second([2, 1, 3]) == 2
assert peak([1, 5, 2]) == 1
assert peak([1, 2, 3]) == -1
assert peak([3, 2, 4, 1]) == 2
assert peak([2, 2, 1]) == -1
assert peak([1, 2, 2]) == -1
