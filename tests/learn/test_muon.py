"""Muon as the learner has it: the published update, whole checkpoints, and what it is refused with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from coderepairrl.learn.muon import Muon
from torch import Tensor

from coderepairrl.errors import ConfigError
from coderepairrl.learn import LearnSettings
from coderepairrl.learn.trainer import Trainer
from coderepairrl.types import Sample

MakeRows = Callable[..., list[Sample]]
SETTINGS = LearnSettings(algorithm="sft", optimizer="muon", lr=1e-3, muon_lr=0.01, warmup_updates=1, weight_decay=0.1)


def published(weight: Tensor, gradients: list[Tensor], lr: float, decay: float) -> Tensor:
    """Jordan et al., 2024, in float64: Nesterov momentum, five quintic iterations, decoupled decay."""
    momentum = torch.zeros_like(weight)
    for gradient in gradients:
        momentum = 0.95 * momentum + 0.05 * gradient
        x = 0.05 * gradient + 0.95 * momentum
        wide = x.T if x.shape[0] > x.shape[1] else x
        wide = wide / wide.norm()
        for _ in range(5):
            gram = wide @ wide.T
            wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
        x = wide.T if x.shape[0] > x.shape[1] else wide
        weight = (1 - lr * decay) * weight - lr * max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5 * x
    return weight


@pytest.mark.parametrize("shape", [(6, 6), (12, 5), (5, 12)])
def test_a_matrix_moves_as_published_and_as_torch_has_it_in_bfloat16(shape: tuple[int, int]) -> None:
    made = torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn(shape, generator=made) for _ in range(4))
    ours, theirs = (start.clone().requires_grad_() for _ in range(2))
    optimizers = (
        Muon([{"params": [ours], "muon": True, "weight_decay": 0.1}], lr=0.02, betas=(0.9, 0.99)),
        torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95),
    )
    for gradient in gradients:
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    exact = published(start.double(), [each.double() for each in gradients], 0.02, 0.1)
    assert (ours.double() - exact).abs().max() < 1e-6
    assert (ours - theirs).abs().max() < 2e-3 < (ours - start).abs().max()


def test_matrices_of_layers_are_muons_and_all_else_is_adamws(miniature: Path, make_rows: MakeRows) -> None:
    """Both at their own rate, with the schedule of one: the first of two updates of warm-up has half of it."""
    trainer = Trainer(miniature, SETTINGS)
    trainer.step(make_rows([20, 30]))
    rates = {id(p): group["lr"] for group in trainer.optimizer.param_groups for p in group["params"]}
    for name, parameter in trainer.policy.parameters.items():
        matrix = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
        assert rates[id(parameter)] == pytest.approx(0.005 if matrix else 0.0005), name
        assert set(trainer.optimizer.state[parameter]) == (
            {"momentum"} if matrix else {"step", "exp_avg", "exp_avg_sq"}
        )


def test_a_checkpoint_goes_on_bit_for_bit(miniature: Path, make_rows: MakeRows, tmp_path: Path) -> None:
    straight, resumed = Trainer(miniature, SETTINGS), Trainer(miniature, SETTINGS)
    straight.step(make_rows([20, 30], 0))
    straight.save(tmp_path / "1")
    expected = [straight.step(make_rows([25, 12], seed)) for seed in (1, 2)]
    resumed.step(make_rows([9, 9], 7))  # a state to be forgotten
    resumed.restore(tmp_path / "1")
    assert [resumed.step(make_rows([25, 12], seed)) for seed in (1, 2)] == expected
    ours, theirs = (dict(trainer.policy.state()) for trainer in (straight, resumed))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"optimizer": "adamw", "muon_lr": 0.02}, "muon_lr=0.02 has no meaning for optimizer=adamw"),
        ({"lora": {}}, "whole models"),
        ({"processes": 2, "strategy": "fsdp2"}, "strategy=fsdp2 divides the moments of optimizer=adamw alone"),
        ({"processes": 2, "strategy": "zero2"}, "strategy=zero2 divides"),
    ],
)
def test_what_it_does_not_do_is_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        LearnSettings(**{"algorithm": "sft", "optimizer": "muon"} | given)
