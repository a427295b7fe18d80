"""The simulated loop: what holds whatever is drawn, and the real loop on a clock of its own, to the last digit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import asynchrony
from coderepairrl.assembly.sizing.replica import Server
from coderepairrl.assembly.sizing.simulation import (
    LEARNING,
    SAMPLING,
    WAITING,
    WEIGHTS,
    Attempt,
    Call,
    Computing,
    Groups,
    Loop,
    Spent,
    simulate,
)
from coderepairrl.rollout import Ticket
from coderepairrl.types import Limits

SIZE = 4
HERE = Computing(engine=True, learner=True)


def drawn(seed: int, calls: int = 4) -> Iterator[list[Attempt]]:
    for number in count():
        chance = random.Random(f"{seed}/{number}")
        prompt = chance.randrange(50, 500)
        yield [
            Attempt(
                chance.random() / 5,
                tuple(
                    Call(prompt if at == 0 else chance.randrange(100), chance.randrange(1, 200), chance.random())
                    for at in range(chance.randrange(1, calls + 1))
                ),
                chance.random() / 5,
            )
            for _ in range(SIZE)
        ]


def loop(**changed: Any) -> Loop:
    given: dict[str, Any] = {
        "per_step": 3,
        "concurrency": 8,
        "staleness": 0,
        "limits": Limits(calls=30, tokens=2000, seconds=60, turn_tokens=150),
        "server": Server(0.01, 0.001, 1e-6, 1e-4, slots=6),
        "learning": learning(0.002),
        "sync": 0.5,
        "steps": 12,
    }
    return Loop(**given | changed)


def learning(token: float) -> Callable[[Groups], float]:
    return lambda groups: token * sum(row.tokens for rows in groups for row in rows)


LOOPS = st.builds(
    loop,
    per_step=st.integers(1, 4),
    refill=st.integers(0, 2),
    concurrency=st.integers(1, 20),
    staleness=st.integers(0, 3),
    limits=st.builds(
        Limits,
        calls=st.integers(1, 4),
        tokens=st.integers(100, 2000),
        seconds=st.floats(0.05, 20),
        turn_tokens=st.integers(1, 200),
    ),
    server=st.builds(
        Server,
        step=st.floats(0.001, 0.1),
        sequence=st.floats(0, 0.01),
        cached=st.floats(0, 1e-5),
        given=st.floats(0, 1e-2),
        replicas=st.integers(1, 3),
        slots=st.integers(1, 8),
        cache=st.sampled_from([500.0, 5000.0, float("inf")]),
        own=st.sampled_from([0.0, 40.0]),
    ),
    learning=st.builds(learning, st.floats(0, 0.01)),
    sync=st.floats(0, 2),
    shared=st.booleans(),
    cores=st.sampled_from([1.0, 2.5, float("inf")]),
    computing=st.builds(Computing, st.booleans(), st.booleans()),
    steps=st.integers(1, 5),
    later=st.integers(0, 5),
)


@settings(max_examples=150, deadline=None)
@given(LOOPS, st.integers(0, 1000))
def test_all_time_is_accounted_for(given: Loop, seed: int) -> None:
    """Both sides' seconds are the clock's; every consumed attempt ended in one way, within its limits and its age."""
    begun = list[Sequence[Attempt]]()

    def seen() -> Iterator[Sequence[Attempt]]:
        for group in drawn(seed):
            begun.append(group)
            yield group

    spent = simulate(given, seen())
    assert sum(spent.engine.values()) == pytest.approx(spent.wall) == sum(spent.learner.values())
    assert spent.computing <= given.cores * spent.wall * (1 + 1e-9) and spent.computing <= spent.wanted * (1 + 1e-9)
    assert spent.learner[WEIGHTS] == pytest.approx(given.sync * given.steps)
    groups = given.steps * (given.per_step + given.refill)
    assert spent.rows == groups * SIZE == sum(spent.by.values())
    assert spent.tokens <= spent.rows * given.limits.tokens
    assert 0 <= spent.age <= groups * given.staleness
    assert spent.at_once <= min(given.concurrency, given.server.slots * given.server.replicas) + 1e-9
    assert spent.ends == sorted(spent.ends) and len(spent.ends) == given.steps
    assert len(begun) <= groups + (given.per_step + given.refill) * given.staleness
    if not given.later:
        assert len(begun) == groups, "no group is begun that no step will consume"


@settings(max_examples=50, deadline=None)
@given(LOOPS, st.integers(0, 1000))
def test_the_same_draws_give_the_same_run(given: Loop, seed: int) -> None:
    assert simulate(given, drawn(seed)) == simulate(given, drawn(seed))


@settings(max_examples=50, deadline=None)
@given(LOOPS, st.integers(0, 1000))
def test_cores_and_cache_that_suffice_change_nothing(given: Loop, seed: int) -> None:
    """Another core than each has got makes nothing faster, nor does a cache that nothing is driven out of."""
    free = replace(given, cores=float("inf"), server=given.server._replace(cache=float("inf")))
    spent = simulate(free, drawn(seed))
    assert spent.again == 0 and spent.computing == pytest.approx(spent.wanted)
    enough = free.concurrency + free.server.replicas + 1
    begun = free.steps * (free.per_step + free.refill) * (free.staleness + 2) * SIZE
    room = free.server._replace(cache=begun * (free.limits.tokens + free.server.own))
    assert simulate(replace(free, cores=float(enough), server=room), drawn(seed)) == spent


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([1.0, 1.5, 3.0]), st.booleans(), st.integers(0, 1000))
def test_no_more_is_done_than_there_are_cores(cores: float, engine: bool, seed: int) -> None:
    """What attempts need of cores is what they get, whoever shares it, and the clock is no faster than that."""
    endless = Limits(calls=99, tokens=10**6, seconds=1e9, turn_tokens=10**6)
    given = loop(cores=cores, limits=endless, steps=2, computing=Computing(engine), server=Server(0.01))
    groups = [group for group, _ in zip(drawn(seed), range(given.steps * given.per_step), strict=False)]
    spent = simulate(given, iter(groups))
    each = [attempt for group in groups for attempt in group]
    work = sum(a.opening + sum(call.pause for call in a.calls) + a.closing for a in each)
    sampling = spent.computing - work
    assert sampling == pytest.approx(0.0 if not engine else sampling, abs=1e-6) and sampling > -1e-6
    assert spent.wall >= spent.computing / cores - 1e-6
    assert spent.wall >= simulate(replace(given, cores=float("inf")), iter(groups)).wall - 1e-6 or engine


def test_an_engine_on_the_cores_shares_them() -> None:
    """By hand: on one core 10 s of tools beside 10 s of sampling take 20 s, on two 10."""
    attempts = [Attempt(10.0, ()), Attempt(0.0, (Call(1, 10),))]
    walls = [
        simulate(
            loop(per_step=1, server=Server(1.0), sync=0.0, steps=1, cores=cores, computing=Computing(True))
            if cores
            else loop(per_step=1, server=Server(1.0), sync=0.0, steps=1),
            iter([attempts]),
        ).wall
        - 0.002 * 11
        for cores in (1.0, 2.0, 0.0)
    ]
    assert walls == pytest.approx([20, 10, 10])


def test_what_a_full_cache_drives_out_is_computed_again() -> None:
    """By hand: two attempts by turns, 100 tokens each at 1 s, replies that take nothing; a cache for both, or one."""
    attempts = [[Attempt(0.0, (Call(100, 0), Call(0, 0)))], [Attempt(0.0, (Call(100, 0), Call(0, 0)))]]
    for cache, again in ((200.0, 0), (150.0, 100), (100.0, 200)):
        given = loop(
            per_step=2,
            server=Server(step=1e-9, given=1.0, slots=1, cache=cache),
            learning=lambda groups: 0.0,
            sync=0.0,
            steps=1,
            limits=Limits(seconds=1e6),
        )
        spent = simulate(given, iter(attempts))
        assert (spent.again, spent.asked) == (again, 400)
        assert spent.wall == pytest.approx(200 + again)


def mean(seeds: int = 12, **changed: Any) -> float:
    """Seconds of the run, over draws."""
    return sum(simulate(loop(**changed), drawn(seed)).wall for seed in range(seeds)) / seeds


@pytest.mark.parametrize("staleness", [0, 2])
def test_more_gpus_are_never_slower(staleness: int) -> None:
    """In expectation, on the same draws: of a list of jobs one order alone may be luckier."""
    server = loop().server
    base = mean(staleness=staleness)
    assert mean(staleness=staleness, server=server._replace(replicas=2)) < base
    assert mean(staleness=staleness, server=server._replace(replicas=3)) < base
    assert mean(staleness=staleness, server=Server(0.005, 0.0005, 5e-7, 5e-5, slots=6)) < base
    assert mean(staleness=staleness, learning=learning(0.001)) < base
    assert mean(staleness=staleness, sync=0.0) < base
    assert mean(staleness=staleness + 1) <= base


def test_more_cores_and_a_larger_cache_are_never_slower() -> None:
    """In expectation, as above."""
    few, small = mean(6, cores=2.0), loop().server._replace(cache=2000.0, given=1e-3)
    assert mean(6) < mean(6, cores=3.0) < few < mean(6, cores=2.0, computing=HERE)
    assert mean(6, server=small._replace(cache=8000.0)) < mean(6, server=small)


def test_more_places_are_faster_where_the_engine_is_the_bound() -> None:
    assert mean(server=loop().server._replace(slots=12), concurrency=16) < mean()


def test_without_staleness_they_alternate() -> None:
    """Whatever the engine does is done while the learner waits, and the two together are the time."""
    spent = simulate(loop(), drawn(0))
    assert spent.engine[WAITING] == pytest.approx(spent.learner[LEARNING])
    assert spent.age == 0
    assert spent.wall == pytest.approx(spent.learner[LEARNING] + spent.learner[WAITING] + spent.learner[WEIGHTS])
    faster = simulate(loop(learning=lambda groups: 0.0), drawn(0))
    assert spent.wall - faster.wall == pytest.approx(spent.learner[LEARNING])


@pytest.mark.parametrize(("token", "slower"), [(0.0002, SAMPLING), (0.02, LEARNING)])
def test_the_slower_side_is_the_bound(token: float, slower: str) -> None:
    """With enough staleness little more than its own time is left."""
    changed: dict[str, Any] = {"learning": learning(token), "staleness": 4, "steps": 40, "sync": 0.0}
    spent = simulate(loop(**changed), drawn(1))
    side = spent.engine if slower == SAMPLING else spent.learner
    assert side[slower] > 0.9 * spent.wall
    alone = simulate(loop(**changed | {"staleness": 0}), drawn(1))
    assert spent.wall < alone.wall


def test_a_server_that_takes_no_time_gives_an_answer() -> None:
    """So may one be fitted whose replies were short beside their prompts."""
    for seed in range(20):
        assert simulate(loop(server=Server(0.0, given=1e-4, slots=6)), drawn(seed)).wall > 0


def test_two_replies_share_a_server() -> None:
    """By hand: 10 tokens alone, then beside 10 of another, whose step takes 3 s: 2 at once 1 + 2 * 1."""
    attempts = [Attempt(0.0, (Call(5, 10),)), Attempt(10.0, (Call(5, 10),))]
    spent = simulate(
        loop(
            per_step=1,
            server=Server(step=1.0, sequence=1.0),
            learning=lambda groups: 0.0,
            sync=0.0,
            steps=1,
            limits=Limits(seconds=1e6),
        ),
        iter([attempts]),
    )
    # the first has 5 tokens after 10 s at 2 s a token, and 5 more at 3 s; then the other has 5 left, at 2 s
    assert spent.wall == pytest.approx(10 + 5 * 3 + 5 * 2)
    assert spent.at_once == pytest.approx((10 + 2 * 15 + 10) / 35)


def test_a_prompt_is_computed_once_for_a_group_and_again_for_new_weights() -> None:
    """By hand: a prompt of 100 tokens at 1 s, and replies that take nothing."""
    group = [Attempt(0.0, (Call(100, 0),))] * SIZE
    changed: dict[str, Any] = {"per_step": 1, "server": Server(step=1e-9, given=1.0), "learning": lambda groups: 0.0}
    spent = simulate(loop(**changed, sync=0.0, steps=2, limits=Limits(seconds=1e6)), iter([group] * 2))
    assert spent.ends == pytest.approx([100, 200])


@pytest.mark.parametrize(
    ("limits", "by", "tokens"),
    [
        (Limits(calls=2, tokens=1000, seconds=1e6, turn_tokens=100), "calls", 2 * 30),
        (Limits(calls=9, tokens=50, seconds=1e6, turn_tokens=100), "tokens", 50),
        (Limits(calls=9, tokens=1000, seconds=25, turn_tokens=100), "time", 30 + 15),
        (Limits(calls=9, tokens=1000, seconds=1e6, turn_tokens=100), "done", 3 * 30),
        (Limits(calls=9, tokens=1000, seconds=1e6, turn_tokens=5), "done", 3 * 15),
    ],
)
def test_what_ends_an_attempt(limits: Limits, by: str, tokens: int) -> None:
    """Three calls, each given 10 tokens and sampling 20 at a second; the time is over within the second one."""
    attempt = Attempt(0.0, (Call(10, 20),) * 3)
    given = loop(per_step=1, concurrency=1, server=Server(1.0), limits=limits, steps=1)
    spent = simulate(given, iter([[attempt]]))
    assert (dict(spent.by), spent.tokens) == ({by: 1}, tokens)


class InOrder(asynchrony.Attempts):
    """Attempts that take what is next in a list, in the order in which they begin."""

    seconds: Iterator[float]

    async def run(self, ticket: Ticket, began: Callable[[], None]) -> Any:
        async with self.room:
            began()
            version, seconds = self.policy.version, next(self.seconds)
            await asyncio.sleep(seconds)
        self.busy += seconds
        return asynchrony.episode(ticket, version, random.Random(ticket.seed).random())


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_it_takes_as_long_as_the_real_loop(staleness: int, ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """`stages.train` with scripted attempts on a clock that jumps: the same attempts, the same seconds."""
    steps, chance = 12, random.Random(staleness)
    lengths = [min(8.0, chance.lognormvariate(-0.5, 1)) for _ in range(steps * asynchrony.TASKS * asynchrony.ATTEMPTS)]
    InOrder.seconds = iter(lengths)
    monkeypatch.setattr(asynchrony, "Attempts", InOrder)
    found = asynchrony.measure(staleness, ratio, steps, 0, 8.0)
    spent = simulated(lengths, staleness, ratio, steps)
    assert spent.wall == pytest.approx(found.seconds, rel=1e-9)
    assert 1 - spent.share(spent.learner, LEARNING) == pytest.approx(found.learner)


def simulated(lengths: Sequence[float], staleness: int, ratio: float, steps: int) -> Spent:
    size = asynchrony.ATTEMPTS
    groups = (lengths[at : at + size] for at in range(0, len(lengths), size))
    step = ratio * asynchrony.TASKS * size / asynchrony.SLOTS
    return simulate(
        loop(
            per_step=asynchrony.TASKS,
            concurrency=asynchrony.SLOTS,
            staleness=staleness,
            limits=Limits(seconds=1e6),
            learning=lambda groups: step,
            sync=0.0,
            steps=steps,
        ),
        ([Attempt(seconds, ()) for seconds in group] for group in groups),
    )
