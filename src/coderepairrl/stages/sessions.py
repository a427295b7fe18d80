"""Sessions of a served model, optionally logged, also for plain chat clients without a key."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from coderepairrl.gateway import Gateway, Session
from coderepairrl.gateway.side import find_side_turns
from coderepairrl.learn.stitch import list_fates, stitch_episode
from coderepairrl.runs import Log
from coderepairrl.runs.codec import digest_json, dump
from coderepairrl.types import Ending, Episode, Limits, Sampling, SideCalls, Turn

_TRAINER_FIELDS = ("episode_id", "advantage")  # Fields of a sample that only its trainer knows.


class _RequestModel(BaseModel):
    """A client's request; None takes the server's value."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class RequestedLimits(_RequestModel):
    """`Limits` of a session."""

    calls: int | None = Field(default=None, ge=1)
    tokens: int | None = Field(default=None, ge=16)
    seconds: float | None = Field(default=None, gt=0)
    turn_tokens: int | None = Field(default=None, ge=1)


class RequestedSampling(_RequestModel):
    """`Sampling` of a session; greedy or truncated (top-p, top-k, min-p) turns are not trained."""

    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1)
    stop: list[str] | None = None


class SessionRequest(_RequestModel):
    """A client's request for a session."""

    id: str = Field(default="", pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,127})?$")
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    limits: RequestedLimits = RequestedLimits()
    sampling: RequestedSampling = RequestedSampling()


class Sessions:
    """Open sessions of `gateway` by id."""

    def __init__(
        self, gateway: Gateway, limits: Limits, log: Log | None = None, *, side_calls: SideCalls | None = None
    ) -> None:
        self._gateway = gateway
        self._side_calls: SideCalls = side_calls or "mask"
        self._limits = limits
        self._log = log
        self._open: dict[str, tuple[Session, Sampling]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._open

    def session(self, name: str) -> Session | None:
        """Open session `name`, or None."""
        return self._open[name][0] if name in self._open else None

    def open(self, request: SessionRequest) -> dict[str, Any]:
        """Open a session; returns what its agent needs."""
        name = request.id or f"session-{secrets.token_hex(8)}"
        limits = replace(self._limits, **request.limits.model_dump(exclude_none=True))
        requested = request.sampling.model_dump(exclude_none=True)
        if "stop" in requested:
            requested["stop"] = tuple(requested["stop"])
        sampling = replace(self._gateway.sampling, **requested)
        if self._log is not None:
            schedule = {"phase": "serve", "step": 0, "group": name, "attempt": 0, "task": ""}
            self._log.append("episode", id=name, **schedule, seed=request.seed, limits=limits, sampling=sampling)
        session = self._gateway.open(name, limits=limits, seed=request.seed, sampling=sampling)
        self._open[name] = session, sampling
        endpoint = session.endpoint
        return {
            "id": name,
            "model": endpoint.model,
            "base_url": endpoint.base_url,
            "root_url": endpoint.base_url.removesuffix("/v1"),
            "key": session.key,
            "socket": endpoint.socket or None,
            "seed": request.seed,
            "limits": asdict(limits),
            "sampling": dump(sampling),
        }

    def summary(self) -> list[dict[str, Any]]:
        """Summarise each open session."""
        return [
            {"id": name, "turns": len(session.turns), **_session_state(session)}
            for name, (session, _) in self._open.items()
        ]

    async def describe(self, name: str) -> dict[str, Any]:
        """Describe the session `name` with its turns. Raises KeyError."""
        return await asyncio.to_thread(_describe, *self._open[name], self._side_calls)

    async def close(self, name: str) -> dict[str, Any]:
        """End the session `name`; return its description. Raises KeyError."""
        entry = self._open[name]
        session, _ = entry
        turns = await self._gateway.close(session)
        if self._open.get(name) is entry:  # no other call has closed it, or opened a new one of that name
            del self._open[name]
            if self._log is not None:
                self._log.append("verdict", verdict=replace(_make_episode(session, turns, self._side_calls), turns=()))
                self._log.sync()
        return await asyncio.to_thread(_describe, *entry, self._side_calls)

    async def close_all(self) -> None:
        """End every session."""
        while self._open:  # others may end meanwhile
            await self.close(next(iter(self._open)))


def _describe(session: Session, sampling: Sampling, side_calls: SideCalls) -> dict[str, Any]:
    turns, max_tokens = session.turns, session.limits.tokens
    episode = _make_episode(session, turns, side_calls)
    rows, account = stitch_episode(episode, 1.0, max_tokens=max_tokens)
    turn_fates = zip(turns, list_fates(episode, max_tokens=max_tokens), strict=True)
    return {
        "id": session.episode_id,
        **_session_state(session),
        "limits": asdict(session.limits),
        "sampling": dump(sampling),
        "turns": [{**dump(turn), "fate": fate, "reason": reason} for turn, (fate, reason) in turn_fates],
        "rows": [{key: value for key, value in dump(row).items() if key not in _TRAINER_FIELDS} for row in rows],
        "account": {**asdict(account), "delivered": account.delivered, "expansion": account.expansion},
    }


def _session_state(session: Session) -> dict[str, Any]:
    return {
        "open": not session.closed,
        "limit": session.limit,
        "fault": str(session.fault) if session.fault else "",
    }


def _make_episode(session: Session, turns: tuple[Turn, ...], side_calls: SideCalls) -> Episode:
    ending = Ending.VOID if session.fault else Ending.LIMIT if session.limit else Ending.DONE
    reason = session.fault.boundary if session.fault else session.limit or "closed"
    return Episode(
        id=session.episode_id,
        task_id="",
        phase="serve",
        step=0,
        group=session.episode_id,
        attempt=0,
        ending=ending,
        reason=reason,
        fault=f"{type(session.fault).__name__}: {session.fault}" if session.fault else "",
        turns=turns,
        side=find_side_turns(turns, side_calls),
    )


CONVERSATIONS = 256
"""Most open conversations; another closes one without turns, else the least recently used."""
_MAX_REQUESTS = 1 << 14  # Requests that `KeylessSessions` remembers; the oldest is forgotten first.


class KeylessSessions:
    """Finds the session for a request without a key, or opens one in `sessions`.

    A request that repeats an earlier one, followed by the reply and new messages, continues its conversation. A retry
    continues one whose client left before the answer.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._names_by_request: dict[str, list[str]] = {}
        """Sessions by the digest of a request's messages."""
        self._open: dict[str, None] = {}
        """Names of open sessions, least recently used first."""
        self._closing: set[asyncio.Task[Any]] = set()

    def __call__(self, request: Mapping[str, Any], is_retry: bool) -> Session:
        """Find or open the session for `request`, a body of any dialect; `is_retry`: its client says so."""
        messages = _request_messages(request)
        replies = [index for index, message in enumerate(messages) if _is_reply(message)]
        session = None
        if is_retry:
            session = next((each for each in self._find_same_requests(messages) if each.is_abandoned), None)
        if session is None and replies:
            session = self._find_continued(messages[: replies[-1]], messages[replies[-1]])
        if session is None:
            session = self._begin()
        self._open.pop(session.episode_id, None)
        self._open[session.episode_id] = None
        names = self._names_by_request.setdefault(digest_json(messages), [])
        names[:] = [name for name in names if name in self._sessions and name != session.episode_id]
        names.append(session.episode_id)
        if len(self._names_by_request) > _MAX_REQUESTS:
            del self._names_by_request[next(iter(self._names_by_request))]
        return session

    def _find_same_requests(self, messages: Sequence[Any]) -> list[Session]:
        """Sessions with this request that can continue, newest first."""
        names = reversed(self._names_by_request.get(digest_json(messages), ()))
        sessions = [self._sessions.session(name) for name in names if name in self._open]
        return [each for each in sessions if each is not None and not each.is_spent]

    def _find_continued(self, messages: Sequence[Any], reply: Any) -> Session | None:
        """The newest session with these messages, preferably with this reply and not yet continued after it."""
        sessions, text = self._find_same_requests(messages), _message_text(reply)
        replied, not_continued = list[Session](), list[Session]()
        for session in sessions:
            indices = {turn.index for turn in session.turns if _message_text(turn.messages[-1]) == text}
            if indices:
                replied.append(session)
            if indices - {turn.base for turn in session.turns}:
                not_continued.append(session)
        return next(iter(not_continued or replied or sessions), None)

    def _begin(self) -> Session:
        open_sessions = {name: session for name in self._open if (session := self._sessions.session(name)) is not None}
        self._open = dict.fromkeys(open_sessions)
        if len(open_sessions) >= CONVERSATIONS:
            self._close(
                next((name for name, each in open_sessions.items() if each.is_untouched), next(iter(open_sessions)))
            )
        name = str(self._sessions.open(SessionRequest(id=f"chat-{secrets.token_hex(8)}"))["id"])
        self._open[name] = None
        session = self._sessions.session(name)
        assert session is not None
        return session

    def _close(self, name: str) -> None:
        del self._open[name]
        closing = asyncio.create_task(self._sessions.close(name))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


def _request_messages(request: Mapping[str, Any]) -> Sequence[Any]:
    """Messages of Chat Completions or Messages, or the input of Responses."""
    sent = request.get("messages", request.get("input"))
    return sent if isinstance(sent, list) else [sent]


def _is_reply(message: Any) -> bool:
    return isinstance(message, Mapping) and (
        message.get("role") == "assistant" or message.get("type") in ("function_call", "reasoning")
    )


def _message_text(message: Any) -> str:
    content = message.get("content") if isinstance(message, Mapping) else message
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return str(content or "")
