"""Seconds for people: 5400 <-> "1h 30m"."""

import re

UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def format_duration(seconds):
    """The largest units first, without those that are zero: 3661 is "1h 1m 1s"."""
    parts = []
    left = int(seconds)
    for unit, size in UNITS.items():
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts)


def parse_duration(text):
    """Seconds of "1h 30m"; units may come in any order."""
    found = re.findall(r"(\d+)([dhms])", text)
    if not found:
        raise ValueError(f"not a duration: {text!r}")
    return sum(int(count) * UNITS[unit] for count, unit in found)
