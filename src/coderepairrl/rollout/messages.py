"""What travels between the controller and a worker (`coderepairrl.rollout.worker`), and how it is packed."""

from __future__ import annotations

import contextlib
import logging
import pickle
from dataclasses import dataclass
from typing import Any

from coderepairrl.errors import CodeRepairError, GatewayFault
from coderepairrl.protocols import Chunk
from coderepairrl.rollout.episodes import Ticket
from coderepairrl.types import Episode, Sampling, Turn

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartAttempt:
    """To the worker: an attempt to make."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class CancelAttempt:
    """To the worker: an attempt that is called off. `AttemptFinished` comes all the same."""

    episode: str


@dataclass(frozen=True, slots=True)
class TurnLogged:
    """To the worker: its `TurnCommitted` of this number is in the log, or why it is not."""

    number: int
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """To the worker: what the engine gave for a request since the last time; `error` is how it failed."""

    number: int
    chunks: tuple[Chunk, ...]
    ended: bool = False
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class TurnCommitted:
    """From the worker: a turn for the log. Its client learns of it after `TurnLogged`."""

    number: int
    episode: str
    turn: Turn


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """From the worker: a prompt for the engine."""

    number: int
    ids: bytes
    """Four bytes each, in native byte order."""
    sampling: Sampling
    seed: int


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """From the worker: an `EngineRequest` that is called off."""

    number: int


@dataclass(frozen=True, slots=True)
class AttemptFinished:
    """From the worker: an episode without its turns, which the controller has.

    `result` is None where the attempt was called off, or raised `error`.
    """

    episode: str
    result: Episode | None
    error: Exception | None = None


ToWorker = StartAttempt | CancelAttempt | TurnLogged | EngineOutput
FromWorker = TurnCommitted | EngineRequest | CancelRequest | AttemptFinished


def portable(error: BaseException) -> Exception:
    """`error` if it can be pickled and is one that callers expect, else a fault that says what it was."""
    if isinstance(error, CodeRepairError | ValueError) and not isinstance(error, UnicodeError):
        with contextlib.suppress(Exception):  # a class of a user's own, with another constructor
            return error if type(pickle.loads(pickle.dumps(error))) is type(error) else GatewayFault(str(error))
    log.error("unexpected %r", error, exc_info=error)
    return GatewayFault(f"{type(error).__name__}: {error}")


def pack(messages: Any) -> bytes:
    """For `unpack`, in a process with the same versions of everything."""
    return pickle.dumps(messages, protocol=pickle.HIGHEST_PROTOCOL)


def unpack(data: bytes) -> Any:
    """What `pack` was given. Workers and controller trust each other: they are one user's processes."""
    return pickle.loads(data)
