"""A gateway session for one test."""

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
    """Open a gateway session in front of `engine`; close it after the block, when it has all its turns."""
    gateway = Gateway(PolicySource(codec, engine), sampling=Sampling(max_tokens=max_tokens), on_turn=on_turn)
    async with gateway.listening():
        session = gateway.open("episode", limits=limits, seed=seed)
        yield session
        await gateway.close(session)
