"""A run's end of a learner that it shares with others (`learn.shared_server`). Without torch."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Self

from coderepairrl.errors import LearnerFault, PrerequisiteError, UsageError
from coderepairrl.learn import rendezvous
from coderepairrl.learn.rendezvous import Channel
from coderepairrl.processes.children import ChildDied, Frame

_SILENT = 60.0
"""Seconds without a word after which a server that owes a reply is taken for hung: a few of `shared_server.BEAT`."""
_OWN = "leave train.learner empty, for a learner of the run's own"


class SharedClient:
    """The process that several runs share, for `Learner` the same as a `Child`."""

    stopped = False

    def __init__(self, channel: Channel, path: Path, pid: int) -> None:
        self._channel = channel
        self._path = path
        self.pid = pid
        """Of the server."""

    @classmethod
    async def connect(cls, path: Path, run: str, patience: float) -> Self:
        """Join the learner that listens at the socket `path`, as `run`, none of whose requests may take longer than
        `patience` seconds.

        Raises `LearnerFault` where nobody listens, `PrerequisiteError` where versions differ, `UsageError` where it is
        another user's.
        """
        try:
            # resolved, since an address may be longer than that of a socket, which it leads to
            channel = Channel(*await asyncio.open_unix_connection(str(path.resolve())))
        except OSError as error:
            raise LearnerFault(
                f"no learner listens at train.learner={path}: {os.strerror(error.errno) if error.errno else error}",
                fix=_again(path),
            ) from error
        try:
            if (owner := channel.owner) not in (None, os.geteuid()):
                raise UsageError(
                    f"the learner at train.learner={path} is of another user ({owner}), who would read what this run"
                    " learns from, and write its weights",
                    fix=f"one of your own, in a folder of yours: crrl learner SOCKET --share, or {_OWN}",
                )
            await channel.send({"run": run, "patience": patience, "versions": rendezvous.versions()})
            answer = await channel.receive_greeting()
            if "error" in answer:
                raise PrerequisiteError(str(answer["error"]), fix=str(answer["fix"]))
            return cls(channel, path, int(answer["welcome"]))
        except (OSError, ValueError, LookupError) as error:
            await channel.close()
            raise LearnerFault(
                f"what listens at train.learner={path} does not answer as a learner that runs share:"
                f" {str(error) or type(error).__name__}",
                fix=_again(path),
            ) from error
        except BaseException:
            await channel.close()
            raise

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.pid} at {self._path}"

    async def send(self, frame: Frame) -> None:
        """See `Child.send`."""
        try:
            await self._channel.send(frame)
        except OSError as error:
            raise self._gone(str(error)) from error

    async def receive(self) -> Frame:
        """See `Child.receive`; not to be cancelled."""
        try:
            while True:
                async with asyncio.timeout(_SILENT):
                    frame = await self._channel.receive()
                if "died" in frame:
                    raise ChildDied(str(frame["died"]))
                if "waiting" not in frame:
                    return frame
        except (OSError, ValueError) as error:
            raise self._gone(str(error) or f"it has said nothing for {_SILENT:g} s") from error

    def kill(self) -> None:
        """Leave: it is not this run's to kill."""
        self._channel.hang_up()

    async def close(self) -> None:
        """Leave."""
        await self._channel.close()

    def _gone(self, why: str) -> ChildDied:
        gone = ChildDied(f"the learner at {self._path} is gone: {why}")
        gone.fix = f"{_again(self._path)}; then go on with --resume"
        return gone


def _again(path: Path) -> str:
    return f"start it: crrl learner {path} --share; or {_OWN}"
