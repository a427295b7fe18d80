"""Transfer of weights from the learner to an engine's workers over gloo, NCCL or shared memory.

Imports no part of the project: it also runs in vLLM's Python. Both ends meet in the folder of an *offer*, a JSON list
of tensors. Receivers hold all tensors until the last, so a broken transfer changes none.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

WINDOW = 1 << 24  # few: touching a new page costs more than copying it
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"
_FOLD = 1 << 16  # 32-bit numbers that are folded into one
# odd factors by Fibonacci hashing (Knuth, The Art of Computer Programming, 6.4) of the position
_PLACES = ((torch.arange(1, _FOLD + 1) * -7046029254386353131 >> 33) & 0x7FFFFFFF | 1).to(torch.int32)


class TransferError(OSError):
    """Broken transfer: the other end is gone, silent, or cancelled."""


class DescribedTensor:
    """Name, type, shape and digest of a tensor."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        """Describe a tensor. Raises ValueError for a type missing from `DTYPES`."""
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{name} is {tensor.dtype}: weights are sent as {', '.join(DTYPES)}")
        self.name, self.dtype, self.shape = name, _NAMES[tensor.dtype], list(tensor.shape)
        self.digest = digest_tensor(tensor)


def digest_tensor(tensor: Tensor) -> str:
    """SHA-256 (hexadecimal) of a tensor's bytes, folded on its device to 1/65536 of their size."""
    # odd factors by position: one differing number always changes the sum; several cancel out about once in 2^32
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    aligned = len(raw) - len(raw) % (4 * _FOLD)
    rest = torch.zeros(4 * _FOLD, dtype=torch.uint8, device=raw.device)
    rest[: len(raw) - aligned] = raw[aligned:]
    places = _PLACES.to(raw.device)
    at_once = 1 if raw.device.type == "cpu" else 1024  # fits in the cache
    folded = hashlib.sha256()
    for part in (raw[:aligned], rest):
        for rows in torch.split(part.view(torch.int32).view(-1, _FOLD), at_once):
            folded.update((rows * places).sum(1, dtype=torch.int32).cpu().numpy().tobytes())
    return folded.hexdigest()


def combine_digests(tensors: Iterable[DescribedTensor]) -> str:
    """SHA-256 (hexadecimal) over names, types, shapes and digests, sorted by name: the checksum of an offer."""
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

    Exhausts the iterator. Raises `TransferError`, and ValueError for tensors outside the offer.
    """
    try:
        offer = json.loads(file.read_text())
        _wait_for_ends(file.parent, offer["called_off"], 0, receivers, seconds)
        with TransferGroup(offer["backend"], file.parent, 0, receivers + 1, seconds) as wire:
            for (name, tensor), listed in zip(tensors, offer["tensors"], strict=True):
                if [name, _NAMES[tensor.dtype], list(tensor.shape)] != listed:
                    raise ValueError(f"{name} is sent where {listed[0]} was offered")
                wire.broadcast(tensor.detach().to(wire.device).contiguous())
    finally:
        deque(tensors, maxlen=0)


def receive(file: Path, rank: int, receivers: int, seconds: float) -> tuple[dict[str, Tensor], str]:
    """Receive the tensors offered in `file`, and their `combine_digests`; `rank` counts from 1.

    Raises `TransferError`, at the latest after `seconds` plus one step, and ValueError for non-finite values.
    """
    offer, deadline = json.loads(file.read_text()), time.monotonic() + seconds
    _wait_for_ends(file.parent, offer["called_off"], rank, receivers, seconds)
    arrived: dict[str, Tensor] = {}
    described: list[DescribedTensor] = []
    with TransferGroup(offer["backend"], file.parent, rank, receivers + 1, seconds) as wire:
        for name, dtype, shape in offer["tensors"]:
            tensor = torch.empty(shape, dtype=DTYPES[dtype], device=wire.device)
            wire.broadcast(tensor)
            if time.monotonic() > deadline:
                raise TransferError(f"the weights did not arrive within {seconds:.0f} s")
            if not torch.isfinite(tensor).all():
                raise ValueError(f"{name} has values that are not finite")
            described.append(DescribedTensor(name, tensor))
            arrived[name] = tensor.cpu()
    return arrived, combine_digests(described)


class TransferGroup:
    """Group of processes that connect by a file in `folder`; rank 0 sends.

    With ``ipc`` values pass through a `_Window`, and gloo only synchronises.
    """

    def __init__(self, backend: str, folder: Path, rank: int, ranks: int, seconds: float) -> None:
        self._window: _Window | None = None
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
        if backend == "ipc":
            try:
                self._window = _Window(folder, sends=rank == 0, all_here=self._run_barrier)
            except BaseException:
                del self._group  # so that the other ends fail at once instead of waiting
                raise
            self.device = self._window.device

    def broadcast(self, tensor: Tensor) -> None:
        """Copy the sender's values into every receiver's tensor, contiguous and on `device`."""
        if self._window is not None:
            self._window.pass_bytes(tensor)
        else:
            self._wait(lambda: self._group.broadcast(tensor, 0))

    def _run_barrier(self) -> None:
        self._synchronise_device()
        self._wait(self._group.barrier)

    def _wait(self, begin: Callable[[], Any]) -> None:
        try:
            begin().wait()
        except RuntimeError as error:
            raise TransferError(f"the transfer broke: {_first_line(error)}") from error

    def _synchronise_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def __enter__(self) -> TransferGroup:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        try:
            self._synchronise_device()
            if self._window is not None:
                self._window.close(failed=failed is not None)
            elif self.device.type == "cuda":
                self._wait_until_done(failed=failed is not None)
        finally:
            del self._group

    def _wait_until_done(self, *, failed: bool) -> None:
        """Wait until all ends are done, unless `failed`: NCCL frees memory that they still read."""
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


class _Window:
    """Memory of the sender, mapped by all ends: receivers read one half while the sender fills the other."""

    def __init__(self, folder: Path, *, sends: bool, all_here: Callable[[], None]) -> None:
        memory, handle = folder / "meet-memory", folder / "meet-handle"
        self._sends = sends
        self._all_here = all_here
        self._passed = 0
        if sends and torch.cuda.is_available():
            self._bytes = torch.empty(WINDOW, dtype=torch.uint8, device="cuda")
            handle.write_bytes(ForkingPickler.dumps(self._bytes))
        elif sends:
            with memory.open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, WINDOW)  # else writing to a full /dev/shm kills the process
            self._bytes = _map_memory(memory)
        all_here()
        if not sends:
            self._bytes = pickle.loads(handle.read_bytes()) if handle.exists() else _map_memory(memory)
        all_here()
        if sends:  # mapped by all: without names, the files vanish with the processes
            memory.unlink(missing_ok=True)
            handle.unlink(missing_ok=True)
        self.device = self._bytes.device

    def pass_bytes(self, tensor: Tensor) -> None:
        rest, half = tensor.view(-1).view(torch.uint8), WINDOW // 2
        while len(rest):
            if not self._sends and self._passed % half == 0:
                self._all_here()  # the sender has filled this half, and may fill the other
            part = rest[: half - self._passed % half]
            place = self._bytes[self._passed % WINDOW :][: len(part)]
            if self._sends:
                place.copy_(part)
            else:
                part.copy_(place)
            rest = rest[len(part) :]
            self._passed += len(part)
            if self._sends and self._passed % half == 0:
                self._all_here()

    def close(self, *, failed: bool) -> None:
        """Unmap: at once if `failed`, else the sender last, since the others read its memory."""
        if self._sends and self._passed % (WINDOW // 2) and not failed:
            self._all_here()
        if not self._sends:
            del self._bytes
        if not failed:
            self._all_here()
        if self._sends:
            del self._bytes
            if self.device.type == "cuda":
                torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def _map_memory(file: Path) -> Tensor:
    return torch.from_file(str(file), shared=True, size=WINDOW, dtype=torch.uint8)


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
