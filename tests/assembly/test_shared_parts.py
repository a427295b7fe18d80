"""What the simulated loop shares out: cores among all who compute, an engine's cache among prefixes."""

from __future__ import annotations

import heapq
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coderepairrl.assembly.sizing.attempts import _worked
from coderepairrl.assembly.sizing.cores import Cores
from coderepairrl.assembly.sizing.prefixes import Prefixes

SECONDS = st.floats(0.0, 50.0)


def ends(cores: Cores, jobs: list[tuple[float, float]]) -> tuple[list[float], float]:
    """When jobs end, of which each begins at a time and needs so many seconds; and the seconds of cores they had."""
    found, had, now = [0.0] * len(jobs), 0.0, 0.0

    def ended(number: int) -> None:
        found[number] = now

    due = [(begin, number) for number, (begin, _) in enumerate(jobs)]
    heapq.heapify(due)
    while due or cores.users:
        left, begins = cores.next(), due[0][0] - now if due else float("inf")
        seconds = min(begins, float("inf") if left is None else left)
        had += cores.users * cores.rate * seconds
        now += seconds
        cores.advance(seconds)
        if begins == seconds:
            number = heapq.heappop(due)[1]
            cores.begin(jobs[number][1], partial(ended, number))
        else:
            cores.pop().done()
    return found, had


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=12), st.sampled_from([0.5, 1.0, 2.0, 3.5]))
def test_cores_are_shared_evenly_and_no_work_is_lost(jobs: list[tuple[float, float]], cores: float) -> None:
    found, had = ends(Cores(cores), jobs)
    work = sum(seconds for _, seconds in jobs)
    assert had == pytest.approx(work, abs=1e-6)
    assert max(found) >= work / cores - 1e-6
    for (begin, seconds), end in zip(jobs, found, strict=True):
        assert end >= begin + seconds / min(1.0, cores) - 1e-6
        for (other, least), sooner in zip(jobs, found, strict=True):
            if begin <= other and seconds <= least:  # whoever came no later and needs no more is done no later
                assert end <= sooner + 1e-6
    alone, _ = ends(Cores(len(jobs)), jobs)
    assert alone == pytest.approx([begin + seconds for begin, seconds in jobs], abs=1e-6)


def test_what_attempts_got_of_cores_is_told_from_their_times() -> None:
    """By hand: two attempts of 10 s on one core, whose engine computes there, too, while the first one waits 4 s."""

    def episode(begin: float, asked: float, answered: float, end: float) -> Any:
        turn = SimpleNamespace(started=asked, ended=answered)
        return SimpleNamespace(turns=[turn], timings={"total": end - begin, "reward": end - answered})

    both = [episode(0.0, 2.0, 6.0, 10.0), episode(0.0, 10.0, 10.0, 10.0)]
    worked = _worked(both, 1, engine=True)
    assert [worked(0, 2), worked(2, 6), worked(6, 10), worked(0, 10)] == pytest.approx([1, 2, 2, 5])
    assert _worked(both, 1, engine=False)(2, 6) == pytest.approx(4)
    assert _worked(both, 2, engine=True)(0, 10) == pytest.approx(10)
    learned = _worked(both, 1, engine=True, learner=[(2.0, 5.0), (10.0, 13.0)])
    assert [learned(2, 5), learned(5, 6), learned(10, 13)] == pytest.approx([1, 0.5, 3])


class Blocks:
    """The cache by single blocks: those of sequences under way, and the others by their last use."""

    def __init__(self, room: float) -> None:
        self.room, self.users, self.idle = room, dict[Any, int](), list[Any]()

    def take(self, chain: list[tuple[Any, int]]) -> int:
        blocks = [(name, at) for name, tokens in chain for at in range(tokens)]
        known = [block in self.users or block in self.idle for block in blocks]
        for block in blocks:
            self.users[block] = self.users.get(block, 0) + 1
        self.idle = [block for block in self.idle if block not in self.users]
        self._make_room()
        return [*known, False].index(False)

    def give(self, chain: list[tuple[Any, int]], had: list[tuple[Any, int]]) -> None:
        for name, tokens in reversed(had):
            for at in reversed(range(tokens)):
                self.users[name, at] -= 1
                if not self.users[name, at]:
                    del self.users[name, at]
                    if at < dict(chain)[name]:
                        self.idle.append((name, at))
        self._make_room()

    def _make_room(self) -> None:
        while self.idle and len(self.users) + len(self.idle) > self.room:
            del self.idle[0]


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([0, 5, 20, 40, float("inf")]),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6), st.integers(0, 4), st.booleans()), max_size=40),
)
def test_prefixes_are_kept_as_blocks_are(room: float, asked: list[tuple[int, int, int, bool]]) -> None:
    """Six attempts of two groups ask, end their replies and ask again, with more tokens each time; weights change."""
    prefixes, blocks = Prefixes(room), Blocks(room)
    sizes, running = dict.fromkeys(range(6), 0), dict[int, list[tuple[Any, int]]]()
    known = dict.fromkeys(range(6), 0)
    for owner, given_, sampled, fresh_weights in asked:
        group = ("group", owner % 2), 4 + owner % 2
        if owner in running:
            had = running.pop(owner)
            chain = [group, (owner, max(0, had[1][1] - sampled))]  # cut before all of it was sampled
            prefixes.give(chain)
            blocks.give(chain, had)
            known[owner] = sizes[owner] = chain[1][1]
            continue
        if fresh_weights and not running:
            prefixes.forget()
            blocks.idle.clear()
            known = dict.fromkeys(known, 0)
        chain = [group, (owner, sizes[owner] + given_ + sampled)]
        found = prefixes.take(chain)
        assert found == blocks.take(chain)
        assert found >= known[owner] or room < float("inf")
        assert (prefixes.held, prefixes.idle) == (len(blocks.users), len(blocks.idle))
        running[owner] = chain
