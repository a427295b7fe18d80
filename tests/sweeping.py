"""Waiting for the removal of what killed processes left."""

from __future__ import annotations

import threading


def wait_for_sweep() -> None:
    """Wait for all threads that sweep."""
    for thread in threading.enumerate():
        if thread.name == "sweep":
            thread.join()
