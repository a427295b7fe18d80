"""Tries of ids, against the definition: sets of beginnings."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from coderepairrl.tokens.trie import Trie

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=9)


def beginnings(sequences: Sequence[Sequence[int]]) -> set[tuple[int, ...]]:
    return {tuple(each[:length]) for each in sequences for length in range(1, len(each) + 1)}


@given(SEQUENCES)
def test_distinct_tokens_are_as_many_as_different_beginnings(sequences: list[list[int]]) -> None:
    trie = Trie()
    for number, ids in enumerate(sequences):
        trie.add(ids, number)
        assert len(trie) == len(beginnings(sequences[: number + 1]))


@given(SEQUENCES, st.lists(st.integers(0, 2), max_size=12))
def test_the_longest_beginning_that_is_known_and_whose_it_is(sequences: list[list[int]], wanted: list[int]) -> None:
    trie = Trie()
    for number, ids in enumerate(sequences):
        trie.add(ids, number)
    found = trie.longest(wanted)
    known = beginnings(sequences)
    length = max((n for n in range(1, len(wanted) + 1) if tuple(wanted[:n]) in known), default=0)
    ends = [number for number, ids in enumerate(sequences) if ids == wanted[:length]]
    assert (found.length, found.end) == (length, ends[-1] if ends else None)
    if length:
        assert found.owner is not None
        assert sequences[found.owner][:length] == wanted[:length]
    else:
        assert found.owner is None


@given(st.lists(st.tuples(st.integers(0, 8), st.lists(st.integers(0, 2), max_size=6)), max_size=9))
def test_a_sequence_is_added_after_another_as_it_is_in_whole(steps: list[tuple[int, list[int]]]) -> None:
    """Whatever has branched off from that other one in the meantime."""
    trie, whole = Trie(), Trie()
    nodes, sequences = [trie.add((), 0)], [[]]
    whole.add((), 0)
    for number, (base, ids) in enumerate(steps, 1):
        base = min(base, len(nodes) - 1)
        nodes.append(trie.add(ids, number, nodes[base]))
        sequences.append([*sequences[base], *ids])
        whole.add(sequences[-1], number)
    assert len(trie) == len(whole) == len(beginnings(sequences))
    for wanted in sequences:
        assert trie.longest(wanted) == whole.longest(wanted)


def test_time_is_linear_in_tokens() -> None:
    """Neither where sequences part matters, nor how long they are: at most 40 times as slow for 16 times as much."""

    def seconds(tokens: int) -> float:
        ids = list(range(tokens))
        rows = [[*ids[: tokens * part // 8], -1, *ids[tokens * part // 8 :]] for part in range(8)]
        best = float("inf")
        for _ in range(3):
            began = time.process_time()
            trie = Trie()
            for number, row in enumerate(itertools.chain(rows, rows)):
                trie.add(row, number)
            best = min(best, time.process_time() - began)
        return best

    assert seconds(64_000) < 40 * seconds(4_000)
