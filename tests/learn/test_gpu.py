"""What the learner does on a GPU, as far as a CPU can show it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Lfm2Config, Lfm2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from coderepairrl.learn import LearnSettings, attention, probe, recurrence
from coderepairrl.learn.learner import LearnerService
from coderepairrl.learn.pack import pack_samples
from coderepairrl.learn.policy import Policy
from coderepairrl.learn.strategy import SingleProcess
from coderepairrl.learn.trainer import Trainer
from coderepairrl.types import Sample

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES |= {"intermediate_size": 64, "max_position_embeddings": 128}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU, as far as torch says; what is switched on for it is switched off again."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    filled = torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def test_a_learner_that_is_given_gpus_needs_a_torch_that_sees_them(miniature, monkeypatch):
    """A large model that learned on the CPU instead would look like a slow GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    start = {"op": "start", "model": str(miniature), "settings": LearnSettings().model_dump(), "gpu": True}
    refused = LearnerService().answer(start)
    assert refused["kind"] == "prerequisite" and "sees none" in refused["error"]


@pytest.mark.parametrize("algorithm", ["gspo", "grpo"])
def test_a_step_has_only_deterministic_kernels(algorithm, miniature, make_rows, found, monkeypatch):
    """Torch refuses others: those that a CPU has, too, in a step with a KL term and all weights trained."""
    assert SingleProcess(LearnSettings()).device.type == "cuda"
    assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.undo()
    trainer = Trainer(miniature, LearnSettings(algorithm=algorithm, beta=0.1, gradient_checkpointing=True))
    assert trainer.step(make_rows([30, 12, 45]))["loss"] != 0.0


def test_heads_get_keys_of_their_own_in_float32_on_a_gpu_alone(miniature, make_rows, monkeypatch):
    tensor = SimpleNamespace(dtype=torch.float32, device=torch.device("cuda"))
    assert attention._needs_repeated_heads(tensor) and not attention._needs_repeated_heads(torch.zeros(1))
    assert not attention._needs_repeated_heads(SimpleNamespace(dtype=torch.bfloat16, device=tensor.device))
    batch = pack_samples(branching(make_rows([30, 12, 45])))
    policy = Policy.load(miniature)
    values = [policy.logprobs(batch, 1.0)]
    monkeypatch.setattr(
        attention, "_TreeAttention", SimpleNamespace(apply=lambda *inputs: attention._attend_gathered(*inputs[:-1]))
    )
    for spread in (False, True):
        monkeypatch.setattr(attention, "_needs_repeated_heads", lambda query, spread=spread: spread)
        seen: list[bool] = []

        def kernel(*arguments: torch.Tensor, enable_gqa: bool, seen: list[bool] = seen, **options: Any) -> torch.Tensor:
            seen.append(enable_gqa)
            return scaled_dot_product_attention(*arguments, enable_gqa=enable_gqa, **options)

        monkeypatch.setattr(attention, "scaled_dot_product_attention", kernel)
        values.append(policy.logprobs(batch, 1.0))
        assert set(seen) == {not spread}
    assert all((value - values[0]).abs().max().item() < 1e-5 for value in values[1:])


def branching(rows: list[Sample]) -> list[Sample]:
    """All begin as the longest does."""
    longest = max((row.ids for row in rows), key=len)
    return [replace(row, ids=longest[: len(row.ids) // 2] + row.ids[len(row.ids) // 2 :]) for row in rows]


def test_a_deep_model_is_probed_by_its_first_layers(tmp_path, monkeypatch):
    ran: set[int] = set()

    def counted(module, *arguments, **options):
        ran.add(module.layer_idx)
        return attention.tree_attention(module, *arguments, **options)

    monkeypatch.setattr(probe, "TREE", "counted")
    AttentionInterface.register("counted", counted)
    Qwen3ForCausalLM(Qwen3Config(**SIZES, num_hidden_layers=9, head_dim=16)).save_pretrained(tmp_path)
    assert Policy.load(tmp_path).model.config.num_hidden_layers == 9
    assert ran == {0, 1, 2, 3}


def test_a_kind_of_layer_that_comes_late_is_probed(tmp_path, monkeypatch):
    """Where nothing resets its convolution, rows are given one by one."""
    monkeypatch.setattr(recurrence, "install_tree_functions", lambda model: False)
    kinds = ["full_attention"] * 6 + ["conv", "full_attention"]
    config = Lfm2Config(**SIZES, num_hidden_layers=8, layer_types=kinds, pad_token_id=0, initializer_range=0.2)
    Lfm2ForCausalLM(config).save_pretrained(tmp_path)
    assert Policy.load(tmp_path).probe_result.way == "rows"
