"""Random rows for the learner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from coderepairrl.types import Sample

MakeRows = Callable[..., list[Sample]]


@pytest.fixture(scope="session")
def make_rows() -> MakeRows:
    """``make_rows(lengths, seed=0)``: rows with gaps in their masks and random old logprobs, one per episode."""
    import torch

    def make(lengths: list[int], seed: int = 0) -> list[Sample]:
        generator = torch.Generator().manual_seed(seed)
        samples = []
        for number, n in enumerate(lengths):
            ids = torch.randint(0, 256, (n,), generator=generator).tolist()
            on = (torch.rand(n, generator=generator) < 0.6).tolist()
            on[0], on[-1] = False, True
            old = (-5.6 + 0.3 * torch.randn(n, generator=generator)).tolist()
            samples.append(
                Sample(
                    f"e{number}",
                    tuple(ids),
                    tuple(on),
                    tuple(value if trained else 0.0 for value, trained in zip(old, on, strict=True)),
                    tuple(0 if trained else -1 for trained in on),
                    advantage=torch.randn((), generator=generator).item(),
                )
            )
        return samples

    return make


@pytest.fixture(scope="session")
def on_policy() -> Callable[..., list[Sample]]:
    """``on_policy(trainer, rows)``: the rows with the trainer's own logprobs as the engine's."""

    def record(trainer, rows: list[Sample]) -> list[Sample]:  # type: ignore[no-untyped-def]
        scored = trainer.logprobs([row.ids for row in rows], 1.0)
        return [
            replace(
                row,
                logprobs=tuple(p if on else 0.0 for p, on in zip([0.0, *logprobs], row.trained, strict=True)),
                versions=tuple(trainer.version if on else -1 for on in row.trained),
            )
            for row, logprobs in zip(rows, scored, strict=True)
        ]

    return record
