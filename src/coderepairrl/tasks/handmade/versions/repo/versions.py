"""Version numbers: parse, compare, find the newest."""

import re

_PATTERN = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:-([0-9A-Za-z.]+))?")


def parse(text):
    """Major, minor, patch and pre-release tag ("" for a release)."""
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a version: {text!r}")
    major, minor, patch, tag = match.groups(default="")
    return int(major), int(minor), int(patch or 0), tag


def is_newer(candidate, current):
    """Whether `candidate` should replace `current`."""
    *new, new_tag = parse(candidate)
    *old, old_tag = parse(current)
    if new != old:
        return new > old
    return new_tag > old_tag


def newest(versions):
    """The newest of some versions, None of none."""
    best = None
    for version in versions:
        if best is None or is_newer(version, best):
            best = version
    return best
