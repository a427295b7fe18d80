"""A session of a gateway for the time of a test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from coderepairrl.gateway import Gateway, PolicySource, Session
from coderepairrl.protocols import Engine
from coderepairrl.tokens import Codec
from coderepairrl.types import Limits, Sampling


@asynccontextmanager
async def open_session(
    codec: Codec,
    engine: Engine,
    limits: Limits,
    *,
    max_tokens: int = 512,
    seed: int = 0,
    on_turn: Callable[..., Any] = lambda *_: None,
) -> AsyncIterator[Session]:
    """Open a session of a gateway in front of `engine`; after the block it is closed and has all its turns."""
    gateway = Gateway(PolicySource(codec, engine), sampling=Sampling(max_tokens=max_tokens), on_turn=on_turn)
    async with gateway.listening():
        session = gateway.open("episode", limits=limits, seed=seed)
        yield session
        await gateway.close(session)
