"""The numbers of a transformer, from its config.json or, where it is not here, as they were published."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from coderepairrl.errors import ConfigError

EXPERTS = {"qwen3_moe": "moe_intermediate_size", "mixtral": "intermediate_size"}
"""Kinds with experts, by how config.json calls the width of one."""
KINDS = ("qwen3", "qwen2", "llama", "mistral", *EXPERTS)
"""Values of ``model_type`` that are known here: grouped attention, and a gated MLP or experts in every layer."""
_SAID = {
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    "max_position_embeddings",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder's dimensions, and what follows from them: parameters, products, bytes of keys and values.

    >>> f"{KNOWN['Qwen3-14B'].parameters / 1e9:.2f}"
    '14.77'
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocabulary: int
    kv_heads: int = 8
    head_dim: int = 128
    tied: bool = False
    """Whether embedding and output head are one matrix."""
    qk_norm: bool = True
    """Whether queries and keys are normalised, as in Qwen3."""
    qkv_bias: bool = False
    o_bias: bool = False
    context: int = 40_960
    """The longest sequence that its positions reach."""
    scaled: bool = False
    """Whether its positions are scaled (as by YaRN), so that they may reach further."""
    half: bool = True
    """Whether its file has 16 bits a weight."""
    experts: int = 0
    """Of a layer; 0 where it has one MLP, of the width `intermediate`."""
    chosen: int = 0
    """Experts that a token goes through."""
    expert: int = 0
    """Width of an expert."""
    codes: float = 0.0
    """Bytes of a weight of the layers' matrices where the file has codes for them, else 0."""

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Of the model in `folder`, whose config.json is there; None if it is of a kind that is not in `KINDS`, has
        codes of a size that is not known, or does not say its numbers. Raises `ConfigError` for what is no JSON."""
        try:
            raw = json.loads((folder / "config.json").read_text())
        except ValueError as error:
            raise ConfigError(f"cannot read {folder / 'config.json'}: {error}", fix="download it again") from error
        kind = raw.get("model_type") if isinstance(raw, dict) else None
        if kind not in KINDS or not all(isinstance(raw.get(name), int) and raw[name] > 0 for name in _SAID):
            return None
        about = raw.get("quantization_config") or {}
        codes = _bytes(about) if about else 0.0
        if codes is None or (codes and kind in EXPERTS):
            return None
        experts = chosen = expert = 0
        if kind in EXPERTS:
            experts = raw.get("num_experts", raw.get("num_local_experts"))  # of the hub, and as transformers writes it
            chosen, expert = raw.get("num_experts_per_tok"), raw.get(EXPERTS[kind])
        plain = raw.get("decoder_sparse_step", 1) == 1 and not raw.get("mlp_only_layers")  # experts in every layer
        if not plain or any(not isinstance(number, int) for number in (experts, chosen, expert)):
            return None
        heads, biased = raw["num_attention_heads"], bool(raw.get("attention_bias", False))
        return cls(
            hidden=raw["hidden_size"],
            intermediate=raw["intermediate_size"],
            layers=raw["num_hidden_layers"],
            heads=heads,
            vocabulary=raw["vocab_size"],
            kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            tied=bool(raw.get("tie_word_embeddings", False)),
            qk_norm=kind.startswith("qwen3"),
            qkv_bias=biased or kind == "qwen2",
            o_bias=biased and kind != "qwen2",
            context=raw["max_position_embeddings"],
            scaled="factor" in (raw.get("rope_scaling") or raw.get("rope_parameters") or ()),
            half=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").endswith("16"),
            experts=experts,
            chosen=chosen,
            expert=expert,
            codes=codes,
        )

    @property
    def config(self) -> dict[str, Any]:
        """Its dimensions by their names in config.json, experts by Qwen3's."""
        names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size") if self.experts else ()
        return dict(zip(names, (self.experts, self.chosen, self.expert), strict=False)) | {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": self.context,
        }

    @property
    def queries(self) -> int:
        """Width of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all keys of a token, and of its values."""
        return self.kv_heads * self.head_dim

    @property
    def linear(self) -> dict[str, tuple[int, int]]:
        """A layer's linear layers by name, ``(in, out)``. Experts are none: all of a layer are one tensor."""
        h, f, q, k = self.hidden, self.intermediate, self.queries, self.keys
        attention = {"q_proj": (h, q), "k_proj": (h, k), "v_proj": (h, k), "o_proj": (q, h)}
        return attention if self.experts else attention | {"gate_proj": (h, f), "up_proj": (h, f), "down_proj": (f, h)}

    @property
    def matrices(self) -> int:
        """Weights of a layer's linear layers, and of what chooses its experts."""
        return sum(rows * columns for rows, columns in self.linear.values()) + self.experts * self.hidden

    @property
    def products(self) -> int:
        """Weights of a layer that a token is multiplied by."""
        return self.matrices + self.chosen * self._expert

    @property
    def _expert(self) -> int:
        return 3 * self.hidden * self.expert

    @property
    def layer(self) -> int:
        """Parameters of a layer."""
        norms = 2 * self.hidden + 2 * self.head_dim * self.qk_norm
        biases = (self.queries + 2 * self.keys) * self.qkv_bias + self.hidden * self.o_bias
        return self.matrices + self.experts * self._expert + norms + biases

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of an output head of its own."""
        return self.vocabulary * self.hidden

    @property
    def root(self) -> int:
        """Parameters outside of the layers."""
        return self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        """All of them, tied ones once."""
        return self.layers * self.layer + self.root

    def size(self, number: int, codes: float = 0.0) -> int:
        """Bytes of all parameters with `number` bytes each, but `codes` of those of the layers' matrices, if given."""
        matrices = self.layers * self.matrices
        return number * self.parameters - int((number - (codes or number)) * matrices)

    @property
    def active(self) -> int:
        """Parameters that a token goes through."""
        return self.parameters - self.layers * (self.experts - self.chosen) * self._expert

    @property
    def kv_width(self) -> int:
        """Numbers that a token leaves in the cache of keys and values."""
        return 2 * self.layers * self.keys

    def adapters(self, rank: int, targets: tuple[str, ...], *, experts: bool = False) -> int:
        """Parameters of low-rank adapters on the layers' matrices `targets`; names that are none add nothing. With
        `experts` also of those on each expert, whose gate and up share the first matrix."""
        each = rank * (2 * self.hidden + 3 * self.expert) * self.experts * experts
        return self.layers * (each + sum(rank * sum(shape) for name, shape in self.linear.items() if name in targets))


def _bytes(about: Mapping[str, Any]) -> float | None:
    """Of a weight with its part of a scale of 16 bits (and AWQ's zero of 4), by ``quantization_config``; None where it
    does not say."""
    if about.get("quant_method") == "fp8":
        return 1.0
    if about.get("quant_method") == "awq" and isinstance(about.get("bits"), int):
        return float(about["bits"]) / 8 + (2 + float(about["bits"]) / 8) / max(
            1.0, float(about.get("group_size") or 128)
        )
    groups = [group.get("weights") or {} for group in (about.get("config_groups") or {}).values()]
    if about.get("quant_method") != "compressed-tensors" or len(groups) != 1 or "num_bits" not in groups[0]:
        return None
    size = int(groups[0].get("group_size") or 0)
    return float(groups[0]["num_bits"]) / 8 + (2 / size if size > 0 else 0.0)


KNOWN = {
    "Qwen3-0.6B": Architecture(1024, 3072, 28, 16, 151_936, tied=True),
    "Qwen3-1.7B": Architecture(2048, 6144, 28, 16, 151_936, tied=True),
    "Qwen3-4B": Architecture(2560, 9728, 36, 32, 151_936, tied=True),
    "Qwen3-8B": Architecture(4096, 12_288, 36, 32, 151_936),
    "Qwen3-14B": Architecture(5120, 17_408, 40, 40, 151_936),
    "Qwen3-32B": Architecture(5120, 25_600, 64, 64, 151_936),
    "Qwen3-30B-A3B": Architecture(2048, 6144, 48, 32, 151_936, kv_heads=4, experts=128, chosen=8, expert=768),
}
"""Qwen3 by the last part of their names: the numbers of their published config.json."""

_ALSO: dict[str, Mapping[str, Any]] = {
    "-AWQ": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "-FP8": {"quant_method": "fp8"},
}
"""Endings of names under which they are published quantised, too."""


def known(path: str) -> Architecture | None:
    """The published numbers of the model that `path` ends with, or of its checkpoint in AWQ or FP8.

    >>> known("Qwen/Qwen3-14B") == KNOWN["Qwen3-14B"], known("mine")
    (True, None)
    >>> known("Qwen/Qwen3-14B-AWQ").codes
    0.51953125
    """
    name = Path(path).name
    for ending, about in _ALSO.items():
        plain = KNOWN.get(name.removesuffix(ending))
        if plain is not None and name.endswith(ending) and not plain.experts:
            return replace(plain, codes=_bytes(about) or 0.0)
    return KNOWN.get(name)
