"""The weights that `Engine.load` takes, read without torch: a file, a folder of full weights, or a peft adapter.

A folder with ``adapter_config.json`` and ``adapter_model.safetensors`` is an adapter; any other has full weights in
Hugging Face layout, in one safetensors file or several. A folder with ``offer.json`` has none: they are transferred by
`coderepairrl.sync.wire`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from coderepairrl.errors import EngineFault
from coderepairrl.processes.extras import require_train
from coderepairrl.runs import storage

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER = "adapter_model.safetensors"
MODEL = "model.safetensors"
OFFER = "offer.json"
CALLED_OFF = "called-off"
"""A file beside the offer: a transfer that has not begun is given up (`coderepairrl.sync.wire`)."""


class Published(NamedTuple):
    """Weights as `Engine.load` takes them: a folder, its policy version, its checksum.

    The folder holds a model (``model.safetensors``, or shards and their index) or adapters in peft's layout
    (``adapter_config.json``, ``adapter_model.safetensors``). The checksum is the SHA-256 in hexadecimal of its
    safetensors files, one after the other in the order of their names. Of a `Learner.offer`, which has no such file, it
    is `coderepairrl.sync.wire.combined_digest`.
    """

    path: Path
    version: int
    checksum: str


class Tensor(NamedTuple):
    """A tensor's header; `dtype` as safetensors spells it (``F32``, ``BF16``)."""

    dtype: str
    shape: tuple[int, ...]


def is_adapter(path: Path) -> bool:
    """Whether these are the weights of an adapter only."""
    return (path / ADAPTER_CONFIG).is_file()


def is_offer(path: Path) -> bool:
    """Whether `path` is the offer of a transfer instead of weights."""
    return (path / OFFER).is_file()


def files(path: Path) -> list[Path]:
    """The safetensors files of weights, by name: those in a folder's index, else `MODEL`, else all.

    Not simply all: a checkpoint also has its optimiser state, and some models a second copy in another layout.
    Raises `EngineFault` when there are none, and for a `MODEL` that the index does not list.
    """
    if is_adapter(path):
        paths = [path / ADAPTER]
    elif (index := path / f"{MODEL}.index.json").is_file():
        try:
            paths = sorted({path / name for name in json.loads(index.read_text())["weight_map"].values()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise EngineFault(f"{index} lists no files: {error!r}") from None
        if (stale := path / MODEL).is_file() and stale not in paths:  # which transformers would load instead
            raise EngineFault(f"{path} has {MODEL} beside the shards that {index.name} lists", fix=f"remove {stale}")
    elif (path / MODEL).is_file():
        paths = [path / MODEL]
    elif path.is_dir():
        paths = sorted(path.glob("*.safetensors"))
    else:
        paths = [path]
    if not paths or not all(file.is_file() for file in paths):
        raise EngineFault(f"there are no weights in {path}")
    return paths


def checksum(path: Path) -> str:
    """SHA-256 in hex over the bytes of `files`, concatenated. Raises `EngineFault`."""
    try:
        return storage.checksum(files(path))
    except OSError as error:
        raise EngineFault(f"cannot read weights: {error}") from None


def verify(path: Path, expected: str) -> None:
    """Raise `EngineFault` unless the `checksum` of `path` is the `expected` one, in upper or lower case."""
    if (actual := checksum(path)) != expected.lower():
        raise EngineFault(f"{path} has SHA-256 {actual}, not {expected}")


def size(path: Path) -> int:
    """Bytes of `files`, or of the offered tensors."""
    if is_offer(path):
        return int(json.loads((path / OFFER).read_text())["bytes"])
    return sum(file.stat().st_size for file in files(path))


def tensors(path: Path) -> dict[str, Tensor]:
    """Type and shape of every tensor, from the headers. Raises `EngineFault` for a file that is not safetensors.

    Raises `PrerequisiteError` without the package safetensors.
    """
    if is_offer(path):
        listed = json.loads((path / OFFER).read_text())["tensors"]
        return {name: Tensor(dtype, tuple(shape)) for name, dtype, shape in listed}
    require_train()
    from safetensors import SafetensorError, safe_open

    headers: dict[str, Tensor] = {}
    for file in files(path):
        try:
            with safe_open(file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    part = opened.get_slice(name)
                    headers[name] = Tensor(part.get_dtype(), tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            raise EngineFault(f"{file} is not a safetensors file: {error}") from None
    return headers


def adapter_rank(path: Path) -> int:
    """The largest rank of an adapter. Raises `EngineFault` for a config that does not say."""
    try:
        config = json.loads((path / ADAPTER_CONFIG).read_text())
        return max([int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values())])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineFault(f"{path / ADAPTER_CONFIG} names no rank: {error!r}") from None
