"""Dimensions of models from their published config.json.

Qwen3.5 and 3.6 are without their vision part. Sources: transformers' defaults of ``Qwen3_5TextConfig`` (9B) and
``Qwen3_5MoeTextConfig`` (35B-A3B); THUDM/slime (scripts/models/qwen3.5-4B.sh and others); for linear attention's heads
and the context, copies of config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coderepairrl.plan.sizing.architecture import Architecture
from coderepairrl.plan.sizing.families import Raw


def _qwen3(hidden: int, width: int, layers: int, heads: int, *, tied: bool = False, **more: Any) -> Raw:
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 40_960,
        "dtype": "bfloat16",
        **more,
    }


def _qwen35(hidden: int, layers: int, kv_heads: int, *, tied: bool = False, **more: Any) -> Raw:
    return {
        "model_type": "qwen3_5_text",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "vocab_size": 248_320,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 262_144,
        "dtype": "bfloat16",
        **more,
    }


_MOE: dict[str, Any] = {
    **{"model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8},
    **{"moe_intermediate_size": 768, "norm_topk_prob": True},
}
_MOE35: dict[str, Any] = {
    **{"model_type": "qwen3_5_moe_text", "num_experts": 256, "num_experts_per_tok": 8},
    **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
}
PUBLISHED: Mapping[str, Raw] = {
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen3-4B": _qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen3-8B": _qwen3(4096, 12_288, 36, 32),
    "Qwen3-14B": _qwen3(5120, 17_408, 40, 40),
    "Qwen3-32B": _qwen3(5120, 25_600, 64, 64),
    "Qwen3-30B-A3B": _qwen3(2048, 6144, 48, 32, **_MOE),
    "Qwen3.5-0.8B": _qwen35(
        1024, 24, 2, tied=True, intermediate_size=3584, num_attention_heads=8, linear_num_value_heads=16
    ),
    "Qwen3.5-4B": _qwen35(2560, 32, 4, tied=True, intermediate_size=9216),
    "Qwen3.5-9B": _qwen35(4096, 32, 4, intermediate_size=12_288),
    **dict.fromkeys(
        ("Qwen3.5-27B", "Qwen3.6-27B"),
        _qwen35(5120, 64, 4, intermediate_size=17_408, num_attention_heads=24, linear_num_value_heads=48),
    ),
    **dict.fromkeys(("Qwen3.5-35B-A3B", "Qwen3.6-35B-A3B"), _qwen35(2048, 40, 2, **_MOE35)),
}
"""Contents of config.json, by the last part of a model's name."""


def _make_architecture(raw: Raw) -> Architecture:
    architecture = Architecture.from_config(raw)
    assert architecture is not None, "the type of a published model is supported"
    return architecture


KNOWN = {name: _make_architecture(raw) for name, raw in PUBLISHED.items()}


def find_published(path: str) -> Architecture | None:
    """Find the published dimensions of the model that the last part of `path` names.

    >>> find_published("Qwen/Qwen3-14B") == KNOWN["Qwen3-14B"], find_published("mine")
    (True, None)
    >>> f"{find_published('Qwen/Qwen3.5-9B').parameters / 1e9:.2f}"
    '8.95'
    """
    return KNOWN.get(Path(path).name)
