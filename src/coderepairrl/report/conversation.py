"""Conversation of an episode: messages by turn, tool calls, forks."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from coderepairrl.printable import printable, visible
from coderepairrl.types import Episode, ToolCall, Turn

_LONG_LINES, _LONG_CHARS = 26, 2600  # about a screen
# arguments of edit tools, such as old_str and new_str, begin with one of these
_OLD, _NEW = ("old", "search"), ("new", "replace")


class Field(NamedTuple):
    """Argument of a tool call; `kind` is ``del`` for replaced text, ``add`` for its replacement."""

    name: str
    text: str
    kind: str = ""


class Call(NamedTuple):
    """Tool call in a reply; `result` is None if the agent reports none."""

    name: str
    fields: list[Field]
    result: ToolCall | None


class Message(NamedTuple):
    """Message of a conversation; `role` is ``assistant`` for the policy."""

    role: str
    label: str  # name of the tool that answers; empty for other roles
    text: str
    thought: str
    calls: list[Call]


def is_long(text: str) -> bool:
    """Whether a page folds `text`."""
    return len(text) > _LONG_CHARS or text.count("\n") >= _LONG_LINES


class Node(NamedTuple):
    """Turn in the tree of turns; a lane is a column of the drawing."""

    turn: int
    lane: int
    parent: int | None
    parent_lane: int
    title: str
    ok: bool | None
    """Success of its tool calls; None without any."""


def build_conversation(episode: Episode) -> dict[int, list[Message]]:
    """Messages by turn index: those that the request added, then the reply."""
    results = _group_calls_by_turn(episode)
    tool_names: dict[str, str] = {}
    return {turn.index: list(_make_messages(turn, results[turn.index], tool_names)) for turn in episode.turns}


def find_unrecorded_calls(episode: Episode) -> list[ToolCall]:
    """Find the tool calls that no reply contains."""
    counts = {turn.index: len(_parse_tool_calls(turn.messages[-1])) for turn in episode.turns if turn.messages}
    return [call for turn, calls in _group_calls_by_turn(episode).items() for call in calls[counts.get(turn, 0) :]]


def _group_calls_by_turn(episode: Episode) -> dict[int, list[ToolCall]]:
    by_turn: dict[int, list[ToolCall]] = defaultdict(list)
    for call in episode.tool_calls:
        by_turn[call.turn].append(call)
    return by_turn


def build_turn_tree(episode: Episode, messages: Mapping[int, Sequence[Message]]) -> list[Node]:
    """Place turns on lanes: the first continuation of a turn stays on its lane, forks get others."""
    nodes: list[Node] = []
    lanes: dict[int, int] = {}
    continued: set[int] = set()
    next_lane = 0
    results = _group_calls_by_turn(episode)
    for turn in episode.turns:
        if turn.base in lanes and turn.base not in continued:
            lane = lanes[turn.base]
            continued.add(turn.base)
        else:
            lane, next_lane = next_lane, next_lane + 1
        lanes[turn.index] = lane
        parent = turn.fork.turn if turn.base is None and turn.fork is not None else turn.base
        calls = results[turn.index]
        ok = all(call.ok for call in calls) if calls else None
        title = summarise_reply(messages[turn.index], turn.index)
        nodes.append(Node(turn.index, lane, parent, 0 if parent is None else lanes.get(parent, 0), title, ok))
    return nodes


def summarise_reply(messages: Sequence[Message], index: int) -> str:
    """Reply in a line: its first tool call, else its first words."""
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


def list_edits(messages: Sequence[Message]) -> list[Field]:
    """Replaced texts and replacements in the reply's calls."""
    return [field for call in (messages[-1].calls if messages else ()) for field in call.fields if field.kind]


def _make_messages(turn: Turn, results: Sequence[ToolCall], tool_names: dict[str, str]) -> Iterator[Message]:
    # `tool_names` collects the names by call id, for the answers in later turns
    for at, message in enumerate(turn.messages):
        role = str(message.get("role", ""))
        is_reply = at == len(turn.messages) - 1
        calls = []
        for number, (name, arguments, call_id) in enumerate(_parse_tool_calls(message)):
            tool_names[call_id] = name
            result = results[number] if is_reply and number < len(results) else None
            calls.append(Call(printable(name), _parse_call_fields(arguments), result))
        label = tool_names.get(str(message.get("tool_call_id", "")), "") if role == "tool" else ""
        text = extract_content_text(message.get("content"))
        thought = extract_content_text(message.get("reasoning_content"))
        yield Message(printable(role), printable(label), visible(text), visible(thought), calls)


def _parse_tool_calls(message: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    # name, arguments, id
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            calls.append((str(function.get("name", "")), function.get("arguments", ""), str(call.get("id", ""))))
    return calls


def _parse_call_fields(arguments: Any) -> list[Field]:
    parsed = arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return [Field("", visible(arguments))]
    if not isinstance(parsed, Mapping):
        return [Field("", visible(arguments if isinstance(arguments, str) else json.dumps(parsed)))]
    kinds = {
        key: "del" if word.startswith(_OLD) else "add" if word.startswith(_NEW) else ""
        for key, word in ((key, str(key).lower()) for key in parsed)
    }
    is_edit = {"del", "add"} <= set(kinds.values())
    return [
        Field(
            printable(str(key)),
            visible(value if isinstance(value, str) else json.dumps(value)),
            kinds[key] if is_edit else "",
        )
        for key, value in parsed.items()
    ]


def extract_content_text(content: Any) -> str:
    """Text of message content; other parts as ``[TYPE]``.

    >>> extract_content_text([{"type": "text", "text": "look: "}, {"type": "image_url"}]), extract_content_text(None)
    ('look: [image_url]', '')
    """
    if isinstance(content, list):
        return "".join(
            str(part["text"]) if "text" in part else f"[{part.get('type', 'part')}]"
            for part in content
            if isinstance(part, Mapping)
        )
    return "" if content is None else str(content)
