"""Conversations in shapes that a model's template refuses, drops, or takes for replies, in shapes that it writes.

Agents send several and late system messages, a user message after another or after a result, results without their
calls, no user message at all. Which of these a template cannot write is asked of the template itself (`Rules.of`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from coderepairrl.tokens.formats import CALL
from coderepairrl.tokens.reading import Message

BEGIN = "Please continue."
"""The user message that is added to a conversation without one, in the words of LiteLLM."""


def _says(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text} | ({"tool_call_id": CALL["id"]} if role == "tool" else {})


_S, _U, _A, _T = (_says(role, f"{role} one") for role in ("system", "user", "assistant", "tool"))
_S2, _U2, _A2 = (_says(role, f"{role} two") for role in ("system", "user", "assistant"))
_C = {"role": "assistant", "content": "", "tool_calls": [CALL]}


class Rules(NamedTuple):
    """What is rewritten before a model's template is applied; all False for a template that writes every shape."""

    systems: bool = False
    """System messages before the first reply join the first."""
    late: bool = False
    """System messages after a reply are a user's."""
    users: bool = False
    """A user message after another joins it."""
    results: bool = False
    """A user message after a result joins it."""
    calls: bool = False
    """A user message after a call without a result is the result."""
    orphans: bool = False
    """A result without its call is a user message."""
    replies: bool = False
    """A reply after another joins it."""
    opening: bool = False
    """`BEGIN` is added where no user message comes before the first reply."""

    @classmethod
    def of(cls, render: Callable[[Sequence[Message]], str]) -> Rules:
        """The rules that a template needs; `render` writes a conversation and raises ValueError if that is refused."""

        def fails(*conversation: Message) -> bool:
            """Whether a message is refused or lost, or the last system message is written as a reply."""
            try:
                text = render(conversation)
            except ValueError:
                return True
            if any(message["content"] not in text for message in conversation):
                return True
            late = max(at for at, each in enumerate(conversation) if each["role"] == "system" or not at)
            reply = {**conversation[late], "role": "assistant"}
            try:
                return bool(late) and render([*conversation[:late], reply, *conversation[late + 1 :]]) == text
            except ValueError:
                return False

        return cls(
            systems=fails(_S, _S2, _U) or fails(_S, _U, _S2),
            late=fails(_S, _U, _A, _S2, _U2) or fails(_S, _U, _A, _S2) or fails(_S, _U, _C, _T, _S2),
            users=fails(_S, _U, _U2),
            results=fails(_S, _U, _C, _T, _U2),
            calls=fails(_S, _U, _C, _U2),
            orphans=fails(_S, _U, _T) or fails(_S, _U, _A, _T),
            replies=fails(_S, _U, _A, _A2, _U2),
            opening=fails(_S, _A, _U) or fails(_A, _U) or fails(_S),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The shapes that are rewritten."""
        return tuple(name for name, is_needed in zip(_NAMES, self, strict=True) if is_needed)


_NAMES = (
    *("several system messages", "a late system message", "a user after a user", "a user after a result"),
    *("a user after a call", "a result without a call", "a reply after a reply", "no user first"),
)


class Reshaped(NamedTuple):
    """A conversation in another shape, and what was changed: the index of a message before, and a description."""

    messages: list[Message]
    changes: list[tuple[int, str]]


def reshape(messages: Sequence[Message], rules: Rules, *, calls: int | None = None) -> Reshaped:
    """`messages` by `rules`: a whole conversation, or what follows a reply with so many `calls`.

    Messages between two replies are rewritten for themselves, so that a longer conversation begins as a shorter one.
    """
    shaped: list[Message] = []
    changes: list[tuple[int, str]] = []
    opening, unanswered = calls is None, calls or 0

    def begin(at: int) -> None:
        """Add the user message that `Rules.opening` demands before the first reply."""
        if opening and rules.opening and all(each["role"] == "system" for each in shaped):
            changes.append((at, "a user message is added before the first reply"))
            shaped.append({"role": "user", "content": BEGIN})

    for at, message in enumerate(messages):
        role, who, how = message["role"], "a user message", ""
        last = shaped[-1]["role"] if shaped else "" if opening else "assistant"
        if role == "system" and last and (rules.systems if opening else rules.late):
            if opening:
                changes.append((at, "a late system message joins the first"))
                has_first = shaped[0]["role"] == "system"
                shaped[:has_first] = [_joined(shaped[0], message) if has_first else message]
                continue
            role, who, how = "user", "a late system message", "is a user's"
        elif role == "tool" and rules.orphans and not (unanswered and last in ("assistant", "tool")):
            role, who, how = "user", "a result without its call", "is a user's"
        if role == "assistant":
            begin(at)
            if last == "assistant" and rules.replies and shaped:
                who, how = "a reply", "joins the one before it"
                shaped[-1] = _joined(shaped[-1], message)
            else:
                shaped.append(message)
            opening, unanswered = False, len(shaped[-1].get("tool_calls") or ())
        elif role == "user" and last == "tool" and rules.results:
            how = "joins the result before it"
            shaped[-1] = _joined(shaped[-1], message)
        elif role == "user" and last == "assistant" and unanswered and rules.calls:
            how = "is the result of the call before it"
            call = shaped[-1]["tool_calls"][0] if shaped else CALL
            shaped.append({"role": "tool", "tool_call_id": call["id"], "content": message["content"]})
            unanswered -= 1
        elif role == "user" and last == "user" and rules.users:
            how = "joins the one before it"
            shaped[-1] = _joined(shaped[-1], message)
        else:
            shaped.append({"role": role, "content": message["content"]} if how else message)
            unanswered -= role == "tool"
        if how:
            changes.append((at, f"{who} {how}"))
    begin(len(messages) - 1)
    return Reshaped(shaped, changes)


def _joined(message: Message, more: Message) -> Message:
    """`message` followed by the text, and the calls, of `more`."""
    text = "\n\n".join(each["content"] for each in (message, more) if each["content"])
    calls = [*(message.get("tool_calls") or ()), *(more.get("tool_calls") or ())]
    return {**message, "content": text, **({"tool_calls": calls} if calls else {})}
