"""Wall-clock time that does not jump."""

from __future__ import annotations

import time

_BEGAN = time.time() - time.monotonic()


def now() -> float:
    """Unix seconds by a monotonic clock: adjustments of the machine's clock have no effect."""
    return _BEGAN + time.monotonic()
