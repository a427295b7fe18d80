"""Nodes as actors of a Ray cluster, which places them, says when one is lost, and carries what travels."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import math
import os
import platform
import re
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from coderepairrl.errors import ConfigError, NodeFault, PrerequisiteError, Several
from coderepairrl.protocols import Engine
from coderepairrl.rollout.across import Across, Line, OnTurn
from coderepairrl.rollout.exchange import FromNode, Node, Setup, ToNode, pack, portable, unpack

LARGE = 1 << 16
"""Bytes beyond which Ray may have to wait for room in its object store, which is not done on the event loop."""
CLOSING = 15.0
"""Seconds that an actor has to take down its sandboxes."""
PACKAGES = ("coderepairrl", "transformers", "tokenizers", "renderers", "aiohttp")
"""What decides the tokens of a conversation, and what can be read of what travels. Ray compares its own."""


_NOT_IMPORTED = "failed to import on the worker"
"""What Ray says of an actor whose class cannot be loaded where it is to be."""


def versions() -> dict[str, str]:
    """Of what has to be the same on all machines."""
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in PACKAGES}}


_INSTALL = "install the same versions on all machines (scripts/setup.sh dev,ray), and start Ray there anew"


class Actor:
    """A node in a process of Ray's. What it gives and takes is packed, and its own errors are part of that."""

    def __init__(
        self, expected: Mapping[str, str], folder: str, path: Sequence[str], setup: bytes, context: int
    ) -> None:
        self._expected = expected
        self._folder = folder
        self._path = path
        self._setup = setup
        self._context = context
        self._parts = AsyncExitStack()
        self._node: Node | None = None

    async def open(self) -> tuple[str, bytes]:
        """The name of its machine, and a packed error if it cannot be a node."""
        name = socket.gethostname()
        try:
            self._check(name)
            setup: Setup = unpack(self._setup)
            self._node = await self._parts.enter_async_context(Node.opened(setup, self._context))
        except ImportError as error:  # a user's own class, say
            return name, pack(PrerequisiteError(f"{type(error).__name__}: {error}", fix=_INSTALL))
        except Exception as error:
            return name, pack(portable(error))
        return name, b""

    def _check(self, name: str) -> None:
        ours = versions()
        if differing := [
            f"{each} {ours[each]}, not {version}" for each, version in self._expected.items() if ours[each] != version
        ]:
            raise PrerequisiteError(
                f"{name} has {', '.join(differing)}: its episodes would not be the same",
                fix=_INSTALL,
            )
        try:
            os.chdir(self._folder)
        except OSError as error:
            raise PrerequisiteError(
                f"{name} cannot enter {self._folder}: {error.strerror}",
                fix="start from a folder on a file system that all machines of the cluster share",
            ) from None
        sys.path += [each for each in self._path if each not in sys.path]  # a user's own classes

    async def give(self) -> bytes:
        """See `Node.give`."""
        return pack(await self._opened.give())

    async def take(self, messages: bytes) -> None:
        """See `Node.take`."""
        self._opened.take(unpack(messages))

    async def close(self) -> None:
        """End what it makes."""
        await self._parts.aclose()

    @property
    def _opened(self) -> Node:
        if self._node is None:
            raise AssertionError("it was not opened")
        return self._node


class _ActorLine(Line):
    """The way to an actor."""

    def __init__(self, ray: Any, actor: Any, name: str) -> None:
        self.name = name
        self._ray = ray
        self._actor = actor

    async def receive(self) -> Sequence[FromNode]:
        """See `Line.receive`."""
        with _faults(self._ray, self.name):
            given: list[FromNode] = unpack(await self._actor.give.remote())
        return given

    async def send(self, messages: Sequence[ToNode]) -> None:
        """See `Line.send`."""
        data = pack(messages)
        with _faults(self._ray, self.name):
            if len(data) > LARGE:
                await (await asyncio.to_thread(self._actor.take.remote, data))
            else:
                await self._actor.take.remote(data)

    async def close(self) -> None:
        """See `Line.close`."""
        with contextlib.suppress(NodeFault, TimeoutError), _faults(self._ray, self.name):
            async with asyncio.timeout(CLOSING):
                await self._actor.close.remote()
        self.drop()

    def drop(self) -> None:
        """See `Line.drop`."""
        self._ray.kill(self._actor)


@contextlib.contextmanager
def _faults(ray: Any, name: str) -> Iterator[None]:
    """Whatever Ray raises is a lost node: it may go on somewhere, but is not listened to any more."""
    try:
        yield
    except ray.exceptions.RayError as error:
        if _NOT_IMPORTED in str(error):
            raise PrerequisiteError(f"{name} cannot be made: {in_short(error)}", fix=_INSTALL) from error
        raise NodeFault(f"{name} was lost: {in_short(error)}") from error


def in_short(error: Exception) -> str:
    """What Ray says on many lines, without ids, so that the same happening twice is the same text.

    >>> in_short(RuntimeError("The actor died.\\n\\tpid: 7\\nIts node was\\n\\nterminated."))
    'RuntimeError: The actor died. Its node was terminated.'
    """
    lines = [line.strip() for line in str(error).splitlines() if not line.startswith("\t")]
    text = re.sub(r"pid=\d+, |\b[0-9a-f]{16,}\b", "", " ".join(filter(None, lines)))
    return f"{type(error).__name__}: {text if len(text) <= 600 else text[:300] + ' ... ' + text[-300:]}"


def too_small(machines: Sequence[Mapping[str, Any]], *, cpus: float, memory: int, room: int) -> str:
    """What is said of those of Ray's `machines` that have the CPUs of an actor, and not the memory of its attempts.

    >>> small = {"Alive": True, "NodeManagerHostname": "b", "Resources": {"CPU": 4.0, "memory": 7e9}}
    >>> too_small([small], cpus=1.0, memory=2 << 30, room=8)  # doctest: +NORMALIZE_WHITESPACE
    'an actor of 8 episodes claims 17.2 GB of memory, more than Ray has on b (7.0 GB): rollout.ray.episodes=3 would fit'
    """
    found = {
        str(each["NodeManagerHostname"]): int(each["Resources"].get("memory", 0))
        for each in machines
        if each["Alive"] and each["Resources"].get("CPU", 0.0) >= cpus
    }
    small = {name: size for name, size in found.items() if size < memory * room}
    if not small:
        return ""
    fitting = min(small.values()) // memory
    what = f"rollout.ray.episodes={fitting} would fit" if fitting else "lower sandbox.options.memory"
    listed = ", ".join(f"{name} ({size / 1e9:.1f} GB)" for name, size in sorted(small.items()))
    claimed = f"an actor of {room} episodes claims {memory * room / 1e9:.1f} GB of memory"
    return f"{claimed}, more than Ray has on {listed}: {what}"


@asynccontextmanager
async def on_ray(
    setup: Setup,
    engine: Engine,
    on_turn: OnTurn,
    *,
    address: str,
    concurrency: int,
    room: int,
    cpus: float,
    memory: int,
    patience: float,
    say: Callable[[str], None],
) -> AsyncIterator[Across]:
    """Makes `concurrency` attempts at once on the Ray cluster at `address`, up to `room` by an actor of `cpus` CPUs.

    Actors are spread over the machines. One that is lost is replaced wherever there is room by then; fewer than are
    wanted will do. An actor claims `memory` bytes for each of its attempts, all that their sandboxes may use: else a
    machine could run out, and Ray would end actors, with the attempts of others, for what one attempt has done. Raises
    `PrerequisiteError` where there is no such cluster, or a machine of it lacks something, and `RunError` after
    `patience` seconds without an actor.
    """
    given = (versions(), str(Path.cwd()), sys.path, pack(setup), engine.context)
    async with _connected(address) as ray:
        remote = ray.remote(Actor).options(
            num_cpus=cpus,
            memory=memory * room or None,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=8,
            scheduling_strategy="SPREAD",
        )
        if small := too_small(ray.nodes(), cpus=cpus, memory=memory, room=room):
            if address == "local":  # where no other machine will come
                raise PrerequisiteError(small)
            say(small)

        async def open_line(seat: int) -> Line:
            with _faults(ray, "an actor"):
                actor = remote.remote(*given)
            line = _ActorLine(ray, actor, f"actor {seat}")
            try:
                with _faults(ray, "an actor"):
                    host, wrong = await actor.open.remote()
                line.name = f"actor {seat} on {host}"
                if wrong:
                    error: Exception = unpack(wrong)
                    if not isinstance(error, ConfigError | PrerequisiteError | Several):  # a full disk: it may pass
                        raise NodeFault(f"an actor on {host} did not start: {error}") from error
                    raise PrerequisiteError(f"{line.name}: {error}", fix=error.fix) from error
            except BaseException:
                ray.kill(actor)
                raise
            return line

        def state() -> str:
            there, free = ray.cluster_resources().get("CPU", 0.0), ray.available_resources().get("CPU", 0.0)
            small = too_small(ray.nodes(), cpus=cpus, memory=memory, room=room)
            taken = f"an actor takes {cpus:g} CPUs, and of the cluster's {there:g} there are {free:g} free"
            return f"{taken}; {small}" if small else taken

        seats = math.ceil(concurrency / room)
        async with Across(
            open_line, engine, on_turn, seats=seats, room=room, patience=patience, say=say, state=state
        ) as executor:
            yield executor


@asynccontextmanager
async def _connected(address: str) -> AsyncIterator[Any]:
    """Ray's module, connected, and disconnected in the end; one that is connected already stays so."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else a cluster that starts here reports to its makers
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # and ends actors where the kernel would end a guest
    try:
        import ray
    except ImportError:
        raise PrerequisiteError("ray is not installed", fix="pip install 'coderepairrl[ray]'") from None
    if ray.is_initialized():
        yield ray
        return
    logging.getLogger("ray").setLevel(logging.ERROR)
    if address not in ("auto", "local"):
        await _check_listens(address)
    try:
        # in a thread, where it leaves the handling of SIGTERM alone
        await asyncio.to_thread(
            ray.init, address=address, log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR
        )
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        mismatch = "mismatch" in str(error)
        fix = "install the same Ray and Python on all of its machines (scripts/setup.sh dev,ray), and start it anew"
        raise PrerequisiteError(
            f"cannot join the Ray cluster {address}: {in_short(error)}", fix=fix if mismatch else _START
        ) from error
    try:
        yield ray
    finally:
        await asyncio.to_thread(ray.shutdown)


_START = "start Ray on this machine and the others (docs/guides/cluster.md), or set rollout.ray.address=local"


async def _check_listens(address: str) -> None:
    """Raise `PrerequisiteError` where nothing listens, for which Ray would wait a minute."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(10.0):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        writer.close()
    except (OSError, TimeoutError, OverflowError) as error:
        raise PrerequisiteError(f"nothing listens at the Ray address {address}: {error}", fix=_START) from None
