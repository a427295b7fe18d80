"""Dimensions of a decoder, from its config.json or as published (`published`)."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from coderepairrl.config.sections.train import Lora
from coderepairrl.errors import ConfigError
from coderepairrl.learn.settings import LINEAR_ATTENTION
from coderepairrl.plan.sizing.families import FAMILIES, Raw, Unknown, layers, positive_numbers
from coderepairrl.plan.sizing.parts import Layer

KINDS = tuple(FAMILIES)
"""Values of ``model_type`` that are known here."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder's dimensions, and what follows from them."""

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
    """Whether its file has 16 bits per weight."""
    kinds: tuple[tuple[Layer, int], ...] = field(init=False, repr=False, compare=False)
    """Distinct layers, and the number of each."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", tuple(Counter(self.blocks).items()))

    @classmethod
    def from_config(cls, raw: Raw) -> Self | None:
        """Dimensions by config.json; None if its type is not in `KINDS`, numbers are missing or weights are codes."""
        if raw.get("quantization_config"):
            return None
        try:
            hidden, vocabulary, context = positive_numbers(raw, "hidden_size", "vocab_size", "max_position_embeddings")
            blocks = layers(raw)
        except Unknown:
            return None
        return cls(
            hidden,
            vocabulary,
            blocks,
            tied=bool(raw.get("tie_word_embeddings", raw["model_type"].startswith("gemma"))),
            context=context,
            scaled="factor" in (raw.get("rope_scaling") or raw.get("rope_parameters") or ()),
            half=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").endswith("16"),
        )

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read config.json in `folder`; None as `of`. Raises `ConfigError` for malformed JSON."""
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
        """Width of a head that positions rotate."""
        return max(layer.mixer.head_dim for layer in self.blocks) or 64

    @property
    def widest(self) -> int:
        """Weights of the largest linear layer."""
        return max((each.size for layer, _ in self.kinds for each in layer.linear), default=0)

    @property
    def matrices(self) -> int:
        """Weights of the layers' matrices, without experts."""
        return sum(count * layer.matrices for layer, count in self.kinds)

    @property
    def products(self) -> int:
        """Weights of the layers that multiply each token."""
        return sum(count * (layer.mixer.multiplied + layer.feed.multiplied) for layer, count in self.kinds)

    @property
    def layer(self) -> int:
        """Parameters of the largest layer."""
        return max(layer.parameters(self.hidden) for layer in self.blocks)

    @property
    def embedding(self) -> int:
        """Parameters of the embedding; an untied output head has as many."""
        return self.vocabulary * self.hidden

    @property
    def root(self) -> int:
        """Parameters outside the layers."""
        return self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        """All parameters, tied ones once."""
        return sum(count * layer.parameters(self.hidden) for layer, count in self.kinds) + self.root

    def size(self, number: int, codes: float = 0.0) -> int:
        """Bytes of all parameters at `number` bytes each, linear layers at `codes` if given."""
        coded = sum(count * (layer.mixer.quantised + layer.feed.quantised) for layer, count in self.kinds)
        return number * self.parameters - int((number - (codes or number)) * coded)

    @property
    def experts(self) -> bool:
        """Whether it is a mixture of experts."""
        return any(layer.feed.count for layer in self.blocks)

    @property
    def active(self) -> int:
        """Parameters that each token uses."""
        idle = (count * (layer.feed.count - layer.feed.chosen) * layer.feed.expert_size for layer, count in self.kinds)
        return self.parameters - sum(idle)

    def adapters(self, rank: int, targets: tuple[str, ...]) -> int:
        """Parameters of low-rank adapters on the linear layers `targets`; unknown names add nothing."""
        names = targeted_layers(targets)
        return sum(count * layer.adapters(rank, names) for layer, count in self.kinds)


def targeted_layers(targets: tuple[str, ...]) -> frozenset[str]:
    """Layer names for `targets`; the default includes linear attention."""
    return frozenset((*targets, *LINEAR_ATTENTION) if targets == Lora().targets else targets)
