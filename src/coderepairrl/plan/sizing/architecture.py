"""Dimensions of a decoder, from its config.json or as published.

`FAMILIES` reads the layers of each ``model_type``. Published dimensions of Qwen3.5 and 3.6 cover only the language
model. Sources: transformers' defaults of ``Qwen3_5TextConfig`` (9B) and ``Qwen3_5MoeTextConfig`` (35B-A3B);
THUDM/slime (scripts/models/qwen3.5-4B.sh and others); for linear attention's heads and the context, copies of
config.json.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from coderepairrl.config.schema import Lora
from coderepairrl.errors import ConfigError
from coderepairrl.learn.settings import LINEAR_ATTENTION
from coderepairrl.plan.sizing.parts import (
    Layer,
    LayerPart,
    make_attention,
    make_delta_net,
    make_experts,
    make_mlp,
)

Raw = Mapping[str, Any]
Layers = tuple[Layer, ...]
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


class UnknownArchitecture(Exception):
    """The configuration is not understood."""


def read_positive_numbers(raw: Raw, *names: str) -> list[int]:
    """Read positive integers of config.json by name. Raises `UnknownArchitecture` if one is missing."""
    values = [raw.get(name) for name in names]
    if any(not isinstance(number, int) or isinstance(number, bool) or number < 1 for number in values):
        raise UnknownArchitecture
    return values  # type: ignore[return-value]


def _read_layer_types(raw: Raw) -> Sequence[str]:
    """Attention type of each layer."""
    if listed := raw.get("layer_types"):
        return list(listed)
    count = raw["num_hidden_layers"]
    if "linear_num_key_heads" in raw:
        interval = raw.get("full_attention_interval", 4)
        return [FULL if number % interval == 0 else LINEAR for number in range(1, count + 1)]
    return [SLIDING if raw.get("sliding_window") and raw.get("use_sliding_window", True) else FULL] * count


def _read_attention(raw: Raw, **more: Any) -> LayerPart:
    hidden, heads = read_positive_numbers(raw, "hidden_size", "num_attention_heads")
    biased = bool(raw.get("attention_bias", False))
    return make_attention(
        hidden,
        heads,
        raw.get("num_key_value_heads") or heads,
        raw.get("head_dim") or hidden // heads,
        **{"qkv_bias": biased, "o_bias": biased, **more},
    )


def _read_mixers(raw: Raw, **more: Any) -> list[LayerPart]:
    """Attention of each layer, the same in all."""
    layer_types = _read_layer_types(raw)
    if {*layer_types} not in ({FULL}, {SLIDING}):
        raise UnknownArchitecture
    window = read_positive_numbers(raw, "sliding_window")[0] if SLIDING in layer_types else 0
    return [_read_attention(raw, window=window, **more)] * len(layer_types)


def _dense_layers(mixers: Sequence[LayerPart], raw: Raw) -> Layers:
    feed = make_mlp(*read_positive_numbers(raw, "hidden_size", "intermediate_size"))
    return tuple(Layer(mixer, feed) for mixer in mixers)


def _expert_layers(mixers: Sequence[LayerPart], raw: Raw, **more: Any) -> Layers:
    if raw.get("decoder_sparse_step", 1) != 1 or raw.get("mlp_only_layers"):
        raise UnknownArchitecture
    # the name on the hub, and the one that transformers writes
    count = "num_experts" if "num_experts" in raw else "num_local_experts"
    names = "hidden_size", count, "num_experts_per_tok", "moe_intermediate_size"
    feed = make_experts(*read_positive_numbers(raw, *names), **more)
    return tuple(Layer(mixer, feed) for mixer in mixers)


def _read_delta_mixers(raw: Raw) -> list[LayerPart]:
    """Gated DeltaNet, with gated attention in every fourth layer."""
    heads, dims = ("linear_num_key_heads", "linear_num_value_heads"), ("linear_key_head_dim", "linear_value_head_dim")
    hidden, key_heads, value_heads, key_dim, value_dim = read_positive_numbers(raw, "hidden_size", *heads, *dims)
    width = raw.get("linear_conv_kernel_dim", 4)
    state = make_delta_net(hidden, key_heads, value_heads, key_dim, value_dim, width)
    kinds = {LINEAR: state, FULL: _read_attention(raw, norm=True, gated=True)}
    layer_types = _read_layer_types(raw)
    if not {*layer_types} <= kinds.keys():
        raise UnknownArchitecture
    return [kinds[kind] for kind in layer_types]


FAMILIES: Mapping[str, Callable[[Raw], Layers]] = {
    "qwen2": lambda raw: _dense_layers(_read_mixers(raw, qkv_bias=True, o_bias=False), raw),
    "qwen3": lambda raw: _dense_layers(_read_mixers(raw, norm=True), raw),
    "llama": lambda raw: _dense_layers(_read_mixers(raw), raw),
    "mistral": lambda raw: _dense_layers(_read_mixers(raw), raw),
    "qwen3_moe": lambda raw: _expert_layers(_read_mixers(raw, norm=True), raw),
    "qwen3_5_text": lambda raw: _dense_layers(_read_delta_mixers(raw), raw),
    "qwen3_5_moe_text": lambda raw: _expert_layers(
        _read_delta_mixers(raw),
        raw,
        shared=read_positive_numbers(raw, "shared_expert_intermediate_size")[0],
        gated=True,
    ),
}
"""Layers by ``model_type``."""
MODEL_TYPES = tuple(FAMILIES)
"""Values of ``model_type`` that are known here."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder's dimensions, and sizes that follow from them."""

    hidden: int
    vocabulary: int
    blocks: tuple[Layer, ...]
    tied: bool
    """Whether embedding and output head are one matrix."""
    context: int
    """The longest sequence that its positions reach."""
    scaled: bool = False
    """Whether its positions are scaled (as by YaRN), so that they may reach further."""
    half: bool = True
    """Whether its weights are stored in 16 bits."""
    layer_counts: tuple[tuple[Layer, int], ...] = field(init=False, repr=False, compare=False)
    """Distinct layers, and the number of each."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_counts", tuple(Counter(self.blocks).items()))

    @classmethod
    def from_config(cls, raw: Raw) -> Self | None:
        """Dimensions from config.json; None if its type is not in `FAMILIES`, numbers are missing or wrong, or weights
        are quantised."""
        family = FAMILIES.get(str(raw.get("model_type")))
        if family is None or raw.get("quantization_config"):
            return None
        names = "hidden_size", "vocab_size", "max_position_embeddings", "num_hidden_layers"
        try:
            hidden, vocabulary, context, count = read_positive_numbers(raw, *names)
            blocks = family(raw)
        except UnknownArchitecture:
            return None
        if len(blocks) != count:
            return None
        return cls(
            hidden,
            vocabulary,
            blocks,
            tied=bool(raw.get("tie_word_embeddings", False)),
            context=context,
            scaled="factor" in (raw.get("rope_scaling") or raw.get("rope_parameters") or ()),
            half=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").endswith("16"),
        )

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read config.json in `folder`, as `from_config`. Raises `ConfigError` for malformed JSON."""
        try:
            raw = json.loads((folder / "config.json").read_text())
        except ValueError as error:
            raise ConfigError(f"cannot read {folder / 'config.json'}: {error}", fix="download it again") from error
        return cls.from_config(raw) if isinstance(raw, dict) else None

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.blocks)

    @property
    def heads(self) -> int:
        """Greatest common divisor of all layers' heads."""
        return math.gcd(*(layer.mixer.heads for layer in self.blocks))

    @property
    def head_dim(self) -> int:
        """Head width that position embeddings rotate."""
        return max(layer.mixer.head_dim for layer in self.blocks)

    @property
    def largest_linear(self) -> int:
        """Weights of the largest linear layer."""
        return max((each.size for layer, _ in self.layer_counts for each in layer.linear), default=0)

    @property
    def multiplied(self) -> int:
        """Weights of the layers that multiply each token."""
        return sum(count * (layer.mixer.multiplied + layer.feed.multiplied) for layer, count in self.layer_counts)

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest layer."""
        return max(layer.parameters(self.hidden) for layer in self.blocks)

    @property
    def embedding(self) -> int:
        """Parameters of the embedding; an untied output head has as many."""
        return self.vocabulary * self.hidden

    @property
    def outside_layers(self) -> int:
        """Parameters outside the layers."""
        return self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        """All parameters, tied ones once."""
        return sum(count * layer.parameters(self.hidden) for layer, count in self.layer_counts) + self.outside_layers

    def count_bytes(self, each: int, quantised_each: float = 0.0) -> int:
        """Bytes of all parameters at `each` bytes, linear layers at `quantised_each` if given."""
        quantised = sum(count * (layer.mixer.quantised + layer.feed.quantised) for layer, count in self.layer_counts)
        return each * self.parameters - int((each - (quantised_each or each)) * quantised)

    @property
    def has_experts(self) -> bool:
        """Whether it is a mixture of experts."""
        return any(layer.feed.count for layer in self.blocks)

    @property
    def active(self) -> int:
        """Parameters that each token uses."""
        idle = (
            count * (layer.feed.count - layer.feed.chosen) * layer.feed.expert_size
            for layer, count in self.layer_counts
        )
        return self.parameters - sum(idle)

    def adapters(self, rank: int, targets: tuple[str, ...]) -> int:
        """Parameters of low-rank adapters on the linear layers `targets`; unknown names add nothing."""
        names = targeted_layers(targets)
        return sum(count * layer.adapters(rank, names) for layer, count in self.layer_counts)


def targeted_layers(targets: tuple[str, ...]) -> frozenset[str]:
    """Names of adapted layers; the default of `targets` includes linear attention."""
    return frozenset((*targets, *LINEAR_ATTENTION) if targets == Lora().targets else targets)


def _qwen3_config(hidden: int, width: int, layers: int, heads: int, *, tied: bool = False, **more: Any) -> Raw:
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


def _qwen35_config(hidden: int, layers: int, kv_heads: int, *, tied: bool = False, **more: Any) -> Raw:
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
    "Qwen3-0.6B": _qwen3_config(1024, 3072, 28, 16, tied=True),
    "Qwen3-1.7B": _qwen3_config(2048, 6144, 28, 16, tied=True),
    "Qwen3-4B": _qwen3_config(2560, 9728, 36, 32, tied=True),
    "Qwen3-8B": _qwen3_config(4096, 12_288, 36, 32),
    "Qwen3-14B": _qwen3_config(5120, 17_408, 40, 40),
    "Qwen3-32B": _qwen3_config(5120, 25_600, 64, 64),
    "Qwen3-30B-A3B": _qwen3_config(2048, 6144, 48, 32, **_MOE),
    "Qwen3.5-0.8B": _qwen35_config(
        1024, 24, 2, tied=True, intermediate_size=3584, num_attention_heads=8, linear_num_value_heads=16
    ),
    "Qwen3.5-4B": _qwen35_config(2560, 32, 4, tied=True, intermediate_size=9216),
    "Qwen3.5-9B": _qwen35_config(4096, 32, 4, intermediate_size=12_288),
    **dict.fromkeys(
        ("Qwen3.5-27B", "Qwen3.6-27B"),
        _qwen35_config(5120, 64, 4, intermediate_size=17_408, num_attention_heads=24, linear_num_value_heads=48),
    ),
    **dict.fromkeys(("Qwen3.5-35B-A3B", "Qwen3.6-35B-A3B"), _qwen35_config(2048, 40, 2, **_MOE35)),
}
"""Contents of config.json, by the last part of a model's name."""
KNOWN = {name: shape for name, raw in PUBLISHED.items() if (shape := Architecture.from_config(raw)) is not None}


def find_published(path: str) -> Architecture | None:
    """Find the published dimensions of a model by the last part of `path`.

    >>> find_published("Qwen/Qwen3-14B") == KNOWN["Qwen3-14B"], find_published("mine")
    (True, None)
    >>> f"{find_published('Qwen/Qwen3.5-9B').parameters / 1e9:.2f}"
    '8.95'
    """
    return KNOWN.get(Path(path).name)
