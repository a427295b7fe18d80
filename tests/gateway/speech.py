"""Clients of the three dialects that write a conversation and read a reply, without the gateway's code.

A conversation is a list of messages in the shape of Chat Completions.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from coderepairrl.gateway import Session

from .conftest import SHELL

Message = dict[str, Any]
FUNCTION: dict[str, Any] = SHELL["function"]  # type: ignore[assignment]


PYTHON = re.compile(
    r"Traceback|\b[A-Z]\w*(Error|Exception)\b|NoneType|<class|<\w+ object|\bdict\b|dictionary|instance of|\b_[A-Z]\w+|"
    r"\bNone\b|\bTrue\b|\bFalse\b|pydantic|aiohttp|\btuple\b|\bstr\b|\bint\b|\bb'"
)
"""Words of our implementation, which no error message may contain."""


@dataclass(frozen=True)
class Speaker:
    """`body` writes a request, `whole` reads a plain reply and `stream` a streamed one, `code` an error's code."""

    path: str
    body: Callable[..., dict[str, Any]]
    whole: Callable[[Any], Message]
    stream: Callable[[bytes], Message]
    code: Callable[[Any], str]


async def post(where: Session | str, name: str, body: Any, *, path: str = "", **headers: str) -> tuple[int, bytes]:
    """Send a request; return status and answer. `where` is a session or a base URL, `body` bytes or JSON.

    Asserts that every error says not to retry and contains no words of `PYTHON`.
    """
    url = (where if isinstance(where, str) else where.endpoint.base_url) + (path or SPEAKERS[name].path)
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    async with aiohttp.ClientSession() as client, client.post(url, data=data, headers=headers) as answer:
        reply = await answer.read()
        if answer.status >= 400:
            assert answer.headers["x-should-retry"] == "false"
            assert PYTHON.search(reply.decode()) is None, reply
        return answer.status, reply


async def begin_request(
    session: Session, name: str, sent: bytes, length: int = 0
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send the part `sent` of a body of `length` bytes (default: the whole) on its own connection."""
    url = urlsplit(session.endpoint.base_url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    head = f"POST {url.path}{SPEAKERS[name].path} HTTP/1.1\r\nHost: a\r\nContent-Length: {length or len(sent)}\r\n\r\n"
    writer.write(head.encode() + sent)
    await writer.drain()
    return reader, writer


async def send_messages(
    session: Session, name: str, messages: list[Message], *, stream: bool = False, **more: Any
) -> Message:
    """Send a conversation; return the reply."""
    status, reply = await post(session, name, SPEAKERS[name].body(messages, stream=stream, **more))
    assert status == 200, reply
    return read_reply(name, reply)


def read_reply(name: str, reply: bytes) -> Message:
    """Read a plain or streamed reply."""
    speaker = SPEAKERS[name]
    return speaker.whole(json.loads(reply)) if reply.startswith(b"{") else speaker.stream(reply)


def read_events(stream: bytes) -> Iterator[Any]:
    for block in stream.split(b"\n\n"):
        line = block.rpartition(b"\n")[2]
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


def _make_call(call_id: str, name: str, arguments: str) -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _make_reply(text: str, calls: Sequence[Message]) -> Message:
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {})}


def _chat_body(messages: list[Message], *, max_tokens: int = 0, stop: Sequence[str] = (), **more: Any) -> Any:
    limits = {"max_tokens": max_tokens} if max_tokens else {}
    return {"model": "policy", "messages": messages, "tools": [SHELL], "stop": list(stop), **limits, **more}


def _chat_stream(stream: bytes) -> Message:
    assert stream.endswith(b"data: [DONE]\n\n")
    text, calls = "", []
    for event in read_events(stream):
        delta = event["choices"][0]["delta"]
        text += delta.get("content") or ""
        calls += [{name: call[name] for name in ("id", "type", "function")} for call in delta.get("tool_calls", ())]
    return _make_reply(text, calls)


def _responses_body(messages: list[Message], *, max_tokens: int = 0, stop: Sequence[str] = (), **more: Any) -> Any:
    """Write a request; Responses has no stop strings."""
    items: list[Any] = []
    for message in messages:
        if message["role"] == "tool":
            output = {"call_id": message["tool_call_id"], "output": message["content"]}
            items.append({"type": "function_call_output", **output})
            continue
        if message["content"] or not message.get("tool_calls"):
            items.append({"role": message["role"], "content": message["content"] or ""})
        for call in message.get("tool_calls", ()):
            items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    limits = {"max_output_tokens": max_tokens} if max_tokens else {}
    return {"model": "policy", "input": items, "tools": [{"type": "function", **FUNCTION}], **limits, **more}


def _responses_whole(reply: Any) -> Message:
    items = reply["output"]
    text = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
    calls = [item for item in items if item["type"] == "function_call"]
    return _make_reply(text, [_make_call(call["call_id"], call["name"], call["arguments"]) for call in calls])


def _responses_stream(stream: bytes) -> Message:
    events = list(read_events(stream))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    last = events[-1]["response"]
    assert last["status"] in ("completed", "incomplete")
    assert last["output"] == done
    message = _responses_whole(last)
    assert message["content"] == text
    return message


def _messages_body(messages: list[Message], *, max_tokens: int = 512, stop: Sequence[str] = (), **more: Any) -> Any:
    """Write a request; results of parallel calls are one message."""
    turns: list[Any] = []
    for message in messages:
        role = "assistant" if message["role"] == "assistant" else "user"
        if message["role"] == "tool":
            call_id = message["tool_call_id"]
            blocks: list[Any] = [{"type": "tool_result", "tool_use_id": call_id, "content": message["content"]}]
        else:
            blocks = [{"type": "text", "text": message["content"]}] if message["content"] else []
        for call in message.get("tool_calls", ()):
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
        if message["role"] == "tool" and turns[-1]["content"][-1]["type"] == "tool_result":
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": role, "content": blocks})
    tool = {"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
    limits = {"max_tokens": max_tokens, "stop_sequences": list(stop)}
    return {"model": "policy", "messages": turns, "tools": [tool], **limits, **more}


def _messages_whole(reply: Any) -> Message:
    blocks = reply["content"]
    calls = [block for block in blocks if block["type"] == "tool_use"]
    return _make_reply(
        "".join(block["text"] for block in blocks if block["type"] == "text"),
        [_make_call(call["id"], call["name"], json.dumps(call["input"])) for call in calls],
    )


def _messages_stream(stream: bytes) -> Message:
    blocks: list[Any] = []
    kinds = []
    for event in read_events(stream):
        kinds.append(event["type"])
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        if event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            delta = event["delta"]
            blocks[-1]["text"] = blocks[-1].get("text", "") + delta.get("text", "")
            blocks[-1]["json"] += delta.get("partial_json", "")
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"])
    return _messages_whole({"content": blocks})


def _openai_code(reply: Any) -> str:
    return str(reply["error"]["code"])


SPEAKERS = {
    "chat": Speaker(
        "/chat/completions", _chat_body, lambda reply: reply["choices"][0]["message"], _chat_stream, _openai_code
    ),
    "responses": Speaker("/responses", _responses_body, _responses_whole, _responses_stream, _openai_code),
    "messages": Speaker(
        "/messages", _messages_body, _messages_whole, _messages_stream, lambda reply: str(reply["crrl"]["code"])
    ),
}
