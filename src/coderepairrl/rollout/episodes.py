"""Episodes: attempts that are logged and scored."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from coderepairrl.errors import Fault
from coderepairrl.gateway import Gateway
from coderepairrl.gateway.side import side_turns
from coderepairrl.protocols import Agent, Sandbox, SandboxBackend
from coderepairrl.rewards import Weighted, on_state_and_patch, score
from coderepairrl.rollout.attempts import Attempt, attempt
from coderepairrl.runs import Log
from coderepairrl.sandbox.standing import Standing
from coderepairrl.types import (
    AgentReport,
    Ending,
    Episode,
    Limits,
    Sampling,
    Score,
    SideCalls,
    Task,
    Verified,
)

_CRASH_CHARS = 20_000
_PRINTED_CHARS = 8_000


@dataclass(frozen=True, slots=True)
class Ticket:
    """An attempt to be made."""

    task: Task
    phase: str
    step: int
    group: str
    attempt: int
    seed: int
    sampling: Sampling
    verified: tuple[Verified, ...] = ()
    """What rewards compare the patch with beside the task's reference. Agent and sandbox are not given it."""
    retry: int = 0

    @property
    def episode(self) -> str:
        """Id of the episode: group, attempt, and how often it had to be tried again."""
        return f"{self.group}-{self.attempt:02d}" + (f"-retry{self.retry}" if self.retry else "")


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from run seed, phase, step, task and attempt, the same on every machine."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


@dataclass(frozen=True, slots=True)
class Terms:
    """How tasks are attempted and judged: those of one kind, or all.

    `rewards` are by phase, and so are `others`: evaluations by another agent, in the sandbox that shows what it needs.
    `side_calls` is the agent's own, else ``mask``, where it is None.
    """

    agent: Agent
    sandbox: SandboxBackend
    limits: Limits
    rewards: Mapping[str, Sequence[Weighted]]
    side_calls: SideCalls | None = None
    others: Mapping[str, tuple[Agent, SandboxBackend]] = field(default_factory=dict)

    def of(self, phase: str) -> Terms:
        """Those of `phase`."""
        if phase not in self.others:
            return self
        agent, sandbox = self.others[phase]
        return replace(self, agent=agent, sandbox=sandbox)

    @property
    def side(self) -> SideCalls:
        """Which calls beside the main conversation are trained."""
        return self.side_calls or self.agent.side_calls


class Rollout:
    """Makes episodes. Everything that happens is in the log before anything else is done with it.

    `kinds` are the terms of tasks by their kind; a kind that is not among them has those of ``""``.
    """

    def __init__(
        self,
        *,
        gateway: Gateway,
        kinds: Mapping[str, Terms],
        log: Log,
        concurrency: int,
        on_episode: Callable[[Episode], None] = lambda episode: None,
    ) -> None:
        self.gateway = gateway
        self.kinds = kinds
        self.log = log
        self.on_episode = on_episode
        self._room = asyncio.Semaphore(concurrency)

    async def run(self, ticket: Ticket, began: Callable[[], None] = lambda: None) -> Episode:
        """Make the attempt, with a verdict in the log. `began` is called once it is its turn.

        Infrastructure faults give a VOID episode, an agent that breaks after the model's first reply one that ended in
        CRASH and has its scores: neither is an error.
        """
        async with self._room:
            began()
            self.log.append(
                "episode",
                id=ticket.episode,
                phase=ticket.phase,
                step=ticket.step,
                group=ticket.group,
                attempt=ticket.attempt,
                task=ticket.task.id,
                kind=ticket.task.kind,
                seed=ticket.seed,
            )
            episode = await self._attempt(ticket)
            self.log.append("verdict", verdict=replace(episode, turns=()))
            self.on_episode(episode)
            return episode

    async def _attempt(self, ticket: Ticket) -> Episode:
        terms = (self.kinds.get(ticket.task.kind) or self.kinds[""]).of(ticket.phase)
        judged = replace(ticket.task, verified=ticket.verified)
        on_state, on_patch = on_state_and_patch(terms.rewards[ticket.phase])
        state: tuple[Score, ...] = ()
        clock, rewarding = time.monotonic, dict[str, float]()
        started = clock()
        episode = Episode(
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

        async def judge(rewards: Sequence[Weighted], episode: Episode, backend: SandboxBackend) -> tuple[Score, ...]:
            at = clock()
            scores = await score(rewards, judged, episode, backend)
            rewarding["reward"] = rewarding.get("reward", 0.0) + clock() - at
            return scores

        async def judge_state(box: Sandbox, patch: bytes) -> None:
            nonlocal state
            state = await judge(on_state, replace(episode, patch=patch), Standing(terms.sandbox, box))

        made = await attempt(
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
        side = await asyncio.to_thread(side_turns, made.turns, terms.side, ticket.task.prompt)
        episode = _ended(replace(episode, turns=made.turns, side=side), made)
        timings = dict(made.timings)
        if made.fault is None:
            timings["tools"] = sum(call.seconds for call in episode.tool_calls)
            try:
                scores = await judge(on_patch, episode, terms.sandbox)
                episode = replace(episode, scores=(*scores, *state))
            except Fault as fault:
                episode = _void(episode, fault)
        timings |= rewarding | {"total": clock() - started}
        return replace(episode, timings={name: round(seconds, 6) for name, seconds in timings.items()})


def _ended(episode: Episode, made: Attempt) -> Episode:
    """`episode` with what came of its attempt, but for scores."""
    report = made.outcome if isinstance(made.outcome, AgentReport) else None
    calls = None if report is None or made.fault is not None else report.tool_calls
    episode = replace(
        episode,
        patch=made.patch,
        printed=_shortened(made.printed, _PRINTED_CHARS),
        tool_calls=calls or (),
        calls_known=calls is not None,
    )
    if made.fault is not None:
        return _void(episode, made.fault)
    crash = _shortened(str(made.outcome)) if made.ending is Ending.CRASH and report is None else ""
    return replace(episode, ending=made.ending, reason=made.reason, crash=crash)


def _void(episode: Episode, fault: Fault) -> Episode:
    words = _shortened(f"{type(fault).__name__}: {fault}")
    return replace(episode, ending=Ending.VOID, reason=fault.boundary, fault=words)


def _shortened(text: str, most: int = _CRASH_CHARS) -> str:
    """`text` without its middle, where it is longer than `most` characters: a policy can write it."""
    left_out = len(text) - most
    half = most // 2
    return text if left_out <= 0 else f"{text[:half]}\n[{left_out} characters left out]\n{text[-half:]}"
