"""Tracking in TensorBoard, trackio or Weights & Biases, fed from a run's log.

Sent by a separate process (`coderepairrl.stages.trackers`) or later. The position in the log is recorded, so that
resuming sends nothing twice.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import IO, Any

from coderepairrl.errors import UsageError
from coderepairrl.report.trackers.adapters import TRACKERS, Tracked
from coderepairrl.runs import Tail, open_run


def send(run: Path, name: str, *, more: Callable[[], bool] = lambda: False, wait: bool = False) -> int:
    """Send unsent steps and evaluations while `more` returns true; return their number.

    ``RUN/NAME/sent`` holds the log position; a kill may send one record twice. Raises `UsageError` while another
    process sends, unless `wait`, and errors of the tracker's package.
    """
    folder = open_run(run)
    place = run / name
    place.mkdir(exist_ok=True)
    with os.fdopen(os.open(place / "sent", os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0) as mark:
        _lock(mark, f"{name} is being sent the metrics of {run}", wait=wait)
        sent, start = 0, _start(mark.read(), place / "sent", folder.log.stat().st_size)
        log = Tail(folder.log, start)
        with closing(TRACKERS[name](_load_tracked(run, folder.about()))) as tracker:
            while True:
                last = not more()  # before the log is read: what is written by now is sent
                for record, end in log.records("step", "eval"):
                    tracker.send(metrics(record), record["step"], record["time"])
                    _note(mark, end)
                    sent += 1
                if last:
                    return sent


def metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """Metrics of a ``step`` or ``eval`` record; evaluations with interval ends.

    >>> metrics({"type": "step", "metrics": {"reward": 0.5, "learn/loss": 0.1, "kl": None}})
    {'train/reward': 0.5, 'learn/loss': 0.1}
    >>> summary = {"values": {"reward": {"value": 0.5, "low": 0.4, "high": None}}}
    >>> metrics({"type": "eval", "name": "greedy", "summary": summary})
    {'greedy/reward': 0.5, 'greedy/reward_low': 0.4}
    """
    if record["type"] == "step":
        values = {name if "/" in name else f"train/{name}": value for name, value in record["metrics"].items()}
    else:
        values = {
            f"{record['name']}/{name}{end}": interval[which]
            for name, interval in record["summary"]["values"].items()
            for which, end in (("value", ""), ("low", "_low"), ("high", "_high"))
        }
    return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}


def _load_tracked(run: Path, about: Mapping[str, Any]) -> Tracked:
    # a copy of a run folder is the same run to a tracker, and another run of its name is not
    with (run / "log.jsonl").open("rb") as log:
        began = hashlib.sha256(log.readline()).hexdigest()[:12]
    return Tracked(run, str(about.get("name") or run.name), began, about.get("config") or {})


def _lock(file: IO[bytes], what: str, *, wait: bool) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"{what} by another process", fix="wait for the run, which sends them itself") from None


def _start(written: bytes, mark: Path, size: int) -> int:
    if written.strip() and (not written.strip().isdigit() or int(written) > size):
        raise UsageError(
            f"{mark} does not say up to which byte of the log its tracker has it: {written[:30]!r}",
            fix="write that number into it, or remove it: everything is sent again",
        )
    return int(written.strip() or 0)


def _note(mark: IO[bytes], end: int) -> None:
    # one write of constant length: an empty file would send everything again
    os.pwrite(mark.fileno(), b"%-20d" % end, 0)
    os.fsync(mark.fileno())
