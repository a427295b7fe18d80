"""Small versions of transformers' architectures: random weights, a few layers, sliding windows shorter than a row.

Initial weights are larger than by default, so that what a layer attends to matters.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coderepairrl.plan.sizing.architecture import MODEL_TYPES

VOCABULARY = 265
WINDOW = 11
"""Tokens that a layer with a sliding window sees."""
SWITCH = 16
"""Row length from which length-dependent rotary embeddings take other frequencies."""
SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512},
    **{"initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
LATENT = {
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
    **{"num_key_value_heads": 4, "head_dim": ...},
}
"""Multi-head latent attention, whose values have another width than its keys."""
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
DELTA = {
    **{"initializer_range": 0.1},  # rounding errors grow along a recurrence: with 0.2 to 1e-4 even in a row alone
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"]},
}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
SHARED = {"shared_expert_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8}


@dataclass(frozen=True)
class Architecture:
    """Peculiarities of a model, and how its rows are trained: as prefix trees, or one by one."""

    model_type: str
    config: dict[str, Any]
    way: str = "trees"
    chunked: bool = True
    """Whether a tree is also computed chunk by chunk."""

    rounding: float = 1e-5
    """Largest difference between rows of a tree and rows alone."""
    special: str = "-"
    """Peculiarities, in words."""

    def row(self, name: str) -> str:
        """Write its line of docs/reference/models.md."""
        chunks = "yes" if self.chunked and self.way == "trees" else "no"
        planned = "yes" if self.model_type in MODEL_TYPES else "no"
        return f"| {name} | `{self.model_type}` | {self.way} | {chunks} | {planned} | {self.special} |"

    def write(self, folder: Path) -> Path:
        """Write its ``config.json`` to `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        # `...` leaves out one of the usual sizes
        config = {key: value for key, value in {**SIZES, **self.config}.items() if value is not Ellipsis}
        (folder / "config.json").write_text(json.dumps({"model_type": self.model_type, **config}))
        return folder


EACH = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
NANO = {
    **{**ALTERNATING, **EACH, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": [48] * 4},
    **{"layer_types": ALTERNATING["layer_types"] * 2, "activation_sparsity_pattern": [0.0] * 4},
}
"""Layers that take keys and values of earlier ones."""
KIMI = {
    **LATENT,
    **LOCAL,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
}
NEMOTRON = {
    **{"hybrid_override_pattern": "M*M-", "num_hidden_layers": 4, "mamba_num_heads": 4, "mamba_head_dim": 16},
    **{"ssm_state_size": 8, "n_groups": 2, "chunk_size": 8},
}
JAMBA = {
    **{"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8, "mamba_dt_rank": 4},
    **{"use_mamba_kernels": False},
}
ARCHITECTURES = {
    "Qwen2": Architecture("qwen2", {}),
    "Qwen3 MoE": Architecture("qwen3_moe", EXPERTS, special="experts"),
    "Qwen3-Next": Architecture(
        "qwen3_next",
        {**DELTA, **EXPERTS, **SHARED},
        chunked=False,
        # row by row, transformers' own differs by 8e-5 from itself when its chunks have 7 tokens instead of 64
        rounding=1e-4,
        special="Gated DeltaNet, experts",
    ),
    "Qwen3.5": Architecture("qwen3_5_text", DELTA, chunked=False, special="Gated DeltaNet"),
    "Qwen3.5 MoE": Architecture(
        "qwen3_5_moe_text",
        {**DELTA, **EXPERTS, **SHARED},
        chunked=False,
        rounding=1e-4,  # row by row, transformers' own in float32 differs by 4.4e-5 from itself in float64
        special="Gated DeltaNet, experts",
    ),
    "GLM-4": Architecture("glm4", {}),
    "GLM-4.5": Architecture("glm4_moe", {**ROUTED, "first_k_dense_replace": 1}, special="experts"),
    "GLM-4.7 Flash": Architecture("glm4_moe_lite", {**ROUTED, **LATENT}, special="latent attention, experts"),
    "DeepSeek-V3": Architecture(
        "deepseek_v3", {**ROUTED, **LATENT, "first_k_dense_replace": 1}, special="latent attention, experts"
    ),
    "gpt-oss": Architecture("gpt_oss", {**ALTERNATING, **LOCAL}, chunked=False, special="sinks, windows, experts"),
    "Llama": Architecture("llama", {}),
    "Llama 4": Architecture(
        "llama4_text",
        {**LOCAL, "num_experts_per_tok": 1, "intermediate_size_mlp": 48, "attention_chunk_size": WINDOW},
        way="rows",
        special="chunked attention, experts",
    ),
    "Mistral": Architecture("mistral", {"sliding_window": None}),
    "Mistral with a window": Architecture("mistral", {"sliding_window": WINDOW}, chunked=False, special="windows"),
    "Ministral 3": Architecture("ministral3", {"sliding_window": None}),
    "Mixtral": Architecture("mixtral", {**LOCAL, "sliding_window": None}, special="experts"),
    "Gemma 2": Architecture(
        "gemma2", {**ALTERNATING, "query_pre_attn_scalar": 8}, way="rows", special="soft caps, windows"
    ),
    "Gemma 3": Architecture(
        "gemma3_text", {**ALTERNATING, "query_pre_attn_scalar": 8}, chunked=False, special="windows"
    ),
    "Gemma 3n": Architecture(
        "gemma3n_text", {**NANO, "laurel_rank": 8}, chunked=False, special="windows, layers that share keys"
    ),
    "Gemma 4": Architecture(
        "gemma4_text",
        {**ALTERNATING, **EACH, "global_head_dim": 16},
        chunked=False,
        special="windows, two widths of heads",
    ),
    "Kimi Linear": Architecture(
        "kimi_linear", {**DELTA, **KIMI}, chunked=False, special="Kimi Delta Attention, latent attention, experts"
    ),
    "MiniMax-M1": Architecture(
        "minimax",
        {**LOCAL, "layer_types": ["linear_attention", "full_attention"]},
        way="rows",
        special="lightning attention, experts",
    ),
    "MiniMax-M2": Architecture("minimax_m2", LOCAL, special="experts"),
    "Nemotron-H": Architecture("nemotron_h", NEMOTRON, chunked=False, special="Mamba-2"),
    "Granite 3": Architecture("granite", {"logits_scaling": 8.0}, special="scaled logits"),
    "Granite 4": Architecture(
        "granitemoehybrid",
        {**MAMBA, **LOCAL, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 16},
        chunked=False,
        rounding=3e-5,  # row by row, transformers' own in float32 differs by 8.5e-6 from itself in float64
        special="Mamba-2, experts",
    ),
    "Falcon-H1": Architecture(
        "falcon_h1", {**MAMBA, "mamba_d_ssm": 64}, chunked=False, special="Mamba-2 beside attention"
    ),
    "Jamba": Architecture("jamba", JAMBA, way="rows", special="Mamba-1, experts"),
    "LFM2": Architecture(
        "lfm2", {"layer_types": ["conv", "full_attention"]}, chunked=False, special="short convolutions"
    ),
    "LFM2 MoE": Architecture(
        "lfm2_moe",
        {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
        chunked=False,
        special="short convolutions, experts",
    ),
    "OLMo 3": Architecture("olmo3", ALTERNATING, chunked=False, special="windows"),
    "OLMo Hybrid": Architecture("olmo_hybrid", DELTA, chunked=False, special="Gated DeltaNet"),
    "Phi-3": Architecture("phi3", {"sliding_window": None}),
    "Phi-4-mini": Architecture(
        "phi3",
        {
            **{"sliding_window": None, "original_max_position_embeddings": SWITCH},
            "rope_parameters": {
                **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": SWITCH},
                **{"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]},
            },
        },
        way="rows",
        special="rotary frequencies by a row's length",
    ),
    "Llama with dynamic RoPE": Architecture(
        "llama",
        {
            "max_position_embeddings": SWITCH,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
        way="rows",
        special="rotary frequencies by a row's length",
    ),
    "Seed-OSS": Architecture("seed_oss", {}),
    "SmolLM3": Architecture("smollm3", {}),
    "Command R7B": Architecture(
        "cohere2", {**ALTERNATING, "logit_scale": 0.25}, chunked=False, special="windows, scaled logits"
    ),
}
