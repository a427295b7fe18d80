"""Where ratios are clipped, on single tokens; whole losses and gradients are in test_reference.py."""

from __future__ import annotations

import pytest
import torch

from coderepairrl.learn.losses import LOSSES, LossScale, TrainedTokens


@pytest.mark.parametrize("name", ["gspo", "grpo"])
def test_clipped_ratios_have_no_gradient_and_are_counted(name):
    logp_N = torch.log(torch.tensor([1.3, 0.7, 1.3])).requires_grad_()
    advantage_R = torch.tensor([1.0, -1.0, -1.0])  # clipped above, clipped below, pulled back inside
    t = TrainedTokens(logp_N, torch.zeros(3), None, torch.arange(3), advantage_R, torch.ones(3), torch.ones(3))
    loss = LOSSES[name](t, LossScale(episodes=2, eps_low=0.1, eps_high=0.2, constant=32))
    loss.value.backward()
    assert (logp_N.grad != 0).tolist() == [False, False, True]
    assert loss.high.tolist() == [True, False, False]
    assert loss.low.tolist() == [False, True, False]
