"""Metrics of a run for TensorBoard, trackio or Weights & Biases, sent from its log.

``python -m coderepairrl.report.trackers RUN NAME`` sends until stdin ends: a separate process, which may fail or hang
(`feed_trackers`). The recorded position in the log prevents sending twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import math
import os
import select
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from coderepairrl.errors import UsageError
from coderepairrl.processes.children import NO_CWD_IMPORTS, read_log_end
from coderepairrl.runs import RunFolder, Tail, open_run

_PAUSE = 1.0  # seconds between two looks at the log
_SECONDS_AFTER_RUN = 60  # time for a tracker to send the rest
_PATIENCE = 15.0  # seconds that the run waits for a tracker's backlog


def send_metrics(run: Path, name: str, *, more: Callable[[], bool] = lambda: False, wait: bool = False) -> int:
    """Send unsent steps and evaluations while `more` returns true; return their number.

    ``RUN/NAME/sent`` holds the log position; after a kill, one record may be sent twice. Raises `UsageError` while
    another process sends, unless `wait`, and errors of the tracker's package.
    """
    folder = open_run(run)
    place = run / name
    place.mkdir(exist_ok=True)
    with os.fdopen(os.open(place / "sent", os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0) as mark:
        _lock_position(mark, f"the metrics of {run} to {name}", wait=wait)
        sent, start = 0, _parse_position(mark.read(), place / "sent", folder.log.stat().st_size)
        log = Tail(folder.log, start)
        with TRACKERS[name](_load_tracked(run, folder.about())) as send:
            while True:
                is_last = not more()  # asked before reading: the last round sends all that the run logged
                for record, end in log.records("step", "eval"):
                    send(flatten_record(record), record["step"], record["time"])
                    # one write of constant length: truncated first, the file could stay empty, and all be sent again
                    os.pwrite(mark.fileno(), b"%-20d" % end, 0)
                    os.fsync(mark.fileno())
                    sent += 1
                if is_last:
                    return sent


def flatten_record(record: Mapping[str, Any]) -> dict[str, float]:
    """Metrics of a ``step`` or ``eval`` record; evaluations with interval ends.

    >>> flatten_record({"type": "step", "metrics": {"reward": 0.5, "learn/loss": 0.1, "kl": None}})
    {'train/reward': 0.5, 'learn/loss': 0.1}
    >>> summary = {"values": {"reward": {"value": 0.5, "low": 0.4, "high": None}}}
    >>> flatten_record({"type": "eval", "name": "greedy", "summary": summary})
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


def _load_tracked(run: Path, about: Mapping[str, Any]) -> TrackedRun:
    # a digest of the log's first line: equal in copies of the run folder, different in runs of the same name
    with (run / "log.jsonl").open("rb") as log:
        run_id = hashlib.sha256(log.readline()).hexdigest()[:12]
    return TrackedRun(run, str(about.get("name") or run.name), run_id, about.get("config") or {})


def _lock_position(file: IO[bytes], what: str, *, wait: bool) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"another process is sending {what}", fix="wait: the run sends them itself") from None


def _parse_position(written: bytes, mark: Path, size: int) -> int:
    if written.strip() and (not written.strip().isdigit() or int(written) > size):
        raise UsageError(
            f"{mark} is not a position in the log: {written[:30]!r}",
            fix="write the number of bytes that the tracker has, or remove the file to send everything again",
        )
    return int(written.strip() or 0)


class TrackedRun(NamedTuple):
    """Run as trackers see it."""

    folder: Path
    name: str
    id: str
    """Stable when the run is resumed."""
    config: Mapping[str, Any]


Send = Callable[[Mapping[str, float], int, float], None]
"""Sends metrics of a training step, logged at a Unix time."""


@contextmanager
def open_tensorboard(run: TrackedRun) -> Iterator[Send]:
    """Event files in ``RUN/tensorboard``; view with ``tensorboard --logdir runs``."""
    from tensorboard.summary import Writer

    with closing(Writer(str(run.folder / "tensorboard"))) as writer:

        def send(metrics: Mapping[str, float], step: int, time: float) -> None:
            for name, value in metrics.items():
                writer.add_scalar(name, value, step, wall_time=time)
            writer.flush()

        yield send


@contextmanager
def open_trackio(run: TrackedRun) -> Iterator[Send]:
    """Local database (``TRACKIO_DIR``), unless ``TRACKIO_SPACE_ID`` or ``TRACKIO_SERVER_URL`` is set.

    It records the times of sending.
    """
    import trackio

    tracked = trackio.init(
        os.environ.get("TRACKIO_PROJECT", "coderepairrl"),
        name=f"{run.name}-{run.id}",  # identifies the run when resumed
        config=dict(run.config),
        resume="allow",
        embed=False,
        auto_log_cpu=False,
        auto_log_gpu=False,
    )
    try:
        yield lambda metrics, step, time: tracked.log(dict(metrics), step=step)
    finally:
        trackio.finish()  # not `tracked.finish`: trackio would finish again at exit


@contextmanager
def open_wandb(run: TrackedRun) -> Iterator[Send]:
    """Server of ``wandb login`` or ``WANDB_BASE_URL``; files in ``RUN/wandb`` if ``WANDB_MODE=offline``."""
    import wandb

    tracked = wandb.init(
        dir=run.folder,
        project=os.environ.get("WANDB_PROJECT", "coderepairrl"),
        name=run.name,
        id=run.id,
        resume="allow",
        config=dict(run.config),
        # nothing about this machine and its code is sent
        settings=wandb.Settings(
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        ),
    )
    # wandb's own step must never decrease
    tracked.define_metric("step", hidden=True)
    tracked.define_metric("*", step_metric="step")
    try:
        yield lambda metrics, step, time: tracked.log({"step": step, "_timestamp": time, **metrics})
    finally:
        tracked.finish()


TRACKERS: Mapping[str, Callable[[TrackedRun], AbstractContextManager[Send]]] = {
    "tensorboard": open_tensorboard,
    "trackio": open_trackio,
    "wandb": open_wandb,
}


def _is_run_alive() -> bool:
    # the run holds the other end of stdin
    ended = bool(select.select([sys.stdin], [], [], _PAUSE)[0])
    if ended:
        signal.alarm(_SECONDS_AFTER_RUN)  # ends this process if a server does not answer
    return not ended


@asynccontextmanager
async def feed_trackers(folder: RunFolder, names: Iterable[str], say: Callable[[str], None]) -> AsyncIterator[None]:
    """Feed the trackers `names` from the log inside the context; `say` reports a failing one once."""
    async with AsyncExitStack() as stack:
        for name in names:
            await stack.enter_async_context(_feed_tracker(folder, name, say))
        yield


@asynccontextmanager
async def _feed_tracker(folder: RunFolder, name: str, say: Callable[[str], None]) -> AsyncIterator[None]:
    send_later = f"crrl export {shlex.quote(str(folder.path))} --to {name}"
    output = folder.logs / f"{name}.log"
    begins = output.stat().st_size if output.exists() else 0
    with output.open("ab") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "coderepairrl.report.trackers", str(folder.path.absolute()), name),
            stdin=asyncio.subprocess.PIPE,
            stdout=file,
            stderr=file,
            env={**os.environ, **NO_CWD_IMPORTS},
            start_new_session=True,  # Ctrl-C reaches only the run, which then ends the tracker
        )

    async def report() -> None:
        if await process.wait():
            reason = (read_log_end(output, begins) or ["no reason given"])[-1]
            say(f"{name} stopped: {reason}; the run folder has all metrics: {send_later}")

    reporting = asyncio.create_task(report())
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(asyncio.shield(reporting), _PATIENCE)
        except TimeoutError:
            reporting.cancel()
            say(f"{name} has not received all metrics: {send_later}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and the processes it started
            await process.wait()


if __name__ == "__main__":
    os.nice(10)
    send_metrics(Path(sys.argv[1]), sys.argv[2], more=_is_run_alive, wait=True)
