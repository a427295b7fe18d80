"""`Sandbox` for backends with a guest process: methods, bridge, diff."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from coderepairrl.errors import ConfigError, SandboxFault
from coderepairrl.printable import printable
from coderepairrl.registry import suggest_nearest
from coderepairrl.sandbox.contents import Entry
from coderepairrl.sandbox.guesthost import GuestProcess, Header
from coderepairrl.sandbox.workspace import PreparedWorkspace, compose_diff
from coderepairrl.types import ExecResult

_log = logging.getLogger(__name__)
T = TypeVar("T")

GRACE_SECONDS = 20.0
"""Time after a command's timeout until a silent guest counts as dead."""
ENDING_SECONDS = 600.0
"""Time limit for a guest to end a command's processes; depends on their kernel resources."""
COLLECT_SECONDS = 120.0
QUEUED_SIGNALS = 1024
"""Queued signals and timers per sandbox; all sandboxes of a user share some 100,000."""
_LEAST_ROOM = 64 << 20
"""Free bytes below which the host's disk is full; otherwise an agent reached its sandbox's limit."""


@dataclass(frozen=True)
class ResourceLimits:
    """Limits of one sandbox. Shared memory counts once; files in ``/tmp`` count separately.

    >>> ResourceLimits(memory=1 << 30).memory >> 20
    1024
    """

    processes: int = 256
    """Processes and threads at a time."""
    memory: int = 2 << 30
    """Bytes of each process (RLIMIT_DATA), and of all together, checked every 0.1 s."""
    cpus: int = 4
    """CPUs used at a time by all processes. Enforced by a control group, or not at all."""
    cpu_seconds: int = 3600
    """CPU time per process."""
    file_bytes: int = 256 << 20
    """Largest file."""
    open_files: int = 1024
    """Per process."""
    tmp_bytes: int = 256 << 20
    """Size of ``/tmp``, and of ``/dev/shm``."""
    disk_bytes: int = 1 << 30
    """Growth of an in-memory workspace."""
    files: int = 100_000
    """Files and folders added in an in-memory workspace and temporary folders."""
    diff_bytes: int = 64 << 20
    """Bytes of changed files in a diff, tracked ones first. The rest is omitted and logged."""
    diff_files: int = 5_000
    """New files in a diff."""
    connections: int = 64
    """Open connections per bridge; further ones wait."""

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> ResourceLimits:
        """Parse a backend's options. Raises `ConfigError`."""
        option_names = [limit.name for limit in fields(cls)]
        for name, value in options.items():
            if name not in option_names:
                raise ConfigError(f"a sandbox has no option {name!r}", fix=suggest_nearest(name, option_names))
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise ConfigError(f"sandbox option {name} must be a positive whole number, not {value!r}")
        return cls(**options)

    def rlimits(self, *, per_user: bool) -> dict[str, int]:
        """Resource limits by name. `per_user`: the kernel counts only this sandbox's processes."""
        limits = {"DATA": self.memory, "FSIZE": self.file_bytes, "NOFILE": self.open_files}
        limits |= {"CPU": self.cpu_seconds, "CORE": 0}
        return limits | ({"NPROC": self.processes, "SIGPENDING": QUEUED_SIGNALS} if per_user else {})


@dataclass
class GuestSandbox:
    """A sandbox whose guest process is ready. Opened and closed by its backend."""

    guest: GuestProcess
    prepared: PreparedWorkspace
    folder: Path
    """Our folder for this sandbox, inaccessible to it."""
    workdir: str
    limits: ResourceLimits
    user: int | None = None
    """User id for git, if we are root."""
    reader: Callable[[], GuestProcess] | None = None
    """Starts a guest that lists changes, if the one inside cannot open every file."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _bridges: list[asyncio.Task[None]] = field(default_factory=list)
    _running: set[asyncio.Task[Any]] = field(default_factory=set)
    _diffs: int = 0

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout: float = 60.0,
        max_bytes: int = 1 << 20,
        cwd: str | None = None,
    ) -> ExecResult:
        """Run as `Sandbox.exec`. Exit codes: 127 not found, 128 + signal, 124 timed out."""
        if not argv:
            raise ValueError("exec needs a command")
        request: Header = {"op": "exec", "argv": list(argv), "env": dict(env or {}), "timeout": timeout}
        request |= {"max_bytes": max_bytes, "cwd": cwd or "."}
        reply, output = await self._send_request(request, stdin, timeout=timeout + GRACE_SECONDS)
        if "errno" in reply:  # a command that fails is not an error of the guest's
            raise SandboxFault(f"the sandbox could not run {argv[0]}: {reply['error']}")
        return ExecResult(
            reply["code"],
            output,
            timed_out=reply.get("timed_out", False),
            truncated=reply.get("truncated", False),
            seconds=reply.get("seconds", 0.0),
        )

    async def read(self, path: str) -> bytes:
        """Read as `Sandbox.read`. Raises IsADirectoryError, and OSError (EFBIG) above 64 MiB."""
        reply, data = await self._send_request({"op": "read", "path": path})
        self._raise_reply_error(reply, path)
        return data

    async def write(self, path: str, data: bytes, *, follow: bool = True) -> None:
        """Write as `Sandbox.write`; errors leave the file as it was.

        Raises OSError (EFBIG, ENOSPC), and `SandboxFault` if the host's disk is full.
        """
        reply, _ = await self._send_request({"op": "write", "path": path, "follow": follow}, data)
        self._raise_reply_error(reply, path)

    async def reach(self, address: str) -> str:
        """Bridge as `Sandbox.reach`: accept from the guest's listening socket and copy both ways.

        A guest without its own loopback can reach one address per socket in `GuestProcess.port_sockets`.
        """
        if not Path(address).is_socket():
            raise SandboxFault(f"{address} is not a Unix socket")
        listener = await self._open_listener()
        listener.setblocking(False)
        self._bridges.append(asyncio.create_task(_serve_bridge(listener, address, self.limits.connections)))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def _open_listener(self) -> socket.socket:
        port_sockets = self.guest.port_sockets
        if port_sockets is None:
            reply, _ = await self._send_request({"op": "listen"})
            if "errno" in reply:
                raise SandboxFault(f"the sandbox cannot listen on its loopback: {reply['error']}")
            return socket.socket(fileno=self.guest.take_descriptor())
        if not port_sockets:
            raise SandboxFault("this sandbox can reach no further address")
        listener = port_sockets.pop()
        listener.listen(128)
        return listener

    async def diff(self) -> bytes:
        """Diff as `Sandbox.diff`, after killing every other process; see `workspace`."""
        changed, summary = await self._run_exclusively(self._collect_changes())
        if summary["left_out"]:
            names = ", ".join(printable(name[:80]) for name in summary["left_out"])
            _log.warning("diff of %s leaves out what is too large or cannot be read: %s", self.workdir, names)
        self._diffs += 1
        scratch = self.folder / f"diff-{self._diffs}"
        return await asyncio.to_thread(
            compose_diff, self.prepared, changed, summary["deleted"], scratch, user=self.user
        )

    async def close(self) -> None:
        """Close every bridge and kill everything inside."""
        for task in (*self._bridges, *self._running):
            task.cancel()
        await asyncio.gather(*self._bridges, *self._running, return_exceptions=True)
        await self.guest.close()

    # -- asking the guest

    async def _send_request(self, request: Header, body: bytes = b"", *, timeout: float = 60.0) -> tuple[Header, bytes]:
        return await self._run_exclusively(self._exchange_frames(request, body, timeout))

    def _raise_reply_error(self, reply: Header, path: str) -> None:
        """Raise the error in `reply`: `SandboxFault` if the host's disk failed, else OSError."""
        if "errno" not in reply:
            return
        code = reply["errno"]
        if code == errno.EIO or (code in (errno.ENOSPC, errno.EDQUOT) and self._is_disk_full()):
            raise SandboxFault(f"the sandbox's disk failed: {reply['error']}", fix="free some disk space")
        raise OSError(code, reply["error"], path)

    def _is_disk_full(self) -> bool:
        room = os.statvfs(self.folder)
        return room.f_bavail * room.f_frsize < _LEAST_ROOM

    async def _exchange_frames(self, request: Header, body: bytes, timeout: float) -> tuple[Header, bytes]:
        try:
            async with asyncio.timeout(timeout) as clock:
                await self.guest.send(request, body)
                reply = await self.guest.receive()
                if "ending" in reply[0]:
                    clock.reschedule(asyncio.get_running_loop().time() + ENDING_SECONDS)
                    reply = await self.guest.receive()
                return reply
        except TimeoutError:
            raise await self.guest.close_with_fault(f"did not answer within {timeout:.0f} s") from None

    async def _collect_changes(self) -> tuple[list[Entry], Header]:
        if self.reader is None:
            return await self._collect_from(self.guest)
        await self._exchange_frames({"op": "settle"}, b"", COLLECT_SECONDS)
        reader = self.reader()
        try:
            await reader.configure({"workdir": self.workdir, "env": {}, "memory": 0, "rlimits": {}})
            return await self._collect_from(reader)
        finally:
            await reader.close()

    async def _collect_from(self, guest: GuestProcess) -> tuple[list[Entry], Header]:
        request = {"op": "collect", "max_bytes": self.limits.diff_bytes, "max_files": self.limits.diff_files}
        changed: list[Entry] = []
        try:
            async with asyncio.timeout(COLLECT_SECONDS):
                await guest.send(request, self.prepared.manifest)
                while True:
                    reply, data = await guest.receive()
                    if "errno" in reply:
                        raise SandboxFault(f"the workspace cannot be read: {reply['error']}")
                    if "done" in reply:
                        return changed, reply
                    changed.append((reply["path"], reply["mode"], data))
        except TimeoutError:
            raise await guest.close_with_fault(f"did not list its files within {COLLECT_SECONDS:.0f} s") from None

    async def _run_exclusively(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`, one at a time. On cancellation, the guest ends its command first."""
        started = False

        async def run_locked() -> T:
            nonlocal started
            async with self._lock:
                started = True
                return await work

        task = asyncio.create_task(run_locked())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # by `close`, not by our caller
                raise SandboxFault("the sandbox was closed meanwhile") from None
            if not started:  # it waits for another request
                task.cancel()
            elif not task.done():
                with contextlib.suppress(SandboxFault):
                    await self.guest.send({"op": "stop"})
                await asyncio.wait({task})
            raise
        finally:
            if not started:
                work.close()


async def _serve_bridge(listener: socket.socket, address: str, most: int) -> None:
    """Connect up to `most` clients of `listener` at a time to the Unix socket `address`."""
    loop = asyncio.get_running_loop()
    room = asyncio.Semaphore(most)
    open_now: set[asyncio.Task[None]] = set()

    def ended(task: asyncio.Task[None]) -> None:
        open_now.discard(task)
        room.release()

    try:
        while True:
            await room.acquire()
            connection, _ = await loop.sock_accept(listener)
            task = loop.create_task(_join_connections(connection, address))
            open_now.add(task)
            task.add_done_callback(ended)
    finally:
        listener.close()
        for task in open_now:
            task.cancel()


async def _join_connections(connection: socket.socket, address: str) -> None:
    writers: list[asyncio.StreamWriter] = []
    try:
        inner, inner_out = await asyncio.open_connection(sock=connection)
        writers.append(inner_out)
        outer, outer_out = await asyncio.open_unix_connection(address)
        writers.append(outer_out)
        await asyncio.gather(_copy_stream(inner, outer_out), _copy_stream(outer, inner_out))
    except OSError as error:  # one side hung up; closing the writers below tells the other
        _log.debug("bridge to %s: %s", address, error)
    finally:
        for writer in writers:
            writer.close()


async def _copy_stream(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(1 << 16):
        target.write(data)
        await target.drain()
    if target.can_write_eof():
        target.write_eof()
