"""Model loading; checks weight names and shapes against the architecture."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import safetensors
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, PreTrainedModel

from coderepairrl import models
from coderepairrl.errors import EngineFault, UsageError
from coderepairrl.learn import shards
from coderepairrl.learn.probe import PLAIN
from coderepairrl.sync import weights

_UNWRAP = "save the model that the wrapper holds, or remove that part from every name"
_MERGE = "merge the adapters first (peft: merge_and_unload, save_pretrained)"
_WRAPPERS = {
    r"(?:^|\.)(_orig_mod\.)": ("torch.compile", _UNWRAP),
    r"(?:^|\.)(module\.)": ("DistributedDataParallel", _UNWRAP),
    r"(?:^|\.)(_fsdp_wrapped_module\.)": ("FSDP", _UNWRAP),
    r"(?:^|\.)(_forward_module\.)": ("Lightning", _UNWRAP),
    r"(?:^|\.)(base_model\.model\.|base_layer\.|lora_[AB]\.)": ("peft", _MERGE),
}
"""Parts of names that training programs leave: program and fix."""
_FIX = "take config.json and all *.safetensors of one model, and remove tensors that it does not use"
_SHOWN = 3
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, safetensors.SafetensorError,
              StrictDataclassError)  # fmt: skip
"""Errors of transformers for unusable files and configurations."""


def load_model(folder: Path, dtype: torch.dtype | str) -> PreTrainedModel:
    """Load a causal language model. Raises `UsageError` for unreadable files, and missing, unexpected or misshapen
    weights.
    """
    return _load(folder, dtype=dtype)


def check_weights(folder: Path) -> None:
    """Raise as `load_model`, from file headers only; skips weights with a `quant_method`."""
    try:
        plain = models.quant_method(folder) is None
    except (OSError, ValueError):
        plain = True  # `_load` says what is wrong
    if plain:
        _load(folder, dtype="auto", device_map="meta")


def _load(folder: Path, **how: Any) -> PreTrainedModel:
    if (folder / weights.ADAPTER_CONFIG).is_file():
        raise UsageError(f"{folder} holds adapters, not a model", fix=_MERGE)
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} holds no model: config.json is missing")
    try:
        models.require_plain_weights(folder)
        weights.files(folder)
        # its own attention: classes of older architectures are looked up by the name of one
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            attn_implementation=PLAIN,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused here
            **how,
        )
        model, names = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
        _check_names(folder, model, **names)
        _check_copies(folder, model)
    except EngineFault as fault:
        raise UsageError(str(fault), fix=fault.fix) from fault
    except UNREADABLE as error:
        problem = f"cannot load the model in {folder}: {type(error).__name__}: {error}"
        raise UsageError(problem, fix=_FIX) from error
    return model


def _check_names(
    folder: Path,
    model: PreTrainedModel,
    missing_keys: Iterable[str],
    unexpected_keys: Iterable[str],
    mismatched_keys: Iterable[tuple[str, tuple[int, ...], tuple[int, ...]]],
    **_: object,
) -> None:
    problems = []
    if missing := sorted(missing_keys):
        problems.append(f"lacks {_listed(missing)}")
    if unexpected := sorted(unexpected_keys):
        problems.append(f"has no place for {_listed(unexpected)}")
    if shapes := sorted(
        f"{name} {tuple(ours)} instead of {tuple(expected)}" for name, ours, expected in mismatched_keys
    ):
        problems.append(f"has {_listed(shapes)}")
    if not problems:
        return
    fix = _FIX
    for pattern, (program, advice) in _WRAPPERS.items():
        for name in unexpected:
            if match := re.search(pattern, name):
                fix = f"{match[1]!r} in a name is left by {program}: {advice}"
    problem = f"the weights in {folder} are not those of its config.json ({type(model).__name__})"
    raise UsageError(f"{problem}: it {'; it '.join(problems)}", fix=fix)


def _listed(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _check_copies(folder: Path, model: PreTrainedModel) -> None:
    # an engine would serve the first
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    with shards.TensorFiles(folder, shards.MODEL) as files:
        for copy, name in tied.items():
            if {copy, name} <= {*files} and not torch.equal(files[copy], files[name]):
                raise UsageError(
                    f"{folder} has different values for {copy} and {name}, which its config.json ties",
                    fix="set tie_word_embeddings to false in config.json, or remove the one that is not used",
                )
