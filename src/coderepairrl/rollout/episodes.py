"""One attempt at one task: agent, sandbox and gateway meet here, and nowhere else."""

from __future__ import annotations

import asyncio
import hashlib
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from coderepairrl.errors import AgentFault, CodeRepairError, Fault, UsageError
from coderepairrl.gateway import Gateway, Session
from coderepairrl.gateway.side import side_turns
from coderepairrl.protocols import Agent, Sandbox, SandboxBackend
from coderepairrl.rewards import Weighted, on_state_and_patch, score
from coderepairrl.runs import Log
from coderepairrl.sandbox.standing import Standing, workspace
from coderepairrl.types import (
    AgentReport,
    Ending,
    Endpoint,
    Episode,
    Limits,
    Sampling,
    Score,
    SideCalls,
    Task,
    Verified,
)

_GRACE = 5.0
"""Seconds beyond the time limit that an agent has to notice by itself that its time is up."""
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

    `rewards` are by phase. `side_calls` is the agent's own, else ``mask``, where it is None.
    """

    agent: Agent
    sandbox: SandboxBackend
    limits: Limits
    rewards: Mapping[str, Sequence[Weighted]]
    side_calls: SideCalls | None = None

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
        self._slots = asyncio.Semaphore(concurrency)

    async def run(self, ticket: Ticket) -> Episode:
        """Make the attempt, with a verdict in the log.

        Infrastructure faults give a VOID episode, an agent that breaks after the model's first reply one that ended in
        CRASH and has its scores: neither is an error.
        """
        async with self._slots:
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
        terms = self.kinds.get(ticket.task.kind) or self.kinds[""]
        judged = replace(ticket.task, verified=ticket.verified)
        on_state, on_patch = on_state_and_patch(terms.rewards[ticket.phase])
        state: tuple[Score, ...] = ()
        clock, timings = time.monotonic, dict[str, float]()
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
        session = self.gateway.open(ticket.episode, limits=terms.limits, seed=ticket.seed, sampling=ticket.sampling)
        try:
            try:
                async with workspace(terms.sandbox, ticket.task) as box:
                    timings["sandbox"] = clock() - started
                    outcome = await _outcome(terms, ticket.task, box, session)
                    at = clock()
                    episode = replace(episode, patch=await box.diff())
                    timings["diff"] = clock() - at
                    if on_state:
                        at = clock()
                        state = await score(on_state, judged, episode, Standing(terms.sandbox, box))
                        timings["reward"] = clock() - at
            finally:
                turns = await self.gateway.close(session)
                side = await asyncio.to_thread(side_turns, turns, terms.side, ticket.task.prompt)
                episode = replace(episode, turns=turns, side=side)
                timings["generate"] = sum(turn.ended - turn.started for turn in turns)
            episode = replace(episode, printed=_printed(terms.agent, outcome))
            if session.fault is not None:
                raise session.fault
            episode = _ended(episode, outcome, session)
            timings["tools"] = sum(call.seconds for call in episode.tool_calls)
            at = clock()
            scores = await score(on_patch, judged, episode, terms.sandbox)
            timings["reward"] = timings.get("reward", 0.0) + clock() - at
            episode = replace(episode, scores=(*scores, *state))
        except Fault as fault:
            # The engine's death reaches the agent as an HTTP error: blame the part that broke first.
            cause = session.fault or fault
            said = _shortened(f"{type(cause).__name__}: {cause}")
            if isinstance(fault, AgentFault):
                episode = replace(episode, printed=_printed(terms.agent, fault))
            episode = replace(episode, ending=Ending.VOID, reason=cause.boundary, fault=said, scores=())
        timings["total"] = clock() - started
        return replace(episode, timings={name: round(seconds, 6) for name, seconds in timings.items()})


async def _outcome(terms: Terms, task: Task, box: Sandbox, session: Session) -> AgentReport | AgentFault:
    """What the agent reports, or how it broke.

    Raises `AgentFault` when a program ended well and never heard from the model: its zero would be no attempt of
    the policy.
    """
    agent = terms.agent
    try:
        report = await run_agent(agent, task, box, session.endpoint, terms.limits.seconds)
    except AgentFault as fault:
        return fault
    if agent.placement == "sandbox" and not session.turns and not session.limit and report.exit != "time":
        said = f"agent {agent.name} ended without a call to the model: {report.log[-2000:].strip()}"
        raise AgentFault(said, printed=report.log)
    return report


def _printed(agent: Agent, outcome: AgentReport | AgentFault) -> str:
    """What a program printed, without its middle. The log of an agent on the host repeats its turns: not kept."""
    if agent.placement == "host":
        return ""
    log = outcome.log if isinstance(outcome, AgentReport) else outcome.printed
    return _shortened(str(log), _PRINTED_CHARS)


def how_it_ended(outcome: AgentReport | AgentFault, session: Session) -> tuple[Ending, str]:
    """How an attempt ended and why, where `session` has no fault.

    A program that breaks at a limit of the gateway's has ended at that limit. Raises `outcome` when the agent broke
    before the model had replied: this was not the policy's doing.
    """
    if isinstance(outcome, AgentReport):
        limit = session.limit or (outcome.exit if outcome.exit in ("calls", "tokens", "time") else "")
        return (Ending.LIMIT, limit) if limit else (Ending.DONE, outcome.exit)
    if session.limit:
        return Ending.LIMIT, session.limit
    if not session.answered:
        raise outcome
    return Ending.CRASH, outcome.how


def _ended(episode: Episode, outcome: AgentReport | AgentFault, session: Session) -> Episode:
    """`episode` with how it ended. Raises `outcome` as `how_it_ended` does."""
    ending, reason = how_it_ended(outcome, session)
    episode = replace(episode, ending=ending, reason=reason)
    if isinstance(outcome, AgentReport):
        return replace(episode, tool_calls=outcome.tool_calls or ())
    return replace(episode, crash=_shortened(str(outcome))) if ending is Ending.CRASH else episode


def _shortened(text: str, most: int = _CRASH_CHARS) -> str:
    """`text` without its middle, where it is longer than `most` characters: a policy can write it."""
    left_out = len(text) - most
    half = most // 2
    return text if left_out <= 0 else f"{text[:half]}\n[{left_out} characters left out]\n{text[-half:]}"


async def run_agent(agent: Agent, task: Task, box: Sandbox, endpoint: Endpoint, seconds: float) -> AgentReport:
    """What `agent` reports, or that its time (`seconds`) was up when it did not notice by itself.

    Raises `AgentFault`, with the traceback, for whatever else an agent raises: its bugs end its episode and are
    counted, and end neither the run nor (by ``sys.exit``) the process.
    """
    try:
        async with asyncio.timeout(seconds + _GRACE) as clock:
            report: object = await agent.run(task, box, endpoint)
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        # a `UsageError` is what our own functions raise for text that a policy may have written, a diff for example
        if isinstance(error, CodeRepairError) and not isinstance(error, UsageError):
            raise
        if clock.expired():
            return AgentReport("time")
        being_stopped = cast(asyncio.Task[None], asyncio.current_task()).cancelling()
        if isinstance(error, asyncio.CancelledError) and being_stopped:
            raise
        where = "".join(traceback.format_exception(error))
        what = "".join(traceback.format_exception_only(error)).strip()  # also of an error whose own text fails
        raise AgentFault(f"agent {agent.name} raised {what}\n{where}", how=type(error).__name__) from error
    if not isinstance(report, AgentReport):
        raise AgentFault(f"agent {agent.name} returned {report!r}, not an AgentReport", how="no report")
    return report
