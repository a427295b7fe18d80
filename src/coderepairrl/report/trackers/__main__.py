"""Send a run's metrics to a tracker until stdin ends: ``python -m coderepairrl.report.trackers RUN NAME``."""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path

from coderepairrl.report.trackers import send

_PAUSE = 1.0
_LAST = 60


def _goes_on() -> bool:
    # the run holds the other end of stdin
    ended = bool(select.select([sys.stdin], [], [], _PAUSE)[0])
    if ended:
        signal.alarm(_LAST)  # a server that does not answer keeps this process no longer
    return not ended


if __name__ == "__main__":
    os.nice(10)
    send(Path(sys.argv[1]), sys.argv[2], more=_goes_on, wait=True)
