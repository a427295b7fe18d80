"""The request that every dialect is parsed into, its errors, and keys that identify conversations."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]
"""``role``, ``content`` (a string), and of an assistant ``tool_calls`` with JSON text as arguments."""
Defaults = Mapping[str, Mapping[str, Any]]
"""Default arguments of each tool."""


@dataclass(frozen=True, slots=True)
class Request:
    """One model call as a client asked for it, in any dialect."""

    dialect: str
    model: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    stream_usage: bool = False
    wishes: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the client chose and the run decides: temperature, seed, tool_choice, ..."""
    hidden: tuple[tuple[int, str], ...] = ()
    """Content that is not text and not shown to the policy: index of its message, and a description."""
    after: str = ""
    """`Call.name` of the call whose conversation the messages continue; empty if they are all of it."""
    opening: int = 0
    """Leading messages that hold for this request only: requests that continue it do not inherit them."""
    store: bool = False
    """Whether the client may fetch the reply again by its id."""
    unread: bool = False
    """Its messages are still items of its dialect as JSON, since some refer to stored replies (`responses.resolve`)."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What the dialect needs for writing the reply."""


@dataclass(frozen=True, slots=True)
class Counter:
    """A dialect's endpoint that counts the tokens of a request: path, parser, response."""

    path: str
    parse: Callable[[bytes], Request]
    reply: Callable[[int], dict[str, Any]]


class ApiError(Exception):
    """An error response; each dialect writes it in its own shape.

    `code` is specific, `kind` is OpenAI's error type. Clients must not retry (``x-should-retry: false``): a fault
    ends the episode, and everything else fails the same way again.
    """

    def __init__(self, status: int, code: str, message: str, *, param: str | None = None, limit: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.limit = limit

    def again(self) -> ApiError:
        """A copy without traceback, to be stored or raised elsewhere.

        A raised exception references every frame it passed; storing it where one of those frames can reach it makes a
        cycle that only the garbage collector frees.
        """
        return ApiError(self.status, self.code, self.message, param=self.param, limit=self.limit)

    @property
    def kind(self) -> str:
        """OpenAI's type of error."""
        if self.status == 401:
            return "authentication_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"


class Digest:
    """Hash of a request body, computed while it arrives; a retry has the same."""

    def __init__(self, dialect: str) -> None:
        self._hash = hashlib.sha256(dialect.encode())  # CPUs have instructions for it

    def update(self, data: bytes) -> None:
        """The next bytes of the body."""
        self._hash.update(data)

    def hexdigest(self) -> str:
        """32 hexadecimal digits."""
        return self._hash.hexdigest()[:32]


class PrefixKeys:
    """Keys (16-byte hashes) of every prefix of a conversation under its tools.

    Conversations with equal keys have equal roles, texts and tool calls. Left out are what clients rewrite, drop or
    trim (ids of tool calls, thoughts, whitespace around a reply) and what they fill in (arguments equal to the default
    in their tool's schema). The last conversation is remembered: one that extends it costs only its new messages.
    """

    def __init__(self) -> None:
        self.defaults: Defaults = {}
        """`argument_defaults` of the last conversation's tools."""
        self._messages: tuple[Message, ...] = ()
        self._keys = [b""]

    def unseen(self, messages: tuple[Message, ...], tools: Sequence[Mapping[str, Any]]) -> tuple[object, ...]:
        """What `of` would have to hash: new tools, and messages that the last conversation did not begin with."""
        if tools_key(tools) != self._keys[0]:
            return tools, messages
        return messages[self._same(messages) :]

    def remember(self, messages: tuple[Message, ...], keys: list[bytes], defaults: Defaults) -> None:
        """Store keys that a worker process computed."""
        self._messages, self._keys, self.defaults = messages, list(keys), defaults

    def of(self, messages: tuple[Message, ...], tools: Sequence[Mapping[str, Any]]) -> list[bytes]:
        """Keys by number of leading messages: the first is that of no message, the last that of all."""
        root = tools_key(tools)
        if root != self._keys[0]:
            self.defaults, self._messages, self._keys = argument_defaults(tools), (), [root]
        same = self._same(messages)
        keys = self._keys[: same + 1]
        for message in messages[same:]:
            keys.append(next_key(keys[-1], message, self.defaults))
        # only now: `next_key` may have raised
        self._messages, self._keys = (*self._messages[:same], *messages[same:]), keys
        return list(keys)

    def _same(self, messages: tuple[Message, ...]) -> int:
        """How many of `messages` the last conversation began with."""
        pairs = enumerate(zip(self._messages, messages, strict=False))
        return next((at for at, (old, new) in pairs if old != new), min(len(self._messages), len(messages)))


class KeyedTools(tuple[Mapping[str, Any], ...]):
    """Tools with their key, computed once: they may be large, and come with every request."""

    key: bytes


def keyed(tools: Sequence[Mapping[str, Any]]) -> KeyedTools:
    """`tools` with their key."""
    sequence = KeyedTools(tools)
    sequence.key = tools_key(tools)
    return sequence


def tools_key(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """Key of the empty conversation under `tools`."""
    return tools.key if isinstance(tools, KeyedTools) else hashlib.blake2b(_json(list(tools)), digest_size=16).digest()


def next_key(key: bytes, message: Message, defaults: Defaults) -> bytes:
    """Key of the conversation `key` followed by `message`, under tools with these `argument_defaults`."""
    return hashlib.blake2b(key + _essence(message, defaults), digest_size=16).digest()


def argument_defaults(tools: Sequence[Mapping[str, Any]]) -> Defaults:
    """Default arguments of each tool, from its JSON schema."""
    defaults: dict[str, dict[str, Any]] = {}
    for tool in tools:
        schema = tool["function"].get("parameters") or {}
        properties = schema.get("properties")
        for argument, described in properties.items() if isinstance(properties, Mapping) else ():
            if isinstance(described, Mapping) and "default" in described:
                defaults.setdefault(tool["function"]["name"], {})[argument] = _parsed(json.dumps(described["default"]))
    return defaults


def _essence(message: Message, defaults: Defaults) -> bytes:
    role, text = message["role"], message["content"]
    if role != "assistant":
        return f"{role}\n{text}".encode()
    calls: list[tuple[str, object]] = []
    functions = [call["function"] for call in message.get("tool_calls", ())]
    for function in functions:
        name, given = function["name"], _parsed(function["arguments"])
        if isinstance(given, dict) and (usual := defaults.get(name)):
            given = {argument: value for argument, value in given.items() if (argument, value) not in usual.items()}
        calls.append((name, given))
    if not calls:
        return f"assistant\n{text.strip()}".encode()
    try:
        return b"calls\n" + _json([text.strip(), *calls])
    except RecursionError:  # nested deeper than can be written
        return b"calls\n" + _json([text.strip(), *((each["name"], each["arguments"]) for each in functions)])


def _parsed(arguments: str) -> Any:
    """JSON text as a value, since clients reformat it; invalid JSON as it is. Empty text and null are `{}`."""
    try:
        value = json.loads(arguments or "null", parse_int=float)  # JavaScript clients write 1.0 back as 1
        return {} if value is None else value
    except (ValueError, RecursionError):
        return arguments


_encode = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode


def _json(value: object) -> bytes:
    return _encode(value).encode(errors="surrogatepass")  # arguments may escape half a character
