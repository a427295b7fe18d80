"""A model's config, read without torch, so that the controller can refuse an unsupported model at once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from coderepairrl.errors import ConfigError

ARCHITECTURE = "Qwen3ForCausalLM"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The numbers of a dense Qwen3, named as in Hugging Face's ``config.json``.

    `context` is the longest sequence that its positions reach (``max_position_embeddings``).
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
    tied: bool
    context: int

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The config of the model in `folder`. Raises `ConfigError` for anything but a servable dense Qwen3."""
        try:
            raw = json.loads((folder / "config.json").read_text())
        except OSError as error:
            raise ConfigError(
                f"{folder} is not a model folder: config.json: {error.strerror}",
                fix="point `model` at a folder in Hugging Face layout: config.json, model.safetensors, tokenizer.json",
            ) from None
        except ValueError as error:
            raise ConfigError(f"{folder / 'config.json'} is not JSON: {error}") from None
        _refuse_what_we_cannot_serve(folder, raw)
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        try:
            heads = int(raw["num_attention_heads"])
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
                tied=bool(raw.get("tie_word_embeddings", False)),
                context=int(raw["max_position_embeddings"]),
            )
        except KeyError as error:
            raise ConfigError(f"{folder / 'config.json'} lacks {error}") from None
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{folder / 'config.json'}: {error}") from None

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that one token occupies in fp32."""
        return 4 * self.num_hidden_layers * 2 * self.num_key_value_heads * self.head_dim

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of a checkpoint and its shape. A tied model's ``lm_head.weight`` is not among them."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
            "self_attn.q_norm.weight": (self.head_dim,),
            "self_attn.k_norm.weight": (self.head_dim,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        for index in range(self.num_hidden_layers):
            shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes


def weights_of(folder: Path) -> Path:
    """The weights that a model folder starts with. Raises `ConfigError` when there are none."""
    path = folder / WEIGHTS
    if not path.is_file():
        sharded = (folder / f"{WEIGHTS}.index.json").exists()
        raise ConfigError(
            f"{folder} has {'sharded weights' if sharded else 'no weights'}: {WEIGHTS} is missing",
            fix="save the model in one piece: model.save_pretrained(folder, max_shard_size='100GB')"
            if sharded
            else "create random weights first, or download the model",
        )
    return path


def _refuse_what_we_cannot_serve(folder: Path, raw: dict[str, Any]) -> None:
    """Better no engine than one whose logits are a little wrong."""
    architectures = raw.get("architectures") or [raw.get("model_type", "nothing named")]
    if ARCHITECTURE not in architectures and raw.get("model_type") != "qwen3":
        raise ConfigError(
            f"the tiny engine serves {ARCHITECTURE}, and {folder} is {', '.join(map(str, architectures))}",
            fix="set engine=vllm, which serves most architectures, or use a dense Qwen3",
        )
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    wanted: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "hidden_act": (raw.get("hidden_act", "silu"), ("silu",)),
        "attention_bias": (raw.get("attention_bias", False), (False,)),
        "use_sliding_window": (raw.get("use_sliding_window", False), (False,)),
        "rope_type": (rope.get("rope_type", rope.get("type", "default")), ("default",)),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", 1.0), (1.0,)),
        "quantization_config": (raw.get("quantization_config"), (None,)),
    }
    for name, (value, allowed) in wanted.items():
        if value not in allowed:
            raise ConfigError(f"the tiny engine does not know {name}={value!r} ({folder / 'config.json'})")
