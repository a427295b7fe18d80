"""Weights from the learner to an engine's workers without a file: over gloo, NCCL, or memory that both have open.

Both ends are here. It runs in the learner and in vLLM's Python, which need not have this project: it imports nothing
of it. The learner writes an *offer*, a folder with ``offer.json`` that says what will come, and both meet there.

Everything that arrives is kept in the receiver's memory until all of it has come, so that a transfer that breaks off
has changed nothing. That costs each receiver as much host memory as the weights have.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

OFFER = "offer.json"
MEET = "meet-"
"""What the names of files begin with that belong to one attempt."""
CALLED_OFF = MEET + "off"
"""A file that whoever drives both ends leaves when one of them has ended: the other need not wait for it."""
WINDOW = 1 << 24
"""Bytes of memory that the ends share with the backend ``ipc``. In the host a new page costs more than its copy."""
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""By their names in safetensors."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"
_FOLD = 1 << 16  # numbers of 32 bits that become one
# Odd, and unlike their neighbours': Fibonacci hashing (Knuth, The Art of Computer Programming, 6.4) of the place.
_PLACES = ((torch.arange(1, _FOLD + 1) * -7046029254386353131 >> 33) & 0x7FFFFFFF | 1).to(torch.int32)


class Torn(OSError):
    """The other end is gone, silent, or was called off."""


class Described:
    """What a tensor is, and what is in it: enough to know it again."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        """Raises ValueError for a type that no engine takes."""
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{name} is {tensor.dtype}: weights travel as {', '.join(DTYPES)}")
        self.name, self.dtype, self.shape = name, _NAMES[tensor.dtype], list(tensor.shape)
        self.digest = digest(tensor)


def digest(tensor: Tensor) -> str:
    """SHA-256 in hex of a tensor's bytes, folded where the tensor is: a GPU's need not cross to the host for it.

    256 KiB at a time, each number of 32 bits is multiplied by an odd number of its place, and all are added modulo
    2^32. One number that differs always shows; several do unless they cancel out, about once in 2^32.
    """
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = len(raw) - len(raw) % (4 * _FOLD)
    rest = torch.zeros(4 * _FOLD, dtype=torch.uint8, device=raw.device)
    rest[: len(raw) - whole] = raw[whole:]
    places = _PLACES.to(raw.device)
    at_once = 1 if raw.device.type == "cpu" else 1024  # what a cache holds
    folded = hashlib.sha256()
    for part in (raw[:whole], rest):
        for rows in torch.split(part.view(torch.int32).view(-1, _FOLD), at_once):
            folded.update((rows * places).sum(1, dtype=torch.int32).cpu().numpy().tobytes())
    return folded.hexdigest()


def checksum(tensors: Iterable[Described]) -> str:
    """SHA-256 in hex over names, types, shapes and digests, in the order of the names."""
    lines = sorted(f"{found.name} {found.dtype} {found.shape} {found.digest}\n" for found in tensors)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def write_offer(folder: Path, backend: str, tensors: Iterable[Described]) -> None:
    """Say what `send` will send, in this order."""
    listed = [[found.name, found.dtype, found.shape] for found in tensors]
    (folder / OFFER).write_text(json.dumps({"backend": backend, "tensors": listed}))


def send(folder: Path, tensors: Iterator[tuple[str, Tensor]], receivers: int, seconds: float) -> None:
    """Send what the offer in `folder` says to so many `receivers`; no step of it may take longer than `seconds`.

    `tensors` are drawn to the end whatever happens: making one may take every process of a learner. Raises `Torn`, and
    ValueError when they are not those of the offer.
    """
    try:
        offer = _read(folder)
        _meet(folder, 0, receivers, seconds)
        with Wire(offer["backend"], folder, 0, receivers + 1, seconds) as wire:
            for (name, tensor), listed in zip(tensors, offer["tensors"], strict=True):
                if [name, _NAMES[tensor.dtype], list(tensor.shape)] != listed:
                    raise ValueError(f"{name} was not offered here, but {listed[0]}")
                wire.broadcast(tensor.detach().to(wire.device).contiguous())
    finally:
        deque(tensors, maxlen=0)


def receive(folder: Path, rank: int, receivers: int, seconds: float) -> tuple[dict[str, Tensor], str]:
    """All that the offer in `folder` says, in host memory, and its `checksum`; `rank` counts from 1.

    Raises `Torn`, also after `seconds` and a step that was begun before, and ValueError for what is not finite.
    """
    offer, deadline = _read(folder), time.monotonic() + seconds
    _meet(folder, rank, receivers, seconds)
    arrived: dict[str, Tensor] = {}
    described: list[Described] = []
    with Wire(offer["backend"], folder, rank, receivers + 1, seconds) as wire:
        for name, dtype, shape in offer["tensors"]:
            tensor = torch.empty(shape, dtype=DTYPES[dtype], device=wire.device)
            wire.broadcast(tensor)
            if time.monotonic() > deadline:
                raise Torn(f"the weights did not arrive within {seconds:.0f} s")
            if not torch.isfinite(tensor).all():
                raise ValueError(f"{name} has values that are not finite")
            described.append(Described(name, tensor))
            arrived[name] = tensor.cpu()
    return arrived, checksum(described)


class Wire:
    """A group of processes that meet over a file in `folder`; rank 0 sends. What differs on a GPU is the backend.

    ``gloo`` and ``nccl`` carry the values themselves. With ``ipc`` they go through a `_Window`, a stretch of the
    sender's memory that all have open, and gloo says whose turn it is.
    """

    def __init__(self, backend: str, folder: Path, rank: int, ranks: int, seconds: float) -> None:
        self._window: _Window | None = None
        wait = timedelta(seconds=seconds)
        try:
            file_store: Any = dist.FileStore  # type: ignore[attr-defined]
            store = file_store(str(folder / f"{MEET}store"), ranks)
            store.set_timeout(wait)
            self._place = rank, ranks, store
            if backend == "nccl":
                self.device = torch.device("cuda", torch.cuda.current_device())
                self._group = _nccl(store, rank, ranks, wait)
            else:
                self.device = torch.device("cpu")
                gloo: Any = dist.ProcessGroupGloo
                options = gloo._Options()
                options._devices = [gloo.create_device(hostname="127.0.0.1")]  # nobody else reaches it
                options._timeout = wait
                self._group = gloo(store, rank, ranks, options)
        except RuntimeError as error:
            raise Torn(f"the ends did not meet: {_first_line(error)}") from error
        if backend == "ipc":
            try:
                self._window = _Window(folder, sends=rank == 0, all_here=self._all_here)
            except BaseException:
                del self._group  # nobody waits for an end that failed
                raise
            self.device = self._window.device

    def broadcast(self, tensor: Tensor) -> None:
        """The sender's values into everybody's tensor, which is contiguous and on `device`."""
        if self._window is not None:
            self._window.pass_through(tensor)
        else:
            self._wait(lambda: self._group.broadcast(tensor, 0))

    def _all_here(self) -> None:
        """Return when everybody is here, with all done that was begun on a GPU."""
        self._settle()
        self._wait(self._group.barrier)

    def _wait(self, begin: Callable[[], Any]) -> None:
        try:
            begin().wait()
        except RuntimeError as error:
            raise Torn(f"the wire broke: {_first_line(error)}") from error

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        """Return when all that was sent has left, and hang up: an end that failed keeps nobody waiting."""
        try:
            self._settle()
            if self._window is not None:
                self._window.close(failed=failed is not None)
            elif self.device.type == "cuda":
                self._part(failed=failed is not None)
        finally:
            del self._group

    def _part(self, *, failed: bool) -> None:
        """Return when nobody reads any more what NCCL takes down with this end; at once if it `failed`."""
        rank, ranks, store = self._place
        store.set(f"done-{rank}", "1")
        if not failed:
            try:
                store.wait([f"done-{other}" for other in range(ranks)])
            except RuntimeError as error:
                raise Torn(f"the ends did not part: {_first_line(error)}") from error


def _nccl(store: Any, rank: int, ranks: int, wait: timedelta) -> Any:
    """A group whose `wait` waits, and raises when it took longer than `wait`.

    Else it returns at once, and when a step takes too long, a thread of torch's ends the process: a server's worker,
    which is to go on serving what it has. Torch looks at the environment while it makes the group.
    """
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
    """Memory where the sender's tensors are, on a GPU or in the host, that all ends have open.

    All tensors, one after the other, pass through its two halves: while the others read one, the sender fills the next.
    """

    def __init__(self, folder: Path, *, sends: bool, all_here: Callable[[], None]) -> None:
        """What opens it lies in `folder` until all have it open. Raises OSError when there is no room for it."""
        memory, handle = folder / f"{MEET}memory", folder / f"{MEET}handle"
        self._sends = sends
        self._all_here = all_here
        self._passed = 0
        if sends and torch.cuda.is_available():
            self._bytes = torch.empty(WINDOW, dtype=torch.uint8, device="cuda")
            handle.write_bytes(ForkingPickler.dumps(self._bytes))
        elif sends:
            with memory.open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, WINDOW)  # whoever writes where there is no room is killed
            self._bytes = _mapped(memory)
        all_here()
        if not sends:
            self._bytes = pickle.loads(handle.read_bytes()) if handle.exists() else _mapped(memory)
        all_here()
        if sends:  # who is killed from here on leaves nothing
            memory.unlink(missing_ok=True)
            handle.unlink(missing_ok=True)
        self.device = self._bytes.device

    def pass_through(self, tensor: Tensor) -> None:
        """The sender's values into everybody's tensor."""
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
        """Let go: at once if this end `failed`, else the sender last, whose memory it is that the others read."""
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


def _mapped(file: Path) -> Tensor:
    return torch.from_file(str(file), shared=True, size=WINDOW, dtype=torch.uint8)


def _read(folder: Path) -> dict[str, Any]:
    offer: dict[str, Any] = json.loads((folder / OFFER).read_text())
    return offer


def _meet(folder: Path, rank: int, receivers: int, seconds: float) -> None:
    """Wait until all ends are there, which the sender says: only then do they connect, which cannot be called off."""
    if rank:
        (folder / f"{MEET}ready-{rank}").touch()
    go = folder / f"{MEET}go"
    wanted = [go] if rank else [folder / f"{MEET}ready-{other}" for other in range(1, receivers + 1)]
    deadline = time.monotonic() + seconds
    while not all(file.exists() for file in wanted):
        if (folder / CALLED_OFF).exists():
            raise Torn("the other end ended before it began")
        if time.monotonic() > deadline:
            raise Torn(f"the other end did not come within {seconds:.0f} s")
        time.sleep(0.005)
    if not rank:
        go.touch()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
