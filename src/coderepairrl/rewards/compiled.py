"""`difflib`'s matching as machine code, by numba where it is installed (``pip install coderepairrl[fast]``).

The algorithm is difflib's own: the longest run of rare characters of a box, the first in a, then the first in b, is
extended by equal characters of any kind, and what is left and right of it are the next boxes. Compiling takes about
3 CPU seconds, once in a process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
_AUTOJUNK, _CODES = 200, 256


@cache
def matcher() -> Callable[[bytes, bytes], int] | None:
    """What counts the characters of two texts in Latin-1 that `difflib.SequenceMatcher` matches; None without numba."""
    try:
        import numba
    except ImportError:
        return None
    compiled: Callable[[Bytes, Bytes], int] = numba.njit(nogil=True)(_matches)

    def matches(a: bytes, b: bytes) -> int:
        return int(compiled(np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)))

    return matches


def _matches(a: Bytes, b: Bytes) -> Any:
    n, m = len(a), len(b)
    counts = np.zeros(_CODES, np.int64)
    for j in range(m):
        counts[b[j]] += 1
    if m >= _AUTOJUNK:
        for code in range(_CODES):
            if counts[code] > m // 100 + 1:
                counts[code] = 0
                # a popular character has no places: no run contains it
    starts = np.zeros(_CODES + 1, np.int64)
    for code in range(_CODES):
        starts[code + 1] = starts[code] + counts[code]
    filled = starts[:_CODES].copy()
    places = np.empty(starts[_CODES], np.int64)
    for j in range(m):
        if filled[b[j]] < starts[b[j] + 1]:
            places[filled[b[j]]] = j
            filled[b[j]] += 1

    lengths = np.zeros(m, np.int64)  # of the run that ends at a character of b and at the one of a that is looked at
    rows = np.full(m, -1, np.int64)  # when that length was written: rows of all boxes are numbered
    row = 0
    boxes = np.empty((min(n, m) + 2, 4), np.int64)
    boxes[0, 0], boxes[0, 1], boxes[0, 2], boxes[0, 3] = 0, n, 0, m
    waiting, total = 1, 0
    while waiting:
        waiting -= 1
        a_low, a_high, b_low, b_high = boxes[waiting, 0], boxes[waiting, 1], boxes[waiting, 2], boxes[waiting, 3]
        i0, j0, size = a_low, b_low, 0
        row += 1  # a gap: runs do not reach from one box into the next
        for i in range(a_low, a_high):
            row += 1
            for place in range(starts[a[i] + 1] - 1, starts[a[i]] - 1, -1):  # so the row before is not yet written over
                j = places[place]
                if j >= b_high:
                    continue
                if j < b_low:
                    break
                length = lengths[j - 1] + 1 if j > b_low and rows[j - 1] == row - 1 else 1
                lengths[j], rows[j] = length, row
                if length > size or (length == size and i0 + size == i + 1):  # of equal ones in a row the first in b
                    i0, j0, size = i - length + 1, j - length + 1, length
        while i0 > a_low and j0 > b_low and a[i0 - 1] == b[j0 - 1]:
            i0, j0, size = i0 - 1, j0 - 1, size + 1
        while i0 + size < a_high and j0 + size < b_high and a[i0 + size] == b[j0 + size]:
            size += 1
        total += size
        if size and a_low < i0 and b_low < j0:
            boxes[waiting, 0], boxes[waiting, 1], boxes[waiting, 2], boxes[waiting, 3] = a_low, i0, b_low, j0
            waiting += 1
        if size and i0 + size < a_high and j0 + size < b_high:
            boxes[waiting, 0], boxes[waiting, 1] = i0 + size, a_high
            boxes[waiting, 2], boxes[waiting, 3] = j0 + size, b_high
            waiting += 1
    return total
