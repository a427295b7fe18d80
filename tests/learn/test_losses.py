"""Where ratios are clipped, on single tokens; whole losses and gradients are in test_reference.py."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coderepairrl.learn.losses import LOSSES, LossScale, TrainedTokens


@given(st.floats(0.2, 3), st.floats(-2, 2), st.floats(0, 0.5), st.floats(0, 0.5))
@settings(deadline=None)
def test_clipped_objective_equals_the_piecewise_form(ratio, advantage, low, high):
    t = TrainedTokens(
        torch.tensor([math.log(ratio)], dtype=torch.float64),
        torch.zeros(1, dtype=torch.float64),
        None,
        torch.tensor([0]),
        *(torch.tensor([value], dtype=torch.float64) for value in (advantage, 1.0, 1.0)),
    )
    bound = min(ratio, 1 + high) if advantage >= 0 else max(ratio, 1 - low)
    for name in ("grpo", "gspo"):
        assert LOSSES[name](t, LossScale(1, low, high)).value.item() == pytest.approx(-bound * advantage, abs=1e-9)


@pytest.mark.parametrize("name", ["gspo", "grpo", "dr_grpo"])
def test_clipped_ratios_have_no_gradient_and_are_counted(name):
    logp_N = torch.log(torch.tensor([1.3, 0.7, 1.3])).requires_grad_()
    advantage_R = torch.tensor([1.0, -1.0, -1.0])  # clipped above, clipped below, pulled back inside
    t = TrainedTokens(logp_N, torch.zeros(3), None, torch.arange(3), advantage_R, torch.ones(3), torch.ones(3))
    loss = LOSSES[name](t, LossScale(episodes=2, eps_low=0.1, eps_high=0.2, constant=32))
    loss.value.backward()
    assert (logp_N.grad != 0).tolist() == [False, False, True]
    assert loss.high.tolist() == [True, False, False]
    assert loss.low.tolist() == [False, True, False]
