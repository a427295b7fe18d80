"""Packing rows into micro-batches without padding: end to end in one sequence, each attending only to itself.

Tensor names carry shapes: T tokens of a micro-batch, R its rows, N its trained tokens. Only trained tokens reach a
loss, so a masked token contributes exactly nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from coderepairrl.types import Sample


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows end to end, and their trained tokens.

    `at_N` are the positions in T whose hidden states predict the trained tokens `target_N`; `row_N` is the row of
    each. `lengths` are those of the rows in tokens, `count_R` the numbers of trained tokens in them.
    """

    ids_T: Tensor
    positions_T: Tensor
    lengths: tuple[int, ...]
    at_N: Tensor
    target_N: Tensor
    row_N: Tensor
    recorded_N: Tensor
    """Logprobs that the engine recorded when it sampled."""
    version_N: Tensor
    advantage_R: Tensor
    weight_R: Tensor
    count_R: Tensor

    def to(self, device: torch.device) -> MicroBatch:
        """The same on `device`."""
        if self.ids_T.device == device:
            return self
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "lengths"}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})


def split(lengths: Sequence[int], budget: int) -> Iterator[slice]:
    """Slices of consecutive rows with at most `budget` tokens together; a longer row is alone.

    >>> [(part.start, part.stop) for part in split([3, 3, 9, 2], budget=6)]
    [(0, 2), (2, 3), (3, 4)]
    """
    start = total = 0
    for at, length in enumerate(lengths):
        if total + length > budget and at > start:
            yield slice(start, at)
            start, total = at, 0
        total += length
    if lengths:
        yield slice(start, len(lengths))


def micro_batches(samples: Sequence[Sample], budget: int) -> list[MicroBatch]:
    """`samples` in order, packed into at most `budget` tokens each. Raises ValueError for a malformed row."""
    for sample in samples:
        _check(sample)
    return [pack(samples[part]) for part in split([len(sample.ids) for sample in samples], budget)]


def minibatches(samples: Sequence[Sample], episodes: int, parts: int) -> list[tuple[list[Sample], int]]:
    """The rows of each of `parts` disjoint minibatches, and its number of the batch's `episodes`.

    Episodes are distributed round-robin, which spreads attempts at one task over the parts; all rows of an episode are
    in one part, and episodes without rows even out the numbers. Parts without rows are left out: they have no gradient.

    >>> rows = [Sample(name, (), (), (), (), 0.0) for name in "aabcd"]
    >>> [(" ".join(row.episode_id for row in part), count) for part, count in minibatches(rows, 8, 3)]
    [('a a d', 3), ('b', 3), ('c', 2)]
    """
    order = {name: number for number, name in enumerate(dict.fromkeys(sample.episode_id for sample in samples))}
    dealt = [
        ([sample for sample in samples if order[sample.episode_id] % parts == part], len(range(part, episodes, parts)))
        for part in range(parts)
    ]
    return [(rows, count) for rows, count in dealt if rows]


def share(samples: Sequence[Sample], budget: int, rank: int, ranks: int) -> tuple[list[MicroBatch], MicroBatch | None]:
    """The micro-batches of process `rank`, and an idle one if other processes have one more.

    Processes that share a model must run it equally often. So their numbers differ by at most one, and rows are
    distributed longest first to the part with the fewest tokens. A single process gets `micro_batches`.
    Raises what `micro_batches` raises.
    """
    if ranks == 1:
        return micro_batches(samples, budget), None
    for sample in samples:
        _check(sample)
    parts = deal([len(sample.ids) for sample in samples], budget, ranks)
    mine = [pack([samples[at] for at in part]) for part in parts[rank::ranks]]
    behind = len(mine) < len(parts[::ranks])
    return mine, pack([min(samples, key=lambda sample: len(sample.ids))]) if behind else None


def deal(lengths: Sequence[int], budget: int, ranks: int) -> list[list[int]]:
    """Indices of rows in parts of about equal length, of at most `budget` tokens each; a longer row is alone.

    The number of parts is a multiple of `ranks`, or that of the rows.

    >>> deal([3, 3, 9, 2], budget=9, ranks=2)
    [[2], [0, 1, 3]]
    """
    order = sorted(range(len(lengths)), key=lambda at: (-lengths[at], at))
    rounds = max(1, -(-sum(lengths) // (budget * ranks)))
    while True:
        parts: list[list[int]] = [[] for _ in range(min(rounds * ranks, len(lengths)))]
        totals = [0] * len(parts)
        for at in order:
            lightest = totals.index(min(totals))
            parts[lightest].append(at)
            totals[lightest] += lengths[at]
        if len(parts) == len(lengths) or all(t <= budget or len(p) == 1 for t, p in zip(totals, parts, strict=True)):
            return [sorted(part) for part in parts]
        rounds += 1


def pack(samples: Sequence[Sample]) -> MicroBatch:
    """One micro-batch of all `samples`."""
    at: list[int] = []
    row: list[int] = []
    recorded: list[float] = []
    version: list[int] = []
    start = 0
    for number, sample in enumerate(samples):
        indices = [i for i, trained in enumerate(sample.trained) if trained]
        at += [start + i - 1 for i in indices]
        row += [number] * len(indices)
        recorded += [sample.logprobs[i] for i in indices]
        version += [sample.versions[i] for i in indices]
        start += len(sample.ids)
    ids_T = torch.tensor([token for sample in samples for token in sample.ids])
    at_N = torch.tensor(at, dtype=torch.long)
    row_N = torch.tensor(row, dtype=torch.long)
    return MicroBatch(
        ids_T=ids_T,
        positions_T=torch.cat([torch.arange(len(sample.ids)) for sample in samples]),
        lengths=tuple(len(sample.ids) for sample in samples),
        at_N=at_N,
        target_N=ids_T[at_N + 1],
        row_N=row_N,
        recorded_N=torch.tensor(recorded, dtype=torch.float32),
        version_N=torch.tensor(version, dtype=torch.long),
        advantage_R=torch.tensor([sample.advantage for sample in samples], dtype=torch.float32),
        weight_R=torch.tensor([sample.weight for sample in samples], dtype=torch.float32),
        count_R=torch.bincount(row_N, minlength=len(samples)).float(),
    )


def scored(rows: Sequence[Sequence[int]]) -> list[Sample]:
    """`rows` of ids as samples whose every token but the first is "trained": for logprobs alone."""
    return [
        Sample("", tuple(row), (False,) + (True,) * (len(row) - 1), (0.0,) * len(row), (0,) * len(row), 0.0)
        for row in rows
    ]


def _check(sample: Sample) -> None:
    sizes = {len(sample.ids), len(sample.trained), len(sample.logprobs), len(sample.versions)}
    if len(sizes) != 1:
        raise ValueError(f"a row of episode {sample.episode_id} has columns of different lengths: {sorted(sizes)}")
    if not any(sample.trained):
        raise ValueError(f"a row of episode {sample.episode_id} has no token to train")
    if sample.trained[0]:
        raise ValueError(f"a row of episode {sample.episode_id} trains its first token, which has no logprob")
