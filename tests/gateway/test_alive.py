"""A plain response of a slow engine: blanks before its JSON keep it alive, and the official SDKs never notice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import web

from coderepairrl.gateway import server
from coderepairrl.types import Endpoint

from .clients import anthropic_client, openai_client
from .conftest import Said, World

ASK: list[Any] = [{"role": "user", "content": "Fix it."}]


async def chat(endpoint: Endpoint, **options: Any) -> str | None:
    sdk = openai_client(endpoint, **options)
    return (await sdk.chat.completions.create(model="policy", messages=ASK)).choices[0].message.content


async def responses(endpoint: Endpoint, **options: Any) -> str | None:
    return (await openai_client(endpoint, **options).responses.create(model="policy", input="Fix it.")).output_text


async def messages(endpoint: Endpoint, **options: Any) -> str | None:
    reply = await anthropic_client(endpoint, **options).messages.create(model="policy", messages=ASK, max_tokens=512)
    return reply.content[0].text  # type: ignore[union-attr]


EVERY = pytest.mark.parametrize("ask", [chat, responses, messages])
Ask = Callable[..., Awaitable[str | None]]


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once three blanks are written."""
    monkeypatch.setattr(server, "HEARTBEAT", 0.01)
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
async def test_a_failure_after_blanks_breaks_the_connection_and_the_retry_is_told(
    world: World, said: Said, alive: asyncio.Event, ask: Ask
) -> None:
    world.engine.script = lambda *_: said("a long story")
    world.engine.gate = alive
    world.engine.fault_after = 6
    session = world.open()
    with pytest.raises((openai.InternalServerError, anthropic.InternalServerError), match="the fake engine died"):
        await ask(session.endpoint)
    assert len(world.engine.seen) == 1
    with pytest.raises((openai.InternalServerError, anthropic.InternalServerError), match="the fake engine died"):
        await ask(session.endpoint)


@pytest.mark.slow
@EVERY
async def test_a_short_read_timeout_does_not_end_a_long_reply(
    world: World, said: Said, monkeypatch: pytest.MonkeyPatch, ask: Ask
) -> None:
    monkeypatch.setattr(server, "HEARTBEAT", 0.2)
    world.engine.script = lambda *_: said("a story")
    world.engine.gate = asyncio.Event()
    asyncio.get_running_loop().call_later(5.0, world.engine.gate.set)
    session = world.open()
    assert await ask(session.endpoint, timeout=2.0, max_retries=0) == "a story"
    assert len(session.turns) == 1
