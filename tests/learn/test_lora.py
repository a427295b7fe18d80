"""Adapters start as zero, alone are trained, and are read by peft, transformers and engines."""

from __future__ import annotations

import hashlib

import pytest
import safetensors.torch
import torch
from peft import PeftModel
from scoring import score_row
from transformers import AutoModelForCausalLM

from coderepairrl.config import load_config
from coderepairrl.config.schema import Lora
from coderepairrl.errors import UsageError
from coderepairrl.learn import LearnSettings
from coderepairrl.learn.policy import Policy
from coderepairrl.learn.trainer import Trainer
from coderepairrl.plan.learner import make_learn_settings

LENGTHS = [30, 12, 45, 8]
SETTINGS = LearnSettings(algorithm="grpo", lr=1e-2, lora=Lora(rank=4, alpha=8))


@pytest.fixture(scope="module")
def trained(miniature, make_rows):
    trainer = Trainer(miniature, SETTINGS)
    for seed in range(2):
        trainer.step(make_rows(LENGTHS, seed))
    return trainer


def state(trainer):
    return {name: tensor.clone() for name, tensor in trainer.policy.parameters.items()}


@torch.no_grad()
def score(model, rows):
    return torch.cat([score_row(model, row.ids) for row in rows])


def ours(trainer, rows):
    return torch.tensor([p for row in trainer.logprobs([row.ids for row in rows], 1.0) for p in row])


def test_adapters_begin_with_the_runs_seed(miniature):
    def initial(seed):
        config = load_config("hello", ["train.lora={rank=4, alpha=8}", f"run.seed={seed}"])
        return state(Trainer(miniature, make_learn_settings(config)))

    first, again, other = initial(1), initial(1), initial(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    differing = {name for name in first if not torch.equal(first[name], other[name])}
    assert differing == {name for name in first if "lora_A" in name}  # the other matrices begin as zero


def test_adapters_start_as_nothing_and_are_all_that_is_trained(miniature, make_rows):
    rows = make_rows(LENGTHS)
    plain, trainer = Trainer(miniature, LearnSettings(algorithm="grpo")), Trainer(miniature, SETTINGS)
    before = {name: p.clone() for name, p in trainer.policy.model.named_parameters()}
    assert torch.equal(ours(plain, rows), ours(trainer, rows))
    assert {name.split(".")[-3] for name in trainer.policy.parameters} == {"lora_A", "lora_B"}
    assert len(trainer.policy.parameters) == 2 * 7 * 2  # two matrices, seven layers of linear maps, two blocks
    trainer.step(rows)
    moved = {name for name, p in trainer.policy.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == set(trainer.policy.parameters)
    assert {id(p) for p in trainer.optimizer.state} == {id(p) for p in trainer.policy.parameters.values()}
    with trainer.policy.use_initial_weights():
        assert torch.equal(ours(trainer, rows), ours(plain, rows))  # adapters off: the reference, exactly
    assert not torch.equal(ours(trainer, rows), ours(plain, rows))


def test_a_checkpoint_is_what_peft_and_transformers_read(miniature, make_rows, trained, tmp_path):
    trained.save(tmp_path / "c")
    rows = make_rows(LENGTHS, 5)
    expected = ours(trained, rows)
    base = AutoModelForCausalLM.from_pretrained(miniature, dtype=torch.float32)
    assert (score(PeftModel.from_pretrained(base, tmp_path / "c"), rows) - expected).abs().max().item() < 1e-5
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "c", dtype=torch.float32)  # finds its base by itself
    assert (score(whole, rows) - expected).abs().max().item() < 1e-5
    assert (tmp_path / "c" / "tokenizer.json").is_file()
    with pytest.raises(UsageError, match="adapters, not a model"):
        Policy.load(tmp_path / "c")


def test_published_merged_or_as_adapter(miniature, make_rows, trained, tmp_path):
    before = {name: p.clone() for name, p in trained.policy.model.named_parameters()}
    merged, version, _ = trained.publish(tmp_path / "merged")
    adapter, _, checksum = trained.publish(tmp_path / "adapter", "adapter")
    assert version == 2
    assert all(torch.equal(p, before[name]) for name, p in trained.policy.model.named_parameters())
    file = adapter / "adapter_model.safetensors"
    assert checksum == hashlib.sha256(file.read_bytes()).hexdigest()
    base = AutoModelForCausalLM.from_pretrained(miniature, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()
    written = safetensors.torch.load_file(merged / "model.safetensors")
    assert written.keys() == safetensors.torch.load_file(miniature / "model.safetensors").keys()
    assert all((theirs[name] - tensor).abs().max().item() < 1e-6 for name, tensor in written.items())
    alone = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    rows = make_rows(LENGTHS, 5)
    assert (score(alone, rows) - ours(trained, rows)).abs().max().item() < 1e-5
    with pytest.raises(ValueError, match="no adapters"):
        Trainer(miniature, LearnSettings()).publish(tmp_path, "adapter")


def test_refuses_targets_that_the_model_does_not_have(miniature):
    with pytest.raises(UsageError, match="no linear layer 'query'"):
        Trainer(miniature, LearnSettings(lora=Lora(targets=("q_proj", "query"))))
