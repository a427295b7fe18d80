"""Wall-clock time without jumps."""

from __future__ import annotations

import time

_BEGAN = time.time() - time.monotonic()


def now() -> float:
    """Unix time in seconds, unaffected by adjustments of the machine's clock."""
    return _BEGAN + time.monotonic()
