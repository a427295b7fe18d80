"""Checks of `series`."""

from coderepairrl.tasks.mutants.corpus.series import (
    collatz,
    deltas,
    fibonacci,
    longest_run,
    running_max,
    running_sum,
    squares,
    triangle,
)

assert fibonacci(0) == 0
assert fibonacci(1) == 1
assert fibonacci(7) == 13
assert triangle(4) == 10
assert triangle(1) == 1
assert triangle(0) == 0
assert collatz(1) == 0
assert collatz(6) == 8
assert collatz(2) == 1
assert running_max([1, 3, 2]) == [1, 3, 3]
assert running_max([5, 4, 6]) == [5, 5, 6]
assert running_sum([1, 2, 3]) == [1, 3, 6]
assert running_sum([5, -1]) == [5, 4]
assert deltas([1, 4, 9]) == [3, 5]
assert deltas([2]) == []
assert deltas([7, 7, 5]) == [0, -2]
assert longest_run([1, 1, 2]) == 2
assert longest_run([3, 4, 5]) == 1
assert longest_run([1, 2, 2, 2, 1]) == 3
assert longest_run([6, 6, 1, 6, 6]) == 2
assert squares(3) == [1, 4, 9]
assert squares(0) == []
assert squares(1) == [1]
