"""What the official SDKs of all dialects see alike: slow replies, failures, and that they may go away."""

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


async def chat(endpoint: Endpoint, *, stream: bool = False, **options: Any) -> str | None:
    completions = openai_client(endpoint, **options).chat.completions
    if not stream:
        return (await completions.create(model="policy", messages=ASK)).choices[0].message.content
    chunks = await completions.create(model="policy", messages=ASK, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


async def responses(endpoint: Endpoint, *, stream: bool = False, **options: Any) -> str | None:
    api = openai_client(endpoint, **options).responses
    if not stream:
        return (await api.create(model="policy", input="Fix it.")).output_text
    events = await api.create(model="policy", input="Fix it.", stream=True)
    return "".join([event.delta async for event in events if event.type == "response.output_text.delta"])


async def messages(endpoint: Endpoint, *, stream: bool = False, **options: Any) -> str | None:
    api = anthropic_client(endpoint, **options).messages
    if not stream:
        reply = await api.create(model="policy", messages=ASK, max_tokens=512)
        return reply.content[0].text  # type: ignore[union-attr]
    async with api.stream(model="policy", messages=ASK, max_tokens=512) as events:
        return await events.get_final_text()


EVERY = pytest.mark.parametrize("ask", [chat, responses, messages])
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


@EVERY
@pytest.mark.parametrize("stream", [False, True])
async def test_no_sdk_repeats_what_is_refused(world: World, ask: Ask, stream: bool) -> None:
    world.engine.fault_after = 0
    session = world.open()
    for _ in range(2):
        with pytest.raises((openai.InternalServerError, anthropic.InternalServerError), match="died") as failed:
            await ask(session.endpoint, stream=stream, max_retries=5)
        assert failed.value.status_code == 503
    assert len(world.engine.seen) == 1
    assert session.fault is not None
    assert session.fault.boundary == "engine"
