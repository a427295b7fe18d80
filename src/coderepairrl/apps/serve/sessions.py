"""Sessions of a served model: opened, described, closed, and optionally logged."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import asdict, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from coderepairrl.gateway import Gateway, Session
from coderepairrl.gateway.side import side_turns
from coderepairrl.learn.stitch import fates, stitch
from coderepairrl.runs import Log
from coderepairrl.runs.codec import dump
from coderepairrl.types import Ending, Episode, Limits, Sampling, SideCalls, Turn


class _Given(BaseModel):
    """A client's wishes; defaults are the server's."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class AskedLimits(_Given):
    """`Limits` of a session."""

    calls: int | None = Field(default=None, ge=1)
    tokens: int | None = Field(default=None, ge=16)
    seconds: float | None = Field(default=None, gt=0)
    turn_tokens: int | None = Field(default=None, ge=1)


class AskedSampling(_Given):
    """`Sampling` of a session, which can be trained on only with a bare temperature."""

    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1)
    stop: list[str] | None = None


class Asked(_Given):
    """A client's request for a session."""

    id: str = Field(default="", pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,127})?$")
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    limits: AskedLimits = AskedLimits()
    sampling: AskedSampling = AskedSampling()


class Sessions:
    """Open sessions of `server` by id."""

    def __init__(
        self, server: Gateway, limits: Limits, log: Log | None = None, *, side_calls: SideCalls | None = None
    ) -> None:
        self._server = server
        self._side_calls: SideCalls = side_calls or "mask"
        self._limits = limits
        self._log = log
        self._open: dict[str, tuple[Session, Sampling]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._open

    def session(self, name: str) -> Session | None:
        """Open session `name`, or None."""
        return self._open[name][0] if name in self._open else None

    def open(self, asked: Asked) -> dict[str, Any]:
        """Open a session; returns what its agent needs."""
        name = asked.id or f"session-{secrets.token_hex(8)}"
        limits = replace(self._limits, **asked.limits.model_dump(exclude_none=True))
        wishes = asked.sampling.model_dump(exclude_none=True)
        if "stop" in wishes:
            wishes["stop"] = tuple(wishes["stop"])
        sampling = replace(self._server.sampling, **wishes)
        if self._log is not None:
            at = {"phase": "serve", "step": 0, "group": name, "attempt": 0, "task": ""}
            self._log.append("episode", id=name, **at, seed=asked.seed, limits=limits, sampling=sampling)
        session = self._server.open(name, limits=limits, seed=asked.seed, sampling=sampling)
        self._open[name] = session, sampling
        endpoint = session.endpoint
        return {
            "id": name,
            "model": endpoint.model,
            "base_url": endpoint.base_url,
            "root_url": endpoint.base_url.removesuffix("/v1"),
            "key": session.key,
            "socket": endpoint.socket or None,
            "seed": asked.seed,
            "limits": asdict(limits),
            "sampling": dump(sampling),
        }

    def summary(self) -> list[dict[str, Any]]:
        """One line for each open session."""
        return [
            {"id": name, "turns": len(session.turns), **_state(session)} for name, (session, _) in self._open.items()
        ]

    async def describe(self, name: str) -> dict[str, Any]:
        """Everything about the session `name`. Raises KeyError."""
        return await asyncio.to_thread(_described, *self._open[name], self._side_calls)

    async def close(self, name: str) -> dict[str, Any]:
        """End the session `name`, and `describe` it to all who close it. Raises KeyError."""
        entry = self._open[name]
        session, _ = entry
        turns = await self._server.close(session)
        if self._open.get(name) is entry:  # nobody was quicker, and this is not another one of that name
            del self._open[name]
            if self._log is not None:
                self._log.append("verdict", verdict=replace(_episode(session, turns, self._side_calls), turns=()))
                self._log.sync()
        return await asyncio.to_thread(_described, *entry, self._side_calls)

    async def close_all(self) -> None:
        """End every session."""
        for name in list(self._open):
            await self.close(name)


def _described(session: Session, sampling: Sampling, side_calls: SideCalls) -> dict[str, Any]:
    turns, most = session.turns, session.limits.tokens
    episode = _episode(session, turns, side_calls)
    rows, account = stitch(episode, 1.0, max_tokens=most)
    each = zip(turns, fates(episode, max_tokens=most), strict=True)
    return {
        "id": session.episode_id,
        **_state(session),
        "limits": asdict(session.limits),
        "sampling": dump(sampling),
        "turns": [{**dump(turn), "fate": fate, "reason": reason} for turn, (fate, reason) in each],
        "rows": [_row(dump(row)) for row in rows],
        "account": {**asdict(account), "delivered": account.delivered, "expansion": account.expansion},
    }


def _state(session: Session) -> dict[str, Any]:
    return {
        "open": not session.closed,
        "limit": session.limit,
        "fault": str(session.fault) if session.fault else "",
    }


def _episode(session: Session, turns: tuple[Turn, ...], side_calls: SideCalls) -> Episode:
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
        side=side_turns(turns, side_calls),
    )


def _row(row: dict[str, Any]) -> dict[str, Any]:
    """A sample without the fields that only its trainer knows."""
    return {name: value for name, value in row.items() if name not in ("episode_id", "advantage")}
