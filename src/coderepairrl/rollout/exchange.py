"""Attempts in another process, a *node*: what travels between it and the controller, and the node's end.

The node has a gateway, agents, sandboxes and rewards of its own. Tokens come from the controller's engine, so that
weights and versions are known in one place, and every turn is in the controller's log before its client learns of it.

Neither side can swamp the other: a session has one turn underway to the log and waits for it, a call one reply from
the engine, and the controller gives a node no more attempts than it has room for.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import pickle
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from coderepairrl import tokens
from coderepairrl.errors import CodeRepairError, EngineFault, GatewayFault
from coderepairrl.gateway import Gateway, PolicySource
from coderepairrl.processes.scratch import scratch
from coderepairrl.protocols import Chunk, Engine
from coderepairrl.rollout.episodes import Terms, Ticket
from coderepairrl.rollout.local import Local
from coderepairrl.tokens import LoadedFrom
from coderepairrl.types import Episode, HistoryPolicy, Sampling, Turn

_STOPPED = "the node stops"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Make:
    """To the node: an attempt."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Stop:
    """To the node: an attempt that is called off. It is `Made` all the same."""

    episode: str


@dataclass(frozen=True, slots=True)
class Kept:
    """To the node: its turn of this number is in the log, or why it is not."""

    number: int
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """To the node: what the engine gave for a request since the last time; `error` is how it failed."""

    number: int
    chunks: tuple[Chunk, ...]
    ended: bool = False
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Committed:
    """From the node: a turn."""

    number: int
    episode: str
    turn: Turn


@dataclass(frozen=True, slots=True)
class Asked:
    """From the node: a request to the engine."""

    number: int
    ids: bytes
    """Four bytes each, in the order of this machine's kind."""
    sampling: Sampling
    seed: int


@dataclass(frozen=True, slots=True)
class Left:
    """From the node: a request to the engine that is called off."""

    number: int


@dataclass(frozen=True, slots=True)
class Made:
    """From the node: an episode without its turns, which the controller has; None where it was called off."""

    episode: str
    made: Episode | None
    error: Exception | None = None


ToNode = Make | Stop | Kept | Sampled
FromNode = Committed | Asked | Left | Made


@dataclass(frozen=True, slots=True)
class Setup:
    """What a node is made of. It is pickled, and made anew on the node's machine from what is there."""

    tokenizer: LoadedFrom
    history_policy: HistoryPolicy
    accept: Collection[str]
    terms: Callable[[], Mapping[str, Terms]]
    """Takes a second; raises what is wrong with that machine."""


def portable(error: BaseException) -> Exception:
    """`error` if it can be pickled and is one that callers expect, else a fault that says what it was."""
    if isinstance(error, CodeRepairError | ValueError) and not isinstance(error, UnicodeError):
        with contextlib.suppress(Exception):  # a class of a user's own, with another constructor
            return error if type(pickle.loads(pickle.dumps(error))) is type(error) else GatewayFault(str(error))
    log.error("unexpected %r", error, exc_info=error)
    return GatewayFault(f"{type(error).__name__}: {error}")


class Relayed(Engine):
    """The controller's engine, as the node's gateway asks it."""

    def __init__(self, context: int, post: Callable[[FromNode], None]) -> None:
        self.context = context
        self._post = post
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Queue[Sampled]] = {}

    def take(self, news: Sampled) -> None:
        """What the engine gave."""
        if (queue := self._waiting.get(news.number)) is not None:  # else it was called off a moment ago
            queue.put_nowait(news)

    async def generate(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[Chunk, None]:
        """See `Engine.generate`."""
        number, queue, ended = next(self._numbers), asyncio.Queue[Sampled](), False
        self._waiting[number] = queue
        self._post(Asked(number, array("I", ids).tobytes(), sampling, seed))
        try:
            while not ended:
                news = await queue.get()
                ended = news.ended
                for chunk in news.chunks:
                    yield chunk
                if news.error is not None:
                    raise news.error
        finally:
            del self._waiting[number]
            if not ended:
                self._post(Left(number))

    async def load(self, path: Path, version: int, checksum: str) -> int:
        """Raises `EngineFault`: weights are the controller's matter."""
        raise EngineFault("weights are loaded by the controller, not by a node")

    async def health(self) -> Mapping[str, float]:
        """Requests under way; the engine's own counters are known to the controller."""
        return {"running": float(len(self._waiting))}

    async def close(self) -> None:
        """Nothing is held."""


class Node:
    """Makes the attempts that it is given, as many at once. `opened` makes one."""

    def __init__(self, setup: Setup, terms: Mapping[str, Terms], context: int) -> None:
        where = setup.tokenizer
        codec = tokens.load(where.model, renderer=where.renderer, thinking=where.thinking)
        self._outbox: list[FromNode] = []
        self._news = asyncio.Event()
        self._engine = Relayed(context, self._post)
        source = PolicySource(codec, self._engine, setup.history_policy)
        self.gateway = Gateway(source, sampling=Sampling(), on_turn=self._commit, accept=setup.accept)
        self._local = Local(self.gateway, terms)
        self._attempts: dict[str, asyncio.Task[Episode]] = {}
        self._unkept: dict[int, asyncio.Future[None]] = {}
        self._numbers = itertools.count()
        self._stopped = False

    @staticmethod
    @asynccontextmanager
    async def opened(setup: Setup, context: int) -> AsyncIterator[Node]:
        """A node with its gateway listening; leaving it ends all attempts. Raises what `Setup.terms` raises."""
        terms = await asyncio.to_thread(setup.terms)
        with scratch("node") as home:
            home.chmod(0o711)  # guests run as another user, and the socket is in it
            node = Node(setup, terms, context)
            async with node.gateway.listening(socket=home / "gateway.sock"):
                try:
                    yield node
                finally:
                    await node.stop()

    def take(self, messages: Sequence[ToNode]) -> None:
        """What the controller sent."""
        for message in messages:
            match message:
                case Make(ticket):
                    task = self._attempts[ticket.episode] = asyncio.create_task(self._local.run(ticket))
                    task.add_done_callback(partial(self._made, ticket.episode))  # also of one that never began
                case Stop(episode):
                    if (left := self._attempts.get(episode)) is not None:
                        left.cancel()
                case Kept(number, error):
                    if (future := self._unkept.pop(number, None)) is not None and not future.done():
                        future.set_result(None) if error is None else future.set_exception(error)
                case Sampled():
                    self._engine.take(message)

    async def give(self) -> list[FromNode]:
        """What is for the controller, as soon as there is something."""
        await self._news.wait()
        self._news.clear()
        given, self._outbox = self._outbox, []
        return given

    async def stop(self) -> None:
        """End all attempts; their turns are not logged any more."""
        self._stopped = True
        for future in self._unkept.values():
            if not future.done():
                future.set_exception(GatewayFault(_STOPPED))
        for task in list(self._attempts.values()):
            task.cancel()
        await asyncio.gather(*self._attempts.values(), return_exceptions=True)

    def _post(self, message: FromNode) -> None:
        self._outbox.append(message)
        self._news.set()

    def _made(self, episode: str, task: asyncio.Task[Episode]) -> None:
        del self._attempts[episode]
        if task.cancelled():
            self._post(Made(episode, None))
        elif (error := task.exception()) is not None:
            self._post(Made(episode, None, portable(error)))
        else:
            self._post(Made(episode, replace(task.result(), turns=())))

    async def _commit(self, episode: str, turn: Turn) -> None:
        if self._stopped:
            raise GatewayFault(_STOPPED)
        number = next(self._numbers)
        kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unkept[number] = kept
        self._post(Committed(number, episode, turn))
        await kept


def pack(messages: Any) -> bytes:
    """For `unpack`, in a process with the same versions of everything."""
    return pickle.dumps(messages, protocol=pickle.HIGHEST_PROTOCOL)


def unpack(data: bytes) -> Any:
    """What `pack` was given. Nodes and controller trust each other: they are one user's processes."""
    return pickle.loads(data)
