"""The controller's end of a learner on several nodes: it admits them, and their processes look like local ones.

The other end is `coderepairrl.learn.node`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterable
from typing import Any, Self

from coderepairrl.errors import CodeRepairError, LearnerFault, PrerequisiteError, UsageError
from coderepairrl.learn import rendezvous
from coderepairrl.learn.rendezvous import Address, Channel
from coderepairrl.processes.children import ChildDied, Frame

_SPAWN, _END = 120.0, 20.0
"""Seconds for a node to start its processes, and to end them."""


class _NumberTaken(UsageError):
    """A node of that number is here, or has vanished without a word."""


class RemoteChild:
    """One of the learner's processes on another node, for `Learner` the same as a `Child`."""

    def __init__(self, node: RemoteNode, *, first: bool) -> None:
        self.pid = 0
        """Once it has begun."""
        self.stopped = False
        self._node = node
        self._first = first
        """Whether it is the node's first: requests travel once to each node."""
        self._frames: asyncio.Queue[Frame | ChildDied] = asyncio.Queue()

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.pid} on {self._node.name}"

    async def send(self, frame: Frame) -> None:
        """See `Child.send`."""
        if self._first:
            try:
                await self._node.channel.send({"request": frame})
            except OSError as error:
                raise ChildDied(f"{self._node.name} left: {error}") from error

    async def receive(self) -> Frame:
        """See `Child.receive`."""
        said = await self._frames.get()
        if isinstance(said, ChildDied):
            self._frames.put_nowait(said)  # so it stays
            raise said
        return said

    def kill(self) -> None:
        """Have all of the node's processes killed, as the caller does with every other."""
        if self._first:
            self._node.notify({"kill": True})

    async def close(self) -> None:
        """End the node's processes; the node stays."""
        if self._first:
            with contextlib.suppress(LearnerFault):  # it left, and its processes end with it
                await self._node.request({"end": True}, _END)

    def deliver(self, said: Frame | ChildDied) -> None:
        """Queue a frame of the process, or its death, for `receive`."""
        self._frames.put_nowait(said)


class RemoteNode:
    """A node that has joined, and the processes of the learner on it."""

    def __init__(self, number: int, host: str, channel: Channel) -> None:
        self.channel = channel
        self.name = f"node {number} ({host})"
        self.children: dict[int, RemoteChild] = {}
        """Its processes, by rank."""
        self._spawning: dict[int, RemoteChild] = {}
        """Those that it was asked to begin. They say nothing before it answers; what is heard by then is of others."""
        self._answers: asyncio.Queue[Frame | None] = asyncio.Queue()
        self._notifying: set[asyncio.Task[None]] = set()

    def notify(self, frame: Frame) -> None:
        """Send what no answer is waited for."""

        async def send() -> None:
            with contextlib.suppress(OSError):  # it left, which `receive_frames` finds, too
                await self.channel.send(frame)

        task = asyncio.ensure_future(send())
        self._notifying.add(task)
        task.add_done_callback(self._notifying.discard)

    async def notified(self) -> None:
        """Wait until what `notify` was given is sent."""
        await asyncio.gather(*self._notifying)

    async def request(self, frame: Frame, seconds: float) -> Frame:
        """The node's answer to `frame`. Raises `LearnerFault` when it is gone, or none comes within `seconds`."""
        while not self._answers.empty():  # of a question that nobody waits for any more
            if self._answers.get_nowait() is None:
                self._answers.put_nowait(None)
                break
        try:
            await self.channel.send(frame)
            async with asyncio.timeout(seconds):
                answer = await self._answers.get()
        except OSError as error:
            raise LearnerFault(f"{self.name} does not answer: {error or type(error).__name__}") from error
        if answer is None:
            self._answers.put_nowait(None)
            raise LearnerFault(f"{self.name} left")
        if "error" in answer:
            raise LearnerFault(f"{self.name}: {answer['error']}")
        return answer

    async def spawn(self, ranks: range, world: int, store: str) -> list[RemoteChild]:
        """Start its processes; returns once they run. Raises as `request`."""
        self.children = {}
        self._spawning = {rank: RemoteChild(self, first=rank == ranks[0]) for rank in ranks}
        began = list(self._spawning.values())
        terms = {"first": ranks[0], "count": len(ranks), "world": world, "store": store}
        told = await self.request({"spawn": terms}, _SPAWN)
        for child, pid in zip(began, told["spawned"], strict=True):
            child.pid = pid
        return began

    async def receive_frames(self) -> None:
        """Hand every frame to the process or the request that it is for, until the node is gone."""
        why = "it hung up"
        try:
            while True:
                frame = await self.channel.receive()
                if "spawned" in frame:  # here, for its processes may speak in the next frame
                    self.children, self._spawning = self._spawning, {}
                child = self.children.get(frame.get("rank", -1))
                if child is None:
                    if "rank" not in frame:
                        self._answers.put_nowait(frame)
                elif "died" in frame:
                    child.deliver(ChildDied(f"{self.name}: {frame['died']}"))
                else:
                    child.deliver(frame["reply"])
        except (OSError, ValueError, LookupError) as error:
            why = str(error)
        self._answers.put_nowait(None)
        for child in self.children.values():
            child.deliver(ChildDied(f"{self.name} left the run: {why}"))


class NodePool:
    """The learner's other nodes, numbered from 1: they join, are checked, work for one learner after the other, and may
    leave and join again."""

    def __init__(self, address: Address, count: int, key: bytes, seconds: float) -> None:
        self.count = count
        """Nodes, this one included."""
        self._address = address
        self._key = key
        self._seconds = seconds
        self._joined: dict[int, RemoteNode] = {}
        self._refused: CodeRepairError | None = None
        """The last one that was refused since somebody began to wait."""
        self._taken = ""
        """What was said to the last one whose number was taken, since then; "" if there was none."""
        self._changed = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @classmethod
    async def open(cls, address: Address, count: int, key: bytes, seconds: float) -> Self:
        """Listen at `address`, and nowhere else. Each wait for nodes ends after `seconds`.

        Raises `UsageError` for an address that is not this machine's, or taken.
        """
        nodes = cls(address, count, key, seconds)
        try:
            nodes._server = await asyncio.start_server(nodes._accept, address.host, address.port)
        except OSError as error:
            raise UsageError(
                f"cannot listen at train.rendezvous={address}: {error.strerror or error}",
                fix="an address of this machine and a port that is free",
            ) from error
        return nodes

    def listening_socket(self) -> socket.socket:
        """A listening socket on a free port of the same address, for torch's own rendezvous."""
        family, kind, _, _, where = socket.getaddrinfo(self._address.host, 0, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind)
        found.bind(where)
        found.listen(1024)
        return found

    async def spawn(self, world: int, port: int) -> list[RemoteChild]:
        """Have every node start its part of `world` processes, that meet at `port` of the rendezvous' address.

        Raises `LearnerFault` for one that does not come in time, `PrerequisiteError` for one with other versions, and
        `UsageError` for one with a number that it cannot have.
        """
        each = world // self.count
        nodes = await self._wait_for_all()
        children: list[RemoteChild] = []
        for number, node in nodes:
            ranks = range(number * each, (number + 1) * each)
            children += await node.spawn(ranks, world, f"{self._address.host}:{port}")
        return children

    async def close(self) -> None:
        """Tell the nodes that the run is over, and stop listening."""
        if self._server is not None:
            self._server.close()
        for node in list(self._joined.values()):
            node.notify({"over": True})
        await asyncio.gather(*(node.notified() for node in self._joined.values()))
        for node in list(self._joined.values()):
            await node.channel.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _wait_for_all(self) -> list[tuple[int, RemoteNode]]:
        self._refused, self._taken = None, ""
        try:
            async with asyncio.timeout(self._seconds):
                while missing := [number for number in range(1, self.count) if number not in self._joined]:
                    if self._refused is not None:
                        raise self._refused
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise LearnerFault(
                f"{_names(missing)} not come to {self._address} within {self._seconds:g} s"
                + (f"; {self._taken}" if self._taken else ""),
                fix=f"start there: crrl learner {self._address} --node {missing[0]}, with the same {rendezvous.KEY},"
                " and go on with --resume; or raise train.node_seconds",
            ) from None
        return sorted(self._joined.items())

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        channel = Channel(reader, writer)
        try:
            number, host = await self._authenticate(channel)
            node = self._joined[number] = RemoteNode(number, host, channel)  # at once, so that no other gets the number
            try:
                await channel.send({"welcome": os.uname().nodename})
                self._changed.set()
                await node.receive_frames()
            finally:
                del self._joined[number]
        except _NumberTaken as error:  # it comes again: perhaps the other is gone, and the kernel does not know yet
            self._taken = str(error)
        except (OSError, ValueError, LookupError, TypeError):
            pass  # a stranger, or one that hung up meanwhile: nobody was promised anything
        except CodeRepairError as error:
            self._refused = error
            self._changed.set()
        except asyncio.CancelledError:
            return
        finally:
            self._connections.discard(task)
            await channel.close()

    async def _authenticate(self, channel: Channel) -> tuple[int, str]:
        """A node's number and host, once it has proven that it has the key. Raises what is said of it."""
        hello = await channel.receive_greeting()
        number, theirs, ours = int(hello["node"]), str(hello["nonce"]), rendezvous.nonce()
        await channel.send({"nonce": ours, "proof": rendezvous.prove(self._key, "controller", number, theirs, ours)})
        reply = await channel.receive_greeting()
        if not rendezvous.proof_matches(reply["proof"], rendezvous.prove(self._key, "node", number, theirs, ours)):
            raise ValueError("another key")
        host, found = str(reply["host"])[:200], dict(reply["versions"])
        try:
            self._check(number, host, found)
        except CodeRepairError as error:
            kind = "prerequisite" if isinstance(error, PrerequisiteError) else "usage"
            kind = "taken" if isinstance(error, _NumberTaken) else kind
            await channel.send({"error": str(error), "fix": error.fix, "kind": kind})
            raise
        return number, host

    def _check(self, number: int, host: str, found: dict[str, Any]) -> None:
        name = f"node {number} ({host})"
        if not 1 <= number < self.count:
            raise UsageError(
                f"{name} has come, and train.nodes={self.count}",
                fix=f"--node is from 1 to {self.count - 1}: node 0 is where crrl train runs",
            )
        if number in self._joined:
            raise _NumberTaken(
                f"{name} has come, and node {number} is here: {self._joined[number].name}",
                fix="give each node a number of its own",
            )
        if listed := rendezvous.differences(found, "here"):
            raise PrerequisiteError(
                f"{name} has other versions: {listed}",
                fix="install the same on every node: scripts/setup.sh there, from the same commit",
            )


def _names(missing: Iterable[int]) -> str:
    numbers = list(missing)
    listed = ", ".join(map(str, numbers))
    return f"node {listed} has" if len(numbers) == 1 else f"nodes {listed} have"
