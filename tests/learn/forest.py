"""A batch whose rows share prefixes in every way, and logprobs and gradients of the batch and of its rows alone."""

from __future__ import annotations

from pathlib import Path

import torch
from scoring import score_row
from transformers import AutoModelForCausalLM

from coderepairrl.learn.pack import MicroBatch, pack_samples
from coderepairrl.learn.policy import Policy
from coderepairrl.types import Sample


def make_forest() -> list[Sample]:
    """Make rows of two prefixes: branches on three levels, of one token, equal rows, and a row that is a prefix."""
    draw = torch.Generator().manual_seed(5)

    def text(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 256, (n,), generator=draw).tolist())

    a, turn, more, b = text(14), text(6), text(5), text(9)
    ids = [
        a + turn + more + text(7),
        a + turn + more + (1,),
        b + text(3),
        a + turn + (2,),
        a + turn + (3,),
        a + text(12),
        b,
        a + turn + text(8),
        b + text(10),
        a + turn + more,
        a + turn + (2,),
        text(4),
    ]
    shared = [len(a), len(b)]
    rows = []
    for number, row in enumerate(ids):
        on = [bool(i) and (i in shared or bool(torch.rand((), generator=draw) < 0.6)) for i in range(len(row))]
        on[-1] = True
        logprobs = tuple((-5.6 + 0.2 * torch.randn((), generator=draw)).item() if i else 0.0 for i in on)
        versions = tuple(0 if i else -1 for i in on)
        rows.append(Sample(f"e{number // 2}", row, tuple(on), logprobs, versions, 1.0 - 0.3 * number, 0.5))
    return rows


ROWS = make_forest()


def weigh(logp_N: torch.Tensor) -> torch.Tensor:
    """Weigh each token differently, so that no two branches are exchangeable."""
    return (logp_N * torch.linspace(0.5, 1.5, len(logp_N), dtype=logp_N.dtype)).sum()


def run_batch(policy: Policy, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logp_N = policy.logprobs(batch, 1.0)
    weigh(logp_N).backward()
    gradients = {name: p.grad.double() for name, p in policy.parameters.items() if p.grad is not None}
    policy.model.zero_grad()
    return logp_N.detach().double(), gradients


def run_rows(policy: Policy, **options: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Like `run_batch`, with a micro-batch for each row."""
    parts, sizes = [], [sum(row.trained) for row in ROWS]
    weights = torch.linspace(0.5, 1.5, sum(sizes)).split(sizes)
    for row, weight in zip(ROWS, weights, strict=True):
        logp_N = policy.logprobs(pack_samples([row]), 1.0, **options)
        (logp_N * weight).sum().backward()
        parts.append(logp_N.detach().double())
    return torch.cat(parts), {name: p.grad.double() for name, p in policy.parameters.items() if p.grad is not None}


def run_alone(folder: Path, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute row by row with transformers' own attention. Shorter rows first: dynamic RoPE keeps the longest one's."""
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **plain)
    parts = dict[int, torch.Tensor]()
    for number, row in sorted(enumerate(ROWS), key=lambda numbered: len(numbered[1].ids)):
        parts[number] = score_row(model, row.ids)[torch.tensor(row.trained[1:])]
    logp_N = torch.cat([parts[number] for number in range(len(ROWS))])
    weigh(logp_N).backward()
    return logp_N.detach().double(), {
        name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None
    }


def compare_runs(
    ours: tuple[torch.Tensor, dict[str, torch.Tensor]], theirs: tuple[torch.Tensor, dict[str, torch.Tensor]]
):
    """Largest differences of logprobs, and of gradients as a fraction of their tensor's largest."""
    assert ours[1].keys() == theirs[1].keys()
    gradients = ((ours[1][name] - value).abs().max() / value.abs().max() for name, value in theirs[1].items())
    return (ours[0] - theirs[0]).abs().max().item(), max(gradients).item()
