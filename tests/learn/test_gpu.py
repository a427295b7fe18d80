"""The learner's code for GPUs, as far as a CPU can test it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM

from coderepairrl.learn import LearnSettings, attention, recurrence
from coderepairrl.learn.learner import LearnerService
from coderepairrl.learn.pack import build_prefix_tree
from coderepairrl.learn.policy import Policy
from coderepairrl.learn.strategy import SingleProcess
from coderepairrl.learn.trainer import Trainer

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES |= {"intermediate_size": 64, "max_position_embeddings": 128}


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch report a GPU; afterwards, switch off what was switched on for it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    filled = torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def test_a_learner_with_gpus_needs_a_torch_that_sees_them(miniature, monkeypatch):
    """A large model that learned on the CPU instead would look like a slow GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    start = {"op": "start", "model": str(miniature), "settings": LearnSettings().model_dump(), "gpu": True}
    refused = LearnerService().answer(start)
    assert refused["kind"] == "prerequisite" and "sees none" in refused["error"]


@pytest.mark.parametrize("algorithm", ["gspo", "grpo"])
def test_a_step_uses_deterministic_kernels_only(algorithm, miniature, make_rows, fake_gpu, monkeypatch):
    """Torch raises for others, on a CPU too; the step has a KL term and trains all weights."""
    assert SingleProcess(LearnSettings()).device.type == "cuda"
    assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.undo()
    trainer = Trainer(miniature, LearnSettings(algorithm=algorithm, beta=0.1, gradient_checkpointing=True))
    assert trainer.step(make_rows([30, 12, 45]))["loss"] != 0.0


def test_keys_are_repeated_for_each_head_in_float32_on_a_gpu_alone():
    """The numbers are in test_tree.py."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    for dtype, device, repeated in (
        (torch.float32, gpu, True),
        (torch.float32, cpu, False),
        (torch.bfloat16, gpu, False),
    ):
        assert attention._needs_repeated_heads(SimpleNamespace(dtype=dtype, device=device)) == repeated


@pytest.mark.parametrize("repeated", [False, True])
def test_repeated_keys_avoid_the_kernel_for_grouped_heads(repeated, monkeypatch):
    """In float32 on a GPU it needs memory quadratic in a row's length."""
    kernel, grouped = attention.scaled_dot_product_attention, set()

    def record(*tensors, enable_gqa, **options):
        grouped.add(enable_gqa)
        return kernel(*tensors, enable_gqa=enable_gqa, **options)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", record)
    monkeypatch.setattr(attention, "_needs_repeated_heads", lambda query: repeated)
    tree = build_prefix_tree([(1, 2, 3), (1, 2, 4)])
    query, key, value = (torch.zeros(1, heads, len(tree.ids), 8) for heads in (6, 2, 2))
    attention._attend_gathered(query, key, value, tree.spans, None)
    assert grouped == {not repeated}


def test_a_late_layer_of_another_kind_is_probed(tmp_path, monkeypatch):
    """Without the functions that reset its convolution, rows are computed one by one."""
    monkeypatch.setattr(recurrence, "install_tree_functions", lambda model: None)
    kinds = ["full_attention"] * 6 + ["conv", "full_attention"]
    config = Lfm2Config(**SIZES, num_hidden_layers=8, layer_types=kinds, pad_token_id=0, initializer_range=0.2)
    Lfm2ForCausalLM(config).save_pretrained(tmp_path)
    assert Policy.load(tmp_path).probe_result.way == "rows"
