"""Episode as conversation: messages by turn, tool calls, forks."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from coderepairrl.printable import printable, visible
from coderepairrl.types import Episode, ToolCall, Turn

_LONG_LINES, _LONG_CHARS = 26, 2600
_OLD, _NEW = ("old", "search"), ("new", "replace")


class Field(NamedTuple):
    """Argument of a tool call; `kind` is ``del`` for replaced text, ``add`` for its replacement."""

    name: str
    text: str
    kind: str = ""


class Call(NamedTuple):
    """Tool call in a reply, with result if the agent counts calls."""

    name: str
    fields: list[Field]
    result: ToolCall | None


class Message(NamedTuple):
    """Message of ``system``, ``user``, ``tool``, or the policy (``assistant``)."""

    role: str
    label: str
    text: str
    thought: str
    calls: list[Call]

    @property
    def long(self) -> bool:
        """Whether a page folds it."""
        return is_long(self.text)


def is_long(text: str) -> bool:
    """Whether a page folds `text`."""
    return len(text) > _LONG_CHARS or text.count("\n") >= _LONG_LINES


class Node(NamedTuple):
    """Turn in the tree: its lane, parent, and parent's lane."""

    turn: int
    lane: int
    parent: int | None
    parent_lane: int
    title: str
    ok: bool | None
    """Success of its tool calls; None without any."""


def conversation(episode: Episode) -> dict[int, list[Message]]:
    """Messages by turn index: those added by the request, then the reply."""
    results: dict[int, list[ToolCall]] = defaultdict(list)
    for call in episode.tool_calls:
        results[call.turn].append(call)
    names: dict[str, str] = {}
    return {turn.index: list(_view_messages(turn, results[turn.index], names)) for turn in episode.turns}


def unheard(episode: Episode) -> list[ToolCall]:
    """Tool calls that no reply contains."""
    counts = {turn.index: _count_calls(turn) for turn in episode.turns}
    calls: dict[int, list[ToolCall]] = defaultdict(list)
    for call in episode.tool_calls:
        calls[call.turn].append(call)
    return [call for turn, turn_calls in calls.items() for call in turn_calls[counts.get(turn, 0) :]]


def tree(episode: Episode, messages: Mapping[int, Sequence[Message]]) -> list[Node]:
    """Turns in order with lanes: the first continuation stays on its parent's, forks get others."""
    nodes: list[Node] = []
    lanes: dict[int, int] = {}
    gone_on: set[int] = set()
    free = 0
    for turn in episode.turns:
        parent = turn.base if turn.base is not None else turn.fork.turn if turn.fork is not None else None
        if parent is not None and parent not in gone_on and turn.base is not None and parent in lanes:
            lane = lanes[parent]
        else:
            lane, free = free, free + 1
        if turn.base is not None:
            gone_on.add(turn.base)
        lanes[turn.index] = lane
        calls = [call for call in episode.tool_calls if call.turn == turn.index]
        ok = all(call.ok for call in calls) if calls else None
        nodes.append(Node(turn.index, lane, parent, lanes.get(parent, 0) if parent is not None else 0, "", ok))
    return [node._replace(title=gist(messages[node.turn], node.turn)) for node in nodes]


def gist(messages: Sequence[Message], index: int) -> str:
    """Reply in a line: tool call or first words."""
    reply = messages[-1] if messages else None
    if reply is None:
        return f"turn {index}"
    if reply.calls:
        call = reply.calls[0]
        more = f" +{len(reply.calls) - 1}" if len(reply.calls) > 1 else ""
        return f"{call.name} {_clip_line(call.fields[0].text) if call.fields else ''}".rstrip() + more
    return _clip_line(reply.text or reply.thought) or "(nothing)"


def _clip_line(text: str) -> str:
    return " ".join(text.split())[:80]


def edits(messages: Sequence[Message]) -> list[Field]:
    """Replaced texts and replacements in a reply's calls."""
    return [field for call in (messages[-1].calls if messages else ()) for field in call.fields if field.kind]


def _view_messages(turn: Turn, results: Sequence[ToolCall], names: dict[str, str]) -> Any:
    for at, message in enumerate(turn.messages):
        role = str(message.get("role", ""))
        last = at == len(turn.messages) - 1
        calls = []
        for number, request in enumerate(_calls(message)):
            name, arguments, identity = request
            names[identity] = name
            result = results[number] if last and number < len(results) else None
            calls.append(Call(printable(name), _fields(arguments), result))
        label = names.get(str(message.get("tool_call_id", "")), "") if role == "tool" else ""
        text, thought = text_of(message.get("content")), text_of(message.get("reasoning_content"))
        yield Message(printable(role), printable(label), visible(text), visible(thought), calls)


def _count_calls(turn: Turn) -> int:
    return len(_calls(turn.messages[-1])) if turn.messages else 0


def _calls(message: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            calls.append((str(function.get("name", "")), function.get("arguments", ""), str(call.get("id", ""))))
    return calls


def _fields(arguments: Any) -> list[Field]:
    parsed = arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return [Field("", visible(arguments))]
    if not isinstance(parsed, Mapping):
        return [Field("", visible(arguments if isinstance(arguments, str) else json.dumps(parsed)))]
    edits = any(_starts(key, _OLD) for key in parsed) and any(_starts(key, _NEW) for key in parsed)
    return [
        Field(
            printable(str(key)),
            visible(value if isinstance(value, str) else json.dumps(value)),
            ("del" if _starts(key, _OLD) else "add" if _starts(key, _NEW) else "") if edits else "",
        )
        for key, value in parsed.items()
    ]


def _starts(key: object, words: tuple[str, ...]) -> bool:
    return str(key).lower().startswith(words)


def text_of(content: Any) -> str:
    """Text of message content; other parts by type.

    >>> text_of([{"type": "text", "text": "look: "}, {"type": "image_url"}]), text_of(None)
    ('look: [image_url]', '')
    """
    if isinstance(content, list):
        return "".join(
            str(part["text"]) if "text" in part else f"[{part.get('type', 'part')}]"
            for part in content
            if isinstance(part, Mapping)
        )
    return "" if content is None else str(content)
