"""Checks of `dates`."""

from coderepairrl.tasks.mutants.corpus.dates import clock, elapsed, is_leap, minutes, month_days, quarter, weekday

assert is_leap(2000) is True
assert is_leap(1900) is False
assert is_leap(2024) is True
assert is_leap(2023) is False
assert minutes(1, 30) == 90
assert minutes(0, 5) == 5
assert minutes(2, 0) == 120
assert clock(90) == "1:30"
assert clock(65) == "1:05"
assert clock(1500) == "1:00"
assert clock(70) == "1:10"
assert weekday(5, 3) == 1
assert weekday(0, 7) == 0
assert weekday(2, 4) == 6
assert month_days(2, True) == 29
assert month_days(2, False) == 28
assert month_days(4, True) == 30
assert month_days(12, False) == 31
assert month_days(6, False) == 30
assert month_days(9, False) == 30
assert month_days(11, True) == 30
assert month_days(1, True) == 31
assert quarter(1) == 1
assert quarter(3) == 1
assert quarter(4) == 2
assert quarter(12) == 4
assert elapsed(8, 12) == 4
assert elapsed(22, 3) == 5
assert elapsed(6, 6) == 0
