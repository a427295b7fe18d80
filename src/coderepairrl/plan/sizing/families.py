"""Layers from config.json: a function for each naming scheme."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coderepairrl.plan.sizing.parts import Layer, Part, attention, delta, experts, latent, mlp

Raw = Mapping[str, Any]
Layers = tuple[Layer, ...]
KEYS_VALUES = "key", "value"
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


class Unknown(Exception):
    """The configuration is not understood."""


def positive_numbers(raw: Raw, *names: str) -> list[int]:
    """Positive integers of config.json by name. Raises `Unknown` if one is missing."""
    values = [raw.get(name) for name in names]
    if any(not isinstance(number, int) or isinstance(number, bool) or number < 1 for number in values):
        raise Unknown
    return values  # type: ignore[return-value]


def layers(raw: Raw) -> Layers:
    """Layers of a model. Raises `Unknown` for other types and missing numbers."""
    family = FAMILIES.get(str(raw.get("model_type")))
    if family is None:
        raise Unknown
    (count,) = positive_numbers(raw, "num_hidden_layers")
    model_layers = family(raw)
    if len(model_layers) != count:
        raise Unknown
    return model_layers


def _layer_types(raw: Raw, every: int) -> Sequence[str]:
    """Attention type of each layer; by default full in every `every`-th (0: all the same)."""
    if listed := raw.get("layer_types"):
        return list(listed)
    count, window = raw["num_hidden_layers"], bool(raw.get("sliding_window"))
    other = LINEAR if "linear_num_key_heads" in raw else SLIDING if window else FULL
    if not every:  # all alike, as in Mistral
        return [SLIDING if window and raw.get("use_sliding_window", True) else FULL] * count
    return [FULL if (number + 1) % every == 0 else other for number in range(count)]


def _attention(raw: Raw, window: int = 0, **more: Any) -> Part:
    hidden, heads = positive_numbers(raw, "hidden_size", "num_attention_heads")
    biased = bool(raw.get("attention_bias", False))
    return attention(
        hidden,
        heads,
        raw.get("num_key_value_heads") or heads,
        raw.get("head_dim") or hidden // heads,
        **{"qkv_bias": biased, "o_bias": biased, "window": window, **more},
    )


def _mixers(raw: Raw, every: int = 0, **more: Any) -> list[Part]:
    mixers = list[Part]()
    for kind in _layer_types(raw, every):
        if kind not in (FULL, SLIDING):
            raise Unknown
        window = positive_numbers(raw, "sliding_window")[0] if kind == SLIDING else 0
        mixers.append(_attention(raw, window, **more))
    return mixers


def _mlp(raw: Raw) -> Part:
    return mlp(*positive_numbers(raw, "hidden_size", "intermediate_size"))


def _dense(mixers: Sequence[Part], raw: Raw, norms: int = 2) -> Layers:
    return tuple(Layer(mixer, _mlp(raw), norms) for mixer in mixers)


def _experts(mixers: Sequence[Part], raw: Raw, width: str, **more: Any) -> Layers:
    if raw.get("decoder_sparse_step", 1) != 1 or raw.get("mlp_only_layers"):
        raise Unknown
    count = "num_experts" if "num_experts" in raw else "num_local_experts"  # of the hub, and as transformers writes it
    feed = experts(*positive_numbers(raw, "hidden_size", count, "num_experts_per_tok", width), **more)
    return tuple(Layer(mixer, feed) for mixer in mixers)


def _grouped(mixers: Sequence[Part], raw: Raw) -> Layers:
    """Layers of GLM and DeepSeek: dense ones, then experts."""
    dense = ["dense"] * raw.get("first_k_dense_replace", 0)
    kinds = raw.get("mlp_layer_types") or dense + ["sparse"] * (len(mixers) - len(dense))
    count = "n_routed_experts" if "n_routed_experts" in raw else "num_local_experts"
    names = "hidden_size", count, "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts"
    hidden, number, chosen, width, shared = positive_numbers(raw, *names)
    sparse = experts(hidden, number, chosen, width, shared=width * shared)
    return tuple(
        Layer(mixer, sparse if kind == "sparse" else _mlp(raw)) for mixer, kind in zip(mixers, kinds, strict=True)
    )


def _latent(raw: Raw) -> list[Part]:
    names = "hidden_size", "num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"
    hidden, heads, plain, turned, value, rank = positive_numbers(raw, *names)
    biased = bool(raw.get("attention_bias", False))
    mixer = latent(hidden, heads, plain, turned, value, rank, raw.get("q_lora_rank") or 0, bias=biased)
    return [mixer] * raw["num_hidden_layers"]


def _delta(raw: Raw, *, joined: bool = False) -> list[Part]:
    """Gated DeltaNet, with gated attention in every fourth layer."""
    names = *(f"linear_num_{each}_heads" for each in KEYS_VALUES), *(f"linear_{each}_head_dim" for each in KEYS_VALUES)
    hidden, key_heads, value_heads, key_dim, value_dim = positive_numbers(raw, "hidden_size", *names)
    width = raw.get("linear_conv_kernel_dim", 4)
    state = delta(hidden, key_heads, value_heads, key_dim, value_dim, width, joined=joined)
    kinds = {LINEAR: state, FULL: _attention(raw, norm="exact", gated=True)}
    layer_types = _layer_types(raw, raw.get("full_attention_interval", 4))
    if not {*layer_types} <= kinds.keys():
        raise Unknown
    return [kinds[kind] for kind in layer_types]


def _qwen2(raw: Raw) -> Layers:
    return _dense(_mixers(raw, qkv_bias=True, o_bias=False), raw)


SHARED = "shared_expert_intermediate_size"
FAMILIES: Mapping[str, Callable[[Raw], Layers]] = {
    "qwen2": _qwen2,
    "qwen3": lambda raw: _dense(_mixers(raw, norm="head"), raw),
    "llama": lambda raw: _dense(_mixers(raw), raw),
    "mistral": lambda raw: _dense(_mixers(raw), raw),
    "qwen3_moe": lambda raw: _experts(_mixers(raw, norm="head"), raw, "moe_intermediate_size"),
    "mixtral": lambda raw: _experts(_mixers(raw), raw, "intermediate_size"),
    "qwen3_5_text": lambda raw: _dense(_delta(raw), raw),
    "qwen3_5_moe_text": lambda raw: _experts(
        _delta(raw), raw, "moe_intermediate_size", shared=positive_numbers(raw, SHARED)[0], gated=True
    ),
    "qwen3_next": lambda raw: _experts(
        _delta(raw, joined=True), raw, "moe_intermediate_size", shared=positive_numbers(raw, SHARED)[0], gated=True
    ),
    "gemma3_text": lambda raw: _dense(_mixers(raw, raw.get("sliding_window_pattern", 6), norm="exact"), raw, 4),
    "olmo3": lambda raw: _dense(_mixers(raw, 4, norm="wide"), raw),
    "gpt_oss": lambda raw: _experts(
        _mixers(raw, 2, sinks=True, qkv_bias=True, o_bias=True), raw, "intermediate_size", biased=True
    ),
    "glm4_moe": lambda raw: _grouped(_mixers(raw, norm="head" if raw.get("use_qk_norm") else "", o_bias=False), raw),
    "glm4_moe_lite": lambda raw: _grouped(_latent(raw), raw),
    "deepseek_v3": lambda raw: _grouped(_latent(raw), raw),
}
"""Layers by ``model_type``."""
