"""Sessions for plain chat clients, which know none: one for each conversation."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from coderepairrl.apps.serve.sessions import Asked, Sessions
from coderepairrl.gateway import Session

CONVERSATIONS = 256
"""Most open conversations: beyond them, one without a turn is closed, or the least recently used."""
_REMEMBERED = 1 << 14


class Visitors:
    """Finder of the session for a request without a key; opens one in `sessions` if needed.

    A request continues the conversation whose last request it repeats, with the reply and new messages; a retry, one
    whose client left before the answer.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._asked: dict[str, list[str]] = {}
        """Sessions by the messages of their requests."""
        self._open: dict[str, None] = {}
        """The one that was asked least recently first."""
        self._closing: set[asyncio.Task[Any]] = set()

    def __call__(self, request: Mapping[str, Any], again: bool) -> Session:
        """Session for `request`, a body of any dialect; `again`: its client marks it as a retry."""
        messages = _messages(request)
        replies = [place for place, message in enumerate(messages) if _by_model(message)]
        session = next((each for each in self._asked_so(messages) if each.abandoned), None) if again else None
        if session is None and replies:
            session = self._replied(messages[: replies[-1]], messages[replies[-1]])
        if session is None:
            session = self._begin()
        self._open.pop(session.episode_id, None)
        self._open[session.episode_id] = None
        digest = _digest(messages)
        still = [name for name in self._asked.get(digest, ()) if name in self._sessions and name != session.episode_id]
        self._asked[digest] = [*still, session.episode_id]
        if len(self._asked) > _REMEMBERED:
            del self._asked[next(iter(self._asked))]
        return session

    def _asked_so(self, messages: Sequence[Any]) -> list[Session]:
        """Sessions with this request that can continue, newest first."""
        names = reversed(self._asked.get(_digest(messages), ()))
        sessions = [self._sessions.session(name) for name in names if name in self._open]
        return [each for each in sessions if each is not None and not each.spent]

    def _replied(self, messages: Sequence[Any], reply: Any) -> Session | None:
        """The newest session with these messages and this reply, preferably one not continued yet; else the newest."""
        able = self._asked_so(messages)
        replies = {
            each.episode_id: [turn.index for turn in each.turns if _text(turn.messages[-1]) == _text(reply)]
            for each in able
        }
        latest = [each for each in able if {*replies[each.episode_id]} - {turn.base for turn in each.turns}]
        return next(iter(latest or [each for each in able if replies[each.episode_id]] or able), None)

    def _begin(self) -> Session:
        open_sessions = {name: session for name in self._open if (session := self._sessions.session(name)) is not None}
        self._open = dict.fromkeys(open_sessions)
        if len(open_sessions) >= CONVERSATIONS:
            self._close(
                next((name for name, each in open_sessions.items() if each.untouched), next(iter(open_sessions)))
            )
        name = str(self._sessions.open(Asked(id=f"chat-{secrets.token_hex(8)}"))["id"])
        self._open[name] = None
        session = self._sessions.session(name)
        assert session is not None  # it was opened just now
        return session

    def _close(self, name: str) -> None:
        del self._open[name]
        closing = asyncio.create_task(self._sessions.close(name))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


def _messages(request: Mapping[str, Any]) -> Sequence[Any]:
    """Messages of Chat Completions or Messages, or the input of Responses."""
    sent = request.get("messages", request.get("input"))
    return sent if isinstance(sent, list) else [sent]


def _by_model(message: Any) -> bool:
    return isinstance(message, Mapping) and (
        message.get("role") == "assistant" or message.get("type") in ("function_call", "reasoning")
    )


def _text(message: Any) -> str:
    content = message.get("content") if isinstance(message, Mapping) else message
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return str(content or "")


def _digest(messages: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()
