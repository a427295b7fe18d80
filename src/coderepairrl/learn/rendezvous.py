"""How the controller and a learner's other nodes find and recognise each other, and the frames between them.

Frames are JSON: nothing that arrives is ever executed, and nothing but the exchange by which both ends prove that they
have the same key is read from whoever has not done so. What follows is neither encrypted nor signed, and torch's own
connections between processes ask for no key at all: the network must be one that nobody else can reach.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import platform
import secrets
import socket
import struct
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from coderepairrl.errors import PrerequisiteError, UsageError
from coderepairrl.processes.children import Frame, pack
from coderepairrl.runs.folder import source_digest

KEY = "CRRL_RENDEZVOUS_KEY"
"""Environment variable with the key."""
SHORTEST = 16
"""Characters of a key."""
GREETING_SECONDS = 10.0
"""Seconds for each answer of the exchange."""
_GREETING_BYTES = 1 << 16
"""Bytes of a frame before both ends know each other."""
_PACKAGES = ("coderepairrl", "torch", "transformers", "peft", "accelerate", "safetensors", "deepspeed", "bitsandbytes")
_LENGTH = struct.Struct(">I")
_PEER = struct.Struct("iII")
"""Process, user and group."""
# a peer whose machine or cable is gone says nothing: the kernel asks, and gives up after half a minute
_ALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000))


class Address(NamedTuple):
    """``HOST:PORT`` of the controller, as the other nodes reach it.

    >>> Address.parse("10.0.0.1:29400")
    Address(host='10.0.0.1', port=29400)
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises `UsageError` for what is no such address, or names no single one."""
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise UsageError(f"{text!r} is no rendezvous", fix="HOST:PORT, for example 10.0.0.1:29400")
        if host in ("0.0.0.0", "::", "[::]", "*"):
            raise UsageError(
                f"the rendezvous {text} is every address of this machine, those that strangers reach included",
                fix="the one by which the learner's other nodes reach it, on a network of theirs alone",
            )
        return cls(host.strip("[]"), int(port))


def key() -> bytes:
    """The key that both ends have. Raises `PrerequisiteError`."""
    found = os.environ.get(KEY, "")
    if len(found) < SHORTEST:
        what = f"{KEY} has {len(found)} characters" if found else f"there is no {KEY}"
        raise PrerequisiteError(
            f"{what}, by which the learner's nodes recognise each other",
            fix=f"export {KEY}=..., the same on every node: openssl rand -hex 32 makes one",
        )
    return found.encode()


def versions() -> dict[str, str]:
    """What must be the same on every node."""
    found = {"python": ".".join(platform.python_version_tuple()[:2]), "code of coderepairrl": source_digest()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def differences(theirs: Mapping[str, Any], here: str) -> str:
    """Which of `versions` are others in `theirs`, in words, where ours are called `here`; "" if none are."""
    ours = versions()
    differing = [name for name in ours if ours[name] != theirs.get(name)]
    return ", ".join(f"{name} {theirs.get(name)} ({here} {ours[name]})" for name in differing)


def prove(key: bytes, who: str, node: int, theirs: str, ours: str) -> str:
    """An HMAC that proves that `who` has the key. It covers the nonces of both ends, so it cannot be replayed."""
    return hmac.new(key, json.dumps([who, node, theirs, ours]).encode(), "sha256").hexdigest()


def proof_matches(proven: Any, expected: str) -> bool:
    """Whether a proof is the expected one, compared in constant time."""
    return isinstance(proven, str) and hmac.compare_digest(proven.encode(), expected.encode())


def nonce() -> str:
    """A number that was never used."""
    return secrets.token_hex(16)


class Channel:
    """A connection that carries frames of JSON: by TCP between a node and the controller, by a Unix socket between a
    run and a learner that it shares."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._sending = asyncio.Lock()
        self.address = ""
        """Of this end; of a Unix socket none."""
        taken: socket.socket = writer.get_extra_info("socket")
        if taken.family == socket.AF_UNIX:
            return
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _ALIVE:
            if hasattr(socket, name):
                taken.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.address = taken.getsockname()[0]

    @property
    def owner(self) -> int | None:
        """The user whose process is at the other end of a Unix socket, where the kernel says it as Linux does."""
        if not hasattr(socket, "SO_PEERCRED"):
            return None
        taken: socket.socket = self._writer.get_extra_info("socket")
        _, user, _ = _PEER.unpack(taken.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        return int(user)

    async def send(self, frame: Mapping[str, Any]) -> None:
        """Send one frame. Raises OSError when the other end is gone."""
        async with self._sending:
            self._writer.write(pack(frame))
            await self._writer.drain()

    async def receive(self, most: int = 1 << 32) -> Frame:
        """The next frame, of at most so many bytes. Raises OSError when the other end is gone, ValueError for what is
        no frame."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > most:
                raise ValueError(f"a frame of {length} bytes")
            frame = json.loads(await self._reader.readexactly(length))
        except asyncio.IncompleteReadError:
            raise ConnectionResetError("the connection was closed") from None
        if not isinstance(frame, dict):
            raise ValueError("no frame")
        return frame

    async def receive_greeting(self) -> Frame:
        """A short frame of somebody who has not proven to have the key. Raises as `receive`, and TimeoutError."""
        async with asyncio.timeout(GREETING_SECONDS):
            return await self.receive(_GREETING_BYTES)

    def hang_up(self) -> None:
        """Close the connection at once, whatever is under way."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Close the connection; frames that were sent still arrive."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:  # it was gone
            return


def process_environment(rank: int, local: int, here: int, world: int, store: str, address: str) -> dict[str, str]:
    """Variables by which process `rank`, the `local`-th of those `here`, finds the others: those of torchrun, and ours.

    `address` is its node's own. Raises as `interface`.
    """
    own: dict[str, int | str] = {
        "RANK": rank,
        "LOCAL_RANK": local,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": here,
        "CRRL_STORE": store,
    }
    own |= dict(zip(("MASTER_ADDR", "MASTER_PORT"), store.rsplit(":", 1), strict=True))  # accelerate insists
    name = interface(address)
    chosen = {each: name for each in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if each not in os.environ}
    return {name: str(value) for name, value in own.items()} | chosen


def interface(address: str) -> str:
    """The network interface that has the address. Raises `UsageError`."""
    import psutil  # type: ignore[import-untyped]

    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return str(name)
    raise UsageError(
        f"no network interface of this machine has the address {address}",
        fix="the rendezvous is an address of the machine that crrl train runs on",
    )
