"""Plain chat clients, which know no session: each of their conversations becomes one."""

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
"""Open at a time: of more, the oldest is closed."""
_REMEMBERED = 1 << 14


class Visitors:
    """Finds the session of a request without a key, or opens one in `sessions`.

    A request goes on with the conversation whose last request it repeats, with the reply and new messages behind it;
    any other begins a conversation. A conversation whose session has reached a limit goes on in a new one.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._asked: dict[str, list[str]] = {}
        """Sessions by the messages of their requests."""
        self._open: list[str] = []
        self._closing: set[asyncio.Task[Any]] = set()

    def __call__(self, request: Mapping[str, Any], again: bool) -> Session:
        """The session of `request`, a body of any dialect; `again` if its client says that it sent it before."""
        messages = _messages(request)
        replies = [place for place, message in enumerate(messages) if _by_model(message)]
        session = self._known(_digest(messages), None) if again else None
        if session is None and replies:
            session = self._known(_digest(messages[: replies[-1]]), messages[replies[-1]])
        if session is None:
            session = self._begin()
        digest = _digest(messages)
        still = [name for name in self._asked.get(digest, ()) if name in self._sessions and name != session.episode_id]
        self._asked[digest] = [*still, session.episode_id]
        if len(self._asked) > _REMEMBERED:
            del self._asked[next(iter(self._asked))]
        return session

    def _known(self, digest: str, reply: Any) -> Session | None:
        """The newest session that was asked this and can go on, of several the one that replied so."""
        found = [self._sessions.session(name) for name in dict.fromkeys(self._asked.get(digest, ()))]
        able = [each for each in found if each and not (each.closed or each.limit or each.fault)]
        said = [each for each in able if any(_text(turn.messages[-1]) == _text(reply) for turn in each.turns)]
        return next(reversed(said or able), None)

    def _begin(self) -> Session:
        name = str(self._sessions.open(Asked(id=f"chat-{secrets.token_hex(8)}"))["id"])
        self._open = [each for each in self._open if each in self._sessions] + [name]
        if len(self._open) > CONVERSATIONS:
            closing = asyncio.create_task(self._sessions.close(self._open.pop(0)))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        session = self._sessions.session(name)
        assert session is not None  # it was opened just now
        return session


def _messages(request: Mapping[str, Any]) -> Sequence[Any]:
    """Those of Chat Completions and Messages, or the input of Responses."""
    given = request.get("messages", request.get("input"))
    return given if isinstance(given, list) else [given]


def _by_model(message: Any) -> bool:
    return isinstance(message, Mapping) and (
        message.get("role") == "assistant" or message.get("type") in ("function_call", "reasoning")
    )


def _text(message: Any) -> str:
    """What a message says, whatever its dialect."""
    content = message.get("content") if isinstance(message, Mapping) else message
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return str(content or "")


def _digest(messages: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()
