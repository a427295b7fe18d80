"""Worker process that makes attempts for the controller, perhaps on another machine, and the messages between both.

Tokens come from the controller's engine, and the controller logs every turn before the agent gets its reply. Neither
side (`coderepairrl.rollout.remote` is the controller's) can flood the other: a session logs one turn at a time, a call
has one reply, and a worker takes no more attempts than its capacity.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import pickle
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from coderepairrl import tokens
from coderepairrl.errors import CodeRepairError, EngineFault, GatewayFault
from coderepairrl.gateway import Gateway, PolicySource
from coderepairrl.processes.scratch import scratch
from coderepairrl.protocols import Engine
from coderepairrl.rollout.episodes import AttemptSettings, PlannedAttempt
from coderepairrl.rollout.local import LocalExecutor
from coderepairrl.tokens import CodecSource
from coderepairrl.types import Chunk, Episode, Sampling, Turn

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartAttempt:
    """To the worker: make an attempt."""

    planned: PlannedAttempt


@dataclass(frozen=True, slots=True)
class CancelAttempt:
    """To the worker: cancel an attempt; `AttemptFinished` still follows."""

    episode: str


@dataclass(frozen=True, slots=True)
class TurnLogged:
    """To the worker: `TurnCommitted` of this `number` is logged, or failed."""

    number: int
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """To the worker: output for an `EngineRequest`, or its `error`."""

    number: int
    chunks: tuple[Chunk, ...]
    ended: bool = False
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class TurnCommitted:
    """From the worker: a turn to log. The agent gets its reply after `TurnLogged`."""

    number: int
    episode: str
    turn: Turn


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """From the worker: a prompt for the engine."""

    number: int
    ids: bytes
    """Prompt as unsigned ints (`array("I")`)."""
    sampling: Sampling
    seed: int


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """From the worker: cancel an `EngineRequest`."""

    number: int


@dataclass(frozen=True, slots=True)
class AttemptFinished:
    """From the worker: an episode without its turns, which are logged; None if cancelled, or after `error`."""

    episode: str
    result: Episode | None
    error: Exception | None = None


ToWorker = StartAttempt | CancelAttempt | TurnLogged | EngineOutput
FromWorker = TurnCommitted | EngineRequest | CancelRequest | AttemptFinished
_STOPPING = "the worker is stopping"
T = TypeVar("T")


async def take_all(queue: asyncio.Queue[T]) -> list[T]:
    """Wait for an item, and return all that are queued by then."""
    items = [await queue.get()]
    while not queue.empty():
        items.append(queue.get_nowait())
    return items


def make_picklable(error: BaseException) -> Exception:
    """Return `error` if it is expected and can be pickled, else a fault with its text."""
    # an engine raises ValueError for a too long prompt; a UnicodeError, which is one too, is a bug
    if isinstance(error, CodeRepairError | ValueError) and not isinstance(error, UnicodeError):
        with contextlib.suppress(Exception):  # pickle cannot call the constructors of some users' classes
            return error if type(pickle.loads(pickle.dumps(error))) is type(error) else GatewayFault(str(error))
    log.error("unexpected %r", error, exc_info=error)
    return GatewayFault(f"{type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """Pickled setup of a worker process."""

    tokenizer: CodecSource
    terms: Callable[[], Mapping[str, AttemptSettings]]
    """Creates each task kind's settings within a second; raises if the machine cannot use them."""


class RelayedEngine(Engine):
    """Engine of the worker's gateway: forwards requests to the controller's engine."""

    def __init__(self, context: int, send: Callable[[FromWorker], None]) -> None:
        self.context = context
        self._send = send
        self._numbers = itertools.count()
        self._outputs: dict[int, asyncio.Queue[EngineOutput]] = {}

    def deliver(self, output: EngineOutput) -> None:
        """Pass engine output to its request."""
        if (queue := self._outputs.get(output.number)) is not None:  # else it was just cancelled
            queue.put_nowait(output)

    async def generate(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[Chunk, None]:
        """See `Engine.generate`."""
        number, queue, ended = next(self._numbers), asyncio.Queue[EngineOutput](), False
        self._outputs[number] = queue
        self._send(EngineRequest(number, array("I", ids).tobytes(), sampling, seed))
        try:
            while not ended:
                output = await queue.get()
                ended = output.ended
                for chunk in output.chunks:
                    yield chunk
                if output.error is not None:
                    raise output.error
        finally:
            del self._outputs[number]
            if not ended:
                self._send(CancelRequest(number))

    async def load(self, path: Path, version: int, checksum: str) -> int:
        """Raise `EngineFault`: the controller loads weights."""
        raise EngineFault("weights are loaded by the controller, not by a worker")

    async def health(self) -> Mapping[str, float]:
        """Count requests; the controller has the engine's counters."""
        return {"running": float(len(self._outputs))}

    async def close(self) -> None:
        """Do nothing."""


class Worker:
    """Makes attempts concurrently; create it with `open`."""

    def __init__(self, setup: WorkerSetup, terms: Mapping[str, AttemptSettings], context: int) -> None:
        source = setup.tokenizer
        codec = tokens.load_codec(source.model, thinking=source.thinking)
        self._outbox = asyncio.Queue[FromWorker]()
        self._engine = RelayedEngine(context, self._outbox.put_nowait)
        self.gateway = Gateway(PolicySource(codec, self._engine), sampling=Sampling(), on_turn=self._commit)
        self._executor = LocalExecutor(self.gateway, terms)
        self._attempts: dict[str, asyncio.Task[Episode]] = {}
        self._unlogged: dict[int, asyncio.Future[None]] = {}  # turns that the controller has not logged yet, by number
        self._numbers = itertools.count()
        self._stopped = False

    @staticmethod
    @asynccontextmanager
    async def open(setup: WorkerSetup, context: int) -> AsyncIterator[Worker]:
        """Run a worker and its gateway until exit, which ends all attempts. Raises as `WorkerSetup.terms`."""
        terms = await asyncio.to_thread(setup.terms)
        with scratch("worker") as home:
            home.chmod(0o711)  # guests run as another user, and must reach the socket
            worker = Worker(setup, terms, context)
            async with worker.gateway.listening(socket=home / "gateway.sock"):
                try:
                    yield worker
                finally:
                    await worker.stop()

    def receive(self, messages: Sequence[ToWorker]) -> None:
        """Carry out the controller's messages."""
        for message in messages:
            match message:
                case StartAttempt(planned):
                    task = self._attempts[planned.episode_id] = asyncio.create_task(self._executor.run(planned))
                    # a callback, as it also runs for a task that is cancelled before it begins
                    task.add_done_callback(partial(self._finish, planned.episode_id))
                case CancelAttempt(episode):
                    if (attempt := self._attempts.get(episode)) is not None:
                        attempt.cancel()
                case TurnLogged(number, error):
                    if (future := self._unlogged.pop(number, None)) is not None and not future.done():
                        if error is None:
                            future.set_result(None)
                        else:
                            future.set_exception(error)
                case EngineOutput():
                    self._engine.deliver(message)

    async def next_messages(self) -> list[FromWorker]:
        """Wait for messages to the controller, and return them."""
        return await take_all(self._outbox)

    async def stop(self) -> None:
        """End all attempts; no more turns are logged."""
        self._stopped = True
        for future in self._unlogged.values():
            if not future.done():
                future.set_exception(GatewayFault(_STOPPING))
        for task in list(self._attempts.values()):
            task.cancel()
        await asyncio.gather(*self._attempts.values(), return_exceptions=True)

    def _finish(self, episode: str, task: asyncio.Task[Episode]) -> None:
        del self._attempts[episode]
        if task.cancelled():
            self._outbox.put_nowait(AttemptFinished(episode, None))
        elif (error := task.exception()) is not None:
            self._outbox.put_nowait(AttemptFinished(episode, None, make_picklable(error)))
        else:
            self._outbox.put_nowait(AttemptFinished(episode, replace(task.result(), turns=())))

    async def _commit(self, episode: str, turn: Turn) -> None:
        if self._stopped:
            raise GatewayFault(_STOPPING)
        number = next(self._numbers)
        logged: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unlogged[number] = logged
        self._outbox.put_nowait(TurnCommitted(number, episode, turn))
        await logged
