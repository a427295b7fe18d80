"""Adapters on weights in 4 bits: an engine serves the same numbers, and all else is as with plain weights.

Where bitsandbytes is not installed, codes of 8 bits stand in for its own.
"""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec

import pytest
import safetensors.torch
import torch

from coderepairrl import models
from coderepairrl.config.schema import Lora
from coderepairrl.errors import UsageError
from coderepairrl.learn import LearnSettings, adapters
from coderepairrl.learn.learner import init_random, merge_adapter, round_model
from coderepairrl.learn.pack import pack_samples
from coderepairrl.learn.policy import Policy
from coderepairrl.learn.trainer import Trainer

LENGTHS = [30, 12, 45, 8, 21, 33]
LORA = Lora(rank=4, alpha=8)
HAS_NF4 = find_spec("bitsandbytes") is not None


@pytest.fixture(autouse=True)
def codes(monkeypatch):
    if not HAS_NF4:
        monkeypatch.setattr(adapters, "_quantise", packed)
        monkeypatch.setattr(adapters, "_dequantise", read)


def packed(weight):
    _, exponent = torch.frexp(weight.float().abs().max())
    numbers = torch.ldexp(weight.float(), 7 - exponent).round().clamp(-127, 127)
    return {"packed": numbers.to(torch.int8).flatten(), "exponent": exponent, "like": weight.new_empty(0)}


def read(codes):
    return torch.ldexp(codes["packed"].float(), codes["exponent"] - 7).to(codes["like"].dtype)


def settings(form="nf4", **more):
    return LearnSettings(**{"algorithm": "grpo", "lr": 1e-3, "lora": LORA, "quantise": form} | more)


def tensors(folder):
    return safetensors.torch.load_file(folder / "model.safetensors")


def largest_difference(ours, theirs):
    return max(abs(a - b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True))


@pytest.fixture
def plain(miniature, tmp_path):
    """The miniature with the numbers of its quantised weights, by precision."""

    def write(precision="fp32"):
        folder = tmp_path / precision
        if not folder.exists():
            round_model(miniature, folder, "nf4", precision)
        return folder

    return write


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_learner_has_the_numbers_that_are_written_for_the_engine(precision, miniature, plain, make_rows):
    folder, rows = plain(precision), [row.ids for row in make_rows(LENGTHS)]
    assert models.read_quantised_form(folder) == "nf4"
    before, after = tensors(miniature), tensors(folder)
    changed = {name for name in before if not torch.equal(before[name].to(after[name].dtype), after[name])}
    assert changed == {name for name in before if "_proj" in name}
    logprobs = [
        Trainer(where, settings(form, precision=precision)).logprobs(rows, 1.0)
        for where, form in ((miniature, "nf4"), (folder, "nf4"), (folder, "none"))
    ]
    assert logprobs[0] == logprobs[1] == logprobs[2]  # bit for bit: quantising twice changes nothing
    exact = Trainer(miniature, settings("none", precision=precision)).logprobs(rows, 1.0)
    assert 1e-4 < largest_difference(exact, logprobs[0]) < 0.5


def test_gradients_are_those_of_plain_weights_with_the_same_numbers(miniature, plain, make_rows):
    batch = pack_samples(make_rows(LENGTHS))

    def gradient(folder, **more):
        policy = Policy.load(folder, settings(**more))
        assert policy.probe_result.way == "trees"
        policy.logprobs(batch, 0.9).square().sum().backward()
        return {name: p.grad for name, p in policy.parameters.items()}

    expected = gradient(plain(), form="none")
    for more in ({}, {"gradient_checkpointing": True}):
        ours = gradient(miniature, **more)
        assert all((ours[name] - value).abs().max() <= 1e-6 for name, value in expected.items())
    assert max(value.abs().max().item() for value in expected.values()) > 1e-3


def test_a_step_learns_and_a_checkpoint_goes_on_bit_for_bit(miniature, make_rows, on_policy, tmp_path):
    trainer = Trainer(miniature, settings(beta=0.1))
    rows = on_policy(trainer, make_rows(LENGTHS))
    first = trainer.step(rows)
    assert first["mismatch_max"] < 1e-5
    assert first["kl"] == pytest.approx(0, abs=1e-6)  # the reference is the quantised base
    trainer.save(tmp_path / "c")
    resumed = Trainer(miniature, trainer.settings)
    resumed.restore(tmp_path / "c")
    trainer.offload()
    trainer.reload()
    for each in (trainer, resumed):
        each.step(rows)
    assert trainer.logprobs([rows[0].ids], 1.0) == resumed.logprobs([rows[0].ids], 1.0)
    assert trainer.logprobs([rows[0].ids], 1.0) != Trainer(miniature, settings()).logprobs([rows[0].ids], 1.0)


def test_merged_weights_have_the_trained_logprobs(miniature, plain, make_rows, tmp_path):
    trainer = Trainer(miniature, settings())
    trainer.step(make_rows(LENGTHS))
    rows = [row.ids for row in make_rows(LENGTHS)]
    path, _, _ = trainer.publish(tmp_path / "whole")
    adapters, _, _ = trainer.publish(tmp_path / "adapters", "adapter")
    merge_adapter(plain(), adapters, tmp_path / "merged", "fp32")
    for folder in (path, tmp_path / "merged"):
        assert not models.read_quantised_form(folder)
        served = Trainer(folder, settings("none")).logprobs(rows, 1.0)
        assert largest_difference(served, trainer.logprobs(rows, 1.0)) < 1e-5


def test_a_checkpoint_with_codes_is_refused_by_its_method(miniature, tmp_path):
    shutil.copytree(miniature, tmp_path / "m")
    config = json.loads((miniature / "config.json").read_text()) | {"quantization_config": {"quant_method": "awq"}}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="quant_method=awq") as refused:
        Policy.load(tmp_path / "m", settings("none"))
    assert "model.quantise=nf4" in refused.value.fix


def test_experts_are_refused(tmp_path):
    from transformers import Qwen3MoeConfig

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    Qwen3MoeConfig(vocab_size=64, num_key_value_heads=1, head_dim=16, **sizes, **experts).save_pretrained(tmp_path)
    init_random(tmp_path, tmp_path / "model", 0)
    with pytest.raises(UsageError, match="experts"):
        Policy.load(tmp_path / "model", settings())
