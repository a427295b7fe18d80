"""Rotary embeddings with length-dependent frequencies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PretrainedConfig

_ORIGINAL = "original_inv_freq"


def read_parameters(config: PretrainedConfig) -> Iterator[dict[str, Any]]:
    """Rotary parameters: one mapping, or one per kind of layer."""
    stated: Any = getattr(config, "rope_parameters", None) or {}
    yield from [stated] if "rope_type" in stated else [each for each in stated.values() if isinstance(each, dict)]


def find_dynamic(model: nn.Module) -> Iterator[nn.Module]:
    """Modules with length-dependent frequencies."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", "")
        if any("dynamic" in kind for kind in (kinds.values() if isinstance(kinds, dict) else (str(kinds),))):
            yield module


def forget_longest_rows(model: nn.Module) -> None:
    """Reset dynamic embeddings before each row: transformers keeps the longest row's frequencies."""
    for module in find_dynamic(model):
        module.register_forward_pre_hook(_forget_length)


def _forget_length(module: nn.Module, _: Any) -> None:
    length = module.original_max_seq_len
    for name, original in list(module.named_buffers(recurse=False)):
        if name.endswith(_ORIGINAL):
            prefix = name.removesuffix(_ORIGINAL)
            setattr(module, f"{prefix}inv_freq", original)
            setattr(module, f"{prefix}max_seq_len_cached", length)
