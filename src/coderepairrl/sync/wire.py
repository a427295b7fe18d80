"""Transfer of weights from the learner to an engine's workers over gloo or NCCL.

Imports no part of the project: it also runs in vLLM's Python. Both ends meet in the folder of an *offer*, a JSON list
of tensors. Receivers apply tensors after the last arrives, so a broken transfer changes none.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"
_FOLD = 1 << 16  # 32-bit numbers that are folded into one
# odd factors by Fibonacci hashing of the position: 2^64 over the golden ratio, as a signed number (Knuth, The Art of
# Computer Programming, 6.4)
_FACTORS = ((torch.arange(1, _FOLD + 1) * -7046029254386353131 >> 33) & 0x7FFFFFFF | 1).to(torch.int32)


class TransferError(OSError):
    """Broken transfer: the other end is gone, silent, or cancelled."""


class DescribedTensor:
    """Name, type, shape and digest of a tensor."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        """Describe a tensor. Raises ValueError for a type missing from `DTYPES`."""
        if tensor.dtype not in _DTYPE_NAMES:
            raise ValueError(f"{name} is {tensor.dtype}: weights are sent as {', '.join(DTYPES)}")
        self.name, self.dtype, self.shape = name, _DTYPE_NAMES[tensor.dtype], list(tensor.shape)
        self.digest = digest_tensor(tensor)


def digest_tensor(tensor: Tensor) -> str:
    """SHA-256 (hexadecimal) of a tensor's bytes, folded on its device to 1/65536 of their size."""
    # each row of `_FOLD` numbers becomes their sum with odd factors: one differing number always changes it, several
    # cancel out about once in 2^32
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    aligned = len(raw) - len(raw) % (4 * _FOLD)
    rest = torch.zeros(4 * _FOLD, dtype=torch.uint8, device=raw.device)
    rest[: len(raw) - aligned] = raw[aligned:]
    factors = _FACTORS.to(raw.device)
    at_once = 1 if raw.device.type == "cpu" else 1024  # fits in the cache
    folded = hashlib.sha256()
    for part in (raw[:aligned], rest):
        for rows in torch.split(part.view(torch.int32).view(-1, _FOLD), at_once):
            folded.update((rows * factors).sum(1, dtype=torch.int32).cpu().numpy().tobytes())
    return folded.hexdigest()


def combine_digests(tensors: Iterable[DescribedTensor]) -> str:
    """Compute an offer's checksum: SHA-256 (hexadecimal) over names, types, shapes and digests, sorted by name."""
    lines = sorted(f"{each.name} {each.dtype} {each.shape} {each.digest}\n" for each in tensors)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def write_offer(file: Path, backend: str, tensors: Sequence[DescribedTensor], *, called_off: str) -> None:
    """Write the offer of `tensors`, in the order of `send`. A file `called_off` next to it ends the wait of both
    ends."""
    listed = [[each.name, each.dtype, each.shape] for each in tensors]
    size = sum(DTYPES[each.dtype].itemsize * math.prod(each.shape) for each in tensors)
    file.write_text(json.dumps({"backend": backend, "called_off": called_off, "bytes": size, "tensors": listed}))


def send(file: Path, tensors: Iterator[tuple[str, Tensor]], receivers: int, seconds: float) -> None:
    """Send `tensors` as offered in `file` to `receivers` processes; each step may take `seconds`.

    Exhausts the iterator, also on failure. Raises `TransferError`, and ValueError for tensors outside the offer.
    """
    try:
        offer = json.loads(file.read_text())
        _wait_for_ends(file.parent, offer["called_off"], 0, receivers, seconds)
        with TransferGroup(offer["backend"], file.parent, 0, receivers + 1, seconds) as group:
            for (name, tensor), listed in zip(tensors, offer["tensors"], strict=True):
                if [name, _DTYPE_NAMES[tensor.dtype], list(tensor.shape)] != listed:
                    raise ValueError(f"{name} is sent where {listed[0]} was offered")
                group.broadcast(tensor.detach().to(group.device).contiguous())
    finally:
        deque(tensors, maxlen=0)  # gathering may be collective: other ranks wait for this one


def receive(file: Path, rank: int, receivers: int, seconds: float) -> tuple[dict[str, Tensor], str]:
    """Receive the tensors offered in `file`, and their `combine_digests`; `rank` counts from 1.

    Raises `TransferError` if the tensors have not arrived after `seconds`, checked after each step, and ValueError for
    non-finite values.
    """
    offer, deadline = json.loads(file.read_text()), time.monotonic() + seconds
    _wait_for_ends(file.parent, offer["called_off"], rank, receivers, seconds)
    arrived: dict[str, Tensor] = {}
    described: list[DescribedTensor] = []
    with TransferGroup(offer["backend"], file.parent, rank, receivers + 1, seconds) as group:
        for name, dtype, shape in offer["tensors"]:
            tensor = torch.empty(shape, dtype=DTYPES[dtype], device=group.device)
            group.broadcast(tensor)
            if time.monotonic() > deadline:
                raise TransferError(f"the weights did not arrive within {seconds:.0f} s")
            if not torch.isfinite(tensor).all():
                raise ValueError(f"{name} has values that are not finite")
            described.append(DescribedTensor(name, tensor))
            arrived[name] = tensor.cpu()
    return arrived, combine_digests(described)


class TransferGroup:
    """Group of processes that connect by a file in `folder`; rank 0 sends."""

    def __init__(self, backend: str, folder: Path, rank: int, ranks: int, seconds: float) -> None:
        wait = timedelta(seconds=seconds)
        try:
            file_store: Any = dist.FileStore  # type: ignore[attr-defined]
            store = file_store(str(folder / "meet-store"), ranks)
            store.set_timeout(wait)
            self._place = rank, ranks, store
            if backend == "nccl":
                self.device = torch.device("cuda", torch.cuda.current_device())
                self._group = _make_nccl_group(store, rank, ranks, wait)
            else:
                self.device = torch.device("cpu")
                gloo: Any = dist.ProcessGroupGloo
                options = gloo._Options()
                options._devices = [gloo.create_device(hostname="127.0.0.1")]  # not reachable from other machines
                options._timeout = wait
                self._group = gloo(store, rank, ranks, options)
        except RuntimeError as error:
            raise TransferError(f"the processes did not connect: {_first_line(error)}") from error

    def broadcast(self, tensor: Tensor) -> None:
        """Copy the sender's values into every receiver's tensor, contiguous and on `device`."""
        try:
            self._group.broadcast(tensor, 0).wait()
        except RuntimeError as error:
            raise TransferError(f"the transfer broke: {_first_line(error)}") from error

    def __enter__(self) -> TransferGroup:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
                self._wait_until_done(failed=failed is not None)
        finally:
            del self._group

    def _wait_until_done(self, *, failed: bool) -> None:
        """Unless `failed`, wait for all ends: NCCL frees memory on leaving, which others may still read."""
        rank, ranks, store = self._place
        store.set(f"done-{rank}", "1")
        if not failed:
            try:
                store.wait([f"done-{other}" for other in range(ranks)])
            except RuntimeError as error:
                raise TransferError(f"the processes did not disconnect: {_first_line(error)}") from error


def _make_nccl_group(store: Any, rank: int, ranks: int, wait: timedelta) -> Any:
    """Create a NCCL group whose operations block, and raise after `wait`."""
    # by default they return at once, and after a timeout torch's watchdog ends the process: a server's worker, which
    # must keep serving; torch reads the variable when it makes the group
    nccl: Any = dist.ProcessGroupNCCL  # type: ignore[attr-defined,unused-ignore]
    options = nccl.Options()
    options._timeout = wait
    before = os.environ.get(_BLOCKING)
    os.environ[_BLOCKING] = "1"
    try:
        return nccl(store, rank, ranks, options)
    finally:
        del os.environ[_BLOCKING]
        if before is not None:
            os.environ[_BLOCKING] = before


def _wait_for_ends(folder: Path, called_off: str, rank: int, receivers: int, seconds: float) -> None:
    """Wait for all processes before they connect, which cannot be interrupted."""
    if rank:
        (folder / f"meet-ready-{rank}").touch()
    go = folder / "meet-go"
    signals = [go] if rank else [folder / f"meet-ready-{other}" for other in range(1, receivers + 1)]
    deadline = time.monotonic() + seconds
    while not all(file.exists() for file in signals):
        if (folder / called_off).exists():
            raise TransferError("the other end was cancelled before the transfer")
        if time.monotonic() > deadline:
            raise TransferError(f"the other end did not connect within {seconds:.0f} s")
        time.sleep(0.005)
    if not rank:
        go.touch()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
