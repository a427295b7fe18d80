"""Checks of `money`."""

from coderepairrl.tasks.mutants.corpus.money import change, cheapest, discount, fee, savings, split_bill, with_tax

assert discount(200, 10) == 180
assert discount(50, 0) == 50
assert discount(80, 50) == 40
assert with_tax(200, 10) == 220
assert with_tax(50, 0) == 50
assert with_tax(80, 50) == 120
assert split_bill(7, 2) == [4, 3]
assert split_bill(9, 3) == [3, 3, 3]
assert split_bill(11, 3) == [4, 4, 3]
assert savings(100, 10, 2) == 121
assert savings(100, 50, 1) == 150
assert savings(70, 5, 0) == 70
assert change(7, [5, 2, 1]) == [5, 2]
assert change(4, [2, 1]) == [2, 2]
assert change(3, [5, 1]) == [1, 1, 1]
assert fee(150, 100) == 5
assert fee(100, 100) == 0
assert fee(90, 100) == 0
assert fee(305, 5) == 30
assert cheapest([5, 3, 8], 4) == 5
assert cheapest([5, 3, 8], 3) == 3
assert cheapest([1], 4) == -1
assert cheapest([9, 6, 7], 5) == 6
