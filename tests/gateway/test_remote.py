"""A gateway in front of another provider's model: real HTTP on both sides."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from coderepairrl.errors import RemoteFault, UsageError
from coderepairrl.gateway import Gateway, Remote, Session
from coderepairrl.gateway.remote_answer import ReceivedReply, RemoteAnswer
from coderepairrl.types import Limits, Sampling

from .conftest import SHELL, Said, World
from .speech import SPEAKERS, Message, post, send_messages

KEY = "sk-secret-key"
ASK: list[Message] = [{"role": "user", "content": "Repair it."}]
WAYS = [(name, stream) for name in SPEAKERS for stream in (False, True)]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
USAGE = {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}


def completion(text: str = "Done.", **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return {"id": "c", "model": "m-1", "choices": [choice], "usage": USAGE, **more}


def ended(reason: str, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": None}, "finish_reason": reason, **more}
    return completion(choices=[choice])


def replying(*replies: Any, asked: list[Any] | None = None) -> Handler:
    """A server that gives `replies` in turn and repeats the last; an integer is a status. It fills `asked`."""
    left = list(replies)

    async def handler(request: web.Request) -> web.Response:
        if asked is not None:
            asked.append((request.headers["Authorization"], await request.json()))
        reply = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(reply, int):
            return web.Response(status=reply, headers={"Retry-After": "0"})
        return web.json_response(reply)

    return handler


def calling(name: str, arguments: Any) -> Handler:
    """A server that replies with a call whose arguments are `arguments`, as JSON text."""
    function = {"name": name, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": function}]}
    return replying(completion(choices=[{"message": message, "finish_reason": "tool_calls"}]))


@asynccontextmanager
async def listening(handler: Handler) -> AsyncIterator[str]:
    """The base URL of a server that completes by `handler`, and lists no models."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{site.port}/v1"
    await runner.cleanup()


@asynccontextmanager
async def relay(url: str, *, limits: Limits | None = None, **options: Any) -> AsyncIterator[Session]:
    """A session of a gateway that relays to `url`."""
    async with Remote(url, **{"model": "m", "key": KEY, "backoff": 0.0, **options}) as remote:
        server = Gateway(remote, sampling=Sampling(temperature=0.5, max_tokens=512), on_turn=lambda *_: None)
        await server.start()
        yield server.open("e", limits=limits or Limits(tokens=4000, seconds=30.0), seed=0)
        await server.stop()


@pytest.mark.parametrize(("name", "stream"), WAYS)
async def test_every_dialect_is_relayed_as_chat(world: World, said: Said, name: str, stream: bool) -> None:
    replies = iter([said("I look.", ("shell", {"cmd": "ls"}), ("shell", {"cmd": "pwd"})), said("Repaired.")])
    world.engine.script = lambda *_: next(replies)
    upstream = world.open()
    async with relay(upstream.endpoint.base_url, model="policy") as session:
        conversation = list(ASK)
        conversation.append(await send_messages(session, name, conversation, stream=stream))
        calls = conversation[-1]["tool_calls"]
        assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"cmd": "ls"}, {"cmd": "pwd"}]
        conversation += [{"role": "tool", "tool_call_id": call["id"], "content": "a.py"} for call in calls]
        last = await send_messages(session, name, conversation, stream=stream)
    assert last["content"] == "Repaired."
    assert [turn.base for turn in upstream.turns] == [None, 0], "it reads its own words in what is relayed"
    assert [(turn.base, turn.masked, turn.sampled, turn.dialect) for turn in session.turns] == [
        (None, "relayed", 0, name),
        (0, "relayed", 0, name),
    ]
    for turn, real in zip(session.turns, upstream.turns, strict=True):
        assert turn.remote["usage"]["completion_tokens"] == len(real.output)
        assert turn.messages[-1]["content"] == real.messages[-1]["content"]
    assert upstream.turns[0].overridden == ("temperature=0.5",)
    assert [message["role"] for message in session.turns[1].messages] == ["tool", "tool", "assistant"]


async def test_usage_is_the_remotes_in_every_dialect(world: World, said: Said) -> None:
    world.engine.script = lambda *_: said("Repaired.")
    upstream = world.open()
    async with relay(upstream.endpoint.base_url, model="policy") as session:
        found = []
        for name in SPEAKERS:
            _, raw = await post(session, name, SPEAKERS[name].body(ASK))
            usage = json.loads(raw)["usage"]
            found.append(usage.get("input_tokens", usage.get("prompt_tokens")))
            found[-1] += usage.get("cache_read_input_tokens", 0)
    assert found == [len(prompt) for prompt, *_ in world.engine.seen]


async def test_the_only_model_of_a_remote_is_found(world: World) -> None:
    async with Remote(world.open().endpoint.base_url) as remote:
        assert (remote.model, remote.context) == ("policy", world.engine.context)

    async with listening(replying(500)) as url:
        with pytest.raises(UsageError, match="unknown models"):
            async with Remote(url):
                pass


async def test_what_is_sent_is_what_the_run_decides() -> None:
    asked: list[Any] = []
    async with (
        listening(replying(completion(), asked=asked)) as url,
        relay(url, extra_body={"top_logprobs": 1}, max_tokens_name="max_completion_tokens") as session,
    ):
        wishes = {"temperature": 1.5, "seed": 3, "tool_choice": "required", "stop": ["END"], "max_tokens": 7}
        await post(session, "chat", {"model": "policy", "messages": ASK, "tools": [SHELL], **wishes})
    [(key, body)] = asked
    assert key == f"Bearer {KEY}"
    assert body == {
        "model": "m",
        "messages": ASK,
        "tools": [SHELL],
        "temperature": 0.5,
        "stop": ["END"],
        "max_completion_tokens": 7,
        "tool_choice": "required",
        "top_logprobs": 1,
    }
    assert session.turns[0].overridden == ("seed=3", "temperature=1.5")


def answers(status: int, text: str = "", **headers: str) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status, text=text, headers=headers)

    return handler


async def cut(request: web.Request) -> web.StreamResponse:
    """A stream, or a body, that ends in the middle."""
    if (await request.json()).get("stream"):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        delta = {"index": 0, "delta": {"content": "I wi"}, "finish_reason": None}
        await response.write(b"data: " + json.dumps({"choices": [delta]}).encode() + b"\n\n")
    else:
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"choices"')
    assert request.transport is not None
    request.transport.close()
    return response


BROKEN: dict[str, tuple[Handler, str]] = {
    "401": (answers(401, f'{{"error": "bad key {KEY}"}}'), "answered 401"),
    "429 for an hour": (answers(429, "slow down", **{"Retry-After": "3600"}), "answered 429"),
    "429 again and again": (answers(429, "slow down"), "answered 429"),
    "elsewhere": (answers(302, "", Location="http://127.0.0.1:1/v1"), "answered 302"),
    "no json": (answers(200, "<html>login</html>"), "not a chat completion"),
    "nothing": (answers(200, '{"choices": []}'), "broke off"),
    "null": (answers(200, '{"choices": null}'), "broke off"),
    "error": (answers(200, json.dumps(ended("error"))), "finish_reason error"),
    "an error in a choice": (answers(200, json.dumps(ended("stop", error={"code": 502}))), '{"code": 502}'),
    "filtered": (answers(200, json.dumps(ended("content_filter"))), "finish_reason content_filter"),
    "FILTERED": (answers(200, json.dumps(ended("SAFETY"))), "finish_reason SAFETY"),
    "cut": (cut, ""),
}


@pytest.mark.parametrize(
    ("broken", "name", "stream"),
    [(broken, *WAYS[at % len(WAYS)]) for at, broken in enumerate(BROKEN)] + [("cut", *way) for way in WAYS],
)
async def test_a_remote_that_fails_is_a_fault_in_the_dialects_words(broken: str, name: str, stream: bool) -> None:
    handler, words = BROKEN[broken]
    speaker = SPEAKERS[name]
    async with listening(handler) as url, relay(url, attempts=2) as session:
        status, raw = await post(session, name, speaker.body(ASK, stream=stream))
        assert isinstance(session.fault, RemoteFault)
        assert words in str(session.fault)
        assert KEY.encode() not in raw and KEY not in str(session.fault)
        if broken == "cut" and stream:
            assert status == 200 and b"I wi" in raw and b"remote" in raw, "an event of the stream"
        else:
            assert (status, speaker.code(json.loads(raw))) == (503, "remote_fault")
        assert (await post(session, name, speaker.body(ASK)))[0] == 503, "the episode is void"
    assert {turn.masked for turn in session.turns} == {"fault"}


async def test_a_dead_remote_is_reported_at_once() -> None:
    async with listening(cut) as url:
        pass
    with pytest.raises(RemoteFault, match="cannot be reached: Connection refused"):
        async with Remote(url, model="m"):
            pass


async def test_a_server_that_speaks_no_http_does_not_make_us_tell_the_key() -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"who is there?\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(babble, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(RemoteFault, match="cannot be reached") as refused:
            async with Remote(f"http://127.0.0.1:{port}/v1", model="m", key=KEY):
                pass
    assert KEY not in str(refused.value)


@pytest.mark.parametrize("failures", [(429, 503), (ended("error"), ended("network_error"))], ids=["busy", "broken off"])
async def test_a_remote_that_fails_for_a_while_is_asked_again(failures: Any) -> None:
    asked: list[Any] = []
    async with listening(replying(*failures, completion(), asked=asked)) as url, relay(url) as session:
        assert (await send_messages(session, "chat", ASK))["content"] == "Done."
    assert (len(asked), len(session.turns), session.fault) == (3, 1, None)


async def test_a_busy_remote_is_no_reply_of_a_model_when_time_runs_out() -> None:
    handler = answers(429, "slow down", **{"Retry-After": "50"})
    async with listening(handler) as url, relay(url, limits=Limits(tokens=4000, seconds=40.0)) as session:
        assert (await post(session, "chat", SPEAKERS["chat"].body(ASK)))[0] == 503
        assert isinstance(session.fault, RemoteFault) and session.limit == ""


def heard(*pieces: Any, kind: str = "delta") -> ReceivedReply:
    """Parse messages, or the chunks of a stream."""
    received = ReceivedReply()
    for piece in pieces:
        received.take(RemoteAnswer.model_validate_json(json.dumps({"choices": [{kind: piece}]})))
    return received


@pytest.mark.parametrize("numbers", [(0, 0, 1, 1), (1, 1, 2, 2), (0, 0, 0, 0), (None, None, None, None)])
def test_calls_of_a_stream_are_distinguished(numbers: tuple[int | None, ...]) -> None:
    """By their number wherever counting starts, and by their id where all have one number or none."""
    pieces = [("a", "run", '{"x"'), (None, None, ": 1}"), ("b", "see", "{"), (None, None, "}")]
    calls = [
        {"index": number, "id": key, "function": {"name": name, "arguments": arguments}}
        for number, (key, name, arguments) in zip(numbers, pieces, strict=True)
    ]
    received = heard(*({"tool_calls": [call]} for call in calls))
    assert [(call["id"], call["name"], call["arguments"]) for call in received.calls] == [
        ("a", "run", '{"x": 1}'),
        ("b", "see", "{}"),
    ]


@pytest.mark.parametrize(
    "function", [{"name": "shell", "arguments": '"b"}'}, {"arguments": '"b"}'}, {"name": None}, None]
)
def test_a_name_in_each_piece_is_one_name(function: Any) -> None:
    pieces = [{"name": "shell", "arguments": '{"cmd":'}, function]
    [call] = heard(*({"tool_calls": [{"index": 0, "id": "a", "function": each}]} for each in pieces)).calls
    arguments = (function or {}).get("arguments", "")
    assert (call["name"], call["arguments"]) == ("shell", '{"cmd":' + arguments)


@pytest.mark.parametrize("kind", ["message", "delta"])
def test_contents_and_arguments_that_are_not_text_are_read(kind: str) -> None:
    thoughts = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}
    image = {"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}
    parts = [thoughts, {"type": "text", "text": "Okay"}, image]
    call = {"id": "a", "function": {"name": "shell", "arguments": {"cmd": "ls"}}}
    received = heard({"content": parts, "tool_calls": [call]}, kind=kind)
    assert (received.reasoning, received.content) == ("Hm.", "Okay\n[image, not shown]")
    assert json.loads(received.calls[0]["arguments"]) == {"cmd": "ls"}


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        ({"prompt_tokens": 10.0, "completion_tokens": 3.0, "prompt_tokens_details": {"cached_tokens": 4.0}}, (10, 3)),
        ({"prompt_tokens": 10, "total_tokens": 13}, (10, 3)),
        ({"prompt_tokens": 10, "completion_tokens": None}, (10, 0)),
        ({}, (None, None)),
        (None, (None, None)),
    ],
)
async def test_counts_of_tokens_may_be_floats_or_missing(usage: Any, counts: Any) -> None:
    """Without any the limit holds for an estimate, and the turn has no counts."""
    limits = Limits(tokens=40, seconds=30.0)
    async with listening(replying(completion(usage=usage))) as url, relay(url, limits=limits) as session:
        await send_messages(session, "chat", ASK)
        reported = session.turns[0].remote["usage"]
    assert (reported.get("prompt_tokens"), reported.get("completion_tokens")) == counts
    assert session.limit == ("" if reported else "tokens")


FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"extra_content": {"google": {"thought_signature": "SIG"}}}),
    ({"reasoning_content": ""}, {}),
    ({"reasoning_details": [{"type": "reasoning.text", "text": "Hm.", "signature": None, "index": 0}]}, {}),
    ({"reasoning_opaque": "SIG"}, {"provider_specific_fields": {"thought_signature": "SIG"}}),
]


@pytest.mark.parametrize(
    ("name", "fields", "of_call"),
    [*(("chat", *each) for each in FIELDS[:3]), *((name, *FIELDS[3]) for name in SPEAKERS)],
)
async def test_fields_that_a_remote_wants_back_are_sent_back(
    name: str, fields: dict[str, Any], of_call: dict[str, Any]
) -> None:
    """In every dialect, even if the client drops them. Other fields are not sent back."""
    call = {"id": "a", "type": "function", "function": {"name": "shell", "arguments": '{"cmd": "ls"}'}, **of_call}
    reply = {"role": "assistant", "content": "I look.", "tool_calls": [call], **fields}
    choice = {"message": {**reply, "annotations": []}, "finish_reason": "tool_calls"}
    asked: list[Any] = []
    async with listening(replying(completion(choices=[choice]), asked=asked)) as url, relay(url) as session:
        said = await send_messages(session, name, ASK)
        said = {key: said[key] for key in ("role", "content", "tool_calls")}
        await send_messages(session, name, [*ASK, said, {"role": "tool", "tool_call_id": "a", "content": "a.py"}])
        assert session.turns[1].base == 0
    assert asked[1][1]["messages"][1] == reply


def test_such_fields_of_a_stream_are_joined() -> None:
    parts: list[Any] = [{"index": 0, "type": "text", "text": text, "format": "v1"} for text in ("Hm", ".")]
    parts.append({"index": 0, "type": "text", "text": None, "signature": "SIG"})
    parts.append({"index": 1, "type": "encrypted", "data": "D"})
    received = heard(*({"reasoning_details": [part], "reasoning_content": ""} for part in parts))
    whole = {"index": 0, "type": "text", "text": "Hm.", "format": "v1", "signature": "SIG"}
    assert received.returned == {"reasoning_details": [whole, parts[-1]], "reasoning_content": ""}


@pytest.mark.parametrize("cut", [False, True])
async def test_the_last_line_of_a_stream_may_lack_its_end(cut: bool) -> None:
    """It is read, for some servers end like this; half an event means that the remote broke off."""
    pieces: list[Any] = [
        {"choices": [{"index": 0, "delta": {"content": "Done."}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": USAGE},
    ]

    async def handler(request: web.Request) -> web.StreamResponse:
        body = "\n\n".join(f"data: {json.dumps(piece)}" for piece in pieces).encode()
        return web.Response(body=body[: -4 if cut else None], content_type="text/event-stream")

    async with listening(handler) as url, relay(url, attempts=1) as session:
        _, raw = await post(session, "chat", SPEAKERS["chat"].body(ASK, stream=True))
        if cut:
            assert "broke off" in str(session.fault), raw
        else:
            assert SPEAKERS["chat"].stream(raw)["content"] == "Done."
            assert session.turns[0].remote["usage"] == USAGE


async def test_a_full_context_is_a_limit_and_no_fault() -> None:
    full = json.dumps({"error": {"message": "too many", "code": "context_length_exceeded"}})
    async with listening(answers(400, full)) as url, relay(url) as session:
        for name, speaker in SPEAKERS.items():
            status, raw = await post(session, name, speaker.body(ASK))
            assert (status, speaker.code(json.loads(raw))) == (400, "context_length_exceeded")
        assert (session.limit, session.fault, session.turns) == ("context", None, ())


async def test_a_remote_that_refuses_what_was_said_is_no_fault() -> None:
    """Some refuse arguments that are no JSON, which their own model wrote; before any reply it is the run's fault."""
    async with listening(replying(completion(), 400)) as url, relay(url) as session:
        said = await send_messages(session, "chat", ASK)
        status, raw = await post(session, "chat", SPEAKERS["chat"].body([*ASK, said, *ASK]))
        assert (status, json.loads(raw)["error"]["code"]) == (400, "remote_refused")
        assert b"answered 400" in raw and session.fault is None and len(session.turns) == 1


async def test_the_episodes_tokens_are_what_the_remote_reports() -> None:
    limits = Limits(tokens=13, seconds=30.0)
    async with listening(replying(completion())) as url, relay(url, limits=limits) as session:
        said = await send_messages(session, "chat", ASK)
        status, raw = await post(session, "chat", SPEAKERS["chat"].body([*ASK, said, *ASK]))
        assert (status, json.loads(raw)["error"]["code"]) == (400, "context_length_exceeded")
        assert session.limit == "tokens"
    limits = Limits(tokens=12, seconds=30.0)
    async with listening(replying(completion())) as url, relay(url, limits=limits) as session:
        await send_messages(session, "chat", ASK)
        assert session.limit == "tokens", "known only after the reply"


async def test_a_client_that_goes_away_stops_the_remote() -> None:
    asked, gone = asyncio.Event(), asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()
        raise AssertionError

    async with listening(handler) as url, relay(url) as session:
        call = asyncio.create_task(post(session, "chat", SPEAKERS["chat"].body(ASK)))
        await asked.wait()
        call.cancel()
        await gone.wait()
    assert [turn.masked for turn in session.turns] == ["aborted"]
    assert session.fault is None


async def test_ids_are_kept_as_information() -> None:
    whole = completion(prompt_token_ids=[1, 2])
    whole["choices"][0]["token_ids"] = [3]
    async with listening(replying(whole)) as url, relay(url) as session:
        await send_messages(session, "chat", ASK)
    [turn] = session.turns
    assert (turn.remote["prompt_token_ids"], turn.remote["token_ids"]) == ([1, 2], [3])
    assert (turn.remote["model"], turn.remote["finish_reason"], turn.sampled) == ("m-1", "stop", 0)


async def test_tokens_of_a_remote_cannot_be_counted_before() -> None:
    async with listening(answers(200)) as url, relay(url) as session:
        body = {"model": "policy", "messages": ASK}
        status, answer = await post(session, "messages", body, path="/messages/count_tokens")
        assert (status, json.loads(answer)["error"]["type"]) == (404, "not_found_error")
        assert session._budget.calls == 0, "an agent that asks before every call has all its calls"
