"""Weights on their way to an engine, read without torch: a file, a folder of full weights, or a peft adapter.

A folder with ``offer.json`` only lists tensors: `coderepairrl.sync.wire` transfers them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from coderepairrl.errors import EngineFault
from coderepairrl.processes.installs import require_train
from coderepairrl.processes.scratch import PREFIX, create_owned_folder, remove_abandoned
from coderepairrl.protocols import Engine
from coderepairrl.runs import RunFolder, storage
from coderepairrl.types import Chunk, Sampling

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER = "adapter_model.safetensors"
MODEL = "model.safetensors"
OFFER = "offer.json"
CALLED_OFF = "called-off"
"""File next to the offer that cancels an unstarted transfer (`coderepairrl.sync.wire`)."""
Send = Callable[[Path, int, int, float], Awaitable[str]]
"""``(offer, version, receivers, seconds)``: sends, and returns "" or why it stopped (`Learner.send`)."""


class PublishedWeights(NamedTuple):
    """Weights for `Engine.load`.

    The checksum is the SHA-256 (hexadecimal) of the safetensors files in order of name; of an offer,
    `coderepairrl.sync.wire.combine_digests`.
    """

    path: Path
    version: int
    checksum: str


class TensorHeader(NamedTuple):
    """Type and shape of a tensor; `dtype` in safetensors' spelling (``F32``, ``BF16``)."""

    dtype: str
    shape: tuple[int, ...]


def is_adapter(path: Path) -> bool:
    """Whether `path` holds only an adapter."""
    return (path / ADAPTER_CONFIG).is_file()


def is_offer(path: Path) -> bool:
    """Whether `path` is the offer of a transfer instead of weights."""
    return (path / OFFER).is_file()


def list_weight_files(path: Path) -> list[Path]:
    """Safetensors files of weights, sorted by name: those in a folder's index, else `MODEL`, else all.

    Raises `EngineFault` for none, and for a `MODEL` that the index does not list.
    """
    # not all in a folder: checkpoints hold optimiser state, and some models a second copy in another layout
    if is_adapter(path):
        paths = [path / ADAPTER]
    elif (index := path / f"{MODEL}.index.json").is_file():
        try:
            paths = sorted({path / name for name in json.loads(index.read_text())["weight_map"].values()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise EngineFault(f"{index} lists no files: {error!r}") from None
        if (stale := path / MODEL).is_file() and stale not in paths:  # transformers would load it
            raise EngineFault(f"{path} has {MODEL} beside the shards that {index.name} lists", fix=f"remove {stale}")
    elif (path / MODEL).is_file():
        paths = [path / MODEL]
    elif path.is_dir():
        paths = sorted(path.glob("*.safetensors"))
    else:
        paths = [path]
    if not paths or not all(file.is_file() for file in paths):
        raise EngineFault(f"{path} has no weights")
    return paths


def compute_checksum(path: Path) -> str:
    """SHA-256 (hexadecimal) of `list_weight_files`, concatenated. Raises `EngineFault`."""
    try:
        return storage.hash_concatenated(list_weight_files(path))
    except OSError as error:
        raise EngineFault(f"cannot read weights: {error}") from None


def verify_checksum(path: Path, expected: str) -> None:
    """Raise `EngineFault` unless `compute_checksum` gives `expected`, ignoring case."""
    if (actual := compute_checksum(path)) != expected.lower():
        raise EngineFault(f"{path} has SHA-256 {actual}, not {expected}")


def count_bytes(path: Path) -> int:
    """Bytes of `list_weight_files`, or of the offered tensors."""
    if is_offer(path):
        return int(json.loads((path / OFFER).read_text())["bytes"])
    return sum(file.stat().st_size for file in list_weight_files(path))


def read_headers(path: Path) -> dict[str, TensorHeader]:
    """Types and shapes of tensors. Raises `EngineFault` for invalid files, `PrerequisiteError` without safetensors."""
    if is_offer(path):
        offer = json.loads((path / OFFER).read_text())
        return {name: TensorHeader(dtype, tuple(shape)) for name, dtype, shape in offer["tensors"]}
    require_train()
    from safetensors import SafetensorError, safe_open

    headers: dict[str, TensorHeader] = {}
    for file in list_weight_files(path):
        try:
            with safe_open(file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    part = opened.get_slice(name)
                    headers[name] = TensorHeader(part.get_dtype(), tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            raise EngineFault(f"{file} is not a safetensors file: {error}") from None
    return headers


def check_layout(
    path: Path, offered: Mapping[str, TensorHeader], layout: Mapping[str, tuple[int, ...]], *, optional: str = ""
) -> None:
    """Raise `EngineFault` unless tensors `offered` by `path` have the shapes of `layout`; `optional` may be absent."""
    wrong = sorted((layout.keys() ^ offered.keys()) - {optional}, key=lambda name: (name in offered, name))
    if wrong:
        raise EngineFault(f"{path} is another model: {'lacks' if wrong[0] in layout else 'adds'} {wrong[0]}")
    for name, tensor in offered.items():
        if name in layout and tensor.shape != layout[name]:
            raise EngineFault(f"{path}: {name} is {tensor.shape}, not {layout[name]}")


def read_adapter_rank(path: Path) -> int:
    """Largest rank of an adapter. Raises `EngineFault` for a config without any."""
    try:
        config = json.loads((path / ADAPTER_CONFIG).read_text())
        return max([int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values())])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineFault(f"{path / ADAPTER_CONFIG} names no rank: {error!r}") from None


def find_shared_path(run: RunFolder, base: Path | None = None) -> Path:
    """Folder of a run's weights in transit: below `base`, /dev/shm, or the temporary folder."""
    memory = Path("/dev/shm")
    base = base or (memory if memory.is_dir() else Path(tempfile.gettempdir()))
    return base / f"{PREFIX}{hashlib.sha256(str(run.path.resolve()).encode()).hexdigest()[:16]}"


@contextmanager
def create_shared_folder(run: RunFolder, base: Path | None = None) -> Iterator[Path]:
    """Create an empty `find_shared_path`, and remove it on exit. Raises `UsageError`."""
    path = find_shared_path(run, base)
    if base is None:
        remove_abandoned(path.parent)
    shutil.rmtree(path, ignore_errors=True)
    with create_owned_folder(path):
        yield path


class StreamedEngine(Engine):
    """Wrapper of an engine that starts the sender of an offer; a broken transfer raises a `Fault` of either."""

    def __init__(self, engine: Engine, send: Send) -> None:
        self.context = engine.context
        self._engine = engine
        self._send = send

    def generate(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[Chunk, None]:
        """See `Engine.generate`."""
        return self._engine.generate(ids, sampling, seed)

    async def load(self, path: Path, version: int, checksum: str) -> int:
        """See `Engine.load`. An offer can be loaded repeatedly while the learner keeps its weights."""
        if not is_offer(path):
            return await self._engine.load(path, version, checksum)
        receivers, patience = await self._engine.receivers()
        for file in path.iterdir():  # left by an earlier attempt
            if file.name != OFFER:
                file.unlink()
        loading = asyncio.ensure_future(self._engine.load(path, version, checksum))
        sending = asyncio.ensure_future(self._send(path, version, receivers, patience))
        try:
            await asyncio.wait({loading, sending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_cancelled = not sending.done()
            if is_cancelled or sending.exception() or sending.result():
                (path / CALLED_OFF).touch()
            await asyncio.wait({loading, sending})
        if fault := sending.exception():
            loading.exception()  # a consequence of `fault`; retrieved, or asyncio would warn
            raise fault
        try:
            return loading.result()  # the checksum holds: everything arrived
        except EngineFault as refusal:
            if is_cancelled or not sending.result():  # a cancelled sender reports only its cancellation
                raise
            raise EngineFault(
                f"{refusal}; the learner stopped sending: {sending.result()}", fix=refusal.fix
            ) from refusal

    async def health(self) -> Mapping[str, float]:
        """See `Engine.health`."""
        return await self._engine.health()

    async def close(self) -> None:
        """See `Engine.close`."""
        await self._engine.close()
