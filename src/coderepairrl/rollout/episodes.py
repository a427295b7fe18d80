"""Episodes: logged and scored attempts."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from coderepairrl.errors import EngineFault
from coderepairrl.protocols import Agent, SandboxBackend
from coderepairrl.rewards import Weighted
from coderepairrl.runs import Log
from coderepairrl.types import Ending, Episode, Limits, Sampling, SideCalls, Task, VerifiedRepair


@dataclass(frozen=True, slots=True)
class PlannedAttempt:
    """Attempt to make."""

    task: Task
    phase: str
    step: int
    group: str
    attempt: int
    seed: int
    sampling: Sampling
    verified: tuple[VerifiedRepair, ...] = ()
    """Further references for rewards, hidden from agent and sandbox."""
    retry: int = 0

    @property
    def episode_id(self) -> str:
        """Group, attempt and retry."""
        return f"{self.group}-{self.attempt:02d}" + (f"-retry{self.retry}" if self.retry else "")


def derive_seed(*parts: object) -> int:
    """Seed of 63 bits from any parts, the same on every machine."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


@dataclass(frozen=True, slots=True)
class AttemptSettings:
    """Settings for making and scoring attempts of one kind of task, or of all.

    `rewards` and `others` (another agent and sandbox, for evaluations) are by phase. `side_calls` defaults to the
    agent's.
    """

    agent: Agent
    sandbox: SandboxBackend
    limits: Limits
    rewards: Mapping[str, Sequence[Weighted]]
    side_calls: SideCalls | None = None
    others: Mapping[str, tuple[Agent, SandboxBackend]] = field(default_factory=dict)

    def for_phase(self, phase: str) -> AttemptSettings:
        """Settings for `phase`."""
        if phase not in self.others:
            return self
        agent, sandbox = self.others[phase]
        return replace(self, agent=agent, sandbox=sandbox)

    @staticmethod
    def for_attempt(kinds: Mapping[str, AttemptSettings], planned: PlannedAttempt) -> AttemptSettings:
        """Settings for the task's kind, or else ``""``, in its phase."""
        return (kinds.get(planned.task.kind) or kinds[""]).for_phase(planned.phase)


class Executor(Protocol):
    """Makes and scores attempts, here or on other machines."""

    async def run(self, planned: PlannedAttempt) -> Episode:
        """Make and score the attempt; each turn is logged before the agent sees it.

        Infrastructure faults give a VOID episode. Raises `CodeRepairError` for faults that every attempt would meet.
        """
        ...


class Rollout:
    """Makes episodes, up to `concurrency` at once, and logs them."""

    def __init__(
        self,
        *,
        executor: Executor,
        log: Log,
        concurrency: int,
        on_episode: Callable[[Episode], None] = lambda episode: None,
        warm_up: Callable[[PlannedAttempt], Awaitable[None]] | None = None,
    ) -> None:
        """Create a rollout; `warm_up` is awaited before the first attempt, and after an engine fault."""
        self.executor = executor
        self.log = log
        self.on_episode = on_episode
        self._room = asyncio.Semaphore(concurrency)
        self._warm_up = warm_up
        self._warming = asyncio.Lock()
        self._is_cold = True

    async def run(self, planned: PlannedAttempt, began: Callable[[], None] = lambda: None) -> Episode:
        """Make the attempt and log its verdict; `began` is called at its start.

        Infrastructure faults give a VOID episode; an agent that breaks after the first reply ends in CRASH, with
        scores.
        """
        async with self._room:
            async with self._warming:
                if self._is_cold and self._warm_up is not None:
                    await self._warm_up(planned)
                    self._is_cold = False
            began()
            self.log.append(
                "episode",
                id=planned.episode_id,
                phase=planned.phase,
                step=planned.step,
                group=planned.group,
                attempt=planned.attempt,
                task=planned.task.id,
                kind=planned.task.kind,
                seed=planned.seed,
            )
            episode = await self.executor.run(planned)
            self.log.append("verdict", verdict=replace(episode, turns=()))  # its turns are already logged
            if episode.ending is Ending.VOID and episode.reason == EngineFault.boundary:
                self._is_cold = True
            self.on_episode(episode)
            return episode
