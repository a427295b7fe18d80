"""Model configs, read without torch so that the controller can reject a model at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from coderepairrl.errors import ConfigError, EngineFault
from coderepairrl.sync.weights import TensorHeader, check_layout

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
FLOATS = ("F32", "BF16", "F16")


class Family(NamedTuple):
    """Differences from Llama without biases; a str is the key in ``config.json`` that decides."""

    attention_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    norms_queries: bool = False
    window: int | None = None
    """Default ``sliding_window`` of every layer; None in families without windows."""


FAMILIES = {
    "LlamaForCausalLM": Family("attention_bias", "attention_bias", "mlp_bias"),
    "MistralForCausalLM": Family(window=4096),
    "Qwen2ForCausalLM": Family(attention_bias=True),
    "Qwen3ForCausalLM": Family("attention_bias", "attention_bias", norms_queries=True),
    "SeedOssForCausalLM": Family("attention_bias", "attention_out_bias", "mlp_bias"),
}
"""Families by ``architectures`` in ``config.json``, or else ``model_type``."""
_FAMILY_BY_TYPE = {name.removesuffix("ForCausalLM").lower(): name for name in FAMILIES}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Dimensions of a dense Llama-like model, named as in Hugging Face's ``config.json``.

    With a `window`, a query attends to that many keys, including its own. `rope` holds the parameters of scaled RoPE,
    else is empty.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope: Mapping[str, Any]
    tied: bool
    context: int
    window: int | None
    attention_bias: bool
    out_bias: bool
    mlp_bias: bool
    norms_queries: bool

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the config in `folder`. Raises `ConfigError` for an architecture not in `FAMILIES`."""
        try:
            raw = json.loads((folder / "config.json").read_text())
        except OSError as error:
            raise ConfigError(
                f"{folder} is not a model folder: config.json: {error.strerror}",
                fix="point `model` at a folder in Hugging Face layout: config.json, model.safetensors, tokenizer.json",
            ) from None
        except ValueError as error:
            raise ConfigError(f"{folder / 'config.json'} is not JSON: {error}") from None
        family = _find_family(folder, raw)
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        _check_supported(folder, raw, rope)
        try:
            heads = int(raw["num_attention_heads"])
            window = raw.get("sliding_window", family.window) if family.window else None
            biases = (family.attention_bias, family.out_bias, family.mlp_bias)
            attention, out, mlp = (bool(raw.get(bias, False)) if isinstance(bias, str) else bias for bias in biases)
            return cls(
                vocab_size=int(raw["vocab_size"]),
                hidden_size=int(raw["hidden_size"]),
                intermediate_size=int(raw["intermediate_size"]),
                num_hidden_layers=int(raw["num_hidden_layers"]),
                num_attention_heads=heads,
                num_key_value_heads=int(raw.get("num_key_value_heads") or heads),
                head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
                rms_norm_eps=float(raw["rms_norm_eps"]),
                # transformers 5 writes it inside rope_parameters, 4 beside it
                rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0))),
                rope={} if _rope_type(rope) == "default" else {**rope, "rope_type": _rope_type(rope)},
                tied=bool(raw.get("tie_word_embeddings", False)),
                context=int(raw["max_position_embeddings"]),
                window=None if window is None else int(window),
                attention_bias=attention,
                out_bias=out,
                mlp_bias=mlp,
                norms_queries=family.norms_queries,
            )
        except KeyError as error:
            raise ConfigError(f"{folder / 'config.json'} lacks {error}") from None
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{folder / 'config.json'}: {error}") from None

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values in fp32."""
        return 4 * self.num_hidden_layers * 2 * self.num_key_value_heads * self.head_dim

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a checkpoint's tensors, without a tied ``lm_head.weight``."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        for name, rows, columns, has_bias in (
            ("self_attn.q_proj", queries, hidden, self.attention_bias),
            ("self_attn.k_proj", keys, hidden, self.attention_bias),
            ("self_attn.v_proj", keys, hidden, self.attention_bias),
            ("self_attn.o_proj", hidden, queries, self.out_bias),
            ("mlp.gate_proj", inner, hidden, self.mlp_bias),
            ("mlp.up_proj", inner, hidden, self.mlp_bias),
            ("mlp.down_proj", hidden, inner, self.mlp_bias),
        ):
            layer[f"{name}.weight"] = (rows, columns)
            if has_bias:
                layer[f"{name}.bias"] = (rows,)
        if self.norms_queries:
            layer |= {"self_attn.q_norm.weight": (self.head_dim,), "self_attn.k_norm.weight": (self.head_dim,)}
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, hidden), "model.norm.weight": (hidden,)}
        for index in range(self.num_hidden_layers):
            shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
        if not self.tied:
            shapes[HEAD] = (self.vocab_size, hidden)
        return shapes

    def check_tensors(self, path: Path, tensors: Mapping[str, TensorHeader]) -> None:
        """Raise `EngineFault` unless `tensors` have `shapes` and types in `FLOATS`."""
        layout = self.shapes()
        if self.tied and HEAD in tensors:  # stored a second time
            layout[HEAD] = layout[EMBEDDING]
        check_layout(path, tensors, layout)
        for name, tensor in tensors.items():
            if tensor.dtype not in FLOATS:
                raise EngineFault(f"{path}: {name} is {tensor.dtype}, and the tiny engine reads {', '.join(FLOATS)}")


def _find_family(folder: Path, raw: Mapping[str, Any]) -> Family:
    kind = str(raw.get("model_type", "an unnamed architecture"))
    architectures = raw.get("architectures") or [_FAMILY_BY_TYPE.get(kind.replace("_", ""), kind)]
    family = next((FAMILIES[name] for name in architectures if name in FAMILIES), None)
    if family is None:
        raise ConfigError(
            f"the tiny engine serves {', '.join(FAMILIES)}, and {folder} is {', '.join(map(str, architectures))}",
            fix="set engine=vllm, which serves most architectures, or use one of these",
        )
    return family


def _rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _check_supported(folder: Path, raw: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for settings that would be ignored, which would make logits slightly wrong."""
    checks: dict[str, tuple[Any, tuple[Any, ...]]] = {  # value and allowed values
        "hidden_act": (raw.get("hidden_act", "silu"), ("silu",)),
        "use_sliding_window": (raw.get("use_sliding_window", False), (False,)),
        "layer_types": ({*(raw.get("layer_types") or ())} - {"full_attention"}, (set(),)),
        "rope_parameters": ({name for name, value in rope.items() if isinstance(value, dict)}, (set(),)),
        "rope_type": (_rope_type(rope), ("default", "linear", "llama3")),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)), (1.0,)),
        "quantization_config": (raw.get("quantization_config"), (None,)),
    }
    for name, (value, allowed) in checks.items():
        if value not in allowed:
            raise ConfigError(f"the tiny engine does not support {name}={value!r} ({folder / 'config.json'})")
