"""The loop as a simulation of discrete events: attempts ask an engine for replies, a learner takes their groups, new
weights go live. A pure function of its inputs; nothing here knows a model, a GPU or a configuration.

Which group may begin and which a step takes is not modelled but asked of the loop's `rollout.StalenessWindow`, so that
alternation (staleness 0) and overlap are what they are in a run. SimPy was considered: its resources hand out places
for a time that is known, and this server (`replica`), whose every arrival changes when all others end, would be written
by hand beside them; what is left for a library is the heap of events below.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple

from coderepairrl.assembly.sizing.cores import Cores, Work
from coderepairrl.assembly.sizing.replica import Job, Replica, Server
from coderepairrl.rollout import StalenessWindow
from coderepairrl.rollout.group_queue import PendingGroup
from coderepairrl.types import Limits

SAMPLING, TOOLS, WAITING, LEARNING, WEIGHTS = "sampling", "tools", "waiting", "learning", "weights"
SWITCHING = "switching"
"""What a side does. The engine samples, has attempts under way that ask nothing (their tools run), or has none; the
learner learns, or waits for groups; both hand over weights. Where they share a GPU, the engine stops
meanwhile; where they have it by turns, they also switch."""


class Call(NamedTuple):
    """One reply of the model: `given` tokens come in, `sampled` go out, and a core works for `pause` seconds until the
    next."""

    given: int
    sampled: int
    pause: float = 0.0


class Attempt(NamedTuple):
    """An attempt that nothing cuts short: seconds of a core until its first call, its calls, and from then to its
    reward."""

    opening: float
    calls: tuple[Call, ...]
    closing: float = 0.0
    limits: Limits | None = None
    """Its own, where it is not the loop's."""


class Row(NamedTuple):
    """What the learner gets of an attempt, in tokens: those its group shares, all, and those that were sampled."""

    prompt: int
    tokens: int
    sampled: int


Groups = Sequence[Sequence[Row]]


class Computing(NamedTuple):
    """Who computes on the cores of the agents, one each, instead of on a GPU."""

    engine: bool = False
    learner: bool = False


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What is simulated: `steps` of a run that has `later` more."""

    per_step: int
    """Groups that a step learns from."""
    refill: int = 0
    """Groups that it samples beside them."""
    concurrency: int
    staleness: int
    limits: Limits
    server: Server
    learning: Callable[[Groups], float]
    """Seconds of a step."""
    sync: float = 0.0
    """Seconds until new weights are live, in which nothing is sampled."""
    shared: bool = False
    """Whether engine and learner have their GPUs together."""
    switch: float = 0.0
    """Seconds of a step in which one leaves a GPU and the other comes, both ways."""
    cores: float = float("inf")
    """That what attempts do beside asking the engine shares."""
    computing: Computing = field(default_factory=Computing)
    """Who shares them."""
    steps: int
    later: int = 0


@dataclass(slots=True)
class Spent:
    """What came of it."""

    ends: list[float] = field(default_factory=list)
    """When each step ended, in seconds from the beginning."""
    engine: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of a replica (the mean of all) by activity: together those of the clock."""
    learner: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    running: float = 0.0
    """Sequence-seconds of all replicas."""
    sampling: float = 0.0
    """Seconds in which any of them samples."""
    computing: float = 0.0
    """Seconds of all cores together in which somebody computed."""
    wanted: float = 0.0
    """The same, had each a core of its own."""
    asked: int = 0
    """Tokens of prompts and of what came after them, by each call anew."""
    again: int = 0
    """Of these, computed again since a full cache had let them go."""
    by: Counter[str] = field(default_factory=Counter)
    """How consumed attempts ended: ``done``, ``calls``, ``tokens``, ``time``."""
    rows: int = 0
    """Of consumed attempts: how many, and their tokens."""
    tokens: int = 0
    sampled: int = 0
    age: int = 0
    """Versions between begin and consumption, summed over groups."""

    @property
    def wall(self) -> float:
        """Seconds of the clock."""
        return self.ends[-1]

    @property
    def step(self) -> float:
        """Seconds of a step, without the first, which has nothing to overlap with."""
        return (self.wall - self.ends[0]) / (len(self.ends) - 1) if len(self.ends) > 1 else self.wall

    @property
    def at_once(self) -> float:
        """Sequences that run, on all replicas, on average while one samples."""
        return self.running / self.sampling if self.sampling else 0.0

    def share(self, side: Mapping[str, float], name: str) -> float:
        """The share of the clock that `side` spends so."""
        return side.get(name, 0.0) / self.wall if self.wall else 0.0


def simulate(loop: Loop, groups: Iterator[Sequence[Attempt]]) -> Spent:
    """Run it: `groups` are drawn in the order in which they begin, so that loops that differ in speed get the same."""
    return _Run(loop, groups).run()


@dataclass(slots=True, eq=False)
class _Group:
    name: str
    left: int
    version: int | None = None
    rows: list[Row] = field(default_factory=list)
    by: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class _Going:
    attempt: Attempt
    group: _Group
    replica: Replica | None = None
    at: int = 0
    """The next call."""
    tokens: int = 0
    sampled: int = 0
    job: Job | None = None
    """The reply that it waits for, or the last one."""
    work: Work | None = None
    """What it does, None where it waits for a reply."""
    deadline: _Event | None = None


@dataclass(slots=True, eq=False)
class _Event:
    call: Callable[[], None] | None


class _Run:
    def __init__(self, loop: Loop, groups: Iterator[Sequence[Attempt]]) -> None:
        self.loop, self.groups = loop, groups
        self.spent = Spent()
        self.now, self.version, self.learner = 0.0, 0, WAITING
        self.window = StalenessWindow(loop.per_step + loop.refill, loop.staleness)
        self.replicas = [Replica(number, loop.server) for number in range(loop.server.replicas)]
        self.cores = Cores(loop.cores)
        self.held: dict[str, _Group] = {}
        self.queue: deque[_Going] = deque()
        self.going = 0
        self._events: list[tuple[float, int, _Event]] = []
        self._count = count()

    def run(self) -> Spent:
        self._step()
        while len(self.spent.ends) < self.loop.steps:
            self._next()()
        self.spent.again = sum(each.prefixes.again for each in self.replicas)
        return self.spent

    def _next(self) -> Callable[[], None]:
        """Let time go by until something happens; what then follows."""
        cores, replicas, events = self.cores, self.replicas, self._events
        rate = 1.0
        if self.loop.computing.engine:
            cores.others = sum(each.samples for each in replicas)
            rate = cores.rate
        while events and events[0][2].call is None:
            heapq.heappop(events)
        soonest = events[0][0] - self.now if events else float("inf")
        ended: Cores | Replica | None = None
        if (seconds := cores.next()) is not None and seconds < soonest:
            soonest, ended = seconds, cores
        for replica in replicas:
            if (seconds := replica.next()) is not None and seconds / rate < soonest:
                soonest, ended = seconds / rate, replica
        self._pass(soonest, rate)
        if ended is not None:
            return ended.pop().done
        self.now, _, event = heapq.heappop(events)
        assert event.call is not None
        return event.call

    def _pass(self, seconds: float, rate: float) -> None:
        """Let time go by, in which an engine has `rate` of its speed."""
        if not seconds:
            return
        self.now += seconds
        spent, cores, learner = self.spent, self.cores, self.learner
        spent.learner[learner] += seconds
        spent.wanted += seconds * cores.users
        spent.computing += seconds * cores.users * cores.rate
        cores.advance(seconds)
        part, sampling = seconds / len(self.replicas), False
        for replica in self.replicas:
            if replica.samples:
                sampling = True
                spent.engine[SAMPLING] += part
                spent.running += len(replica.running) * seconds
                replica.advance(seconds * rate)
            elif replica.paused:
                spent.engine[learner if learner in (WEIGHTS, SWITCHING) else WAITING] += part
            else:
                spent.engine[TOOLS if self.going else WAITING] += part
        if sampling:
            spent.sampling += seconds

    def _after(self, seconds: float, call: Callable[[], None]) -> _Event:
        event = _Event(call)
        heapq.heappush(self._events, (self.now + seconds, next(self._count), event))
        return event

    # -- the steps

    def _step(self) -> None:
        later = self.loop.later + self.loop.steps - len(self.spent.ends) - 1
        for _ in range(self.window.capacity(wanted=self.window.per_step, begun=len(self.held), later=later)):
            attempts = next(self.groups)
            group = _Group(str(next(self._count)), len(attempts))
            self.held[group.name] = group
            self.queue.extend(_Going(attempt, group) for attempt in attempts)
        self._offer()
        self._take()

    def _take(self) -> None:
        if self.learner != WAITING:
            return
        begun = [
            PendingGroup(g.name, self.version if g.version is None else g.version, not g.left)
            for g in self.held.values()
        ]
        chosen = self.window.choose(begun, version=self.version, wanted=self.window.per_step)
        if chosen is None:
            return
        groups = [self.held.pop(each.group) for each in chosen]
        for group in groups:
            self.spent.by += group.by
            self.spent.rows += len(group.rows)
            self.spent.tokens += sum(row.tokens for row in group.rows)
            self.spent.sampled += sum(row.sampled for row in group.rows)
            self.spent.age += self.version - (group.version or 0)
        learn = partial(self._learn, [group.rows for group in groups[: self.loop.per_step]])
        self._pause(self.loop.shared)
        if not self.loop.switch:
            return learn()
        self.learner = SWITCHING
        self._after(self.loop.switch, learn)

    def _learn(self, groups: Groups) -> None:
        self.learner = LEARNING
        begin = self.cores.begin if self.loop.computing.learner else self._after
        begin(self.loop.learning(groups), self._publish)

    def _publish(self) -> None:
        self.learner = WEIGHTS
        self._pause(True)
        self._after(self.loop.sync, self._live)

    def _live(self) -> None:
        self.learner = WAITING
        self.version += 1
        for replica in self.replicas:
            replica.forget()
        self._pause(False)
        self.spent.ends.append(self.now)
        if len(self.spent.ends) < self.loop.steps:
            self._step()

    def _pause(self, paused: bool) -> None:
        for replica in self.replicas:
            replica.paused = paused

    # -- the attempts

    def _limits(self, going: _Going) -> Limits:
        return going.attempt.limits or self.loop.limits

    def _offer(self) -> None:
        while self.queue and self.going < self.loop.concurrency:
            going = self.queue.popleft()
            self.going += 1
            if going.group.version is None:
                going.group.version = self.version
            going.replica = min(self.replicas, key=lambda replica: replica.attempts)
            going.replica.attempts += 1
            going.deadline = self._after(self._limits(going).seconds, partial(self._late, going))
            going.work = self.cores.begin(going.attempt.opening, partial(self._ask, going))

    def _ask(self, going: _Going) -> None:
        limits, calls, replica = self._limits(going), going.attempt.calls, going.replica
        assert replica is not None
        if going.at == len(calls):
            return self._close(going, "done")
        if going.at == limits.calls:
            return self._close(going, "calls")
        call = calls[going.at]
        context = going.tokens + call.given
        if context >= limits.tokens:
            return self._close(going, "tokens")
        wanted = min(call.sampled, limits.turn_tokens, limits.tokens - context)
        self.spent.asked += context
        reply = partial(self._reply, going)
        going.work, going.job = None, Job(context, calls[0].given, wanted, going.group, going, reply)
        replica.ask(going.job)

    def _reply(self, going: _Going) -> None:
        assert going.job is not None
        self._read(going, going.job, going.job.wanted)
        pause = going.attempt.calls[going.at].pause
        going.at += 1
        if going.tokens >= self._limits(going).tokens:
            return self._close(going, "tokens")
        going.work = self.cores.begin(pause, partial(self._ask, going))

    def _read(self, going: _Going, job: Job, sampled: int) -> None:
        going.tokens = job.context + sampled
        going.sampled += sampled

    def _late(self, going: _Going) -> None:
        if going.work is not None:
            self.cores.cut(going.work)
        elif going.replica is not None and going.job is not None:
            self._read(going, going.job, going.replica.cut(going.job))
        self._close(going, "time")

    def _close(self, going: _Going, by: str) -> None:
        assert going.deadline is not None and going.replica is not None
        going.deadline.call = None
        going.replica.attempts -= 1
        going.group.by[by] += 1
        calls = going.attempt.calls
        prompt = min(calls[0].given if calls else 0, going.tokens)
        row = Row(prompt, going.tokens, going.sampled)
        self.cores.begin(going.attempt.closing, partial(self._finish, going.group, row))

    def _finish(self, group: _Group, row: Row) -> None:
        group.rows.append(row)
        group.left -= 1
        self.going -= 1
        self._offer()
        if not group.left:
            self._take()
