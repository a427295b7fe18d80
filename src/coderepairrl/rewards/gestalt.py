"""`difflib`'s ratio of two texts, exactly, several times faster.

`difflib.SequenceMatcher` finds the longest match, then does the same left and right of it (Ratcliff and Obershelp's
"gestalt" matching). Of a text b of 200 and more characters it ignores those that make up more than one in a hundred
("autojunk"), so what it looks for is the longest run of *rare* characters, the first in a, then the first in b; equal
characters of any kind then extend it. Runs of rare characters are short. So instead of asking each box (a range of a
against a range of b) for its longest run, this looks for runs of each length once, the longest first, and splits the
box at every hit: what is left of the hit has been looked at, what is right of it comes next.

Where numba is installed, `compiled` does it as difflib does, and several times faster again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache

from cydifflib import SequenceMatcher

from coderepairrl.rewards.compiled import matcher

_AUTOJUNK = 200
"""Characters from which difflib ignores popular ones."""
_LONGEST = 64
"""Rare runs beyond this length (text whose alphabet is large) are left to the general algorithm."""
_GENERAL_PAIRS = 1_000_000_000
_COMPILED_PAIRS = 100_000_000
"""Texts made to slow difflib's way down take seconds at this size."""
_WORK = 10_000_000_000
"""Characters that may be searched, some seconds; the matches found by then, the longest, are the result."""

_BREAK = "\0"
_RUN = re.compile("[^\0]{2,}")


def ratio(a: str, b: str) -> float:
    """``difflib.SequenceMatcher(None, a, b).ratio()``.

    Equal to it but for texts whose product of lengths is beyond 1e9, of which some matches may be missed: a patch of
    10 MB takes seconds instead of minutes.

    >>> ratio("abcd", "bcde")
    0.75
    """
    compiled = matcher() if len(a) * len(b) <= _COMPILED_PAIRS else None
    if compiled is not None and (a or b):
        try:
            return 2.0 * compiled(a.encode("latin-1"), b.encode("latin-1")) / (len(a) + len(b))
        except UnicodeEncodeError:
            pass  # an alphabet beyond the compiled code's
    return interpreted(a, b)


def interpreted(a: str, b: str) -> float:
    """`ratio`, without compiled code of our own."""
    if len(b) < _AUTOJUNK:
        return float(SequenceMatcher(None, a, b).ratio())
    if a == b:
        return 1.0
    popular = len(b) // 100 + 1
    common = {ord(character): _BREAK for character in set(a) if not 0 < b.count(character) <= popular}
    marked = a.translate(common)
    longest = max(map(len, _RUN.findall(marked)), default=1)
    if (longest > _LONGEST or _BREAK in a) and len(a) * len(b) <= _GENERAL_PAIRS:
        return float(SequenceMatcher(None, a, b).ratio())
    return 2.0 * _matches(a, b, marked, min(longest, _LONGEST)) / (len(a) + len(b))


def _matches(a: str, b: str, marked: str, longest: int) -> int:
    """Characters that match; `marked` is `a` with a break in place of every character that is not rare."""
    boxes = [(0, len(a), 0, len(b))]
    total = work = 0
    for length in range(longest, 0, -1):
        runs, left = _runs(length), []
        for a_low, a_high, b_low, b_high in boxes:
            for run in runs(marked, a_low, a_high):
                i = max(run.start(), a_low)
                while i <= run.end() - length:
                    j = b.find(a[i : i + length], b_low, b_high)
                    work += (b_high if j < 0 else j) - b_low
                    if work > _WORK:
                        return total
                    if j < 0:
                        i += 1
                        continue
                    before = _equal_before(a, i, b, j, min(i - a_low, j - b_low))
                    end = _equal_after(a, i + length, b, j + length, min(a_high - i, b_high - j) - length)
                    total += before + length + end
                    if i - before > a_low and j - before > b_low:
                        left.append((a_low, i - before, b_low, j - before))
                    i = a_low = i + length + end
                    b_low = j + length + end
            if a_low < a_high and b_low < b_high:
                left.append((a_low, a_high, b_low, b_high))
        boxes = left
    # Where no rare run matches, difflib takes the common start of the box.
    return total + sum(
        _equal_after(a, a_low, b, b_low, min(a_high - a_low, b_high - b_low)) for a_low, a_high, b_low, b_high in boxes
    )


@cache
def _runs(length: int) -> Callable[[str, int, int], Iterator[re.Match[str]]]:
    """Finds the runs of at least `length` characters between breaks."""
    return re.compile(f"[^{_BREAK}]{{{length},}}").finditer


def _equal_after(a: str, i: int, b: str, j: int, most: int) -> int:
    """How many characters from `i` and `j` on are equal."""
    n = 0
    while n + 32 <= most and a[i + n : i + n + 32] == b[j + n : j + n + 32]:
        n += 32
    while n < most and a[i + n] == b[j + n]:
        n += 1
    return n


def _equal_before(a: str, i: int, b: str, j: int, most: int) -> int:
    """How many characters before `i` and `j` are equal."""
    n = 0
    while n + 32 <= most and a[i - n - 32 : i - n] == b[j - n - 32 : j - n]:
        n += 32
    while n < most and a[i - n - 1] == b[j - n - 1]:
        n += 1
    return n
