"""Workers as actors of a Ray cluster, which places them and reports lost ones."""

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

CLOSE_SECONDS = 15.0
CPUS = 1.0  # per actor
PATIENCE = 300.0  # seconds without an actor, after which the run ends
PACKAGES = ("coderepairrl", "transformers", "tokenizers", "renderers", "aiohttp")
"""Packages that determine tokens and messages. Ray compares its own version."""

_NOT_IMPORTED = "failed to import on the worker"  # in Ray's message if a machine has other code
_INSTALL_FIX = "install the same versions on all machines (scripts/setup.sh train,ray), and restart Ray there"


def read_versions() -> dict[str, str]:
    """Versions that machines must share."""
    installed = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), **installed, "code of coderepairrl": source_digest()}


class WorkerActor:
    """Worker in a Ray process, with pickled messages and errors."""

    _worker: Worker

    def __init__(self) -> None:
        self._parts = AsyncExitStack()

    async def open(
        self, expected: Mapping[str, str], folder: str, path: Sequence[str], setup: bytes, context: int
    ) -> tuple[str, bytes]:
        """Start; return the host name, and a pickled error or nothing."""
        host = socket.gethostname()
        try:
            self._check_machine(host, expected, folder)
            sys.path += [each for each in path if each not in sys.path]  # for the user's classes
            self._worker = await self._parts.enter_async_context(Worker.open(pickle.loads(setup), context))
        except ImportError as error:  # the module of a user's class, for example, is missing
            return host, pickle.dumps(PrerequisiteError(f"{type(error).__name__}: {error}", fix=_INSTALL_FIX))
        except Exception as error:
            return host, pickle.dumps(make_picklable(error))
        return host, b""

    def _check_machine(self, host: str, expected: Mapping[str, str], folder: str) -> None:
        local = read_versions()
        if differing := [
            f"{each} {local[each]}, not {version}" for each, version in expected.items() if local[each] != version
        ]:
            raise PrerequisiteError(
                f"{host} has {', '.join(differing)}: its episodes would not be the same",
                fix=_INSTALL_FIX,
            )
        try:
            os.chdir(folder)
        except OSError as error:
            raise PrerequisiteError(
                f"{host} cannot enter {folder}: {error.strerror}",
                fix="start from a folder on a file system that all machines of the cluster share",
            ) from None

    async def next_messages(self) -> bytes:
        """Return pickled messages; see `Worker.next_messages`."""
        return pickle.dumps(await self._worker.next_messages())

    async def receive(self, messages: bytes) -> None:
        """See `Worker.receive`."""
        self._worker.receive(pickle.loads(messages))

    async def close(self) -> None:
        """End all attempts."""
        await self._parts.aclose()


class _ActorConnection(Connection):
    def __init__(self, ray: Any, actor: Any, name: str) -> None:
        self.name = name
        self._ray = ray
        self._actor = actor

    async def receive(self) -> Sequence[FromWorker]:
        with _convert_ray_errors(self._ray, self.name):
            messages: list[FromWorker] = pickle.loads(await self._actor.next_messages.remote())
        return messages

    async def send(self, messages: Sequence[ToWorker]) -> None:
        with _convert_ray_errors(self._ray, self.name):
            await self._actor.receive.remote(pickle.dumps(messages))

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
            raise PrerequisiteError(f"{name} cannot start: {format_on_one_line(error)}", fix=_INSTALL_FIX) from error
        raise WorkerFault(f"{name} was lost: {format_on_one_line(error)}") from error


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
        actor_class = ray.remote(WorkerActor).options(
            num_cpus=CPUS,
            memory=memory * capacity or None,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=8,  # `next_messages` waits while others are served
            scheduling_strategy="SPREAD",
        )

        async def connect(number: int) -> Connection:
            with _convert_ray_errors(ray, "an actor"):
                actor = actor_class.remote()
            connection = _ActorConnection(ray, actor, f"actor {number}")
            try:
                with _convert_ray_errors(ray, "an actor"):
                    host, pickled_error = await actor.open.remote(*arguments)
                connection.name = f"actor {number} on {host}"
                if pickled_error:
                    error: Exception = pickle.loads(pickled_error)
                    # other errors may be temporary, such as a full disk
                    if not isinstance(error, ConfigError | PrerequisiteError | CombinedError):
                        raise WorkerFault(f"an actor on {host} did not start: {error}") from error
                    raise PrerequisiteError(f"{connection.name}: {error}", fix=error.fix) from error
            except BaseException:
                ray.kill(actor)
                raise
            return connection

        def describe() -> str:
            total, free = ray.cluster_resources(), ray.available_resources()
            return (
                f"an actor takes {CPUS:g} CPU and {memory * capacity / 1e9:.1f} GB of memory; the cluster has"
                f" {free.get('CPU', 0.0):g} of {total.get('CPU', 0.0):g} CPUs and"
                f" {free.get('memory', 0.0) / 1e9:.1f} of {total.get('memory', 0.0) / 1e9:.1f} GB free"
            )

        async with RemoteExecutor(
            connect,
            engine,
            on_turn,
            wanted=math.ceil(concurrency / capacity),
            capacity=capacity,
            patience=patience,
            say=say,
            describe=describe,
            watch=lambda: watch_head(ray),
        ) as executor:
            yield executor
