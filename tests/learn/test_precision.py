"""Types, rounding and learning with bfloat16, a float32 head and moments of 8 bits."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import safetensors.torch
import torch

from coderepairrl.config.schema import Lora
from coderepairrl.errors import PrerequisiteError
from coderepairrl.learn import LearnSettings
from coderepairrl.learn.learner import init_random
from coderepairrl.learn.pack import pack_samples
from coderepairrl.learn.policy import Policy
from coderepairrl.learn.settings import require_packages
from coderepairrl.learn.trainer import Trainer
from coderepairrl.processes.installs import install_extra

LENGTHS = [30, 12, 45, 8, 21, 33]
LORA = Lora(rank=4, alpha=8)


def flat(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.policy.parameters.values()])


def test_bf16_computes_in_bfloat16_and_trains_in_float32(miniature, make_rows, tmp_path):
    rows = make_rows(LENGTHS)
    exact = Trainer(miniature, LearnSettings(algorithm="grpo", lr=1e-3))
    for lora in (None, LORA):
        trainer = Trainer(miniature, LearnSettings(algorithm="grpo", lr=1e-3, precision="bf16", lora=lora))
        dtypes = {p.requires_grad: p.dtype for p in trainer.policy.model.parameters()}
        assert dtypes == ({True: torch.float32} if lora is None else {True: torch.float32, False: torch.bfloat16})
        a, b = (torch.tensor(t.logprobs([rows[0].ids], 1.0)[0]) for t in (exact, trainer))
        assert a.dtype == b.dtype == torch.float32
        assert 0 < (a - b).abs().max().item() < 0.05  # another precision, the same model
        trainer.step(rows)
        assert {v.dtype for s in trainer.optimizer.state.values() for v in s.values()} == {torch.float32}
        path, _, _ = trainer.publish(tmp_path / str(lora is None))
        assert {t.dtype for t in safetensors.torch.load_file(path / "model.safetensors").values()} == {torch.bfloat16}
        trainer.save(tmp_path / "c")
        resumed = Trainer(miniature, trainer.settings)
        resumed.restore(tmp_path / "c")
        assert resumed.step(rows) == trainer.step(rows)


@pytest.fixture(scope="module")
def confident(tmp_path_factory):
    """A network with logits up to about 30, as large as those of a trained model."""
    from transformers import Qwen3Config

    folder = tmp_path_factory.mktemp("confident")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    Qwen3Config(
        vocab_size=2000,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.6,
        tie_word_embeddings=False,
        **sizes,
    ).save_pretrained(folder)
    init_random(folder, folder / "model", 0)
    return folder / "model"


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_a_float32_head_rounds_no_logit(lora, confident, make_rows):
    """Compare with float64 on the same hidden states; `-rP` prints the errors of docs/guides/memory.md."""
    batch = pack_samples(make_rows([120, 80]))
    policy = Policy.load(confident, LearnSettings(precision="bf16", lora=lora))
    with torch.no_grad():
        logprobs = policy.logprobs(batch, 1.0)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = policy._packed.hidden(batch)[batch.at_N]
        weight = policy.model.get_output_embeddings().weight.bfloat16()  # as an engine has it
        logits = hidden.double() @ weight.double().T
        exact = logits.log_softmax(-1).gather(1, batch.target_N[:, None])[:, 0]
    largest = (logprobs - exact).abs().max().item()
    print(f"logits up to {logits.abs().max():.0f}, logprobs off by up to {largest:.1g}")
    assert largest < 1e-4


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_gradients_of_a_float32_head_are_those_of_float64(lora, confident):
    """Gradients of hidden states, and of its own weights if these are trained."""
    policy = Policy.load(confident, LearnSettings(precision="bf16", lora=lora))
    weight = policy.model.get_output_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 128, generator=generator).bfloat16().float()  # so that their gradient is not rounded
    target = torch.randint(0, 2000, (50,), generator=generator)
    ours = hidden.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        policy._packed._compute_logprobs(ours, target, 0.9).square().sum().backward()
    exact, served = hidden.double().requires_grad_(), weight.detach().bfloat16().double().requires_grad_()
    (exact @ served.T / 0.9).log_softmax(-1).gather(1, target[:, None]).square().sum().backward()
    assert (ours.grad - exact.grad).abs().max().item() < 1e-5 * exact.grad.abs().max().item()
    if lora is None:
        assert (weight.grad - served.grad).abs().max().item() < 1e-5 * served.grad.abs().max().item()
    else:
        assert weight.grad is None


@pytest.mark.real
@pytest.mark.parametrize("lora", [None, Lora(rank=64)])
def test_moments_of_8_bits_train_and_resume(lora, miniature, make_rows, on_policy, tmp_path):
    pytest.importorskip("bitsandbytes")
    settings = LearnSettings(algorithm="grpo", lr=1e-3, max_grad_norm=1e9, optimizer="adamw_8bit", lora=lora)
    small, exact = Trainer(miniature, settings), Trainer(miniature, settings.with_changes(optimizer="adamw"))
    rows = [replace(row, advantage=1.0) for row in on_policy(small, make_rows(LENGTHS))]
    start, ours, theirs = flat(small), *([t.step(rows)["loss"] for _ in range(4)] for t in (small, exact))
    assert ours == pytest.approx(theirs, abs=0.02) and ours[3] < ours[2] < ours[1] < ours[0] - 0.01
    moved, expected = flat(small) - start, flat(exact) - start
    assert (moved @ expected / (moved.norm() * expected.norm())).item() > 0.98
    dtypes = {p.numel() >= 4096: small.optimizer.state[p]["state1"].dtype for p in small.policy.parameters.values()}
    assert dtypes == {True: torch.uint8, False: torch.float32}

    small.save(tmp_path / "c")
    resumed = Trainer(miniature, settings)
    resumed.restore(tmp_path / "c")
    for _ in range(2):
        assert resumed.step(rows) == small.step(rows)
    assert torch.equal(flat(resumed), flat(small))


@pytest.mark.parametrize(
    ("package", "setting", "options"),
    [
        ("deepspeed", "train.strategy=zero2", {"strategy": "zero2", "processes": 2}),
        ("bitsandbytes", "train.optimizer=adamw_8bit", {"optimizer": "adamw_8bit"}),
        ("bitsandbytes", "model.quantise=nf4", {"quantise": "nf4", "lora": LORA}),
    ],
)
def test_a_missing_package_is_named_with_the_setting_that_needs_it(package, setting, options, monkeypatch):
    for name in ("deepspeed", "bitsandbytes", "bitsandbytes.optim"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PrerequisiteError, match=f"{setting} needs the package {package}") as refused:
        require_packages(LearnSettings(**options))
    assert refused.value.fix == install_extra(package)
