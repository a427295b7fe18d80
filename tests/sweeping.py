"""Waits for what is removed beside the work."""

from __future__ import annotations

import threading


def wait_for_sweep() -> None:
    """What killed processes left is gone."""
    for thread in threading.enumerate():
        if thread.name == "sweep":
            thread.join()
