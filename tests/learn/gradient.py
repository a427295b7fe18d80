"""The gradient of a step of the real trainer, captured before clipping, and its comparison with another."""

from __future__ import annotations

import pytest
import torch


def gradient_of_step(trainer, samples, monkeypatch: pytest.MonkeyPatch, episodes=None, tokens=None):
    """Make a step; returns its metrics, and its gradient by the name of the weights."""
    seen = {}

    def keep(parameters, *_, **__):
        seen.update({name: p.grad.clone() for name, p in trainer.policy.parameters.items()})
        return torch.tensor(0.0)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", keep)
        metrics = trainer.step(samples, episodes, tokens)
    return metrics, seen


def check_gradient(ours, theirs, tolerance, least=1e-3):
    """Assert that both are equal within `tolerance`, and `theirs` is larger than `least` somewhere."""
    assert ours.keys() == theirs.keys()
    assert max(value.abs().max().item() for value in theirs.values()) > least
    off = {name: (ours[name] - value).abs().max().item() for name, value in theirs.items()}
    assert max(off.values()) < tolerance, max(off, key=off.__getitem__)
