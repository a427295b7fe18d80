"""The dialect-independent request, its errors, and conversation keys."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Message = Mapping[str, Any]
"""``role``, ``content`` (a string), and for an assistant ``tool_calls`` with arguments as JSON text."""
Defaults = Mapping[str, Mapping[str, Any]]
"""Default arguments of each tool."""


@dataclass(frozen=True, slots=True)
class Request:
    """A model call as requested."""

    dialect: str
    model: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    stream_usage: bool = False
    client_settings: Mapping[str, Any] = field(default_factory=dict)
    """Client settings, decided by the run: temperature, seed, tool_choice, ..."""
    hidden: tuple[tuple[int, str], ...] = ()
    """Content hidden from the policy: index of its message, and a description."""
    continued_call: str = ""
    """`Call.name` of the continued call; empty if `messages` are the whole conversation."""
    opening: int = 0
    """Number of leading messages (instructions) not inherited by later requests."""
    store: bool = False
    """Whether the client may fetch the reply by id."""
    unread: bool = False
    """Whether messages are unparsed items that may refer to stored replies (`responses.resolve_references`)."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """Data for writing the reply."""


@dataclass(frozen=True, slots=True)
class Counter:
    """A token-counting endpoint: path, parser, response."""

    path: str
    parse: Callable[[bytes], Request]
    reply: Callable[[int], dict[str, Any]]


@dataclass(eq=False)
class ApiError(Exception):
    """An error response of any dialect; `code` is specific, `kind` is OpenAI's error type.

    Clients must not retry (``x-should-retry: false``): a fault ends the episode, other errors would repeat.
    """

    status: int
    code: str
    message: str
    param: str | None = field(default=None, kw_only=True)
    limit: str = field(default="", kw_only=True)

    def __str__(self) -> str:
        return self.message

    def without_traceback(self) -> ApiError:
        """Copy without traceback, whose frames would form a reference cycle."""
        return replace(self)

    @property
    def kind(self) -> str:
        """OpenAI's error type."""
        if self.status == 401:
            return "authentication_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"


class PrefixKeys:
    """Keys (16-byte hashes) of every prefix of a conversation with its tools.

    Equal keys mean equal roles, texts and tool calls, ignoring parts that clients rewrite or drop (call ids, thoughts,
    whitespace around a reply) or fill in (default arguments). Extending the last conversation is cheap.
    """

    def __init__(self) -> None:
        self.defaults: Defaults = {}
        self._messages: tuple[Message, ...] = ()
        self._keys = [b""]

    def list_unhashed(self, messages: tuple[Message, ...], tools: Sequence[Mapping[str, Any]]) -> tuple[object, ...]:
        """New tools and messages, which `compute` would hash."""
        if hash_tools(tools) != self._keys[0]:
            return tools, messages
        return messages[self._count_same(messages) :]

    def store_keys(self, messages: tuple[Message, ...], keys: list[bytes], defaults: Defaults) -> None:
        """Store keys that a worker process computed."""
        self._messages, self._keys, self.defaults = messages, list(keys), defaults

    def compute(self, messages: tuple[Message, ...], tools: Sequence[Mapping[str, Any]]) -> list[bytes]:
        """Keys of all prefixes, shortest first."""
        tools_key = hash_tools(tools)
        if tools_key != self._keys[0]:
            self.defaults, self._messages, self._keys = read_argument_defaults(tools), (), [tools_key]
        same = self._count_same(messages)
        keys = self._keys[: same + 1]
        for message in messages[same:]:
            keys.append(hash_message(keys[-1], message, self.defaults))
        # last, as `hash_message` may raise
        self._messages, self._keys = (*self._messages[:same], *messages[same:]), keys
        return list(keys)

    def _count_same(self, messages: tuple[Message, ...]) -> int:
        pairs = enumerate(zip(self._messages, messages, strict=False))
        return next((at for at, (old, new) in pairs if old != new), min(len(self._messages), len(messages)))


class KeyedTools(tuple[Mapping[str, Any], ...]):
    """Tools with their cached key, as every request repeats them."""

    key: bytes


def add_tools_key(tools: Sequence[Mapping[str, Any]]) -> KeyedTools:
    """Add the key to `tools`."""
    sequence = KeyedTools(tools)
    sequence.key = hash_tools(tools)
    return sequence


def hash_tools(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """Key of the empty conversation with `tools`."""
    if isinstance(tools, KeyedTools):
        return tools.key
    return hashlib.blake2b(_as_json_bytes(list(tools)), digest_size=16).digest()


def hash_message(key: bytes, message: Message, defaults: Defaults) -> bytes:
    """Key of conversation `key` followed by `message`."""
    return hashlib.blake2b(key + _canonical_bytes(message, defaults), digest_size=16).digest()


def read_argument_defaults(tools: Sequence[Mapping[str, Any]]) -> Defaults:
    """Default arguments by tool, from the JSON schemas."""
    defaults: dict[str, dict[str, Any]] = {}
    for tool in tools:
        schema = tool["function"].get("parameters") or {}
        properties = schema.get("properties")
        for argument, described in properties.items() if isinstance(properties, Mapping) else ():
            if isinstance(described, Mapping) and "default" in described:
                defaults.setdefault(tool["function"]["name"], {})[argument] = _parse_call_arguments(
                    json.dumps(described["default"])
                )
    return defaults


def _canonical_bytes(message: Message, defaults: Defaults) -> bytes:
    role, text = message["role"], message["content"]
    if role != "assistant":
        return f"{role}\n{text}".encode()
    calls: list[tuple[str, object]] = []
    functions = [call["function"] for call in message.get("tool_calls", ())]
    for function in functions:
        name, arguments = function["name"], _parse_call_arguments(function["arguments"])
        if isinstance(arguments, dict) and (tool_defaults := defaults.get(name)):
            arguments = dict(each for each in arguments.items() if each not in tool_defaults.items())
        calls.append((name, arguments))
    if not calls:
        return f"assistant\n{text.strip()}".encode()
    try:
        return b"calls\n" + _as_json_bytes([text.strip(), *calls])
    except RecursionError:  # nested deeper than can be written
        return b"calls\n" + _as_json_bytes([text.strip(), *((each["name"], each["arguments"]) for each in functions)])


def _parse_call_arguments(arguments: str) -> Any:
    """Parse JSON; invalid JSON stays text, empty text and null are `{}`."""
    try:
        value = json.loads(arguments or "null", parse_int=float)  # JavaScript clients write 1.0 back as 1
        return {} if value is None else value
    except (ValueError, RecursionError):
        return arguments


_encode = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode


def _as_json_bytes(value: object) -> bytes:
    return _encode(value).encode(errors="surrogatepass")  # arguments may have lone surrogates, as escapes
