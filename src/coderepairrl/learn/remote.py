"""The controller's connection to a learner started by torchrun (`coderepairrl.learn.torchrun`).

Rank 0 first sends the 32-byte digest of a shared secret. Frames are JSON, neither encrypted nor signed: the network
must be private, as for torch's connections.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import platform
import secrets
import socket
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

from coderepairrl.errors import CodeRepairError, LearnerFault, PrerequisiteError, UsageError
from coderepairrl.processes.children import ChildDied, Frame, encode_frame
from coderepairrl.runs import source_digest

SECRET = "CRRL_LEARNER_SECRET"
"""Environment variable; at least 16 characters."""
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
"""Else restarted ranks look for each other under a key with the restart count, which may differ between machines."""
GREETING_SECONDS = 10.0
"""Time limit of the handshake, at each end."""
_DISMISS_SECONDS = 5.0
_PACKAGES = ("coderepairrl", "torch", "transformers", "peft", "accelerate", "safetensors", "deepspeed", "bitsandbytes")
# TCP probes a silent peer, and drops the connection to a machine that has not answered for half a minute
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000))


def parse_address(text: str) -> tuple[str, int]:
    """Split ``HOST:PORT``. Raises `UsageError`.

    >>> parse_address("10.0.0.1:29500")
    ('10.0.0.1', 29500)
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"{text!r} is not HOST:PORT", fix="train.listen=10.0.0.1:29500, for example")
    if host in ("0.0.0.0", "::", "[::]", "*"):
        raise UsageError(
            f"train.listen={text} would listen on every network of this machine",
            fix="name one address of this machine, on a network that nobody else can reach",
        )
    return host.strip("[]"), int(port)


def read_secret() -> bytes:
    """Digest of the shared secret. Raises `PrerequisiteError`."""
    secret = os.environ.get(SECRET, "")
    if len(secret) < 16:
        raise PrerequisiteError(
            f"{SECRET} has {len(secret)} characters, and train.listen needs 16 or more",
            fix=f"export {SECRET}=..., the same for crrl and every torchrun: openssl rand -hex 32 makes one",
        )
    return hashlib.sha256(secret.encode(errors="surrogateescape")).digest()


def read_learner_versions() -> dict[str, str]:
    """Read the versions of Python and packages, which must be equal on all machines."""
    installed = {"python": ".".join(platform.python_version_tuple()[:2]), "code of coderepairrl": source_digest()}
    for name in _PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            installed[name] = "missing"
    return installed


def format_torchrun(listen: str) -> str:
    """Format the command that starts the learner."""
    return (
        f"{OWN_STORE} torchrun --nnodes=MACHINES --nproc-per-node=GPUS --max-restarts=100"
        f" --rdzv-backend=c10d --rdzv-endpoint={listen.rpartition(':')[0]}:29400"
        f" -m coderepairrl.learn.torchrun {listen}"
    )


def enable_keepalive(connection: socket.socket) -> None:
    """Let the kernel detect a lost peer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def digest_files(paths: Iterable[Path]) -> dict[str, str]:
    """SHA-256 by path; "" if unreadable."""

    def digest(path: Path) -> str:
        try:
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            return ""

    paths = list(paths)
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(map(str, paths), pool.map(digest, paths), strict=True))


@asynccontextmanager
async def digest_common_files(models: Iterable[Path], folders: Iterable[Path]) -> AsyncIterator[dict[str, str]]:
    """Yield SHA-256 by path of files that every machine must see: of `models`, and a temporary one in each folder.

    The temporary ones show whether a folder is shared, or only has the same path.
    """
    files = [file for model in models for name in ("config.json", "*.safetensors") for file in model.glob(name)]
    probes = [folder / f".common-{secrets.token_hex(8)}" for folder in folders]
    try:
        for probe in probes:
            probe.parent.mkdir(parents=True, exist_ok=True)
            probe.write_text(probe.name)
        yield await asyncio.to_thread(digest_files, [file.resolve() for file in (*files, *probes)])
    finally:
        for probe in probes:
            probe.unlink(missing_ok=True)


class RemoteLearner:
    """Connection to rank 0, used like a `Child`."""

    stopped = False  # by SIGSTOP, as `Child.stopped`: not known for another machine

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: Mapping[str, Any], listen: str
    ) -> None:
        self._reader, self._writer, self._listen = reader, writer, listen
        self.pid = int(hello["pid"])
        """Process id of rank 0."""
        self.name = f"{self.pid} on {str(hello['machines'][0]['host'])[:200]}"

    @classmethod
    async def accept(cls, listen: str, processes: int, patience: float) -> Self:
        """Wait up to `patience` seconds for rank 0, which connects for all `processes` ranks.

        Raises `LearnerFault` when none connects, `UsageError` for a bad address or number of ranks, `PrerequisiteError`
        for versions that differ.
        """
        (host, port), secret = parse_address(listen), read_secret()
        joined: asyncio.Future[Self] = asyncio.get_running_loop().create_future()
        rejected = ""

        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal rejected
            try:
                async with asyncio.timeout(GREETING_SECONDS):
                    if not hmac.compare_digest(await reader.readexactly(len(secret)), secret):
                        rejected = f"; a connection without this run's {SECRET} was rejected"
                        raise ValueError(f"wrong {SECRET}")
                    hello = await _receive(reader)
                    if joined.done():
                        raise ValueError("the run already has a learner")
                    enable_keepalive(writer.get_extra_info("socket"))
                    learner = cls(reader, writer, hello, listen)
                    _check_machines(hello["machines"], processes)
                    writer.write(encode_frame({"welcome": os.uname().nodename}))
                    joined.set_result(learner)
                    return
            except CodeRepairError as error:
                joined.set_exception(error)
                writer.write(encode_frame({"error": f"{error}; {error.fix}"}))
            except (OSError, ValueError, LookupError, TypeError, asyncio.IncompleteReadError) as error:  # not a learner
                writer.write(
                    encode_frame({"error": f"crrl rejects this connection: {str(error) or type(error).__name__}"})
                )
            writer.close()

        try:
            server = await asyncio.start_server(greet, host, port)
        except OSError as error:
            raise UsageError(
                f"cannot listen at train.listen={listen}: {error.strerror or error}",
                fix="name an address of this machine and a free port",
            ) from error
        try:
            async with asyncio.timeout(patience):
                return await joined
        except TimeoutError:
            raise LearnerFault(
                f"no learner connected to {listen} within {patience:g} s (train.patience){rejected}",
                fix=f"start it on each machine: {format_torchrun(listen)}; then continue with --resume",
            ) from None
        finally:
            server.close()

    async def send(self, frame: Mapping[str, Any]) -> None:
        """Send one frame. Raises `ChildDied`."""
        try:
            self._writer.write(encode_frame(frame))
            await self._writer.drain()
        except OSError as error:
            raise self._make_lost_error(error) from error

    async def receive(self) -> Frame:
        """Receive one frame. Raises `ChildDied`."""
        try:
            return await _receive(self._reader)
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            raise self._make_lost_error(error) from error

    async def dismiss(self) -> None:
        """End the ranks, waiting briefly."""
        with suppress(ChildDied, OSError):
            async with asyncio.timeout(_DISMISS_SECONDS):
                await self.send({"exit": 0})
                while not self._reader.at_eof():  # not read: a cancelled request may still be reading
                    await asyncio.sleep(0.01)

    def kill(self) -> None:
        """Close the connection at once: the ranks end, and torchrun restarts them."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Do `kill`, and wait until the connection is closed."""
        self.kill()  # a graceful close would wait for a hung rank to read what was sent
        with suppress(OSError):
            await self._writer.wait_closed()

    def _make_lost_error(self, error: Exception) -> ChildDied:
        lost = ChildDied(f"the connection to the learner, process {self.name}, was lost ({error or type(error)})")
        lost.fix = (
            "the output of torchrun says why; if it has ended, start it again on each machine:"
            f" {format_torchrun(self._listen)}; then continue with --resume"
        )
        return lost


async def _receive(reader: asyncio.StreamReader) -> Frame:
    length = int.from_bytes(await reader.readexactly(4), "big")
    frame: Frame = json.loads(await reader.readexactly(length))
    return frame


def _check_machines(machines: Sequence[Mapping[str, Any]], processes: int) -> None:
    if len(machines) != processes:
        raise UsageError(
            f"torchrun started {len(machines)} learner processes, and train.processes={processes}",
            fix="train.processes is --nnodes times --nproc-per-node",
        )
    local = read_learner_versions()
    for machine in machines:
        if differing := [name for name in local if local[name] != machine["versions"].get(name)]:
            listed = ", ".join(f"{name} {machine['versions'].get(name)} (here {local[name]})" for name in differing)
            raise PrerequisiteError(
                f"the learner on {machine['host']} has different versions: {listed}",
                fix="install the same on every machine: scripts/setup.sh there, from the same commit",
            )
    without_gpu = [machine["host"] for machine in machines if not machine["gpu"]]
    if 0 < len(without_gpu) < processes:  # ranks with and without a GPU would wait for each other forever
        raise PrerequisiteError(
            f"the learner on {without_gpu[0]} sees no GPU, while other processes do",
            fix="repair the driver or CUDA_VISIBLE_DEVICES there, or set it to '' for every torchrun, to learn on CPUs",
        )
