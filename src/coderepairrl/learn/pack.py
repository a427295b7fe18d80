"""Packing of rows into prefix-tree micro-batches: no padding, each distinct token once.

T tokens of a micro-batch, R rows, N trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coderepairrl.learn.attention import Span
from coderepairrl.tokens.trie import count_common_prefix
from coderepairrl.types import Sample

Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Prefix tree of rows, and their trained tokens.

    `positions_T` are indices within a row. `at_N` are the places in T that predict the trained tokens `target_N` of
    rows `row_N`; `recorded_N` are the engine's logprobs, `count_R` trained tokens per row.
    """

    ids_T: Tensor
    positions_T: Tensor
    spans: tuple[Span, ...]
    at_N: Tensor
    target_N: Tensor
    row_N: Tensor
    recorded_N: Tensor
    version_N: Tensor
    advantage_R: Tensor
    weight_R: Tensor
    count_R: Tensor
    chunk_tokens: int = 0
    """Tokens per chunk of a large tree (`packed._ChunkedLogprobs`); 0: all."""
    sample_indices: tuple[int, ...] = ()
    """Indices of its rows among the samples of `pack_rank_share`."""

    def to(self, device: torch.device) -> MicroBatch:
        """Copy on `device`."""
        if self.ids_T.device == device:
            return self
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {name: v.to(device) for name, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **moved)


class PrefixTree(NamedTuple):
    """Places of row tokens in their prefix tree.

    >>> build_prefix_tree([(1, 2, 3), (1, 2, 4, 5), (9,)])
    PrefixTree(ids=[1, 2, 3, 4, 5, 9], positions=[0, 1, 2, 2, 3, 0], spans=(Span(start=0, stop=3, before=()), \
Span(start=3, stop=5, before=((0, 2),)), Span(start=5, stop=6, before=())), where=[[0, 1, 2], [0, 1, 3, 4], [5]])
    """

    ids: list[int]
    positions: list[int]
    """Ancestors per token."""
    spans: tuple[Span, ...]
    where: list[list[int]]
    """Places of each row's tokens in `ids`."""


def build_prefix_tree(rows: Sequence[Ids]) -> PrefixTree:
    """Build the prefix tree of `rows`."""
    ids: list[int] = []
    positions: list[int] = []
    spans: list[Span] = []
    where: list[list[int]] = [[] for _ in rows]
    path: tuple[tuple[int, int], ...] = ()
    places: list[int] = []
    for at, shared in _sort_rows(rows):
        row, start = rows[at], len(ids)
        if shared < len(row):
            spans.append(Span(start, start + len(row) - shared, _take_tokens(path, shared)))
            path = _join_runs(spans[-1].keys)
            places = [*places[:shared], *range(start, spans[-1].stop)]
            ids += row[shared:]
            positions += range(shared, len(row))
        where[at] = places[: len(row)]
    return PrefixTree(ids, positions, tuple(spans), where)


def _sort_rows(rows: Sequence[Ids]) -> list[tuple[int, int]]:
    """Row indices sorted by ids, each with the length of the prefix shared with the row before."""
    order = sorted(range(len(rows)), key=lambda at: tuple(rows[at]))
    shared = [count_common_prefix(rows[before], rows[at]) for before, at in pairwise(order)]
    return list(zip(order, [0, *shared], strict=False))  # without rows, only the 0 is left over


def _take_tokens(runs: Sequence[tuple[int, int]], tokens: int) -> tuple[tuple[int, int], ...]:
    prefix = []
    for start, stop in runs:
        if tokens > 0:
            prefix.append((start, min(stop, start + tokens)))
        tokens -= stop - start
    return tuple(prefix)


def _join_runs(runs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    *rest, last = runs
    if rest and rest[-1][1] == last[0]:
        return (*rest[:-1], (rest[-1][0], last[1]))
    return tuple(runs)


def count_distinct_tokens(rows: Sequence[Ids]) -> int:
    """Count tokens, shared prefixes once."""
    return sum(len(rows[at]) - shared for at, shared in _sort_rows(rows))


def cut_rows(rows: Sequence[Ids], micro_tokens: int, ranks: int = 1, *, tree_tokens: int = 0) -> list[list[int]]:
    """Cut `rows` into parts of at most `micro_tokens` distinct tokens, as ascending indices; a longer row is alone.

    Minimises computed tokens, then parts. Larger parts, up to `tree_tokens`, are computed in chunks.

    >>> cut_rows([(1, 2, 3), (5,), (1, 2, 4), (6, 7)], micro_tokens=4)
    [[0, 2], [1, 3]]
    """
    order, largest = _sort_rows(rows), max(micro_tokens, tree_tokens)
    parts = _cut_order(order, rows, micro_tokens, largest)
    if ranks > 1:  # find the smallest limit that needs no more rounds of one part per rank
        number = -(-len(parts) // ranks) * ranks
        low, high = 0, largest
        while high - low > 1:
            middle = (low + high) // 2
            smaller = _cut_order(order, rows, micro_tokens, middle)
            low, high, parts = (low, middle, smaller) if len(smaller) <= number else (middle, high, parts)
    return parts


def _cut_order(
    order: Sequence[tuple[int, int]], rows: Sequence[Ids], micro_tokens: int, largest: int
) -> list[list[int]]:
    # dynamic programming
    best: list[tuple[int, int, int]] = [(0, 0, 0)]
    """Best cut of the first n rows: cost, parts, start of the last part."""
    for stop in range(1, len(order) + 1):
        cuts: list[tuple[int, int, int]] = []
        fresh = 0  # tokens of the part, without those that its first row shares with the previous row
        for start in range(stop - 1, -1, -1):
            at, shared = order[start]
            fresh += len(rows[at]) - shared
            tokens = fresh + shared
            if tokens > largest and cuts:
                break
            # in forward passes: a backward pass takes two, and a tree in chunks is computed forward twice
            cost = 4 if tokens > micro_tokens and cuts else 3
            cuts.append((best[start][0] + cost * tokens, best[start][1] + 1, start))
        best.append(min(cuts))
    parts = []
    stop = len(order)
    while stop:
        start = best[stop][2]
        parts.append(sorted(at for at, _ in order[start:stop]))
        stop = start
    return parts[::-1]


def deal_minibatches(samples: Sequence[Sample], episodes: int, parts: int) -> list[tuple[list[Sample], int]]:
    """Deal episodes round-robin into `parts`: rows, and a share of `episodes` (some without rows).

    >>> rows = [Sample(name, (), (), (), (), 0.0) for name in "aabcd"]
    >>> [(" ".join(row.episode_id for row in part), count) for part, count in deal_minibatches(rows, 8, 3)]
    [('a a d', 3), ('b', 3), ('c', 2)]
    """
    order = {name: number for number, name in enumerate(dict.fromkeys(sample.episode_id for sample in samples))}
    parts_and_counts = [
        ([sample for sample in samples if order[sample.episode_id] % parts == part], len(range(part, episodes, parts)))
        for part in range(parts)
    ]
    return [(rows, count) for rows, count in parts_and_counts if rows]


def pack_rank_share(
    samples: Sequence[Sample], micro_tokens: int, rank: int = 0, ranks: int = 1, *, tree_tokens: int = 0
) -> tuple[list[MicroBatch], MicroBatch | None]:
    """Micro-batches of process `rank`, and an idle last one if needed. Raises ValueError for a malformed row."""
    for sample in samples:
        _check_sample(sample)
    parts = cut_rows([sample.ids for sample in samples], micro_tokens, ranks, tree_tokens=tree_tokens)
    mine = [
        replace(pack_samples([samples[at] for at in part], micro_tokens), sample_indices=tuple(part))
        for part in parts[rank::ranks]
    ]
    # Trees computed in chunks come first, as their gradients are not exchanged. An idle micro-batch may come last, as
    # processes that share a model must run it equally often.
    mine.sort(key=lambda batch: not batch.chunk_tokens)
    needs_idle = len(mine) < len(parts[::ranks]) or (ranks > 1 and bool(mine[-1].chunk_tokens))
    return mine, pack_samples([min(samples, key=lambda sample: len(sample.ids))]) if needs_idle else None


def pack_samples(samples: Sequence[Sample], micro_tokens: int = 0) -> MicroBatch:
    """Pack `samples` into one micro-batch, in chunks above `micro_tokens`."""
    ids, positions, spans, where = build_prefix_tree([sample.ids for sample in samples])
    at: list[int] = []
    target: list[int] = []
    row: list[int] = []
    recorded: list[float] = []
    version: list[int] = []
    for number, (sample, places) in enumerate(zip(samples, where, strict=True)):
        indices = [i for i, trained in enumerate(sample.trained) if trained]
        at += [places[i - 1] for i in indices]
        target += [sample.ids[i] for i in indices]
        row += [number] * len(indices)
        recorded += [sample.logprobs[i] for i in indices]
        version += [sample.versions[i] for i in indices]
    row_N = torch.tensor(row, dtype=torch.long)
    return MicroBatch(
        ids_T=torch.tensor(ids),
        positions_T=torch.tensor(positions),
        spans=spans,
        at_N=torch.tensor(at, dtype=torch.long),
        target_N=torch.tensor(target, dtype=torch.long),
        row_N=row_N,
        recorded_N=torch.tensor(recorded, dtype=torch.float32),
        version_N=torch.tensor(version, dtype=torch.long),
        advantage_R=torch.tensor([sample.advantage for sample in samples], dtype=torch.float32),
        weight_R=torch.tensor([sample.weight for sample in samples], dtype=torch.float32),
        count_R=torch.bincount(row_N, minlength=len(samples)).float(),
        chunk_tokens=micro_tokens // 2 if len(ids) > micro_tokens and len(samples) > 1 else 0,
    )


def make_scoring_samples(rows: Sequence[Sequence[int]]) -> list[Sample]:
    """Samples that score every token of `rows` except the first."""
    return [
        Sample("", tuple(row), (False,) + (True,) * (len(row) - 1), (0.0,) * len(row), (0,) * len(row), 0.0)
        for row in rows
    ]


def count_trained_tokens(samples: Sequence[Sample]) -> int:
    """Count trained tokens."""
    return sum(sum(sample.trained) for sample in samples)


def _check_sample(sample: Sample) -> None:
    sizes = {len(sample.ids), len(sample.trained), len(sample.logprobs), len(sample.versions)}
    if len(sizes) != 1:
        raise ValueError(f"a row of episode {sample.episode_id} has columns of different lengths: {sorted(sizes)}")
    if not any(sample.trained):
        raise ValueError(f"a row of episode {sample.episode_id} has no token to train")
    if sample.trained[0]:
        raise ValueError(f"a row of episode {sample.episode_id} trains its first token, which has no logprob")
