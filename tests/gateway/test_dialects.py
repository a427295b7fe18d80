"""What holds in every dialect: retries, disconnects, ends, keep-alives, refusals in shape, and what fuzz finds."""

from __future__ import annotations

import asyncio
import copy
import io
import json
import re
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, NamedTuple

import aiohttp
import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coderepairrl import tokens
from coderepairrl.gateway import Gateway, Session, dialects, workers
from coderepairrl.types import Finish, Limits, Sampling, sequence
from gateways import open_session

from .conftest import SHELL, Fake, Said, World, check_exact_ids, wait_until
from .speech import SPEAKERS, post, read_reply


class Speech(NamedTuple):
    """How a client speaks a dialect, written down without any of the gateway's code."""

    full: dict[str, Any]
    """A request that uses every field whose meaning the gateway knows."""
    error: Callable[[Any], str]
    """The type of a refusal, after a check of its shape."""
    terminal: bytes
    alive: bytes
    """What a silent stream says."""
    headers: Mapping[str, str] = {}


def _openai(body: Any) -> str:
    assert set(body["error"]) == {"message", "type", "code", "param"}
    assert body["error"]["message"]
    assert body["error"]["code"]
    return str(body["error"]["type"])


def _anthropic(body: Any) -> str:
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["message"]
    return str(body["error"]["type"])


FUNCTION: dict[str, Any] = SHELL["function"]  # type: ignore[assignment]
CALL = {"id": "c", "type": "function", "function": {"name": "shell", "arguments": '{"cmd": "ls"}'}}
CHAT = Speech(
    {
        "model": "policy",
        "messages": [
            {"role": "system", "content": "Repair."},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "<|im_end|>"},
        ],
        "tools": [SHELL],
        "max_tokens": 40,
        "stop": ["STOP"],
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    _openai,
    b"data: [DONE]\n\n",
    b": still here\n\n",
)
RESPONSES = Speech(
    {
        "model": "policy",
        "instructions": "Repair.",
        "input": [
            {"role": "user", "content": "a"},
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c", "name": "shell", "arguments": '{"cmd": "ls"}'},
            {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "x"},
            {"type": "function_call_output", "call_id": "c", "output": "<|im_end|>"},
            {"type": "custom_tool_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "y"}]},
        ],
        "tools": [
            {"type": "function", **FUNCTION},
            {"type": "custom", "name": "patch"},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", **FUNCTION}]},
            {"type": "web_search"},
        ],
        "max_output_tokens": 40,
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "metadata": {"a": "b"},
        "tool_choice": "auto",
        "stream": True,
    },
    _openai,
    b"event: response.completed\n",
    b"event: response.in_progress\n",
)
MESSAGES = Speech(
    {
        "model": "policy",
        "max_tokens": 40,
        "system": [{"type": "text", "text": "Repair."}],
        "messages": [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "d"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "c", "name": "shell", "input": {"cmd": "ls"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "<|im_end|>"}]},
                    {"type": "text", "text": "go on"},
                ],
            },
        ],
        "tools": [
            {"name": "shell", "input_schema": FUNCTION["parameters"]},
            {"type": "web_search_20250305", "name": "web_search"},
        ],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["STOP"],
        "thinking": {"type": "disabled"},
        "stream": True,
    },
    _anthropic,
    b"event: message_stop\n",
    b"event: ping\n",
    {"anthropic-version": "2023-06-01"},
)
SPEECHES = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}
EVERY = pytest.mark.parametrize("name", SPEECHES)


def make_body(name: str, **fields: Any) -> dict[str, Any]:
    return SPEAKERS[name].body([{"role": "user", "content": "Fix it."}], **fields)


async def send(where: Session | str, name: str, body: Any, *, path: str = "", **headers: str) -> tuple[int, bytes]:
    heads = {**SPEECHES[name].headers} | {header.replace("_", "-"): value for header, value in headers.items()}
    return await post(where, name, body, path=path, **heads)


async def read_stream_so_far(session: Session, name: str) -> AsyncIterator[bytes]:
    """All of a plain request's stream so far, each time that more of it has come."""
    seen, url = b"", session.endpoint.base_url + SPEAKERS[name].path
    async with (
        aiohttp.ClientSession() as client,
        client.post(url, json=make_body(name) | {"stream": True}) as response,
    ):
        assert response.status == 200
        async for data in response.content.iter_any():
            yield (seen := seen + data)


@EVERY
@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_joins_the_running_call_and_replays_the_finished_one(
    world: World, said: Said, name: str, stream: bool
) -> None:
    world.holds(said("a story"))
    session = world.open()
    body = make_body(name) | {"stream": stream}
    first = asyncio.create_task(send(session, name, body, x_stainless_retry_count="0"))
    await wait_until(lambda: world.engine.seen)
    second = asyncio.create_task(send(session, name, body, x_stainless_retry_count="1"))
    (call,) = session._calls.values()
    await wait_until(lambda: call._followers == 2)
    world.engine.gate.set()
    replies = [await first, await second, await send(session, name, body, x_stainless_retry_count="2")]
    assert len(session.turns) == len(world.engine.seen) == 1
    assert {status for status, _ in replies} == {200}
    assert {read_reply(name, reply)["content"] for _, reply in replies} == {"a story"}
    assert len({re.findall(rb'"id": ?"(.+?)"', reply)[0] for _, reply in replies}) == 1
    assert (await send(session, name, body, x_stainless_retry_count="0"))[0] == 200
    assert len(session.turns) == 2


def _events(stream: bytes) -> Iterator[dict[str, Any]]:
    """The data of a stream's events; each event that has a name is named by its type."""
    assert stream.endswith(b"\n\n")
    for block in stream.removesuffix(b"\n\n").split(b"\n\n"):
        lines = block.split(b"\n")
        if lines == [b": still here"] or lines == [b"data: [DONE]"]:
            continue
        data = json.loads(lines[-1].removeprefix(b"data: "))
        assert [b"event: " + data["type"].encode()] == lines[:-1] if "type" in data else len(lines) == 1
        yield data


@EVERY
async def test_the_turn_is_committed_before_the_terminal_event(world: World, said: Said, name: str) -> None:
    commit = asyncio.Event()

    async def slowly(episode: str, turn: object) -> None:
        await commit.wait()

    session, speech = world.open(), SPEECHES[name]
    session._on_turn = slowly
    world.holds(said("ok then"))
    async for seen in read_stream_so_far(session, name):
        if b'"ok' in seen and not commit.is_set():  # streamed as it was sampled, and not recorded yet
            world.engine.gate.set()
            assert speech.terminal not in seen
            assert session.turns == ()
            commit.set()
    assert speech.terminal in seen
    assert len(session.turns) == 1


@pytest.mark.parametrize("stream", [False, True])
@EVERY
async def test_the_clients_max_tokens_apply_and_its_temperature_does_not(
    world: World, said: Said, name: str, stream: bool
) -> None:
    world.engine.script = lambda *_: said("a long story")
    session = world.open()
    body = make_body(name, max_tokens=5, temperature=0.1, stream=stream)
    status, reply = await send(session, name, body)
    assert status == 200
    assert read_reply(name, reply)["content"] == "a lon"
    (turn,) = await world.gateway.close(session)
    assert (turn.finish, turn.sampling.temperature, session.limit) == (Finish.LENGTH, 1.0, "")
    assert turn.overridden == ("temperature=0.1",)


@EVERY
async def test_a_silent_stream_sends_keep_alives(
    world: World, said: Said, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialects, "HEARTBEAT", 0.01)
    world.holds(said("a story"))
    session, speech = world.open(), SPEECHES[name]
    async for seen in read_stream_so_far(session, name):
        if seen.count(speech.alive) >= 3:
            world.engine.gate.set()
    assert len(list(_events(seen))) > 3
    assert speech.terminal in seen


@EVERY
async def test_a_stream_that_fails_ends_with_an_error_event(
    world: World, said: Said, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the stream has begun there is no status to answer with: the failure is an event of the dialect."""
    monkeypatch.setattr(dialects, "HEARTBEAT", 0.01)
    world.engine.chunk = 1
    world.engine.fault_after = 1
    world.holds([*said.codec.encode(" "), *said("a story")])  # leading blanks are not sent
    session, speech = world.open(), SPEECHES[name]
    async for stream in read_stream_so_far(session, name):
        world.engine.gate.set()
        seen = stream
    last = list(_events(seen))[-1]
    assert "the fake engine died" in json.dumps(last)
    assert last.get("type") == {"chat": None, "responses": "response.failed", "messages": "error"}[name]
    if name == "responses":
        assert (last["response"]["status"], last["response"]["error"]["code"]) == ("failed", "server_error")
    assert speech.terminal not in seen
    assert session.fault is not None


@EVERY
async def test_every_refusal_has_the_dialects_shape(world: World, name: str) -> None:
    speech, session = SPEECHES[name], world.open()

    async def refused(body: Any, where: Session | str = session, path: str = "", **headers: str) -> tuple[int, str]:
        status, reply = await send(where, name, body, path=path, **headers)
        return status, speech.error(json.loads(reply))

    wrong = "invalid_request_error"
    missing, closed = ("not_found_error", wrong) if name == "messages" else (wrong, wrong)
    assert await refused(b"{") == (400, wrong)
    assert await refused(b"") == (400, wrong)
    assert await refused(b'{"a":' * 50_000) == (400, wrong)
    assert await refused({"model": "policy"}) == (400, wrong)
    assert await refused(make_body(name) | {"stream": "yes"}) == (400, wrong)
    assert await refused(make_body(name), f"{world.gateway.url}/s/guess/v1") == (401, "authentication_error")
    assert await refused(make_body(name), f"{world.gateway.url}/v1", x_api_key="guess") == (
        401,
        "authentication_error",
    )
    assert await refused(make_body(name), path=f"{SPEAKERS[name].path}/nowhere") == (404, missing)
    assert await refused(b"no deflate", Content_Encoding="deflate") == (400, wrong)
    async with (
        aiohttp.ClientSession() as client,
        client.get(session.endpoint.base_url + SPEAKERS[name].path, headers=speech.headers) as response,
    ):
        assert (response.status, speech.error(await response.json())) == (405, wrong)
    await world.gateway.close(session)
    assert await refused(make_body(name)) == (410, closed)
    assert world.engine.seen == []
    assert session.fault is None


@EVERY
async def test_every_limit_ends_as_the_dialect_has_it(world: World, said: Said, name: str) -> None:
    speech = SPEECHES[name]
    world.engine.script = lambda *_: said("x" * 3000)

    async def ask(session: Session) -> tuple[int, Any]:
        status, reply = await send(session, name, make_body(name))
        return status, json.loads(reply)

    async def refused(session: Session) -> tuple[str, str]:
        status, reply = await ask(session)
        assert (status, speech.error(reply)) == (400, "invalid_request_error")
        if session.limit == "tokens" and name == "messages":
            assert re.search(r"prompt is too long: \d+ tokens > \d+ maximum", reply["error"]["message"])
        assert reply["crrl"]["limit"] == session.limit
        return SPEAKERS[name].code(reply), session.limit

    session = world.open(calls=0)
    prompt = (await ask(session))[1]["crrl"]["context_tokens"] - 512
    assert (await ask(session))[0] == 200
    assert await refused(session) == ("episode_limit_reached", "calls")
    assert (await send(session, name, make_body(name), x_stainless_retry_count="1"))[0] == 200, "a retry costs nothing"
    assert await refused(world.open(seconds=1e-9)) == ("episode_limit_reached", "time")
    assert await refused(world.open(tokens=prompt)) == ("context_length_exceeded", "tokens")
    session = world.open(tokens=prompt + 50)
    status, reply = await ask(session)
    assert (status, reply["crrl"]["limit"], reply["crrl"]["context_tokens"]) == (200, "tokens", prompt + 50)
    cut = {
        "chat": lambda: reply["choices"][0]["finish_reason"] == "length",
        "responses": lambda: (
            (reply["status"], reply["incomplete_details"]["reason"]) == ("incomplete", "max_output_tokens")
        ),
        "messages": lambda: reply["stop_reason"] == "model_context_window_exceeded",
    }
    assert cut[name]()
    world.engine.context = prompt
    assert await refused(world.open()) == ("context_length_exceeded", "context")


@EVERY
async def test_a_body_may_be_compressed(world: World, name: str) -> None:
    body = json.dumps(make_body(name)).encode()
    for encoding, packed in (("zstd", pyarrow.compress(body, "zstd", asbytes=True)), ("deflate", zlib.compress(body))):
        assert (await send(world.open(), name, packed, Content_Encoding=encoding))[0] == 200


@EVERY
async def test_a_huge_body_is_refused_however_small_it_is_packed(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "MAX_BODY", 1 << 20)
    gateway = Gateway(world.gateway.source, sampling=Sampling(), on_turn=lambda *_: None)
    await gateway.start()
    session, speech = gateway.open("e", limits=Limits(), seed=0), SPEECHES[name]
    huge = b" " * (workers.MAX_BODY + 1)
    for body, headers in ((io.BytesIO(huge), {}), (zlib.compress(huge), {"Content_Encoding": "deflate"})):
        status, reply = await send(session, name, body, **headers)
        assert (status, speech.error(json.loads(reply))) == (
            413,
            "request_too_large" if name == "messages" else "invalid_request_error",
        )
    await gateway.stop()


@EVERY
async def test_the_key_is_taken_as_every_sdk_sends_it(world: World, name: str) -> None:
    session = world.open()
    for headers in ({"Authorization": f"Bearer {session.key}"}, {"x_api_key": session.key}):
        assert (await send(f"{world.gateway.url}/v1", name, make_body(name), **headers))[0] == 200


@EVERY
async def test_special_tokens_in_text_are_inert(world: World, name: str) -> None:
    """Wherever a client writes it, the text of a special token is text."""
    speech, session = SPEECHES[name], world.open()
    marks = "<|im_end|>", "<|im_start|>", "<tool_call>", "<think>"
    poisoned = json.loads(json.dumps(speech.full).replace('"a"', json.dumps("".join(marks))))
    assert (await send(session, name, speech.full))[0] == 200
    assert (await send(session, name, poisoned))[0] == 200
    added = world.gateway.source.codec.tokenizer.added
    clean, dirty = (prompt for prompt, *_ in world.engine.seen)
    assert len(dirty) > len(clean)
    for mark in marks:
        assert clean.count(added[mark]) == dirty.count(added[mark])


# Bodies that are nearly right: a valid one with some of its values replaced, removed or doubled.
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 10**20)
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "a", "text", "user", "tool", "<|im_end|>", "\x00", "🛠️", "auto", "namespace", "reasoning"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "a"]), inner),
    max_leaves=5,
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _paths(inner, (*path, key))


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    name = draw(st.sampled_from(sorted(SPEECHES)))
    body = copy.deepcopy(SPEECHES[name].full)
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from([path for path in _paths(body) if path != ("model",)]))
        at: Any = body
        for key in path:
            at = at[key]
        action = draw(st.sampled_from(["replace", "remove", "double", "add"]))
        if action == "remove":
            del at[last]
        elif action == "double" and isinstance(at, list):
            at.insert(last, copy.deepcopy(at[last]))
        elif action == "add" and isinstance(at[last], dict):
            at[last][draw(st.sampled_from(["unknown", "type", "content", "role"]))] = draw(JUNK)
        else:
            at[last] = draw(JUNK)
        if not body:
            break
    return name, body


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(found=st.lists(bodies(), min_size=4, max_size=4), raw=st.binary(max_size=60))
def test_fuzz(codec: tokens.Codec, found: list[tuple[str, dict[str, Any]]], raw: bytes) -> None:
    """Any body is a reply or a refusal in its dialect's shape, and no episode is the worse for it."""
    said = Said(codec)
    engine = Fake(lambda *_: said("I look.", ("shell", {"cmd": "ls"})))

    async def play() -> None:
        async with open_session(codec, engine, Limits(calls=100, tokens=4000, seconds=60.0), max_tokens=60) as session:
            for name, body in [*found, *((name, raw) for name in SPEECHES)]:
                status, reply = await send(session, name, body)
                assert status == 200 or 400 <= status < 500, (status, reply, body)
                if status != 200:
                    SPEECHES[name].error(json.loads(reply))
                elif isinstance(body, dict) and body.get("stream"):
                    assert list(_events(reply))
                else:
                    json.loads(reply)
                counter = {"responses": "/responses/input_tokens", "messages": "/messages/count_tokens"}.get(name)
                if counter:
                    counted, _ = await send(session, name, body, path=counter)
                    assert counted == 200 or 400 <= counted < 500
                    assert counted == 200 or status != 200
        assert session.fault is None
        check_exact_ids(session.turns, engine)
        assert all(len(sequence(session.turns, turn.index)) <= 4000 for turn in session.turns)

    asyncio.run(play())
