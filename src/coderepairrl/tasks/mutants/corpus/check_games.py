"""Checks of `games`."""

from coderepairrl.tasks.mutants.corpus.games import best_of, level, move, nim, score, streak, winner

assert winner(3, 1) == "a"
assert winner(1, 3) == "b"
assert winner(2, 2) == "none"
assert score(2, 1) == 5
assert score(0, 4) == 0
assert score(3, 3) == 6
assert level(25, 10) == 3
assert level(9, 10) == 1
assert level(10, 10) == 2
assert streak([0, 1, 1]) == 2
assert streak([1, 0]) == 0
assert streak([1, 1, 1]) == 3
assert move(5, 3, 6) == 2
assert move(0, 1, 4) == 1
assert move(3, 1, 4) == 0
assert best_of([3, 2], [1, 5]) == 0
assert best_of([4, 4], [1, 2]) == 2
assert best_of([1, 2, 3], [1, 3, 4]) == -2
assert nim(4, 3) is False
assert nim(5, 3) is True
assert nim(7, 2) is True
assert nim(6, 2) is False
