"""Conversations of an episode."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from coderepairrl.config.secrets import remove_secrets
from coderepairrl.runs import codec
from coderepairrl.types import Episode, Turn, leaf_indices, messages_with_turns

SampledMessage = tuple[Mapping[str, Any], Turn | None]
"""Message, and the turn that sampled it in this episode, if any."""


class Chat(NamedTuple):
    """Conversation from first message to last reply."""

    messages: Sequence[SampledMessage]
    side: bool
    """Outside the main conversation: a title, a summary, a sub-agent."""


def list_chats(episode: Episode) -> list[Chat]:
    """Conversations of `episode`: the last main one, earlier ones that the client rewrote, side ones."""
    ends = sorted(leaf_indices(episode.turns), key=lambda leaf: (leaf in episode.side, -leaf))
    return [Chat(messages_with_turns(episode.turns, leaf), leaf in episode.side) for leaf in ends]


def has_secrets(chat: Chat) -> bool:
    """Whether a text has a secret, which token ids would reveal."""
    texts = (text for message, _ in chat.messages for text in _list_message_texts(message))
    return any(remove_secrets(text) != text for text in texts)


def _list_message_texts(message: Mapping[str, Any]) -> Iterator[str]:
    yield from (message["content"], message.get("reasoning_content") or "")
    for call in message.get("tool_calls", ()):
        yield from (
            call["function"]["name"],
            call["function"]["arguments"],
            _unescape_json(call["function"]["arguments"]),
        )


def _unescape_json(arguments: str) -> str:
    # a secret whose letters are escaped (\u006b for k) is one again once parsed
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False)
    except (ValueError, RecursionError):
        return arguments


def redact_text(text: str) -> str:
    """Remove secrets and lone surrogates.

    >>> redact_text("half: \\ud83d")
    'half: ?'
    """
    return remove_secrets(text).encode(errors="replace").decode()


def redact_patch(patch: bytes) -> str:
    """Remove secrets; encode as `codec.bytes_to_text`."""
    text = remove_secrets(patch.decode("utf-8", "surrogateescape"))
    return codec.bytes_to_text(text.encode("utf-8", "surrogateescape"))


def convert_to_chat_message(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Convert to the Chat Completions schema without secrets; missing keys are None, for typed columns.

    >>> convert_to_chat_message({"role": "user", "content": "Hello"})["tool_calls"] is None
    True
    """
    calls = raw.get("tool_calls")
    return {
        "role": raw["role"],
        "content": redact_text(raw["content"]),
        "reasoning_content": redact_text(raw["reasoning_content"]) if raw.get("reasoning_content") else None,
        "tool_calls": [_convert_call_to_chat(call) for call in calls] if calls else None,
        "tool_call_id": redact_text(raw["tool_call_id"]) if raw.get("tool_call_id") is not None else None,
    }


def _convert_call_to_chat(call: Mapping[str, Any]) -> dict[str, Any]:
    written = call["function"]["arguments"]
    unescaped = _unescape_json(written)
    arguments = redact_text(written if remove_secrets(unescaped) == unescaped else unescaped)
    function = {"name": redact_text(call["function"]["name"]), "arguments": arguments}
    return {"id": redact_text(call["id"]), "type": "function", "function": function}
