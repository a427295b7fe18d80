"""Workers as actors of a Ray cluster, which places them and reports lost ones."""
# small arguments and results travel in Ray's messages, not in its object store, which other users may fill

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import math
import os
import pickle
import platform
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from coderepairrl.errors import CombinedError, ConfigError, PrerequisiteError, WorkerFault
from coderepairrl.protocols import Engine
from coderepairrl.rollout.ray_cluster import connect_ray, format_on_one_line, watch_head
from coderepairrl.rollout.remote import Connection, OnTurn, RemoteExecutor
from coderepairrl.rollout.worker import FromWorker, ToWorker, Worker, WorkerSetup, make_picklable
from coderepairrl.runs import source_digest

PIECE = 1 << 16
"""Bytes of an argument or result; beyond 100 KB they use the object store (Ray's ``max_direct_call_object_size``)."""
CLOSE_SECONDS = 15.0
CPUS = 1.0
PATIENCE = 300.0
PACKAGES = ("coderepairrl", "transformers", "tokenizers", "renderers", "aiohttp")
"""Packages that determine tokens and messages. Ray compares its own version."""

_NOT_IMPORTED = "failed to import on the worker"
_INSTALL = "install the same versions on all machines (scripts/setup.sh train,ray), and restart Ray there"


def read_versions() -> dict[str, str]:
    """Versions that machines must share."""
    installed = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), **installed, "code of coderepairrl": source_digest()}


class WorkerActor:
    """Worker in a Ray process, with pickled messages and errors."""

    def __init__(
        self, expected: Mapping[str, str], folder: str, path: Sequence[str], setup: bytes, context: int
    ) -> None:
        self._expected = expected
        self._folder = folder
        self._path = path
        self._setup = setup
        self._context = context
        self._parts = AsyncExitStack()
        self._worker: Worker | None = None
        self._received = bytearray()
        self._unsent = memoryview(b"")

    async def open(self) -> tuple[str, bytes]:
        """Start; return the host name, and a pickled error."""
        name = socket.gethostname()
        try:
            self._check(name)
            setup: WorkerSetup = pickle.loads(self._setup)
            self._worker = await self._parts.enter_async_context(Worker.open(setup, self._context))
        except ImportError as error:  # of a user's class, for example
            return name, pickle.dumps(PrerequisiteError(f"{type(error).__name__}: {error}", fix=_INSTALL))
        except Exception as error:
            return name, pickle.dumps(make_picklable(error))
        return name, b""

    def _check(self, name: str) -> None:
        local = read_versions()
        if differing := [
            f"{each} {local[each]}, not {version}" for each, version in self._expected.items() if local[each] != version
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
        sys.path += [each for each in self._path if each not in sys.path]  # for the user's classes

    async def next_piece(self) -> tuple[bytes, bool]:
        """Return the next piece of pickled messages, and whether it is the last."""
        if not self._unsent:
            self._unsent = memoryview(pickle.dumps(await self._require_worker.next_messages()))
        piece, self._unsent = self._unsent[:PIECE], self._unsent[PIECE:]
        return bytes(piece), not self._unsent

    async def receive(self, piece: bytes, last: bool) -> None:
        """See `Worker.receive`; messages come in pieces."""
        self._received += piece
        if last:
            messages, self._received = pickle.loads(self._received), bytearray()
            self._require_worker.receive(messages)

    async def close(self) -> None:
        """End all attempts."""
        await self._parts.aclose()

    @property
    def _require_worker(self) -> Worker:
        assert self._worker is not None, "it was not opened"
        return self._worker


class _ActorConnection(Connection):
    def __init__(self, ray: Any, actor: Any, name: str) -> None:
        self.name = name
        self._ray = ray
        self._actor = actor

    async def receive(self) -> Sequence[FromWorker]:
        received, last = bytearray(), False
        with _convert_ray_errors(self._ray, self.name):
            while not last:
                piece, last = await self._actor.next_piece.remote()
                received += piece
        messages: list[FromWorker] = pickle.loads(received)
        return messages

    async def send(self, messages: Sequence[ToWorker]) -> None:
        data = pickle.dumps(messages)
        with _convert_ray_errors(self._ray, self.name):
            for start in range(0, len(data), PIECE):
                end = start + PIECE
                await self._actor.receive.remote(data[start:end], end >= len(data))

    async def close(self) -> None:
        with contextlib.suppress(WorkerFault, TimeoutError), _convert_ray_errors(self._ray, self.name):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._actor.close.remote()
        self.kill()

    def kill(self) -> None:
        self._ray.kill(self._actor)


@contextlib.contextmanager
def _convert_ray_errors(ray: Any, name: str) -> Iterator[None]:
    # any error of Ray means a lost worker: it may still run, but is ignored
    try:
        yield
    except ray.exceptions.RayError as error:
        if _NOT_IMPORTED in str(error):
            raise PrerequisiteError(f"{name} cannot be made: {format_on_one_line(error)}", fix=_INSTALL) from error
        raise WorkerFault(f"{name} was lost: {format_on_one_line(error)}") from error


def describe_small_machines(machines: Sequence[Mapping[str, Any]], *, memory: int, capacity: int) -> str:
    """Describe machines with an actor's CPUs, but not its memory.

    >>> small = {"Alive": True, "NodeManagerHostname": "b", "Resources": {"CPU": 4.0, "memory": 7e9}}
    >>> describe_small_machines([small], memory=2 << 30, capacity=8)  # doctest: +NORMALIZE_WHITESPACE
    'an actor of 8 episodes claims 17.2 GB of memory, more than Ray has on b (7.0 GB): rollout.ray.episodes=3 would fit'
    """
    memory_by_name = {
        str(each["NodeManagerHostname"]): int(each["Resources"].get("memory", 0))
        for each in machines
        if each["Alive"] and each["Resources"].get("CPU", 0.0) >= CPUS
    }
    small = {name: size for name, size in memory_by_name.items() if size < memory * capacity}
    if not small:
        return ""
    fitting = min(small.values()) // memory
    remedy = f"rollout.ray.episodes={fitting} would fit" if fitting else "lower sandbox.options.memory"
    listed = ", ".join(f"{name} ({size / 1e9:.1f} GB)" for name, size in sorted(small.items()))
    claimed = f"an actor of {capacity} episodes claims {memory * capacity / 1e9:.1f} GB of memory"
    return f"{claimed}, more than Ray has on {listed}: {remedy}"


@asynccontextmanager
async def ray_executor(
    setup: WorkerSetup,
    engine: Engine,
    on_turn: OnTurn,
    *,
    address: str,
    concurrency: int,
    capacity: int,
    memory: int,
    say: Callable[[str], None],
    patience: float = PATIENCE,
) -> AsyncIterator[RemoteExecutor]:
    """Make `concurrency` attempts at once on the Ray cluster, up to `capacity` per actor with one CPU.

    Actors spread over the machines; lost ones are replaced. An actor claims `memory` bytes per attempt, all that its
    sandbox may use: else Ray would end actors when a machine runs out. Raises `PrerequisiteError` for a missing cluster
    or an unfit machine, and `RunError` after `patience` seconds without an actor.
    """
    arguments = (read_versions(), str(Path.cwd()), sys.path, pickle.dumps(setup), engine.context)
    async with connect_ray(address) as ray:
        remote = ray.remote(WorkerActor).options(
            num_cpus=CPUS,
            memory=memory * capacity or None,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=8,
            scheduling_strategy="SPREAD",
        )
        if small := describe_small_machines(ray.nodes(), memory=memory, capacity=capacity):
            if address == "local":  # no other machine will join
                raise PrerequisiteError(small)
            say(small)

        async def connect(number: int) -> Connection:
            with _convert_ray_errors(ray, "an actor"):
                actor = remote.remote(*arguments)
            connection = _ActorConnection(ray, actor, f"actor {number}")
            try:
                with _convert_ray_errors(ray, "an actor"):
                    host, wrong = await actor.open.remote()
                connection.name = f"actor {number} on {host}"
                if wrong:
                    error: Exception = pickle.loads(wrong)
                    if not isinstance(
                        error, ConfigError | PrerequisiteError | CombinedError
                    ):  # a full disk: it may pass
                        raise WorkerFault(f"an actor on {host} did not start: {error}") from error
                    raise PrerequisiteError(f"{connection.name}: {error}", fix=error.fix) from error
            except BaseException:
                ray.kill(actor)
                raise
            return connection

        def describe() -> str:
            total, free = ray.cluster_resources().get("CPU", 0.0), ray.available_resources().get("CPU", 0.0)
            small = describe_small_machines(ray.nodes(), memory=memory, capacity=capacity)
            usage = f"an actor takes {CPUS:g} CPU, and {free:g} of the cluster's {total:g} are free"
            return f"{usage}; {small}" if small else usage

        async with RemoteExecutor(
            connect,
            engine,
            on_turn,
            workers=math.ceil(concurrency / capacity),
            capacity=capacity,
            patience=patience,
            say=say,
            describe=describe,
            watch=lambda: watch_head(ray),
        ) as executor:
            yield executor
