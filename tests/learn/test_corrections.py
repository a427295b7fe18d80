"""Weights for what another policy sampled: against the formulas, and what they leave alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from coderepairrl.learn.corrections import weights
from hypothesis import given
from hypothesis import strategies as st

from coderepairrl.errors import ConfigError
from coderepairrl.learn import LearnSettings
from coderepairrl.learn.losses import LOSSES, Scale, Trained
from coderepairrl.learn.trainer import Trainer

ROW_N = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])
COUNT_R = torch.tensor([3.0, 4.0, 2.0], dtype=torch.float64)
ADVANTAGE_R = torch.tensor([1.5, -0.7, 0.4], dtype=torch.float64)
CAP, BOUND = 1.3, 1.2
SCALE = Scale(episodes=3, eps_low=0.1, eps_high=0.15, constant=20)


def draw(seed):
    generator = torch.Generator().manual_seed(seed)
    return [-2 + 0.3 * torch.randn(len(ROW_N), generator=generator, dtype=torch.float64) for _ in range(3)]


def decoupled(name, logp, proximal, behaviour, kind, bound):
    """The decoupled objective of PPO, row by row and token by token (arXiv 2110.00641, eq. 12)."""
    total = 0.0
    for row in range(3):
        at = (row == ROW_N).nonzero()[:, 0].tolist()
        apart = [(proximal[i] - behaviour[i]).item() for i in at]
        mean = sum(apart) / len(at)
        if bound is not None and not 1 / bound <= math.exp(mean) <= bound:
            continue
        weight = [min(math.exp(mean if kind == "sequence" else d), CAP) if kind != "off" else 1.0 for d in apart]

        def clipped(ratio, row=row):
            bounded = ratio.clamp(1 - SCALE.eps_low, 1 + SCALE.eps_high)
            return torch.min(ratio * ADVANTAGE_R[row], bounded * ADVANTAGE_R[row])

        if name == "gspo":
            total = total - sum(weight) / len(at) * clipped((logp[at] - proximal[at]).mean().exp())
        else:
            each = sum(w * clipped((logp[i] - proximal[i]).exp()) for w, i in zip(weight, at, strict=True))
            total = total - each / (SCALE.constant if name == "dr_grpo" else len(at))
    return total / 3


@pytest.mark.parametrize("name", ["gspo", "grpo", "dr_grpo"])
@pytest.mark.parametrize(("kind", "bound"), [("token", None), ("sequence", BOUND), ("off", BOUND), ("token", BOUND)])
def test_the_loss_is_the_decoupled_one_and_so_is_its_gradient(name, kind, bound):
    left_out = 0
    for seed in range(5):
        logp, proximal, behaviour = draw(seed)
        ours, theirs = logp.clone().requires_grad_(), logp.clone().requires_grad_()
        found = weights(proximal, behaviour, ROW_N, COUNT_R, kind, CAP, bound)
        left_out += int(found.masked_R.sum())
        trained = Trained(ours, proximal, None, ROW_N, ADVANTAGE_R, torch.ones(3), COUNT_R, found.weight_N)
        loss, expected = LOSSES[name](trained, SCALE).value, decoupled(name, theirs, proximal, behaviour, kind, bound)
        assert loss.item() == pytest.approx(float(torch.as_tensor(expected).detach()), abs=1e-12)
        gradient = torch.autograd.grad(loss, ours)[0]
        wanted = torch.autograd.grad(expected, theirs)[0] if torch.is_tensor(expected) else torch.zeros_like(logp)
        assert torch.allclose(gradient, wanted, atol=1e-12)
    assert (left_out > 0) == (bound is not None)


def test_what_is_masked_teaches_nothing_and_still_counts_as_an_episode(miniature, make_rows, on_policy):
    """A step with a row that is left out has the weights of a step without it, averaged over as many episodes."""
    settings = LearnSettings(algorithm="grpo", old_logprobs="recomputed", mismatch_mask=1.5, lr=1e-2)
    trainer, control = Trainer(miniature, settings), Trainer(miniature, settings.but(mismatch_mask=None))
    rows = on_policy(trainer, make_rows([40, 30, 50]))
    far = replace(
        rows[1], logprobs=tuple(p - 1.0 if on else p for p, on in zip(rows[1].logprobs, rows[1].trained, strict=True))
    )
    metrics = trainer.step([rows[0], far, rows[2]], 3)
    control.step([rows[0], rows[2]], 3)
    assert metrics["mismatch_masked"] == pytest.approx(1 / 3)
    assert "mismatch_cut" not in metrics
    for ours, theirs in zip(trainer.policy.parameters.values(), control.policy.parameters.values(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


@given(st.lists(st.floats(-2.0, 2.0), min_size=9, max_size=9))
def test_no_weight_exceeds_the_cap_and_every_row_within_the_bound_stays(differences):
    old = torch.tensor(differences, dtype=torch.float64)
    for kind in ("token", "sequence"):
        found = weights(old, torch.zeros(9), ROW_N, COUNT_R, kind, CAP, BOUND)
        means = [old[row == ROW_N].mean().item() for row in range(3)]
        assert found.weight_N.max() <= CAP
        assert found.masked_R.tolist() == [abs(mean) > math.log(BOUND) for mean in means]
        assert all((found.weight_N[row == ROW_N] == 0).all() == masked for row, masked in enumerate(found.masked_R))


def test_the_diagnostics_are_those_of_the_ratios(miniature, make_rows, on_policy):
    trainer = Trainer(miniature, LearnSettings(algorithm="grpo", micro_tokens=64))
    rows = on_policy(trainer, make_rows([40, 30, 50]))
    metrics = trainer.measure(rows)
    assert metrics["ess"] == pytest.approx(1.0) and metrics["behaviour_kl"] == pytest.approx(0.0, abs=1e-6)
    moved = [replace(row, logprobs=tuple(p - 0.1 * (i % 7) for i, p in enumerate(row.logprobs))) for row in rows]
    apart = [0.1 * (i % 7) for row in rows for i, on in enumerate(row.trained) if on]
    ratios = [math.exp(difference) for difference in apart]
    metrics = trainer.measure(
        [replace(row, versions=tuple(v - (at > 0) for v in row.versions)) for at, row in enumerate(moved)]
    )
    assert metrics["ess"] == pytest.approx(sum(ratios) ** 2 / len(ratios) / sum(r * r for r in ratios), rel=1e-4)
    assert metrics["behaviour_ratio_max"] == pytest.approx(max(ratios), rel=1e-4)
    assert metrics["behaviour_ratio_min"] == pytest.approx(1.0, rel=1e-4)
    expected = sum(r - d - 1 for r, d in zip(ratios, apart, strict=True)) / len(ratios)
    assert metrics["behaviour_kl"] == pytest.approx(expected, rel=1e-3)
    older = sum(sum(row.trained) for row in rows[1:])
    assert metrics["staleness_mean"] == pytest.approx(older / len(ratios)) and metrics["staleness_max"] == 1


def test_a_mask_is_refused_where_it_would_do_nothing():
    with pytest.raises(ConfigError, match=r"mismatch_mask=2 .*nothing to correct"):
        LearnSettings(mismatch_mask=2.0)
    with pytest.raises(ConfigError, match="mismatch_mask=2"):
        LearnSettings(algorithm="sft", mismatch_mask=2.0)
    assert LearnSettings(old_logprobs="recomputed", mismatch_mask=2.0).mismatch_mask == 2.0
