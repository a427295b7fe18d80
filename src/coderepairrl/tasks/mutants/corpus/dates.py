"""Calendar and clock."""


def is_leap(year: int) -> bool:
    """Whether the year has 366 days."""
    if year % 400 == 0:
        return True
    if year % 100 == 0:
        return False
    return year % 4 == 0


def minutes(hour: int, minute: int) -> int:
    """Minutes since midnight."""
    return hour * 60 + minute


def clock(total: int) -> str:
    """Minutes since midnight as ``h:mm``."""
    hour = total // 60 % 24
    minute = total % 60
    if minute < 10:
        return str(hour) + ":0" + str(minute)
    return str(hour) + ":" + str(minute)


def weekday(start: int, days: int) -> int:
    """The day of the week, 0 to 6, some days after `start`."""
    return (start + days) % 7


def month_days(month: int, leap: bool) -> int:
    """Days of a month, 1 to 12."""
    if month == 2:
        if leap:
            return 29
        return 28
    if month in [4, 6, 9, 11]:
        return 30
    return 31


def quarter(month: int) -> int:
    """The quarter, 1 to 4, of a month."""
    return (month - 1) // 3 + 1


def elapsed(start: int, end: int) -> int:
    """Hours from `start` to `end` on a clock of 24."""
    if end >= start:
        return end - start
    return end + 24 - start
