"""The gradient of a step of the real trainer, taken where its optimiser would use it; the weights stay."""

from __future__ import annotations

import pytest
import torch


def gradient_of_step(trainer, samples, monkeypatch: pytest.MonkeyPatch, episodes=None, tokens=None):
    """The step's metrics, and its gradient by the name of the weights."""
    seen = {}

    def keep(parameters, *_, **__):
        seen.update({name: p.grad.clone() for name, p in trainer.policy.parameters.items()})
        return torch.tensor(0.0)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", keep)
        metrics = trainer.step(samples, episodes, tokens)
    return metrics, seen
