"""What `Engine.load` is given, read without torch: a file, a folder of full weights, or a folder with a peft adapter.

A folder with ``adapter_config.json`` and ``adapter_model.safetensors`` is an adapter; any other holds full weights in
Hugging Face layout, in one safetensors file or several. A folder with ``offer.json`` holds none: they come over a wire
(`coderepairrl.sync.wire`).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from coderepairrl.errors import EngineFault
from coderepairrl.runs import storage

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER = "adapter_model.safetensors"
MODEL = "model.safetensors"
OFFER = "offer.json"
MEET = "meet-"
CALLED_OFF = MEET + "off"
"""Names in an offer: `coderepairrl.sync.wire` says what they mean."""
_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


class Published(NamedTuple):
    """Weights as `Engine.load` takes them: a folder, its policy version, its checksum.

    The folder holds a model (``model.safetensors``, or shards and their index) or adapters in peft's layout
    (``adapter_config.json``, ``adapter_model.safetensors``). The checksum is the SHA-256 in hexadecimal of its
    safetensors files, one after the other in the order of their names. A `Learner.offer` has no such file.
    """

    path: Path
    version: int
    checksum: str


class Tensor(NamedTuple):
    """What a header says of a tensor; `dtype` as safetensors spells it (``F32``, ``BF16``)."""

    dtype: str
    shape: tuple[int, ...]


def is_adapter(path: Path) -> bool:
    """Whether these are the weights of an adapter only."""
    return (path / ADAPTER_CONFIG).is_file()


def is_offer(path: Path) -> bool:
    """Whether these weights are not here, but what they will be."""
    return (path / OFFER).is_file()


def files(path: Path) -> list[Path]:
    """The safetensors files of weights, by name: those that a folder's index lists, `MODEL`, or all there are.

    A checkpoint also has its optimiser's, and some models come twice, in their makers' layout, too.
    Raises `EngineFault` when there are none.
    """
    if is_adapter(path):
        found = [path / ADAPTER]
    elif (index := path / f"{MODEL}.index.json").is_file():
        try:
            found = sorted({path / name for name in json.loads(index.read_text())["weight_map"].values()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise EngineFault(f"{index} lists no files: {error!r}") from None
    elif (path / MODEL).is_file():
        found = [path / MODEL]
    elif path.is_dir():
        found = sorted(path.glob("*.safetensors"))
    else:
        found = [path]
    if not found or not all(file.is_file() for file in found):
        raise EngineFault(f"there are no weights in {path}")
    return found


def checksum(path: Path) -> str:
    """SHA-256 in hex over the bytes of `files`, one after the other: of one file, simply its own."""
    try:
        return storage.checksum(files(path))
    except OSError as error:
        raise EngineFault(f"cannot read weights: {error}") from None


def verify(path: Path, expected: str) -> None:
    """Raise `EngineFault` unless the `checksum` of `path` is the `expected` one, in whatever case."""
    if (found := checksum(path)) != expected.lower():
        raise EngineFault(f"{path} has SHA-256 {found}, not {expected}")


def size(path: Path) -> int:
    """Bytes of `files`, or of the tensors that are offered."""
    if is_offer(path):
        return sum(_BYTES[tensor.dtype] * math.prod(tensor.shape) for tensor in tensors(path).values())
    return sum(file.stat().st_size for file in files(path))


def tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor's type and shape, from the headers. Raises `EngineFault` for what is cut or no safetensors."""
    if is_offer(path):
        listed = json.loads((path / OFFER).read_text())["tensors"]
        return {name: Tensor(dtype, tuple(shape)) for name, dtype, shape in listed}
    found: dict[str, Tensor] = {}
    for file in files(path):
        try:
            with safe_open(file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    part = opened.get_slice(name)
                    found[name] = Tensor(part.get_dtype(), tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            raise EngineFault(f"{file} is not a safetensors file: {error}") from None
    return found


def adapter_rank(path: Path) -> int:
    """The largest rank of an adapter. Raises `EngineFault` for a config that does not say."""
    try:
        config = json.loads((path / ADAPTER_CONFIG).read_text())
        return max([int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values())])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineFault(f"{path / ADAPTER_CONFIG} names no rank: {error!r}") from None
