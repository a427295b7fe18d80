"""Small models by their config.json, with random weights, and the memory that autograd keeps of a forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from coderepairrl.learn import LearnSettings
from coderepairrl.learn.attention import TREE
from coderepairrl.learn.pack import make_scoring_samples, pack_samples
from coderepairrl.learn.policy import Policy
from coderepairrl.plan.sizing.architecture import Architecture
from coderepairrl.plan.sizing.learner import compute_learner_memory
from coderepairrl.types import Sample

Raw = Mapping[str, Any]
SMALL: Raw = {
    **{"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "head_dim": 16},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 40_960},
    "tie_word_embeddings": False,
}
SPARSE: Raw = {
    **{**SMALL, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}


def read_shape(raw: Raw) -> Architecture:
    """Read the architecture as the plan does."""
    architecture = Architecture.from_config(raw)
    assert architecture is not None
    return architecture


def build_model(raw: Raw, settings: LearnSettings) -> PreTrainedModel:
    """Build a model with random weights, in the type in which a learner loads them."""
    half = settings.precision == "bf16" and settings.lora is not None
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**raw),
        attn_implementation=TREE,
        dtype=torch.bfloat16 if half else torch.float32,
    )
    return model


def count_saved(raw: Raw, settings: LearnSettings, tokens: int) -> int:
    """Count the bytes that autograd keeps of a forward pass of two rows, each storage once."""
    policy = Policy(build_model(raw, settings), Path(), settings)
    weights = {p.untyped_storage()._cdata for p in policy.model.parameters()}
    seen: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            seen[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rows = ([(start + at) % raw["vocab_size"] for at in range(tokens // 2)] for start in (0, 1))
        policy.logprobs(pack_samples(make_scoring_samples(rows)), 1.0)
    return sum(storage.nbytes() for storage in seen.values())


def compare_depth(raw: Raw, more: Raw, settings: LearnSettings, tokens: int) -> tuple[int, int]:
    """Bytes that autograd keeps for the further layers of `more` beyond those of `raw`, measured and planned: the first
    layer is left out, since with frozen weights it keeps less."""
    settings = settings.with_changes(micro_tokens=tokens)
    small, large = (
        compute_learner_memory(read_shape(each), settings, longest=tokens // 2).activations for each in (raw, more)
    )
    return count_saved(more, settings, tokens) - count_saved(raw, settings, tokens), large - small


def make_rows(tokens: int, count: int) -> list[Sample]:
    """Make rows of `tokens` tokens, all trained except the first."""
    made = []
    for number in range(count):
        (row,) = make_scoring_samples([[(7 * i + number) % 96 for i in range(tokens)]])
        made.append(replace(row, episode_id=f"e{number}", logprobs=(0.0, *[-4.5] * (tokens - 1)), advantage=1.0))
    return made
