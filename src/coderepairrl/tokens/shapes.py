"""Rewrite conversations whose shape a model's chat template refuses, drops, or writes as a reply of the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from coderepairrl.tokens.formats import CALL
from coderepairrl.tokens.reading import Message

Render = Callable[[Sequence[Message]], str]
"""Renders a conversation with a chat template; raises ValueError for one that it refuses."""
BEGIN = "Please continue."
"""User message added to a conversation without one (LiteLLM's words)."""


class Shape(StrEnum):
    """Shape of a conversation that some templates cannot write, and how it is rewritten."""

    SYSTEMS = "several system messages"
    """Joined to the first; after a reply see `LATE`."""
    LATE = "a late system message"
    """After a reply; becomes a user message."""
    USERS = "a user after a user"
    """Joined."""
    AFTER_RESULT = "a user after a result"
    """Joined to the result."""
    AFTER_CALL = "a user after a call"
    """Becomes the call's result."""
    ORPHAN = "a result without a call"
    """Becomes a user message."""
    REPLIES = "a reply after a reply"
    """Joined."""
    NO_USER = "no user first"
    """`BEGIN` is added before the first reply."""


def _make_message(role: str, text: str) -> Message:
    return {"role": role, "content": text} | ({"tool_call_id": CALL["id"]} if role == "tool" else {})


# _S system, _U user, _A assistant, _T tool, _C a reply with a tool call
_S, _U, _A, _T = (_make_message(role, f"{role}1") for role in ("system", "user", "assistant", "tool"))
_S2, _U2, _A2 = (_make_message(role, f"{role}2") for role in ("system", "user", "assistant"))
_C: Message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
EXAMPLES: Mapping[Shape, tuple[tuple[Message, ...], ...]] = {
    Shape.SYSTEMS: ((_S, _S2, _U), (_S, _U, _S2)),
    Shape.LATE: ((_S, _U, _A, _S2, _U2), (_S, _U, _A, _S2), (_S, _U, _C, _T, _S2)),
    Shape.USERS: ((_S, _U, _U2),),
    Shape.AFTER_RESULT: ((_S, _U, _C, _T, _U2),),
    Shape.AFTER_CALL: ((_S, _U, _C, _U2), (_S, _U, _C, _U2, _T)),
    Shape.ORPHAN: ((_S, _U, _T), (_S, _U, _A, _T)),
    Shape.REPLIES: ((_S, _U, _A, _A2, _U2), (_S, _U, _A, _C, _T)),
    Shape.NO_USER: ((_S, _A, _U), (_A, _U), (_S,)),
}


def find_unwritten_shapes(render: Render, *, has_tools: bool = True) -> frozenset[Shape]:
    """Find the shapes that a template cannot write; without tools, try only conversations without calls."""
    return frozenset(
        shape
        for shape, each in EXAMPLES.items()
        if not all(is_written(render, one) for one in each if has_tools or not has_calls(one))
    )


def has_calls(messages: Sequence[Message]) -> bool:
    """Whether `messages` have tool calls or results."""
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def is_written(render: Render, conversation: Sequence[Message]) -> bool:
    """Whether the rendered text has every message's content, and no system message as a reply."""
    try:
        text = render(conversation)
    except ValueError:
        return False
    if any(message["content"] not in text for message in conversation):
        return False
    # a template that writes system messages as replies writes the same if one has the role of a reply
    last = max((at for at, message in enumerate(conversation) if message["role"] == "system"), default=0)
    reply = {**conversation[last], "role": "assistant"}
    try:
        return not last or render([*conversation[:last], reply, *conversation[last + 1 :]]) != text
    except ValueError:
        return True


class Reshaped(NamedTuple):
    """A rewritten conversation, and the changes: index of the message and its shape."""

    messages: list[Message]
    changes: list[tuple[int, Shape]]


_JOINED = {
    ("user", "user"): Shape.USERS,
    ("tool", "user"): Shape.AFTER_RESULT,
    ("assistant", "assistant"): Shape.REPLIES,
}


def reshape(messages: Sequence[Message], shapes: Collection[Shape], *, calls: int | None = None) -> Reshaped:
    """Rewrite a conversation so that it has none of `shapes`; with `calls`, it continues a reply with as many calls.

    After the first reply, adding messages only extends the result: messages are appended, or text to the last one.
    """
    shaped: list[Message] = []
    changes: list[tuple[int, Shape]] = []
    opening = calls is None  # before the first reply
    unanswered = calls or 0  # calls of the last reply without a result

    def must_rewrite(at: int, shape: Shape) -> bool:
        if shape in shapes:
            changes.append((at, shape))
        return shape in shapes

    numbered = list(enumerate(messages))
    first = next((at for at, message in numbered if message["role"] == "assistant"), len(messages))
    has_user = any(message["role"] != "system" for message in messages[:first])
    if opening and not has_user and must_rewrite(min(first, len(messages) - 1), Shape.NO_USER):
        numbered.insert(first, (first, {"role": "user", "content": BEGIN}))
    for at, message in numbered:
        role = message["role"]
        last = shaped[-1]["role"] if shaped else "" if opening else "assistant"
        if role == "system" and opening and last and must_rewrite(at, Shape.SYSTEMS):
            has_system = shaped[0]["role"] == "system"  # then the first message is replaced, else one is inserted
            shaped[:has_system] = [_join_messages(shaped[0], message) if has_system else message]
            continue
        is_late = role == "system" and not opening
        is_orphan = role == "tool" and not (unanswered and last in ("assistant", "tool"))
        if (is_late or is_orphan) and must_rewrite(at, Shape.LATE if is_late else Shape.ORPHAN):
            role, message = "user", {"role": "user", "content": message["content"]}
        if role == "user" and last == "assistant" and unanswered and must_rewrite(at, Shape.AFTER_CALL):
            call = shaped[-1]["tool_calls"][0] if shaped else CALL
            role, message = "tool", {"role": "tool", "tool_call_id": call["id"], "content": message["content"]}
        if shaped and (last, role) in _JOINED and must_rewrite(at, _JOINED[last, role]):
            shaped[-1] = _join_messages(shaped[-1], message)
        else:
            shaped.append(message)
            unanswered -= role == "tool"
        if role == "assistant":
            opening, unanswered = False, len(shaped[-1].get("tool_calls") or ())
    return Reshaped(shaped, changes)


def _join_messages(message: Message, more: Message) -> Message:
    text = "\n\n".join(each["content"] for each in (message, more) if each["content"])
    calls = [*(message.get("tool_calls") or ()), *(more.get("tool_calls") or ())]
    return {**message, "content": text, **({"tool_calls": calls} if calls else {})}
