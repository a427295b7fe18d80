"""A server that computes for all of its sequences at once, as it is simulated: who runs, and when the next one ends.

Each sequence gets a token per decoding step, whose time grows with their number and with what is cached, and prompts
are computed between steps. So a sequence that needs n tokens ends when a common count of steps has grown by n, wherever
the time of a step changes in between: one heap for each replica.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from coderepairrl.assembly.sizing.prefixes import Chain, Prefixes

_SHORTEST = 1e-12
"""Seconds of a decoding step at least."""


class Server(NamedTuple):
    """An engine by its seconds, each of `replicas` for itself. A decoding step takes ``step + running * sequence +
    cached tokens * cached``, a token that is computed before it takes `given`."""

    step: float
    sequence: float = 0.0
    cached: float = 0.0
    given: float = 0.0
    replicas: int = 1
    slots: int = 1_000_000
    """Sequences that a replica runs at once."""
    cache: float = float("inf")
    """Tokens that it holds."""
    own: float = 0.0
    """As many of them does a sequence take beside its own: states and windows."""

    def at(self, speed: Server, factor: float = 1.0) -> Server:
        """As large as this one, with `factor` times the seconds of `speed`."""
        step, sequence, cached, given = (factor * each for each in speed[:4])
        return self._replace(step=step, sequence=sequence, cached=cached, given=given)


@dataclass(slots=True, eq=False)
class Job:
    """A reply: `wanted` tokens after `context`, whose first `shared` are `group`'s, the rest `owner`'s. `done` is what
    follows its end."""

    context: int
    shared: int
    wanted: int
    group: Hashable
    owner: Hashable
    done: Callable[[], None]
    began: float = 0.0
    """The count of steps at which it began."""

    def chain(self, sampled: int) -> Chain:
        """What is in the cache of it with `sampled` tokens of the reply."""
        return (self.group, self.shared), (self.owner, self.context - self.shared + sampled)


class Replica:
    """`_steps` counts decoding steps; `_debt` is the time (s) of prompt tokens before the next one."""

    def __init__(self, number: int, server: Server) -> None:
        self.number, self.server = number, server
        self.running: set[Job] = set()
        self.waiting: deque[Job] = deque()
        self.attempts = 0
        """That ask it."""
        self.paused = False
        self.prefixes = Prefixes(server.cache)
        self._steps, self._debt, self._cached = 0.0, 0.0, 0.0
        self._ends: list[tuple[float, int, Job]] = []
        self._count = count()

    @property
    def samples(self) -> bool:
        """Whether it computes now."""
        return bool(self.running) and not self.paused

    @property
    def step_seconds(self) -> float:
        """Seconds of a decoding step; of speeds that were fitted all may be 0."""
        server = self.server
        return max(_SHORTEST, server.step + len(self.running) * server.sequence + self._cached * server.cached)

    def advance(self, seconds: float) -> None:
        """It computes for so long."""
        if seconds <= self._debt:
            self._debt -= seconds
        else:
            self._steps += (seconds - self._debt) / self.step_seconds
            self._debt = 0.0

    def next(self) -> float | None:
        """Seconds until a sequence ends, if nothing else happens; None where nothing runs."""
        ends = self._ends
        while ends and ends[0][2] not in self.running:
            heapq.heappop(ends)
        if self.paused or not ends:
            return None
        left = ends[0][0] - self._steps
        return self._debt + left * self.step_seconds if left > 0.0 else self._debt

    def ask(self, job: Job) -> None:
        """Begin a reply, or let it wait for a place."""
        self.waiting.append(job)
        self._admit()

    def pop(self) -> Job:
        """The sequence that ends now."""
        ended, _, job = heapq.heappop(self._ends)
        self._steps = max(self._steps, ended)
        self._leave(job, job.wanted)
        return job

    def cut(self, job: Job) -> int:
        """Take it out; tokens that it has sampled."""
        if job not in self.running:
            self.waiting.remove(job)
            return 0
        sampled = min(job.wanted, int(self._steps - job.began))
        self._leave(job, sampled)
        return sampled

    def forget(self) -> None:
        """New weights: what runs is computed again."""
        self.prefixes.forget()
        self._debt += sum(job.context for job in self.running) * self.server.given

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.server.slots:
            job = self.waiting[0]
            chain, need = job.chain(job.wanted), self.server.own
            if self.running and self.prefixes.held + self.prefixes.more(chain) + need > self.prefixes.room:
                break
            self.waiting.popleft()
            self.running.add(job)
            job.began = self._steps
            heapq.heappush(self._ends, (self._steps + job.wanted, next(self._count), job))
            self._cached += job.context + job.wanted / 2
            self.prefixes.room -= need
            self._debt += max(0, job.context - self.prefixes.take(chain)) * self.server.given

    def _leave(self, job: Job, sampled: int) -> None:
        self.running.remove(job)
        self.prefixes.room += self.server.own
        self.prefixes.give(job.chain(sampled))
        self._cached -= job.context + job.wanted / 2
        if not self.running:
            self._debt, self._cached = 0.0, 0.0
        self._admit()
