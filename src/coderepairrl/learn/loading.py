"""Load models, and read and write weight files in Hugging Face layout, a tensor at a time; checks names and shapes."""

from __future__ import annotations

import json
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import safetensors
import safetensors.torch
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from coderepairrl import models
from coderepairrl.errors import EngineFault, UsageError
from coderepairrl.learn.probe import EAGER
from coderepairrl.printable import join_first
from coderepairrl.sync import weights

MODEL = "model"
ADAPTER = "adapter_model"
SHARD_BYTES = 2 << 30
"""Limit of a file, unless a single tensor is larger."""


def write_tensors(folder: Path, stem: str, tensors: Iterable[tuple[str, Tensor]], *, is_writer: bool = True) -> None:
    """Write ``stem.safetensors``, or ``stem-00001-of-0000N.safetensors``, with an index.

    Processes without `is_writer` only iterate over `tensors`, since gathering them may need every process.
    """
    remaining = iter(tensors)
    try:
        if is_writer:
            # peft and vLLM read adapters from one file only
            _write_shards(folder, stem, remaining, sys.maxsize if stem == ADAPTER else SHARD_BYTES)
    finally:
        deque(remaining, maxlen=0)


def _write_shards(folder: Path, stem: str, tensors: Iterator[tuple[str, Tensor]], limit: int) -> None:
    held: dict[str, Tensor] = {}
    shards: list[tuple[Path, list[str]]] = []
    size = total = 0

    def flush() -> None:
        file = folder / f"{stem}-{len(shards) + 1:05d}.safetensors"
        safetensors.torch.save_file(held, file, metadata={"format": "pt"})
        shards.append((file, list(held)))
        held.clear()

    for name, tensor in tensors:
        if held and size + tensor.nbytes > limit:
            flush()
            size = 0
        held[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    weight_map: dict[str, str] = {}
    for number, (file, names) in enumerate(shards, 1):
        part = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        renamed = file.rename(folder / f"{stem}{part}.safetensors")
        weight_map |= dict.fromkeys(names, renamed.name)
    # a single file has an index, too: else vLLM would read every safetensors file in the folder; it is sorted, since a
    # restored optimiser has its moments in another order, and equal states must give equal files
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def convert_to_file_layout(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Convert tensors to the file layout of the architecture."""
    cast(Any, model)._weight_conversions = None  # ignore conversions of the files that the model was loaded from
    for name, tensor in tensors:
        yield from revert_weight_conversion(cast(PreTrainedModel, model), {name: tensor}).items()


class TensorFiles:
    """Tensors by name in the files of a stem (`write_tensors`), read on demand."""

    def __init__(self, folder: Path, stem: str) -> None:
        """Open the files. Raises OSError or SafetensorError."""
        self._files = ExitStack()
        self._file_of: dict[str, Any] = {}
        index = folder / f"{stem}.safetensors.index.json"
        names = (
            sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if index.is_file()
            else [f"{stem}.safetensors"]
        )
        for name in names:
            file = self._files.enter_context(safe_open(folder / name, framework="pt"))
            self._file_of |= dict.fromkeys(file.keys(), file)

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def check(self, shapes: Mapping[str, torch.Size]) -> None:
        """Raise `UsageError` unless names and shapes match."""
        file_shapes = {name: torch.Size(file.get_slice(name).get_shape()) for name, file in self._file_of.items()}
        if file_shapes != dict(shapes):
            wrong = sorted({*file_shapes.items()} ^ {*shapes.items()})[0][0]
            raise UsageError(f"these are the weights of a different model: {wrong} differs")


_UNWRAP = "save the model that the wrapper holds, or remove that part from every name"
_MERGE = "merge the adapters first (peft: merge_and_unload, save_pretrained)"
_WRAPPERS = {
    r"(?:^|\.)(_orig_mod\.)": ("torch.compile", _UNWRAP),
    r"(?:^|\.)(module\.)": ("DistributedDataParallel", _UNWRAP),
    r"(?:^|\.)(_fsdp_wrapped_module\.)": ("FSDP", _UNWRAP),
    r"(?:^|\.)(_forward_module\.)": ("Lightning", _UNWRAP),
    r"(?:^|\.)(base_model\.model\.|base_layer\.|lora_[AB]\.)": ("peft", _MERGE),
}
"""Training program and fix, by the part of tensor names that the program leaves behind."""
_FIX = "take config.json and all *.safetensors of one model, and remove tensors that it does not use"
_SHOWN_NAMES = 3
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, safetensors.SafetensorError,
              StrictDataclassError)  # fmt: skip
"""Errors of transformers for unusable files and configurations."""


def check_weights(folder: Path) -> None:
    """Raise what `load_model` raises, but read only file headers; skips quantised weights."""
    try:
        is_plain = models.read_quant_method(folder) is None
    except (OSError, ValueError):
        is_plain = True  # `load_model` says what is wrong
    if is_plain:
        load_model(folder, "auto", device_map="meta")


def load_model(folder: Path, dtype: torch.dtype | str, **options: Any) -> PreTrainedModel:
    """Load a causal language model. Raises `UsageError` for unreadable files, and missing, unexpected or misshapen
    weights.
    """
    if (folder / weights.ADAPTER_CONFIG).is_file():
        raise UsageError(f"{folder} holds adapters, not a model", fix=_MERGE)
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} holds no model: config.json is missing")
    try:
        models.require_plain_weights(folder)
        weights.list_weight_files(folder)
        # our attention is set later: older architectures choose their classes by its name
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=EAGER,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `_check_names` refuses them
            **options,
        )
        model, names = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
        _check_names(folder, model, **names)
        _check_tied_weights(folder, model)
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
        problems.append(f"the folder lacks {join_first(missing, _SHOWN_NAMES)}")
    if unexpected := sorted(unexpected_keys):
        problems.append(f"the model has no place for {join_first(unexpected, _SHOWN_NAMES)}")
    if shapes := sorted(
        f"{name} {tuple(shape)} instead of {tuple(expected)}" for name, shape, expected in mismatched_keys
    ):
        problems.append(f"the folder has {join_first(shapes, _SHOWN_NAMES)}")
    if not problems:
        return
    fix = _FIX
    for pattern, (program, advice) in _WRAPPERS.items():
        for name in unexpected:
            if match := re.search(pattern, name):
                fix = f"{match[1]!r} in a name is left by {program}: {advice}"
    problem = f"the weights in {folder} are not those of its config.json ({type(model).__name__})"
    raise UsageError(f"{problem}: {'; '.join(problems)}", fix=fix)


def _check_tied_weights(folder: Path, model: PreTrainedModel) -> None:
    # an engine would load only one of two copies
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    with TensorFiles(folder, MODEL) as files:
        for copy, name in tied.items():
            if {copy, name} <= {*files} and not torch.equal(files[copy], files[name]):
                raise UsageError(
                    f"{folder} has different values for {copy} and {name}, which its config.json ties",
                    fix="set tie_word_embeddings to false in config.json, or remove the one that is not used",
                )
