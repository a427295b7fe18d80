"""When something happened: a clock that nobody sets."""

from __future__ import annotations

import time

_BEGAN = time.time() - time.monotonic()


def now() -> float:
    """Unix seconds, counted on from the moment at which this process first asked.

    Who sets the machine's clock, or lets it be corrected, moves no time within a process: what lies between two of
    them was as long as they say.
    """
    return _BEGAN + time.monotonic()
