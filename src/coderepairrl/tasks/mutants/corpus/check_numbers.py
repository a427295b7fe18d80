"""Checks of `numbers`."""

from coderepairrl.tasks.mutants.corpus.numbers import (
    clamp,
    count_divisors,
    digit_sum,
    factorial,
    gcd,
    is_prime,
    power,
    sign,
)

assert clamp(5, 0, 3) == 3
assert clamp(-2, 0, 3) == 0
assert clamp(2, 1, 3) == 2
assert clamp(9, 1, 9) == 9
assert gcd(12, 8) == 4
assert gcd(7, 5) == 1
assert gcd(6, 0) == 6
assert gcd(9, 27) == 9
assert factorial(5) == 120
assert factorial(1) == 1
assert factorial(3) == 6
assert power(2, 5) == 32
assert power(3, 0) == 1
assert power(3, 4) == 81
assert power(7, 1) == 7
assert is_prime(2) is True
assert is_prime(9) is False
assert is_prime(1) is False
assert is_prime(13) is True
assert is_prime(25) is False
assert is_prime(8) is False
assert digit_sum(123) == 6
assert digit_sum(10) == 1
assert digit_sum(9) == 9
assert digit_sum(0) == 0
assert sign(7) == 1
assert sign(-3) == -1
assert sign(0) == 0
assert sign(1) == 1
assert sign(-1) == -1
assert count_divisors(6) == 4
assert count_divisors(1) == 1
assert count_divisors(7) == 2
