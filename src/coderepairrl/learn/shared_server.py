"""A learner that several runs share, ``crrl learner SOCKET --share``: it listens at a Unix socket, and carries their
requests, one after the other, to one process that has the frozen model once (`learn.shared_worker`). Without torch.

A run first says its name, its versions and its patience. Then each of its frames is a request, answered by a reply or
``{"died": why}``; until then it hears ``{"waiting": true}`` every few seconds. Who hangs up has left.

A study whose runs share one has it within itself (`hosted`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from coderepairrl.errors import LearnerFault, UsageError
from coderepairrl.learn import rendezvous
from coderepairrl.learn.rendezvous import Channel
from coderepairrl.printable import logged
from coderepairrl.processes import hosting
from coderepairrl.processes.children import Child, ChildDied, Frame
from coderepairrl.processes.hosting import Restarts, Say
from coderepairrl.processes.scratch import scratch
from coderepairrl.processes.signals import stoppable

MODULE = "coderepairrl.learn.shared_worker"
BEAT = 10.0
"""Seconds between two signs of life to a run that waits for a reply."""
_LEAVING = 60.0
"""Seconds at least that the process may take to forget a run."""


async def share(path: Path, *, log_dir: Path) -> None:
    """Serve runs at the socket `path` until a signal of `signals.STOPPING`. The process logs to
    ``log_dir/learner.log``.

    Raises `UsageError` where a socket cannot be, or another learner is.
    """
    with stoppable() as received:
        try:
            async with _serving(LearnerServer(log_dir, say=_say, on_client=_say), path):
                _say(f"runs with train.learner={path} share this learner")
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            if not received:
                raise
            _say(f"{received[0]}: stopped")


@asynccontextmanager
async def hosted(learner: LearnerServer, address: Path) -> AsyncIterator[None]:
    """Within, runs join `learner` at `address`, which may have any length: it leads to a socket in a temporary folder.

    It ends with this process, killed or not. Raises `UsageError` where another process has one there, or none can be.
    """
    with (
        hosting.claimed_by_us(address, "learner", "wait for its end: each would need its own"),
        scratch("learner") as folder,
    ):
        async with _serving(learner, folder / "socket"):
            hosting.lead(address, folder / "socket")
            try:
                yield
            finally:
                address.unlink(missing_ok=True)


@asynccontextmanager
async def _serving(learner: LearnerServer, path: Path) -> AsyncIterator[None]:
    with _listening_socket(path) as listening:
        server = await asyncio.start_unix_server(learner.handle, sock=listening)
        try:
            yield
        finally:
            server.close()
            await learner.close()


@contextmanager
def _listening_socket(path: Path) -> Iterator[socket.socket]:
    """A listening socket at `path` that only this user may reach, gone at the end."""
    with hosting.claimed_by_us(path, "learner", "have the runs join that one, or take another path"):
        if path.exists() and not path.is_socket():
            raise UsageError(f"{path} is no socket, but a file or a folder", fix="remove it, or take another path")
        try:
            if path.is_socket():  # of one that was killed
                path.unlink()
            listening = _bound(path)
        except OSError as error:
            raise UsageError(
                f"cannot listen at {path}: {error.strerror or error}",
                fix="a short path in a folder of yours on this machine's own disk, such as /tmp/learner.sock",
            ) from error
        with listening:
            try:
                yield listening
            finally:
                path.unlink(missing_ok=True)


def _bound(path: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listening.bind(str(path))
        listening.listen()
    except BaseException:
        listening.close()
        raise
    finally:
        os.umask(before)
    return listening


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

    def __init__(
        self,
        log_dir: Path,
        *,
        say: Say,
        on_client: Say = lambda _: None,
        env: Mapping[str, str] | None = None,
        gpu: bool = False,
        restarts: int | None = None,
    ) -> None:
        """Its process has `env` beside ours, and with `gpu` must see one. After so many `restarts` in a row it is given
        up; None: it is started whenever a run asks for it. `say` gets what concerns all runs, `on_client` who joins,
        leaves or is refused."""
        self._log = log_dir / "learner.log"
        self._say, self._on_client = say, on_client
        self._env, self._gpu, self._restarts = env, gpu, Restarts(restarts)
        self.failure = ""
        """Why it is not started any more; empty as long as it is."""
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
            self._on_client(f"{client.name} has joined")
            try:
                await self._serve(client, channel)
            finally:
                await asyncio.shield(self._release(client))
        except OSError:
            pass  # it hung up, which is how a run leaves
        except (ValueError, LookupError, TypeError) as error:  # it is no run, or does not keep to the protocol
            self._on_client(f"a connection is closed: {error!r}")
        except UsageError as error:
            self._on_client(str(error))
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
        if listed := rendezvous.differences(found, "there"):
            refused = f"{name} has other versions than the learner that it shares: {listed}"
            await channel.send({"error": refused, "fix": "start both from the same installation"})
            raise UsageError(refused)
        await channel.send({"welcome": os.getpid()})
        return _Client(name, f"{next(self._numbers)} {name}", patience)

    async def _serve(self, client: _Client, channel: Channel) -> None:
        """Its requests. Raises OSError once it has hung up, ValueError when it asks before it was answered."""
        while True:
            frame = await channel.receive()
            if not isinstance(frame.get("op"), str):
                raise ValueError("a request without a name")
            asked = asyncio.ensure_future(self._answer(client, frame))
            further = asyncio.ensure_future(channel.receive())
            try:
                while not asked.done():
                    await asyncio.wait({asked, further}, timeout=BEAT, return_when=asyncio.FIRST_COMPLETED)
                    if further.done():
                        further.result()  # raises where it hung up
                        raise ValueError("a request before the last one was answered")
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
                except LearnerFault as fault:
                    return {"error": str(fault), "kind": "refused", "fix": fault.fix}
                if frame["op"] == "start":
                    frame["gpu"] = self._gpu or frame.get("gpu", False)
                reply = await self._forward(client, frame, client.patience)
                if reply.get("kind") == "refused":
                    reply["fix"] = reply["fix"] or f"{self._log} says more"
                return reply
            finally:
                client.running = False

    async def _worker(self) -> Child:
        """The process, a new one where the last one has ended. Raises `LearnerFault` for one that is given up."""
        if self._child is not None and self._child.process.poll() is not None:
            await self._ended(self._child, "it ended while nobody asked anything of it")
        if self.failure:
            raise LearnerFault(self.failure, fix=f"{self._log} says more")
        if self._child is None:
            self._child = await Child.spawn(MODULE, log=self._log, env=self._env)
            self._restarts.started()
        return self._child

    async def _forward(self, client: _Client, frame: Frame, patience: float) -> Frame:
        child = client.child
        if child is None or child is not self._child:
            return {"died": self._end}
        try:
            async with asyncio.timeout(patience):
                await child.send({**frame, "run": client.key})
                return await child.receive()
        except TimeoutError:
            stopped = ": it was stopped" if child.stopped else ""
            child.kill()
            why = f"{frame['op']} of {client.name} took longer than its train.patience, {patience:g} s{stopped}"
        except ChildDied as death:
            why = f"during {frame['op']} of {client.name}: {death}"
        await self._ended(child, why)
        return {"died": self._end}

    async def _ended(self, child: Child, why: str) -> None:
        await child.close()
        self._end = f"the process that several runs share ended: {why}"
        if child is not self._child:  # it was ended by `close`
            return
        self._child = None
        self._say(self._end)
        if not self._restarts.may_go_on():
            self.failure = f"the learner that the runs share died {self._restarts.deaths} times in a row: {why}"
            self._say(self.failure)

    async def _release(self, client: _Client) -> None:
        async with self._turn:
            if client.child is not None:
                # which frees memory: a run of little patience is not to end what others are waiting for
                await self._forward(client, {"op": "leave"}, max(client.patience, _LEAVING))
        self._on_client(f"{client.name} has left")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it
        print(logged(text), file=sys.stderr, flush=True)
