"""A learner that several runs share, ``crrl learner SOCKET --share``: it listens at a Unix socket, and carries their
requests, one after the other, to one process that has the frozen model once (`learn.shared_worker`). Without torch.

A run first says its name, its versions and its patience. Then each of its frames is a request, answered by a reply or
``{"died": why}``; until then it hears ``{"waiting": true}`` every few seconds. Who hangs up has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from coderepairrl.errors import UsageError
from coderepairrl.learn import rendezvous
from coderepairrl.learn.rendezvous import Channel
from coderepairrl.printable import logged
from coderepairrl.processes.children import Child, ChildDied, Frame
from coderepairrl.processes.signals import stoppable

MODULE = "coderepairrl.learn.shared_worker"
BEAT = 10.0
"""Seconds between two signs of life to a run that waits for a reply."""


async def share(path: Path, *, log_dir: Path) -> None:
    """Serve runs at the socket `path` until a signal of `signals.STOPPING`. The process logs to
    ``log_dir/learner.log``.

    Raises `UsageError` where a socket cannot be, or another learner is.
    """
    with _listening_socket(path) as listening, stoppable() as received:
        learner = LearnerServer(log_dir)
        server = await asyncio.start_unix_server(learner.handle, sock=listening)
        _say(f"runs with train.learner={path} share this learner")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if not received:
                raise
            _say(f"{received[0]}: stopped")
        finally:
            server.close()
            await learner.close()


@contextmanager
def _listening_socket(path: Path) -> Iterator[socket.socket]:
    """A listening socket at `path` that only this user may reach, gone at the end."""
    lock = path.with_name(f"{path.name}.lock")  # held while its owner lives; the socket of one that was killed stays
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with lock.open("w") as held, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"another learner listens at {path}", fix="have the runs join that one, or take another path"
                ) from None
            if path.is_socket():
                path.unlink()
            before = os.umask(0o177)
            try:
                listening.bind(str(path))
            finally:
                os.umask(before)
            try:
                listening.listen()
                yield listening
            finally:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot listen at {path}: {error.strerror or error}",
            fix="a short path in a folder of yours on this machine's own disk, such as /tmp/learner.sock",
        ) from error


@dataclass(slots=True)
class _Client:
    """A run that has joined."""

    name: str
    key: str
    patience: float
    child: Child | None = None
    """The process that has its state."""
    running: bool = False
    """Whether the process has its request."""


class LearnerServer:
    """The runs that have joined, and the process that serves them."""

    def __init__(self, log_dir: Path) -> None:
        self._log = log_dir / "learner.log"
        self._child: Child | None = None
        self._end = ""
        """How the last process ended."""
        self._turn = asyncio.Lock()  # first come, first served; a run has one request at a time, so they take turns
        self._numbers = count(1)
        self._connections: set[asyncio.Task[None]] = set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it is closed."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        channel = Channel(reader, writer)
        try:
            client = await self._handshake(channel)
            _say(f"{client.name} has joined")
            try:
                await self._serve(client, channel)
            finally:
                await asyncio.shield(self._release(client))
        except OSError:
            pass  # it hung up, which is how a run leaves
        except (ValueError, LookupError, TypeError) as error:  # it is no run, or does not keep to the protocol
            _say(f"a connection is closed: {error!r}")
        except UsageError as error:
            _say(str(error))
        except asyncio.CancelledError:
            return
        finally:
            self._connections.discard(task)
            await channel.close()

    async def close(self) -> None:
        """End the process, and all connections."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()  # a request that it has at this moment ends, too
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        if child is not None:
            await child.close()

    async def _handshake(self, channel: Channel) -> _Client:
        hello = await channel.receive_greeting()
        name, patience, found = str(hello["run"])[:200], float(hello["patience"]), dict(hello["versions"])
        ours = rendezvous.versions()
        if differing := [each for each in ours if ours[each] != found.get(each)]:
            listed = ", ".join(f"{each} {found.get(each)} (there {ours[each]})" for each in differing)
            refused = f"{name} has other versions than the learner that it shares: {listed}"
            await channel.send({"error": refused, "fix": "start both from the same installation"})
            raise UsageError(refused)
        await channel.send({"welcome": os.getpid()})
        return _Client(name, f"{next(self._numbers)} {name}", patience)

    async def _serve(self, client: _Client, channel: Channel) -> None:
        """Its requests. Raises OSError once it has hung up, ValueError when it asks before it was answered."""
        while True:
            asked = asyncio.ensure_future(self._answer(client, await channel.receive()))
            further = asyncio.ensure_future(channel.receive())
            try:
                while not asked.done():
                    await asyncio.wait({asked, further}, timeout=BEAT, return_when=asyncio.FIRST_COMPLETED)
                    if further.done():
                        raise ValueError("a request before the last one was answered") from further.exception()
                    if not asked.done():
                        await channel.send({"waiting": True})
            finally:
                further.cancel()
                if not client.running:  # else the process has its request, and will answer: that is waited for
                    asked.cancel()
                await asyncio.gather(asked, further, return_exceptions=True)
            await channel.send(asked.result())

    async def _answer(self, client: _Client, frame: Frame) -> Frame:
        """The reply, once it is this run's turn."""
        async with self._turn:
            client.running = True
            try:
                try:
                    client.child = client.child or await self._worker()
                except OSError as error:
                    return {"error": f"its process does not start: {error}", "kind": "refused", "fix": ""}
                return await self._forward(client, frame)
            finally:
                client.running = False

    async def _worker(self) -> Child:
        """The process, a new one where the last one has ended."""
        if self._child is not None and self._child.process.poll() is not None:
            await self._ended(self._child, "it ended while nobody asked anything of it")
        if self._child is None:
            self._child = await Child.spawn(MODULE, log=self._log)
        return self._child

    async def _forward(self, client: _Client, frame: Frame) -> Frame:
        child = client.child
        if child is None or child is not self._child:
            return {"died": self._end}
        try:
            async with asyncio.timeout(client.patience):
                await child.send({**frame, "run": client.key})
                return await child.receive()
        except TimeoutError:
            stopped = ": it was stopped" if child.stopped else ""
            child.kill()
            why = f"{frame['op']} of {client.name} took longer than its train.patience, {client.patience:g} s{stopped}"
        except ChildDied as death:
            why = f"during {frame['op']} of {client.name}: {death}"
        await self._ended(child, why)
        return {"died": self._end}

    async def _ended(self, child: Child, why: str) -> None:
        await child.close()
        self._end = f"the process that several runs share ended: {why}"
        if child is self._child:  # else it was ended by `close`
            self._child = None
            _say(self._end)

    async def _release(self, client: _Client) -> None:
        async with self._turn:
            if client.child is not None:
                await self._forward(client, {"op": "leave"})
        _say(f"{client.name} has left")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it
        print(logged(text), file=sys.stderr, flush=True)
