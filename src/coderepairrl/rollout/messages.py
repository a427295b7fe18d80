"""Messages between controller and worker (`coderepairrl.rollout.worker`)."""

from __future__ import annotations

import contextlib
import logging
import pickle
from dataclasses import dataclass
from typing import Any

from coderepairrl.errors import CodeRepairError, GatewayFault
from coderepairrl.rollout.episodes import Ticket
from coderepairrl.types import Chunk, Episode, Sampling, Turn

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartAttempt:
    """To the worker: make an attempt."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class CancelAttempt:
    """To the worker: cancel an attempt. `AttemptFinished` still comes."""

    episode: str


@dataclass(frozen=True, slots=True)
class TurnLogged:
    """To the worker: its `TurnCommitted` is logged, or failed."""

    number: int
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """To the worker: engine output of a request, or its `error`."""

    number: int
    chunks: tuple[Chunk, ...]
    ended: bool = False
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class TurnCommitted:
    """From the worker: a turn for the log. Its client waits for `TurnLogged`."""

    number: int
    episode: str
    turn: Turn


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """From the worker: a prompt for the engine."""

    number: int
    ids: bytes
    sampling: Sampling
    seed: int


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """From the worker: cancel an `EngineRequest`."""

    number: int


@dataclass(frozen=True, slots=True)
class AttemptFinished:
    """From the worker: an episode without turns; None if cancelled, or after `error`."""

    episode: str
    result: Episode | None
    error: Exception | None = None


ToWorker = StartAttempt | CancelAttempt | TurnLogged | EngineOutput
FromWorker = TurnCommitted | EngineRequest | CancelRequest | AttemptFinished


def portable(error: BaseException) -> Exception:
    """Expected, picklable `error`, else a fault with its text."""
    if isinstance(error, CodeRepairError | ValueError) and not isinstance(error, UnicodeError):
        with contextlib.suppress(Exception):  # a class of a user's own, with another constructor
            return error if type(pickle.loads(pickle.dumps(error))) is type(error) else GatewayFault(str(error))
    log.error("unexpected %r", error, exc_info=error)
    return GatewayFault(f"{type(error).__name__}: {error}")


def pack(messages: Any) -> bytes:
    """Serialize for `unpack`, in a process with the same versions."""
    return pickle.dumps(messages, protocol=pickle.HIGHEST_PROTOCOL)


def unpack(data: bytes) -> Any:
    """Restore what `pack` serialized, for processes of one user only."""
    return pickle.loads(data)
