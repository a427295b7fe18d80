"""Attempts with a gateway in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from coderepairrl.errors import Fault
from coderepairrl.gateway import Gateway
from coderepairrl.gateway.side import find_side_turns
from coderepairrl.protocols import Sandbox, SandboxBackend
from coderepairrl.rewards import Weighted, score_episode, split_state_rewards
from coderepairrl.rollout.attempts import Attempt, make_attempt
from coderepairrl.rollout.episodes import AttemptSettings, Executor, PlannedAttempt
from coderepairrl.sandbox.wrapped import OpenSandboxBackend
from coderepairrl.types import AgentReport, Ending, Episode, Score

_CRASH_CHARS = 20_000
_PRINTED_CHARS = 8_000


class LocalExecutor(Executor):
    """Agents and sandboxes on this machine, with sessions of `gateway`.

    `kinds` are terms by kind of task; ``""`` covers all others.
    """

    def __init__(self, gateway: Gateway, kinds: Mapping[str, AttemptSettings]) -> None:
        self.gateway = gateway
        self.kinds = kinds

    async def run(self, ticket: PlannedAttempt) -> Episode:
        """See `Executor.run`."""
        terms = AttemptSettings.for_ticket(self.kinds, ticket)
        judged = replace(ticket.task, verified=ticket.verified)
        on_state, on_patch = split_state_rewards(terms.rewards[ticket.phase])
        state: tuple[Score, ...] = ()
        clock, rewarding = time.monotonic, dict[str, float]()
        started = clock()
        episode = start_episode(ticket)

        async def judge(rewards: Sequence[Weighted], episode: Episode, backend: SandboxBackend) -> tuple[Score, ...]:
            at = clock()
            scores = await score_episode(rewards, judged, episode, backend)
            rewarding["reward"] = rewarding.get("reward", 0.0) + clock() - at
            return scores

        async def judge_state(box: Sandbox, patch: bytes) -> None:
            nonlocal state
            state = await judge(on_state, replace(episode, patch=patch), OpenSandboxBackend(terms.sandbox, box))

        result = await make_attempt(
            self.gateway,
            ticket.task,
            terms.agent,
            terms.sandbox,
            name=ticket.episode,
            limits=terms.limits,
            seed=ticket.seed,
            sampling=ticket.sampling,
            at_end=judge_state if on_state else None,
        )
        side = await asyncio.to_thread(find_side_turns, result.turns, terms.side, ticket.task.prompt)
        episode = _complete_episode(replace(episode, turns=result.turns, side=side), result)
        timings = dict(result.timings)
        if result.fault is None:
            timings["tools"] = sum(call.seconds for call in episode.tool_calls)
            try:
                scores = await judge(on_patch, episode, terms.sandbox)
                episode = replace(episode, scores=(*scores, *state))
            except Fault as fault:
                episode = mark_void(episode, fault)
        timings |= rewarding | {"total": clock() - started}
        return replace(episode, timings={name: round(seconds, 6) for name, seconds in timings.items()})


def start_episode(ticket: PlannedAttempt) -> Episode:
    """Episode before any result."""
    return Episode(
        id=ticket.episode,
        task_id=ticket.task.id,
        phase=ticket.phase,
        step=ticket.step,
        group=ticket.group,
        attempt=ticket.attempt,
        ending=Ending.VOID,
        kind=ticket.task.kind,
        language=ticket.task.language,
        repository=ticket.task.repository,
        difficulty=ticket.task.difficulty,
    )


def _complete_episode(episode: Episode, attempt: Attempt) -> Episode:
    report = attempt.outcome if isinstance(attempt.outcome, AgentReport) else None
    calls = None if report is None or attempt.fault is not None else report.tool_calls
    episode = replace(
        episode,
        patch=attempt.patch,
        printed=_shorten(attempt.printed, _PRINTED_CHARS),
        tool_calls=calls or (),
        calls_known=calls is not None,
    )
    if attempt.fault is not None:
        return mark_void(episode, attempt.fault)
    crash = _shorten(str(attempt.outcome)) if attempt.ending is Ending.CRASH and report is None else ""
    return replace(episode, ending=attempt.ending, reason=attempt.reason, crash=crash)


def mark_void(episode: Episode, fault: Fault) -> Episode:
    """Mark `episode` as VOID."""
    words = _shorten(f"{type(fault).__name__}: {fault}")
    return replace(episode, ending=Ending.VOID, reason=fault.boundary, fault=words)


def _shorten(text: str, most: int = _CRASH_CHARS) -> str:
    # a policy can write any length
    left_out = len(text) - most
    half = most // 2
    return text if left_out <= 0 else f"{text[:half]}\n[{left_out} characters left out]\n{text[-half:]}"
