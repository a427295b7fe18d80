"""What every dialect is translated to, and the errors that every dialect translates from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]
"""``role``, ``content`` (a string), and of an assistant ``tool_calls`` with JSON text as arguments."""
Defaults = Mapping[str, Mapping[str, Any]]
"""Of each tool, what its arguments are where they are left out."""


@dataclass(frozen=True, slots=True)
class Request:
    """One model call as a client asked for it, whatever its dialect."""

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
    """What of the messages is no text and is not shown: the index of a message, and a few words."""
    after: str = ""
    """Name of the call (`Call.name`) whose conversation the messages go on from, where they are not all of it."""
    opening: int = 0
    """Messages at the beginning that stand for this request only: others that go on from it do not inherit them."""
    store: bool = False
    """Whether the client may ask for the reply again, by its name."""
    unread: bool = False
    """Its messages are items of its dialect as JSON, some of which refer to stored replies: the dialect reads them."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What the dialect remembers of the request for its reply."""


@dataclass(frozen=True, slots=True)
class Counter:
    """A dialect's way to ask how many tokens a request has: its path, its bodies, its answer."""

    path: str
    parse: Callable[[bytes], Request]
    reply: Callable[[int], dict[str, Any]]


class ApiError(Exception):
    """An answer that is not a reply; each dialect gives it its own shape.

    `code` says exactly what happened, `kind` is the family of OpenAI's error types. No client may retry: a
    fault ends the episode, everything else is as wrong the second time (``x-should-retry: false``).
    """

    def __init__(self, status: int, code: str, message: str, *, param: str | None = None, limit: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.limit = limit

    def again(self) -> ApiError:
        """The same error, to be kept or raised elsewhere.

        One that was raised holds every frame it passed, with all they know: kept in one of them, or by something that
        one of them knows, it is freed by the garbage collector only.
        """
        return ApiError(self.status, self.code, self.message, param=self.param, limit=self.limit)

    @property
    def kind(self) -> str:
        """OpenAI's type of error."""
        if self.status == 401:
            return "authentication_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"


class Digest:
    """The name of a request body, by which a retry is recognised, computed while the body arrives."""

    def __init__(self, dialect: str) -> None:
        self._hash = hashlib.sha256(dialect.encode())  # which processors have instructions for

    def update(self, data: bytes) -> None:
        """The next bytes of the body."""
        self._hash.update(data)

    def name(self) -> str:
        """32 hexadecimal digits."""
        return self._hash.hexdigest()[:32]


class Names:
    """Names of every prefix of a conversation under its tools, of one conversation after another.

    Two conversations with the same name say the same: equal roles, texts and tool calls. Ids of tool calls,
    thoughts and blanks around a reply are left out, since clients rewrite, drop and trim them, and so are arguments
    that are what their tool's schema has as default, since clients fill them in.
    """

    def __init__(self) -> None:
        self.defaults: Defaults = {}
        """`argument_defaults` of the last conversation's tools."""
        self._messages: tuple[Message, ...] = ()
        self._keys = [b""]

    def unseen(self, messages: tuple[Message, ...], tools: Sequence[Mapping[str, Any]]) -> tuple[object, ...]:
        """What `of` would have to name: the messages that the last conversation did not begin with, new tools."""
        if tools_name(tools) != self._keys[0]:
            return tools, messages
        return messages[self._same(messages) :]

    def remember(self, messages: tuple[Message, ...], keys: list[bytes], defaults: Defaults) -> None:
        """Keep what `of` would have found, where a process of `workers` named the conversation."""
        self._messages, self._keys, self.defaults = messages, list(keys), defaults

    def of(self, messages: tuple[Message, ...], tools: Sequence[Mapping[str, Any]]) -> list[bytes]:
        """The nth is that of the first n messages. What the last conversation began with is not named again."""
        root = tools_name(tools)
        if root != self._keys[0]:
            self.defaults, self._messages, self._keys = argument_defaults(tools), (), [root]
        same = self._same(messages)
        keys = self._keys[: same + 1]
        for message in messages[same:]:
            keys.append(next_key(keys[-1], message, self.defaults))
        self._messages, self._keys = (*self._messages[:same], *messages[same:]), keys  # not if one has no name
        return list(keys)

    def _same(self, messages: tuple[Message, ...]) -> int:
        """How many of `messages` the last conversation began with."""
        pairs = enumerate(zip(self._messages, messages, strict=False))
        return next((at for at, (old, new) in pairs if old != new), min(len(self._messages), len(messages)))


class Tools(tuple[Mapping[str, Any], ...]):
    """Tools whose name is known: they may be large, and come with every request."""

    name: bytes


def named(tools: Sequence[Mapping[str, Any]]) -> Tools:
    """`tools`, named."""
    sequence = Tools(tools)
    sequence.name = tools_name(tools)
    return sequence


def tools_name(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """Name of the empty conversation under `tools`."""
    return tools.name if isinstance(tools, Tools) else hashlib.blake2b(_json(list(tools)), digest_size=16).digest()


def next_key(key: bytes, message: Message, defaults: Defaults) -> bytes:
    """Name of the conversation `key` after `message`, under tools with `argument_defaults`."""
    return hashlib.blake2b(key + _essence(message, defaults), digest_size=16).digest()


def argument_defaults(tools: Sequence[Mapping[str, Any]]) -> Defaults:
    """What each tool takes for arguments that are left out, where its schema says so."""
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
    """The meaning of JSON text, which clients may format anew; the text itself where it has none."""
    try:
        return json.loads(arguments, parse_int=float)  # as JavaScript reads numbers, and writes 1.0 back as 1
    except (ValueError, RecursionError):
        return arguments


_encode = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode


def _json(value: object) -> bytes:
    return _encode(value).encode(errors="surrogatepass")  # arguments may escape half a character
