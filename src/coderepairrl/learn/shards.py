"""Weights as files in Hugging Face layout, one tensor at a time."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from coderepairrl.errors import UsageError

MODEL = "model"
ADAPTER = "adapter_model"
SHARD = 2 << 30
"""Bytes of a file; a single tensor may exceed it."""


def write(
    folder: Path, stem: str, tensors: Iterable[tuple[str, Tensor]], *, here: bool = True, shard: int = SHARD
) -> None:
    """Write ``stem.safetensors``, or ``stem-00001-of-0000N.safetensors``, with an index.

    `tensors` is iterated even without `here`, since gathering may take every process.
    """
    remaining = iter(tensors)
    try:
        if here:
            # peft and vLLM read adapters from one file only
            _write(folder, stem, remaining, sys.maxsize if stem == ADAPTER else shard)
    finally:
        deque(remaining, maxlen=0)


def _write(folder: Path, stem: str, tensors: Iterator[tuple[str, Tensor]], shard: int) -> None:
    held: dict[str, Tensor] = {}
    shards: list[tuple[Path, list[str]]] = []
    size = total = 0

    def flush() -> None:
        file = folder / f"{stem}-{len(shards) + 1:05d}.safetensors"
        safetensors.torch.save_file(held, file, metadata={"format": "pt"})
        shards.append((file, list(held)))
        held.clear()

    for name, tensor in tensors:
        if held and size + tensor.nbytes > shard:
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
    # a single file has an index, too: else vLLM would read every safetensors file in the folder
    # sorted: a restored optimiser has its moments in another order, and equal states must give equal files
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def published(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Tensors in the architecture's file layout."""
    cast(Any, model)._weight_conversions = None  # those of the files that it was read from, such as a checkpoint's
    for name, tensor in tensors:
        yield from revert_weight_conversion(cast(PreTrainedModel, model), {name: tensor}).items()


class TensorFiles:
    """Tensors of one stem, read on demand."""

    def __init__(self, folder: Path, stem: str) -> None:
        """Open the files. Raises OSError or SafetensorError."""
        self._files = ExitStack()
        self._where: dict[str, Any] = {}
        index = folder / f"{stem}.safetensors.index.json"
        names = (
            sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if index.is_file()
            else [f"{stem}.safetensors"]
        )
        for name in names:
            file = self._files.enter_context(safe_open(folder / name, framework="pt"))
            self._where |= dict.fromkeys(file.keys(), file)

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._where[name].get_tensor(name)
        return tensor

    def check(self, shapes: Mapping[str, torch.Size]) -> None:
        """Raise `UsageError` unless names and shapes match."""
        file_shapes = {name: torch.Size(file.get_slice(name).get_shape()) for name, file in self._where.items()}
        if file_shapes != dict(shapes):
            wrong = sorted({*file_shapes.items()} ^ {*shapes.items()})[0][0]
            raise UsageError(f"these are the weights of another model: {wrong} differs")
