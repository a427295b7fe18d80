"""The losses against hand loops over tokens, and what must not change them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coderepairrl.learn.losses import LOSSES, Scale, Trained

SCALE = Scale(episodes=2, eps_low=0.1, eps_high=0.2, beta=0.05, constant=32)
# rows 0 and 1 are the fork of one episode, row 2 another episode
ROWS = ((0, 0, 0), (1, 1, 1, 1, 1, 1), (2, 2))


def trained(*, ref=True, seed=0, requires_grad=True):
    generator = torch.Generator().manual_seed(seed)
    row_N = torch.tensor([number for row in ROWS for number in row])
    counts = [len(row) for row in ROWS]
    logp_N = -2 + 0.3 * torch.randn(len(row_N), generator=generator, dtype=torch.float64)
    return Trained(
        logp_N=logp_N.requires_grad_(requires_grad),
        old_N=-2 + 0.3 * torch.randn(len(row_N), generator=generator, dtype=torch.float64),
        ref_N=-2 + 0.3 * torch.randn(len(row_N), generator=generator, dtype=torch.float64) if ref else None,
        row_N=row_N,
        advantage_R=torch.tensor([1.5, 1.5, -0.8], dtype=torch.float64),
        weight_R=torch.tensor([3 / 9, 6 / 9, 1.0], dtype=torch.float64),
        count_R=torch.tensor(counts, dtype=torch.float64),
    )


SMALL = replace(SCALE, eps_low=0.01, eps_high=0.02, tokens=11, delta=1.3)


@pytest.mark.parametrize("name", sorted({*LOSSES} - {"sft", "cispo"}))
def test_gradient_equals_finite_differences(name):
    """All but those whose gradient is stopped somewhere."""
    t = trained()
    loss = LOSSES[name](t, SMALL)
    loss.value.backward()
    assert name == "reinforce" or 0 < (loss.low | loss.high).sum() < len(loss.low)
    for i in range(len(t.logp_N)):
        values = []
        for step in (1e-6, -1e-6):
            moved = t.logp_N.detach().clone()
            moved[i] += step
            fields = {n: getattr(t, n) for n in ("old_N", "ref_N", "row_N", "advantage_R", "weight_R", "count_R")}
            values.append(LOSSES[name](Trained(moved, **fields), SMALL).value.item())
        assert t.logp_N.grad[i].item() == pytest.approx((values[0] - values[1]) / 2e-6, abs=1e-7)


@given(st.floats(0.2, 3), st.floats(-2, 2), st.floats(0, 0.5), st.floats(0, 0.5))
@settings(deadline=None)
def test_clipped_objective_equals_the_piecewise_form(ratio, advantage, low, high):
    t = Trained(
        torch.tensor([math.log(ratio)], dtype=torch.float64),
        torch.zeros(1, dtype=torch.float64),
        None,
        torch.tensor([0]),
        *(torch.tensor([value], dtype=torch.float64) for value in (advantage, 1.0, 1.0)),
    )
    bound = min(ratio, 1 + high) if advantage >= 0 else max(ratio, 1 - low)
    for name in ("grpo", "gspo"):
        assert LOSSES[name](t, Scale(1, low, high)).value.item() == pytest.approx(-bound * advantage, abs=1e-9)


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_forks_do_not_weigh_more(name):
    """On policy, an episode pulls with a total gradient of its advantage however it is cut into rows."""
    t = trained(ref=False)
    t = Trained(t.logp_N, t.logp_N.detach(), None, t.row_N, t.advantage_R, t.weight_R, t.count_R)
    LOSSES[name](t, SCALE).value.backward()
    gradient = t.logp_N.grad
    assert gradient[:9].tolist() == pytest.approx([-1.5 / 2 / 9] * 9)  # as one row of nine tokens would have
    assert gradient[9:].tolist() == pytest.approx([0.8 / 2 / 2] * 2)


@pytest.mark.parametrize("name", ["gspo", "grpo", "dr_grpo"])
def test_clipped_ratios_have_no_gradient_and_are_counted(name):
    count = torch.tensor([1.0, 1.0, 1.0])
    logp_N = torch.log(torch.tensor([1.3, 0.7, 1.3])).requires_grad_()
    advantage_R = torch.tensor([1.0, -1.0, -1.0])  # clipped above, clipped below, pulled back inside
    t = Trained(logp_N, torch.zeros(3), None, torch.arange(3), advantage_R, torch.ones(3), count)
    loss = LOSSES[name](t, SCALE)
    loss.value.backward()
    assert (logp_N.grad != 0).tolist() == [False, False, True]
    assert loss.high.tolist() == [True, False, False]
    assert loss.low.tolist() == [False, True, False]
