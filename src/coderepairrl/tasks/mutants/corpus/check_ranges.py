"""Checks of `ranges`."""

from coderepairrl.tasks.mutants.corpus.ranges import contains, gap, overlaps, scale, shared, steps

assert overlaps(0, 3, 2, 5) is True
assert overlaps(0, 3, 3, 5) is False
assert overlaps(4, 6, 1, 4) is False
assert overlaps(2, 5, 1, 3) is True
assert contains(1, 4, 1) is True
assert contains(1, 4, 4) is False
assert contains(1, 4, 0) is False
assert contains(1, 4, 3) is True
assert shared(0, 5, 3, 9) == 2
assert shared(0, 2, 4, 6) == 0
assert shared(1, 8, 2, 4) == 2
assert shared(3, 9, 0, 5) == 2
assert gap(0, 2, 5, 7) == 3
assert gap(5, 7, 0, 2) == 3
assert gap(0, 4, 2, 6) == 0
assert gap(0, 2, 3, 9) == 1
assert steps(0, 6, 2) == [0, 2, 4]
assert steps(1, 3, 1) == [1, 2]
assert steps(4, 2, 1) == []
assert scale(5, 0, 10) == 0.5
assert scale(3, 3, 3) == 0
assert scale(4, 2, 6) == 0.5
assert scale(8, 4, 8) == 1
