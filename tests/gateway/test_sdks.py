"""What the official SDKs see alike: slow replies, and failures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import web

from coderepairrl.gateway import dialects
from coderepairrl.types import Endpoint

from .clients import anthropic_client, openai_client
from .conftest import Said, World

ASK: list[Any] = [{"role": "user", "content": "Fix it."}]


async def chat(endpoint: Endpoint, **options: Any) -> str | None:
    completions = openai_client(endpoint, **options).chat.completions
    return (await completions.create(model="policy", messages=ASK)).choices[0].message.content


async def messages(endpoint: Endpoint, **options: Any) -> str | None:
    api = anthropic_client(endpoint, **options).messages
    reply = await api.create(model="policy", messages=ASK, max_tokens=512)
    return reply.content[0].text  # type: ignore[union-attr]


EVERY = pytest.mark.parametrize("ask", [chat, messages])
Ask = Callable[..., Awaitable[str | None]]


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once three blanks are written."""
    monkeypatch.setattr(dialects, "HEARTBEAT", 0.01)
    write, event, blanks = web.StreamResponse.write, asyncio.Event(), []

    async def counted(response: web.StreamResponse, data: bytes) -> None:
        await write(response, data)
        blanks.append(data)
        if blanks[-3:] == [b" "] * 3:
            event.set()

    monkeypatch.setattr(web.StreamResponse, "write", counted)
    return event


@EVERY
async def test_a_reply_follows_the_blanks(world: World, said: Said, alive: asyncio.Event, ask: Ask) -> None:
    world.engine.script = lambda *_: said("a story")
    world.engine.gate = alive
    session = world.open()
    assert await ask(session.endpoint) == "a story"
    assert len(session.turns) == 1


@EVERY
async def test_a_failure_after_blanks_breaks_the_connection_and_no_sdk_repeats_what_is_refused(
    world: World, said: Said, alive: asyncio.Event, ask: Ask
) -> None:
    """The retry after the broken connection learns why, and is the last one."""
    world.engine.script = lambda *_: said("a long story")
    world.engine.gate = alive
    world.engine.fault_after = 6
    session = world.open()
    for _ in range(2):
        with pytest.raises((openai.InternalServerError, anthropic.InternalServerError), match="died") as failed:
            await ask(session.endpoint, max_retries=5)
        assert failed.value.status_code == 503
    assert len(world.engine.seen) == 1
    assert session.fault is not None
    assert session.fault.boundary == "engine"
