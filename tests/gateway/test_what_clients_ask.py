"""Features of each vendor's API, by the official SDKs: model names, formats, older fields, stored responses."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
from collections import Counter
from random import Random
from typing import Any

import aiohttp
import openai
import pytest

from coderepairrl.gateway import dialects
from coderepairrl.types import Finish

from .clients import openai_client
from .conftest import SHELL, Said, World, check_exact_ids, wait_until
from .speech import SPEAKERS, begin_request, post
from .test_remote import calling, completion, listening, relay, replying

ASK: list[Any] = [{"role": "user", "content": "Fix it."}]
EVERY = pytest.mark.parametrize("name", SPEAKERS)
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


@EVERY
async def test_any_name_is_the_model_and_is_recorded(world: World, name: str) -> None:
    session = world.open()
    body = SPEAKERS[name].body(ASK) | {"model": "vendor/model-9"}
    status, reply = await post(session, name, body)
    assert (status, json.loads(reply)["model"]) == (200, "vendor/model-9")
    assert (await post(session, name, SPEAKERS[name].body(ASK)))[0] == 200
    assert [turn.overridden for turn in session.turns] == [('model="vendor/model-9"',), ()]
    assert (await openai_client(session.endpoint).models.retrieve("vendor/model-9")).id == "vendor/model-9"


NAMED = {"name": "n", "schema": SCHEMA, "strict": True}
FORMATS: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"response_format": {"type": "json_schema", "json_schema": NAMED}}),
    ("responses", {"text": {"format": {"type": "json_schema", **NAMED}}}),
    (
        "messages",
        {"output_config": {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}}},
    ),
    ("messages", {"output_format": {"type": "json_schema", "schema": SCHEMA}}),  # as it was spelled before
]


@pytest.mark.parametrize(("name", "more"), FORMATS)
async def test_a_format_is_a_wish_and_a_remote_is_told(world: World, name: str, more: dict[str, Any]) -> None:
    session = world.open()
    body = SPEAKERS[name].body(ASK) | more
    assert (await post(session, name, body))[0] == 200
    wanted = {"name": "reply", "schema": SCHEMA} if name == "messages" else NAMED
    wish = {"type": "json_schema", "json_schema": wanted}
    assert session.turns[0].overridden == (f"response_format={json.dumps(wish, sort_keys=True)}",)
    received: list[Any] = []
    async with listening(replying(completion(), asked=received)) as url, relay(url) as remote:
        assert (await post(remote, name, body | {"model": "policy"}))[0] == 200
    assert received[0][1]["response_format"] == wish
    assert remote.turns[0].overridden == ()


async def test_a_plain_format_is_no_wish(world: World) -> None:
    session = world.open()
    plain: dict[str, Any] = {
        "chat": {"response_format": {"type": "text"}},
        "responses": {"text": {"format": {"type": "text"}, "verbosity": "low"}},
        "messages": {"output_config": {"effort": "high"}},
    }
    for name, more in plain.items():
        assert (await post(session, name, SPEAKERS[name].body(ASK) | more))[0] == 200
    assert {turn.overridden for turn in session.turns} == {()}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_older_functions_of_chat_are_tools(world: World, said: Said, stream: bool) -> None:
    world.says(said("I look.", ("shell", {"cmd": "ls"})), said("Done."))
    session = world.open()
    completions = openai_client(session.endpoint).chat.completions
    options: Any = {"functions": [SHELL["function"]], "function_call": {"name": "shell"}, "model": "policy"}
    if stream:
        chunks = [chunk async for chunk in await completions.create(messages=ASK, stream=True, **options)]
        [called] = [chunk.choices[0].delta.function_call for chunk in chunks if chunk.choices[0].delta.function_call]
        finish, text = chunks[-1].choices[0].finish_reason, "I look."
    else:
        reply = await completions.create(messages=ASK, **options)
        called, finish = reply.choices[0].message.function_call, reply.choices[0].finish_reason
        text = reply.choices[0].message.content
        assert reply.choices[0].message.tool_calls is None
    assert (called.name, json.loads(called.arguments), finish) == ("shell", {"cmd": "ls"}, "function_call")
    back = {"role": "assistant", "content": text, "function_call": {"name": "shell", "arguments": called.arguments}}
    result = {"role": "function", "name": "shell", "content": "a.py"}
    last = await completions.create(messages=[*ASK, back, result], **options)
    assert last.choices[0].finish_reason == "stop"
    assert [turn.base for turn in session.turns] == [None, 0]
    assert session.turns[1].messages[0] == {"role": "tool", "tool_call_id": "shell", "content": "a.py"}
    assert session.turns[0].overridden == ('tool_choice={"function": {"name": "shell"}, "type": "function"}',)
    check_exact_ids(session.turns, world.engine)


async def test_a_response_can_be_fetched_until_it_is_deleted(world: World, said: Said) -> None:
    world.engine.script = lambda *_: said("I look.", ("shell", {"cmd": "ls"}))
    session, other = world.open(), world.open("other")
    api = openai_client(session.endpoint).responses
    tool: Any = {"type": "function", "strict": False, **SHELL["function"]}
    made = await api.create(model="policy", input="Fix it.", tools=[tool], metadata={"a": "b"})
    assert made.store is True  # type: ignore[attr-defined]
    assert (await api.retrieve(made.id)).to_dict() == made.to_dict()
    streamed = [event async for event in await api.create(model="policy", input="Fix it.", stream=True)]
    last = streamed[-1].response  # type: ignore[union-attr]
    assert (await api.retrieve(last.id)).output_text == "I look."
    await api.delete(made.id)
    asked = [
        lambda: api.retrieve(made.id),
        lambda: api.delete(made.id),
        lambda: api.create(model="policy", input="Go on.", previous_response_id=made.id),
        lambda: api.create(model="policy", input=[{"type": "item_reference", "id": made.output[0].id}]),
        lambda: openai_client(other.endpoint).responses.retrieve(last.id),
        lambda: api.retrieve("resp_nothing"),
    ]
    for each in asked:
        with pytest.raises(openai.NotFoundError):
            await each()
    assert len(session.turns) == 2
    assert await api.retrieve(last.id)


async def test_a_response_that_is_not_stored_cannot_be_fetched(world: World) -> None:
    session = world.open()
    api = openai_client(session.endpoint).responses
    made = await api.create(model="policy", input="Fix it.", store=False)
    assert made.store is False  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        await api.retrieve(made.id)
    await api.create(model="policy", input="Go on.", previous_response_id=made.id)
    assert session.turns[1].base == 0


async def test_a_request_may_refer_to_earlier_items(world: World, said: Said) -> None:
    """Replies that a client leaves to the server are one path, also in a large request, which another process reads."""
    world.engine.context = 1 << 20
    world.says([*said.thought(), *said("I look.", ("shell", {"cmd": "ls"}))], said("Done."))
    session = world.open(tokens=1 << 19)
    api = openai_client(session.endpoint, max_retries=0).responses
    tool: Any = {"type": "function", "strict": False, **SHELL["function"]}
    ask: list[Any] = [{"role": "user", "content": "words " * 50_000}]
    first = await api.create(model="policy", input=ask, tools=[tool])
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    references: list[Any] = [{"type": "item_reference", "id": item.id} for item in first.output]
    result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "a.py"}  # type: ignore[union-attr]
    await api.create(model="policy", input=[*ask, *references, result], tools=[tool])
    assert [turn.base for turn in session.turns] == [None, 0]
    check_exact_ids(session.turns, world.engine)
    # each item once: a body holds 30,000 references, and each response is written on the event loop
    with pytest.raises(openai.NotFoundError, match="twice"):
        await api.create(model="policy", input=[references[1]] * 2)


VENDOR: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "local_shell": (
        {"command": ["ls", "-l"], "timeout_ms": 5},
        {"action": {"type": "exec", "command": ["ls", "-l"], "timeout_ms": 5, "env": {}}},
        {"id": "ID", "output": "a.py"},
        "a.py",
    ),
    "shell": (
        {"commands": ["ls", "pwd"]},
        {"action": {"commands": ["ls", "pwd"], "timeout_ms": None, "max_output_length": None}},
        {
            "call_id": "ID",
            "output": [
                {"stdout": "a.py\n", "stderr": "no\n", "outcome": {"type": "exit", "exit_code": 2}},
                {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}},
            ],
        },
        "a.py\nno\n[exit code 2]\n[timed out]",
    ),
    "apply_patch": (
        {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b"},
        {"operation": {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b"}},
        {"call_id": "ID", "status": "completed", "output": "Done!"},
        "Done!",
    ),
}


@pytest.mark.parametrize("kind", VENDOR)
async def test_a_tool_that_is_named_by_its_type_is_called_by_an_item_of_its_own(
    world: World, said: Said, kind: str
) -> None:
    arguments, fields, output, text = VENDOR[kind]
    world.says(said("", (kind, arguments)), said("Done."))
    session = world.open()
    api = openai_client(session.endpoint).responses
    options: Any = {"model": "policy", "tools": [{"type": kind}]}
    [item] = (await api.create(input=ASK, **options)).output
    call = item.to_dict()
    assert (call["type"], call["status"]) == (f"{kind}_call", "completed")
    assert {key: call[key] for key in fields} == fields
    result = {"type": f"{kind}_call_output", **output}
    result |= {key: call["call_id"] for key in ("id", "call_id") if result.get(key) == "ID"}
    await api.create(input=[*ASK, call, result], **options)
    assert [turn.base for turn in session.turns] == [None, 0]
    assert session.turns[1].messages[0]["content"] == text
    assert {turn.overridden for turn in session.turns} == {()}
    check_exact_ids(session.turns, world.engine)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [("local_shell", {"command": 3}), ("shell", {}), ("apply_patch", {"type": "update_file"}), ("apply_patch", [])],
)
async def test_arguments_that_do_not_fit_stay_a_function_call(world: World, kind: str, arguments: Any) -> None:
    async with listening(calling(kind, arguments)) as url, relay(url) as session:
        api = openai_client(session.endpoint).responses
        [item] = (await api.create(model="policy", input=ASK, tools=[{"type": kind}])).output  # type: ignore[list-item]
    assert (item.type, json.loads(item.arguments)) == ("function_call", arguments)  # type: ignore[union-attr]


async def test_a_probe_for_a_server_is_answered(world: World) -> None:
    session = world.open()
    root = session.endpoint.base_url.removesuffix("/v1")
    async with aiohttp.ClientSession() as client:
        for url in (world.gateway.url, f"{world.gateway.url}/v1", root, f"{root}/", f"{root}/v1"):
            for method in ("HEAD", "GET"):
                async with client.request(method, url) as answer:
                    assert answer.status == 200
    assert session.turns == ()


def leave(writer: asyncio.StreamWriter, *, reset: bool) -> None:
    if reset:
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()


async def test_clients_that_vanish_at_any_moment_leave_whole_sessions_and_no_traceback(
    world: World, said: Said, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the end of a connection and our learning of it something may be written to it."""
    monkeypatch.setattr(dialects, "HEARTBEAT", 0.003)
    unhandled: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
    world.engine.script = lambda *_: said("a long story " * 30)
    world.engine.delay = 0.001
    random = Random(0)

    async def visit(number: int) -> None:
        session = world.open(f"e{number}")
        name = random.choice(list(SPEAKERS))
        body = json.dumps(SPEAKERS[name].body(ASK, stream=random.random() < 0.5)).encode()
        sent = body[: len(body) // 2] if number % 10 == 0 else body
        _, writer = await begin_request(session, name, sent, len(body))
        await asyncio.sleep(random.random() * 0.2)
        leave(writer, reset=random.random() < 0.5)
        await asyncio.sleep(0.1)
        assert (await post(session, name, SPEAKERS[name].body(ASK, max_tokens=3)))[0] == 200
        await world.gateway.close(session)
        assert session.fault is None

    for _ in range(2):
        await asyncio.gather(*map(visit, range(60)))
    turns = Counter((turn.finish, turn.masked) for _, turn in world.committed)
    assert turns.keys() <= {(Finish.ABORT, "aborted"), (Finish.STOP, ""), (Finish.LENGTH, "")}
    assert {turn.dialect for _, turn in world.committed if turn.finish is Finish.ABORT} == set(SPEAKERS)
    assert world.engine.closed == len(world.engine.seen)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert unhandled == []


async def test_a_client_that_vanishes_as_its_reply_ends_has_a_whole_turn(
    world: World, said: Said, caplog: pytest.LogCaptureFixture
) -> None:
    """A reply that was sampled to its end is recorded as such, even if nobody listens."""
    caplog.set_level(logging.WARNING)
    session = world.open()
    recording, go_on = asyncio.Event(), asyncio.Event()

    async def record_slowly(episode: str, turn: Any) -> None:
        recording.set()
        await go_on.wait()

    session._on_turn = record_slowly
    world.engine.script = lambda *_: said("a story")
    body = json.dumps(SPEAKERS["chat"].body(ASK, stream=True)).encode()
    _, writer = await begin_request(session, "chat", body)
    await recording.wait()
    leave(writer, reset=True)
    await asyncio.sleep(0.02)
    go_on.set()
    async with asyncio.timeout(5):
        await wait_until(lambda: session.turns)
    assert (session.turns[0].finish, session.turns[0].masked, session.fault) == (Finish.STOP, "", None)
    assert [record.getMessage() for record in caplog.records] == []
