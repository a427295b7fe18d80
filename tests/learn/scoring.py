"""Logprobs by transformers' own forward pass, one row at a time, and a change of a model's weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def score_row(model, ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Logprobs of all tokens but the first."""
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0]


def perturb(model) -> None:
    """Change the weights of `model`, so that a KL term between it and the policy has a gradient."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
