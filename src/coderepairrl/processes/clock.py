"""Wall-clock time that does not jump."""

from __future__ import annotations

import time

_BEGAN = time.time() - time.monotonic()


def now() -> float:
    """Unix seconds, by a monotonic clock since this module was imported.

    Adjustments of the machine's clock have no effect, so that differences of two times in one process are durations.
    """
    return _BEGAN + time.monotonic()
