"""The host's end of a guest: starting it, asking it, and being sure that it is gone."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from coderepairrl.errors import SandboxFault
from coderepairrl.sandbox.cgroups import Group
from coderepairrl.sandbox.privileges import command_as

_FRAME = struct.Struct(">II")
_MAX_HEADER, _MAX_BODY = 64 << 20, 1 << 30  # far above what a guest sends; beyond, it is broken
STARTUP_SECONDS = 30.0

Header = dict[str, Any]
Command = Callable[[int], tuple[Sequence[str], Sequence[int]]]
"""From the descriptor of a socket to argv, and to further descriptors to pass on."""
Ask = Callable[[socket.socket], None]
Join = Callable[[int], None]
_NOT_NOW = (errno.EAGAIN, errno.ETOOMANYREFS)
"""Why a socket takes no further descriptors until earlier ones have arrived."""


def started(
    command: Command,
    *,
    log: Path,
    user: int | None = None,
    env: Mapping[str, str] | None = None,
    group: Group | None = None,
    first: Sequence[str] = (),
    kind: socket.SocketKind = socket.SOCK_STREAM,
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start ``command(fd of its end of a socket)`` as `user`, in `group`; the process, and our end.

    `first` goes before it: a program that does something with our rights and becomes what follows.
    Must be called from the event loop's own thread: what is started dies with the *thread* that started it.
    Raises `SandboxFault`.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    argv, descriptors = command(theirs.fileno())
    try:
        with theirs, log.open("ab") as sink:
            process = subprocess.Popen(
                [*(group.entering() if group else ()), *first, *command_as(user, argv)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=sink,
                env=dict(env or {}),
                cwd="/",
                pass_fds=[theirs.fileno(), *descriptors],
                start_new_session=True,  # the terminal's Ctrl-C is the controller's to handle
            )
    except OSError as error:
        ours.close()
        raise SandboxFault(f"cannot start the sandbox: {error}") from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return process, ours


class _ToFork(NamedTuple):
    theirs: socket.socket
    ask: Ask
    join: Join | None


class GuestProcess:
    """A running guest (and its bubblewrap, if any) behind one socket. One request at a time.

    All methods belong to one event loop. Once a method raised `SandboxFault` the guest is dead and stays dead.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes] | None,
        connection: socket.socket,
        log: Path,
        doors: list[socket.socket] | None = None,
    ) -> None:
        connection.setblocking(False)
        self.process = process
        """What it was started by; None where it is forked from a `Template`."""
        self.pid = process.pid if process is not None else 0
        """Of that process, or of the guest itself once it was forked."""
        self.doors = doors
        """Bound to ports of the host's loopback, all that the guest can reach; None if it has a loopback itself."""
        self.inner: int | None = None
        """Pidfd of the guest, where its end brings about that of every process of the sandbox."""
        self._socket = connection
        self._log = log
        self._buffer = bytearray()
        self._descriptors: list[int] = []
        self._closed = False
        self._sending = asyncio.Lock()
        self._info = -1
        self._expected = False
        self._to_fork: _ToFork | None = None

    @classmethod
    def spawn(
        cls,
        command: Command,
        *,
        log: Path,
        user: int | None = None,
        env: Mapping[str, str] | None = None,
        doors: list[socket.socket] | None = None,
        group: Group | None = None,
        first: Sequence[str] = (),
    ) -> GuestProcess:
        """As `started`, which says what the parameters are, and `doors` those of the guest."""
        try:
            process, ours = started(command, log=log, user=user, env=env, group=group, first=first)
        except SandboxFault:
            for door in doors or ():
                door.close()
            raise
        return cls(process, ours, log, doors)

    @classmethod
    def await_from(cls, listener: socket.socket, argv: Sequence[str], *, log: Path) -> GuestProcess:
        """Start `argv`, which brings about a guest that connects to `listener` (ours from now on).

        Raises `SandboxFault`.
        """
        try:
            with log.open("ab") as sink:
                process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=sink,
                    cwd=log.parent,  # where Podman leaves a file when a container is out of memory
                    start_new_session=True,
                )
        except OSError as error:
            listener.close()
            raise SandboxFault(f"cannot start the sandbox: {error}") from error
        guest = cls(process, listener, log)
        guest._expected = True
        return guest

    @classmethod
    def forked(cls, ask: Ask, join: Join | None, *, log: Path) -> GuestProcess:
        """One that is forked when configured: `ask` has it done for the guest's end of a socket, or raises OSError.

        Before it runs anything, `join` is called with its process id, in a thread.
        """
        ours, theirs = socket.socketpair()
        guest = cls(None, ours, log)
        guest._to_fork = _ToFork(theirs, ask, join)
        return guest

    async def _be_forked(self, theirs: socket.socket, ask: Ask, join: Join | None) -> None:
        while True:
            try:
                ask(theirs)
                break
            except OSError as error:
                if error.errno not in _NOT_NOW:
                    raise await self.died("lost the process that guests are forked from") from error
                await asyncio.sleep(0.005)
        theirs.close()
        await self.receive()
        self.inner = self.take_descriptor()
        self.pid = int(Path(f"/proc/self/fdinfo/{self.inner}").read_text().partition("\nPid:")[2].split()[0])
        if self.pid <= 0:  # which would be us
            raise await self.died()
        if join is not None:
            try:
                await asyncio.to_thread(join, self.pid)
            except OSError as error:
                raise await self.died(f"cannot enter its control group ({error})") from error

    async def _accept(self, process: subprocess.Popen[bytes]) -> None:
        """Take the guest's connection, the first of all: it runs nothing before it is asked."""
        loop, listener = asyncio.get_running_loop(), self._socket
        ended = os.pidfd_open(process.pid)
        accepting = loop.create_task(loop.sock_accept(listener))
        gone = loop.create_task(_readable(ended))
        try:
            await asyncio.wait({accepting, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not accepting.done():
                process.wait()
                raise await self.died()
            self._socket, _ = accepting.result()
            self._socket.setblocking(False)
        finally:
            for task in (accepting, gone):
                task.cancel()
            await asyncio.gather(accepting, gone, return_exceptions=True)
            os.close(ended)
        listener.close()
        self._expected = False
        pid, _, _ = struct.unpack("3i", self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        with contextlib.suppress(OSError):  # a guest on another machine's kernel, or gone by now
            self.inner = os.pidfd_open(pid)

    def inner_from(self, info: int) -> None:
        """bubblewrap will write to the descriptor `info` (ours from now on) which process is its pid 1."""
        self._info = info

    async def configure(self, settings: Mapping[str, object], timeout: float = STARTUP_SECONDS) -> None:
        """First contact: hand over the `settings`, wait until it is ready. Raises `SandboxFault`."""
        try:
            async with asyncio.timeout(timeout):
                if self._to_fork is not None:
                    await self._be_forked(*self._to_fork)
                if self._expected and self.process is not None:
                    await self._accept(self.process)
                await self.send(settings)
                reply, _ = await self.receive()
        except TimeoutError:
            raise await self.died(f"did not start within {timeout:.0f} s") from None
        if self._info >= 0:  # the guest has spoken, so bubblewrap has written it
            with os.fdopen(self._info, "rb") as info:
                self._info = -1
                self.inner = os.pidfd_open(json.loads(info.read(4096))["child-pid"])
        elif self.doors is not None:  # under a supervisor, which cleans up after it
            with contextlib.suppress(ProcessLookupError):
                self.inner = os.pidfd_open(reply["ready"])

    async def send(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        """Send one request. Raises `SandboxFault`."""
        if self._closed:
            raise SandboxFault("the sandbox is closed")
        text = json.dumps(header).encode()
        try:
            async with self._sending:  # "stop" must not cut into a long request
                await asyncio.get_running_loop().sock_sendall(
                    self._socket, b"".join((_FRAME.pack(len(text), len(body)), text, body))
                )
        except OSError as error:
            raise await self.died() from error

    async def receive(self) -> tuple[Header, bytes]:
        """The next reply. Raises `SandboxFault` when the guest is gone or sends what no guest sends."""
        header_size, body_size = _FRAME.unpack(await self._exactly(_FRAME.size))
        if header_size > _MAX_HEADER or body_size > _MAX_BODY:
            raise await self.died("sent a frame beyond all measure")
        try:
            header = json.loads(await self._exactly(header_size))
        except ValueError as error:
            raise await self.died("sent a malformed frame") from error
        return header, await self._exactly(body_size)

    def take_descriptor(self) -> int:
        """The descriptor that came with the last reply, now the caller's. Raises `SandboxFault`."""
        if not self._descriptors:
            raise SandboxFault("the guest sent no descriptor")
        return self._descriptors.pop()

    async def died(self, how: str = "") -> SandboxFault:
        """End what is left of the guest; returns the fault to raise, with its last words."""
        await self.close()
        status = self.process.returncode if self.process is not None else None
        if not how and status is None:
            how = "ended"
        elif not how:
            how = f"was killed ({signal.Signals(-status).name})" if status and status < 0 else f"ended ({status})"
        words = self._log.read_text(errors="replace").strip()[-600:] if self._log.exists() else ""
        return SandboxFault(f"the sandbox {how}" + (f": {words}" if words else ""))

    async def close(self) -> None:
        """Kill everything inside and wait until it is gone. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._to_fork is not None and self.inner is None:
            await self._unforked(self._to_fork.theirs)
        for opened in (self._socket, *(self.doors or ())):
            opened.close()
        for descriptor in (*self._descriptors, *([self._info] if self._info >= 0 else [])):
            os.close(descriptor)
        if self.inner is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self.inner, signal.SIGKILL)
            await _readable(self.inner, 30.0)
            os.close(self.inner)
        if self.process is not None:
            await self._reap(self.process)

    async def _unforked(self, theirs: socket.socket) -> None:
        """Wait until no process has the other end of our socket: one that is being forked ends when we hang up."""
        theirs.close()
        with contextlib.suppress(OSError, TimeoutError):
            self._socket.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(5.0):
                while await asyncio.get_running_loop().sock_recv(self._socket, 1 << 16):
                    pass

    async def _reap(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + 5.0  # a guest that is hung up on ends by itself, and its children first
        while process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.001)
        kill_group(process)
        await asyncio.to_thread(process.wait)

    async def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 18, 4)
            except BlockingIOError:
                await _readable(self._socket.fileno())
                continue
            except OSError as error:
                raise await self.died() from error
            self._descriptors += descriptors
            if not data:
                raise await self.died()
            self._buffer += data
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and what it forked: a bubblewrap that is killed while it starts leaves a child which waits
    forever for its user ids."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # gone, or about to be
        os.killpg(process.pid, signal.SIGKILL)


async def _readable(descriptor: int, timeout: float | None = None) -> None:
    """Return once `descriptor` is readable, or after `timeout` seconds."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def arrived() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(descriptor, arrived)
    try:
        await asyncio.wait({ready}, timeout=timeout)
    finally:
        loop.remove_reader(descriptor)
