"""The conversations of an episode."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from coderepairrl.config.secrets import without_secrets
from coderepairrl.runs import codec
from coderepairrl.types import Episode, Turn, leaves, replies

Said = tuple[Mapping[str, Any], Turn | None]
"""A message, and the turn that it is the reply of, if the policy sampled it in this episode."""


class Chat(NamedTuple):
    """A conversation from its first message to its last reply."""

    said: Sequence[Said]
    side: bool
    """Whether it is beside the agent's main one: a title, a summary, a sub-agent."""


def chats(episode: Episode) -> list[Chat]:
    """All conversations of `episode`, of which none continues another: first the main one as it ended, then what
    it was before the client rewrote it, then those beside it."""
    ends = sorted(leaves(episode.turns), key=lambda leaf: (leaf in episode.side, -leaf))
    return [Chat(replies(episode.turns, leaf), leaf in episode.side) for leaf in ends]


def has_secrets(chat: Chat) -> bool:
    """Whether `message` takes anything out of it that its token ids would still say."""
    return any(without_secrets(text) != text for said, _ in chat.said for text in _texts(said))


def _texts(said: Mapping[str, Any]) -> Iterator[str]:
    yield from (said["content"], said.get("reasoning_content") or "")
    for call in said.get("tool_calls", ()):
        yield from (call["function"]["name"], call["function"]["arguments"], _unescaped(call["function"]["arguments"]))


def _unescaped(arguments: str) -> str:
    r"""JSON without escapes of letters: behind ``\u006b`` a secret would be one again for those who parse it."""
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False)
    except (ValueError, RecursionError):
        return arguments


def clean(text: str) -> str:
    """`text` as any file may have it: without secrets, and with ``?`` for halves of characters.

    >>> clean("half: \\ud83d")
    'half: ?'
    """
    return without_secrets(text).encode(errors="replace").decode()


def clean_patch(patch: bytes) -> str:
    """`patch` without secrets, as `codec.bytes_to_text` writes it: in base64 nobody would find them."""
    text = without_secrets(patch.decode("utf-8", "surrogateescape"))
    return codec.bytes_to_text(text.encode("utf-8", "surrogateescape"))


def message(said: Mapping[str, Any]) -> dict[str, Any]:
    """A message in the schema of Chat Completions; what it lacks is None, since a column has one type.

    >>> message({"role": "user", "content": "Hello"})["tool_calls"] is None
    True
    """
    calls = said.get("tool_calls")
    return {
        "role": said["role"],
        "content": clean(said["content"]),
        "reasoning_content": clean(said["reasoning_content"]) if said.get("reasoning_content") else None,
        "tool_calls": [_call(call) for call in calls] if calls else None,
        "tool_call_id": clean(said["tool_call_id"]) if said.get("tool_call_id") is not None else None,
    }


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    written = call["function"]["arguments"]
    shown = _unescaped(written)
    arguments = clean(written if without_secrets(shown) == shown else shown)
    function = {"name": clean(call["function"]["name"]), "arguments": arguments}
    return {"id": clean(call["id"]), "type": "function", "function": function}
