"""Supervised fine-tuning: cross-entropy as torch computes it, and divergences from other models.

References score every row alone through transformers' own attention, without packing, in float64.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gradient import gradient_of_step
from test_distributed import close_to
from torch.nn.functional import cross_entropy, log_softmax
from transformers import AutoModelForCausalLM

from coderepairrl.config.schema import Lora
from coderepairrl.learn.learner import init_random
from coderepairrl.learn.losses import kl_divergence
from coderepairrl.learn.settings import LearnSettings
from coderepairrl.learn.trainer import Trainer
from coderepairrl.types import Sample
from learners import start_learner

LENGTHS = [19, 7, 30, 12]
LORA = Lora(rank=4, alpha=8)
SFT = LearnSettings(algorithm="sft", micro_tokens=40, lr=1e-2, max_grad_norm=1e9)
MakeRows = Callable[..., list[Sample]]


@pytest.fixture(scope="module")
def rows(make_rows: MakeRows) -> list[Sample]:
    """Rows of which the first two belong to one example and have weights."""
    first, second, *others = make_rows(LENGTHS, seed=3)
    return [replace(first, weight=0.7), replace(second, weight=0.3, episode_id="e0"), *others]


@pytest.fixture(scope="module")
def teacher(miniature: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The miniature, twice as wide, with other random weights."""
    home = tmp_path_factory.mktemp("teacher")
    shape = Path(shutil.copytree(miniature, home / "shape"))
    config = json.loads((shape / "config.json").read_text())
    (shape / "config.json").write_text(json.dumps(config | {"hidden_size": 2 * config["hidden_size"]}))
    init_random(shape, home / "model", seed=5)
    return home / "model"


def logits(model: Any, row: Sample, temperature: float = 1.0) -> torch.Tensor:
    """Logits that predict a row's trained tokens."""
    at = [i - 1 for i, trained in enumerate(row.trained) if trained]
    return model(input_ids=torch.tensor([row.ids])).logits[0, at] / temperature


def targets(row: Sample) -> torch.Tensor:
    return torch.tensor([token for token, trained in zip(row.ids, row.trained, strict=True) if trained])


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    p, q = log_softmax(p, -1), log_softmax(q, -1)
    return (p.exp() * (p - q)).sum(-1)


def load_float64(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def check_gradient_of(model: Any, gradients: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, parameter in model.named_parameters():
        if name in gradients:
            assert (gradients[name] - parameter.grad).abs().max().item() < tolerance, name
    assert sum(gradient.abs().max().item() for gradient in gradients.values()) > 1e-3


def compute_loss(model: Any, rows: list[Sample], weight: float, other: Any = None, teacher: Any = None) -> float:
    """Cross-entropy plus `weight` times the KL from `other`, or the KL from `teacher`; also computes gradients."""
    tokens = sum(row.weight * sum(row.trained) for row in rows)
    loss = torch.zeros((), dtype=torch.float64)
    for row in rows:
        ours = logits(model, row)
        term = cross_entropy(ours, targets(row), reduction="none") if teacher is None else 0.0
        with torch.no_grad():
            from_other = None if other is None else logits(other, row)
            from_teacher = None if teacher is None else logits(teacher, row)
        term = term + (0.0 if from_teacher is None else divergence(from_teacher, ours))
        term = term + (0.0 if from_other is None else weight * divergence(from_other, ours))
        loss = loss + row.weight * term.sum() / tokens
    loss.backward()
    return loss.item()


def test_the_loss_and_its_gradient_are_cross_entropy(
    miniature: Path, rows: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics, gradient = gradient_of_step(Trainer(miniature, SFT), rows, monkeypatch)
    model = load_float64(miniature)
    assert metrics["loss"] == pytest.approx(compute_loss(model, rows, 0.0), abs=1e-6)
    check_gradient_of(model, gradient, 1e-6)
    right = [(logits(model, row).argmax(-1) == targets(row)).double() for row in rows]
    nll = [cross_entropy(logits(model, row), targets(row), reduction="none") for row in rows]
    assert metrics["accuracy"] == pytest.approx(torch.cat(right).mean().item(), abs=1e-9)
    assert metrics["nll"] == pytest.approx(torch.cat(nll).mean().item(), abs=1e-6)
    assert not {"ratio_mean", "clip_low", "entropy", "denominator", "staleness_max", "kl"} & metrics.keys()


@pytest.mark.parametrize("lora", [None, LORA])
def test_the_kl_term_is_against_the_initial_weights(
    lora: Lora | None, miniature: Path, rows: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few steps have moved the policy away from them."""
    trainer = Trainer(miniature, SFT.with_changes(beta=0.5, lora=lora))
    assert trainer.step(rows)["kl"] == pytest.approx(0.0, abs=1e-6)
    trainer.step(rows)
    path, *_ = trainer.publish(tmp_path)
    moved, initial = load_float64(path), load_float64(miniature)
    before = {name: value.detach().double().clone() for name, value in trainer.policy.parameters.items()}
    metrics, gradient = gradient_of_step(trainer, rows, monkeypatch)
    assert metrics["loss"] == pytest.approx(compute_loss(moved, rows, 0.5, initial), abs=2e-6)
    assert metrics["kl"] > 1e-3
    if lora is None:
        check_gradient_of(moved, gradient, 5e-6)
    else:
        weights = {name: parameter.grad for name, parameter in moved.named_parameters()}
        for name, a in before.items():
            if ".lora_A." in name:  # the chain rule, by which the gradient of the whole weight becomes B's
                whole = weights[name.partition(".lora_A.")[0] + ".weight"]
                expected = LORA.scaling * whole @ a.T
                assert (gradient[name.replace(".lora_A.", ".lora_B.")] - expected).abs().max().item() < 5e-6, name


def test_a_teacher_of_collected_tokens_is_distilled(
    miniature: Path, teacher: Path, rows: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(miniature, SFT.with_changes(teacher=str(teacher)))
    before = trainer.measure(rows)
    metrics, gradient = gradient_of_step(trainer, rows, monkeypatch)
    model = load_float64(miniature)
    assert metrics["loss"] == pytest.approx(compute_loss(model, rows, 0.0, teacher=load_float64(teacher)), abs=1e-6)
    check_gradient_of(model, gradient, 1e-6)
    for _ in range(8):
        trainer.step(rows)
    assert trainer.measure(rows)["teacher_kl"] < 0.7 * before["teacher_kl"]
    assert before["teacher_kl"] == pytest.approx(metrics["teacher_kl"], abs=1e-6)


def test_a_teacher_may_pad_the_vocabulary_otherwise() -> None:
    ours, theirs = torch.randn(3, 11), torch.randn(3, 9)
    assert torch.allclose(kl_divergence(ours, theirs), kl_divergence(ours[:, :9], theirs))


def test_measuring_equals_a_step_and_changes_no_weight(miniature: Path, rows: list[Sample]) -> None:
    trainer = Trainer(miniature, SFT.with_changes(beta=0.1))
    before = {name: value.clone() for name, value in trainer.policy.parameters.items()}
    measured = trainer.measure(rows)
    assert all(torch.equal(value, before[name]) for name, value in trainer.policy.parameters.items())
    assert trainer.version == 0
    step = trainer.step(rows)
    assert {name: step[name] for name in measured} == pytest.approx(measured, abs=1e-6)
    with pytest.raises(ValueError, match="empty"):
        trainer.measure([])


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo"])
def test_a_teacher_of_sampled_tokens_is_added_to_the_reward(
    algorithm: str, miniature: Path, teacher: Path, rows: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient is the weighted sum of the algorithm's and that of KL(student || teacher) in float64."""
    constant = 16 if algorithm == "dr_grpo" else None
    plain = LearnSettings(algorithm=algorithm, micro_tokens=40, max_completion_tokens=constant, temperature=0.8)
    _, alone = gradient_of_step(Trainer(miniature, plain), rows, monkeypatch)
    both = plain.with_changes(teacher=str(teacher), teacher_weight=0.3)
    metrics, gradient = gradient_of_step(Trainer(miniature, both), rows, monkeypatch)
    student, wide = load_float64(miniature), load_float64(teacher)
    episodes, terms = len({row.episode_id for row in rows}), []
    for row in rows:
        with torch.no_grad():
            taught = logits(wide, row, 0.8)
        distance = divergence(logits(student, row, 0.8), taught)
        terms.append(distance.detach())
        share = 1 / 16 if constant else row.weight / sum(row.trained)
        (share * distance.sum() / episodes).backward()
    for name, parameter in student.named_parameters():
        if name in gradient:
            expected = 0.7 * alone[name] + 0.3 * parameter.grad
            assert (gradient[name] - expected).abs().max().item() < 2e-6, name
    assert metrics["teacher_kl"] == pytest.approx(torch.cat(terms).mean().item(), abs=1e-5)


@pytest.mark.parametrize("lora", [None, LORA])
async def test_two_processes_are_one(
    lora: Lora | None, miniature: Path, teacher: Path, make_rows: MakeRows, tmp_path: Path
) -> None:
    settings = SFT.with_changes(beta=0.1, lora=lora, teacher=str(teacher), teacher_weight=0.5)
    alone = Trainer(miniature, settings)
    async with start_learner(miniature, tmp_path, settings.with_changes(processes=2)) as two:
        for lengths, seed in (([30, 12, 45], 1), ([19], 2)):
            rows = make_rows(lengths, seed)
            close_to(await two.measure(rows), alone.measure(rows))
            close_to(await two.step(rows), alone.step(rows))
