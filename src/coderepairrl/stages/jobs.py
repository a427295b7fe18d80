"""Commands of ours as child processes, each with a run folder that says how far it is.

Nothing else keeps what is done, so nothing else could be left wrong by a crash: what has begun is resumed, what is
done is skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from coderepairrl.errors import ExitCode, RunError
from coderepairrl.processes.children import NOT_FROM_HERE

_GRACE = 120.0
"""Seconds that a run may take to stop."""
_TAIL, _LAST = 1 << 14, 1 << 20
Say = Callable[[str], None]
State = Literal["done", "begun", "new"]


class Command(Protocol):
    """A command of ours that makes a run folder."""

    @property
    def words(self) -> Sequence[str]:
        """The command after ``crrl``, without ``--resume``."""

    @property
    def log(self) -> Path:
        """What its processes print."""

    def state(self) -> State:
        """How far it is."""


def state_of(folder: Path, steps: Callable[[], int] | None = None) -> State:
    """How far the run in `folder` is, by its log: one that trains is done after `steps`.

    Raises `RunError` where the last line of the log is none.
    """
    log = folder / "log.jsonl"
    if not log.is_file() or not log.stat().st_size:
        return "new"
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST))
        *lines, rest = file.read().split(b"\n")
    told = [line for line in lines if not line.startswith(b'{"type":"used"')]  # which may be counted once more after it
    if rest or not told or not (last := told[-1]).startswith(b'{"type":"end"'):
        return "begun"
    if steps is None:
        return "done"
    try:
        return "done" if json.loads(last)["step"] >= steps() else "begun"
    except (ValueError, LookupError, TypeError) as error:
        raise RunError(
            f"the last line of {log} is no end of a run: {error!r}",
            fix=f"restore the log from a copy, or: rm -r {shlex.quote(str(folder))}",
        ) from error


async def until_done(job: Command, say: Say, finished: Callable[[Command, float], None]) -> str:
    """Run `job` if it is not done, and call `finished` with the seconds that it took; why it did not end well, else
    empty.

    Cancelling it stops the run, in order; the kernel kills it where this process is killed.
    """
    if (state := job.state()) == "done":
        return ""
    say(f"{job} {'goes on' if state == 'begun' else 'begins'}")
    began, start = time.monotonic(), job.log.stat().st_size if job.log.exists() else 0
    code = await _process([*job.words, *(["--resume"] if state == "begun" else [])], job.log)
    if code == ExitCode.INTERRUPTED:
        return "it was stopped by a signal"
    if code:
        return last_error(job.log, start) or (f"killed by signal {-code}" if code < 0 else f"exit code {code}")
    if job.state() != "done":
        return f"it ended without an error, and is not finished: see {job.log}"
    finished(job, time.monotonic() - began)
    return ""


async def _process(words: Sequence[str], log: Path) -> int:
    """The exit code of ``crrl WORDS...``, whose output is appended to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as sink:
        process = await asyncio.create_subprocess_exec(
            *python(words),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env={**os.environ, **NOT_FROM_HERE},
            start_new_session=True,  # the terminal's Ctrl-C is for us, who stop it
        )
    try:
        return await process.wait()
    except asyncio.CancelledError:
        await stop(process)
        raise


async def stop(process: asyncio.subprocess.Process) -> None:
    """End `process`: in order, or by force after two minutes."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _GRACE)
    except TimeoutError:
        process.kill()
        await process.wait()


def python(words: Sequence[str]) -> list[str]:
    """``crrl WORDS...`` as a child that dies with this process."""
    return [sys.executable, "-m", "coderepairrl.processes.child", str(os.getpid()), "coderepairrl.cli", *words]


def last_error(log: Path, start: int = 0) -> str:
    """What the last process said was wrong, from `start` of its output on; empty if it did not."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - _TAIL))
        lines = file.read().decode(errors="replace").splitlines()
    found = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return found[-1] if found else ""


def flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables by dotted key; an empty one is a value.

    >>> flat({"train": {"lr": 0.1}, "kinds": {}})
    {'train.lr': 0.1, 'kinds': {}}
    """
    found: dict[str, Any] = {}
    for key, value in data.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {prefix + key: value}
    return found
