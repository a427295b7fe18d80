"""Checks of `grid`."""

from coderepairrl.tasks.mutants.corpus.grid import area, border, cell, count_inside, diagonal, inside, manhattan

assert manhattan(0, 0, 3, 4) == 7
assert manhattan(5, 2, 1, 2) == 4
assert manhattan(1, 6, 1, 1) == 5
assert inside(0, 0, 3) is True
assert inside(3, 1, 3) is False
assert inside(1, 3, 3) is False
assert inside(-1, 2, 3) is False
assert inside(2, -1, 3) is False
assert area(0, 0, 3, 2) == 6
assert area(5, 4, 1, 1) == 12
assert area(2, 7, 4, 1) == 12
assert border(3, 3) == 8
assert border(1, 5) == 5
assert border(4, 1) == 4
assert border(2, 5) == 10
assert cell(5, 3) == [1, 2]
assert cell(0, 4) == [0, 0]
assert cell(8, 4) == [2, 0]
assert diagonal(0, 0, 2, 2) is True
assert diagonal(1, 3, 3, 1) is True
assert diagonal(0, 0, 1, 2) is False
assert diagonal(4, 1, 2, 2) is False
assert count_inside([0, 3, 1], [0, 1, 2], 3) == 2
assert count_inside([-1, 2], [2, 2], 3) == 1
assert count_inside([1, 2, 0], [-2, 4, 1], 4) == 1
