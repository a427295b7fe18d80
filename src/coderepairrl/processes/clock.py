"""The time of day, by a clock that does not jump."""

from __future__ import annotations

import time

_BEGAN = time.time() - time.monotonic()


def now() -> float:
    """Unix seconds, counted on from the moment at which this process first asked.

    Setting or correcting the machine's clock meanwhile changes nothing: the difference of two times of one process is
    what passed between them.
    """
    return _BEGAN + time.monotonic()
