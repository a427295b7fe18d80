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

_CRASH_CHARS = 20_000  # kept of a crash or fault; a policy may have made it long
_PRINTED_CHARS = 8_000  # kept of a program's output


class LocalExecutor(Executor):
    """Agents and sandboxes on this machine, with sessions of `gateway`.

    `kinds` are settings by kind of task; ``""`` covers all others.
    """

    def __init__(self, gateway: Gateway, kinds: Mapping[str, AttemptSettings]) -> None:
        self.gateway = gateway
        self.kinds = kinds

    async def run(self, planned: PlannedAttempt) -> Episode:
        """See `Executor.run`."""
        settings = AttemptSettings.for_attempt(self.kinds, planned)
        task = replace(planned.task, verified=planned.verified)  # as the rewards see it
        state_rewards, patch_rewards = split_state_rewards(settings.rewards[planned.phase])
        state_scores: tuple[Score, ...] = ()
        clock, reward_timings = time.monotonic, dict[str, float]()
        started = clock()
        episode = start_episode(planned)

        async def score(rewards: Sequence[Weighted], episode: Episode, backend: SandboxBackend) -> tuple[Score, ...]:
            began = clock()
            scores = await score_episode(rewards, task, episode, backend)
            reward_timings["reward"] = reward_timings.get("reward", 0.0) + clock() - began
            return scores

        async def score_state(box: Sandbox, patch: bytes) -> None:
            nonlocal state_scores
            backend = OpenSandboxBackend(settings.sandbox, box)
            state_scores = await score(state_rewards, replace(episode, patch=patch), backend)

        result = await make_attempt(
            self.gateway,
            planned.task,
            settings.agent,
            settings.sandbox,
            name=planned.episode_id,
            limits=settings.limits,
            seed=planned.seed,
            sampling=planned.sampling,
            at_end=score_state if state_rewards else None,
        )
        side_calls = settings.side_calls or settings.agent.side_calls
        side = await asyncio.to_thread(find_side_turns, result.turns, side_calls, planned.task.prompt)
        episode = _complete_episode(replace(episode, turns=result.turns, side=side), result)
        timings = dict(result.timings)
        if result.fault is None:
            timings["tools"] = sum(call.seconds for call in episode.tool_calls)
            try:
                scores = await score(patch_rewards, episode, settings.sandbox)
                episode = replace(episode, scores=(*scores, *state_scores))
            except Fault as fault:
                episode = mark_void(episode, fault)
        timings |= reward_timings | {"total": clock() - started}
        return replace(episode, timings={name: round(seconds, 6) for name, seconds in timings.items()})


def start_episode(planned: PlannedAttempt) -> Episode:
    """Episode before any result."""
    return Episode(
        id=planned.episode_id,
        task_id=planned.task.id,
        phase=planned.phase,
        step=planned.step,
        group=planned.group,
        attempt=planned.attempt,
        ending=Ending.VOID,
        kind=planned.task.kind,
        language=planned.task.language,
        repository=planned.task.repository,
        difficulty=planned.task.difficulty,
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
    message = _shorten(f"{type(fault).__name__}: {fault}")
    return replace(episode, ending=Ending.VOID, reason=fault.boundary, fault=message)


def _shorten(text: str, most: int = _CRASH_CHARS) -> str:
    # leave out the middle
    left_out = len(text) - most
    half = most // 2
    return text if left_out <= 0 else f"{text[:half]}\n[{left_out} characters left out]\n{text[-half:]}"
