"""The host's side of a guest, the process that serves a sandbox: start, requests, reliable termination."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coderepairrl.errors import SandboxFault, TaskError
from coderepairrl.sandbox.cgroups import Cgroup
from coderepairrl.sandbox.privileges import command_as

_FRAME = struct.Struct(">II")
_MAX_HEADER, _MAX_BODY = 64 << 20, 1 << 30  # far above what a working guest sends
STARTUP_SECONDS = 30.0
_ACCEPT_SECONDS = 0.01
"""Seconds between checks for a connection: a container takes 0.5 s to start."""

Header = dict[str, Any]
Command = Callable[[int], tuple[Sequence[str], Sequence[int]]]
"""Maps the descriptor of the guest's end of a socket to argv and further inherited descriptors."""


def start_process(
    command: Command,
    *,
    log: Path,
    user: int | None = None,
    env: Mapping[str, str] | None = None,
    group: Cgroup | None = None,
    prefix: Sequence[str] = (),
    kind: socket.SocketKind = socket.SOCK_STREAM,
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start `command` as `user` in `group`; return the process and the host's end of its socket.

    `prefix` precedes the command line: a program that runs as our user and execs the rest. Call it from the event
    loop's thread: the process dies with the *thread* that started it. Raises `SandboxFault`.
    """
    host_end, guest_end = socket.socketpair(socket.AF_UNIX, kind)
    argv, descriptors = command(guest_end.fileno())
    try:
        with guest_end, log.open("ab") as sink:
            process = subprocess.Popen(
                [*(group.enter_command() if group else ()), *prefix, *command_as(user, argv)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=sink,
                env=dict(env or {}),
                cwd="/",
                pass_fds=[guest_end.fileno(), *descriptors],
                start_new_session=True,  # the controller handles the terminal's Ctrl-C
            )
    except OSError as error:
        host_end.close()
        raise SandboxFault(f"cannot start the sandbox: {error}") from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return process, host_end


class GuestProcess:
    """Connection to the guest of a sandbox, for one request at a time; a `SandboxFault` ends the guest."""

    process: subprocess.Popen[bytes] | None = None
    """Process that started the guest; None if it was forked (`template`)."""
    port_sockets: list[socket.socket] | None = None
    """Sockets bound to the only host ports that the guest can reach; None if the guest has its own loopback device."""
    pidfd: int | None = None
    """Pidfd of the guest, if all processes of the sandbox die with it."""

    def __init__(self, connection: socket.socket, log: Path) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._log = log
        self._buffer = bytearray()
        self._descriptors: list[int] = []
        self._closed = False
        self._sending = asyncio.Lock()

    async def configure(self, settings: Mapping[str, object], timeout: float = STARTUP_SECONDS) -> None:
        """Send the `settings` and wait until the guest is ready.

        Raises `SandboxFault`, and `TaskError` if the sandbox cannot run the Python of the task's environment.
        """
        try:
            async with asyncio.timeout(timeout):
                await self._wait_for_connection()
                await self.send(settings)
                reply, _ = await self.receive()
        except TimeoutError:
            raise await self.close_with_fault(f"did not start within {timeout:.0f} s") from None
        self._on_ready(reply["ready"])
        if python := reply["cannot_run"]:
            raise TaskError(
                f"the sandbox cannot run {python}, which is {os.path.realpath(python)}",
                fix="make the environment with a Python that all users may run (/usr/bin/python3 -m venv), or make "
                "the folder of that Python visible: sandbox.options.binds",
            )

    async def _wait_for_connection(self) -> None:
        """Wait until the guest can receive settings."""

    def _on_ready(self, pid: int) -> None:
        """Called when the guest is ready; `pid` is its process id in its own namespace."""

    async def send(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        """Send one request. Raises `SandboxFault`."""
        if self._closed:
            raise SandboxFault("the sandbox is closed")
        text = json.dumps(header).encode()
        try:
            async with self._sending:  # a "stop" request must not be written inside a long one
                await asyncio.get_running_loop().sock_sendall(
                    self._socket, b"".join((_FRAME.pack(len(text), len(body)), text, body))
                )
        except OSError as error:
            raise await self.close_with_fault() from error

    async def receive(self) -> tuple[Header, bytes]:
        """Receive the next reply. Raises `SandboxFault`."""
        header_size, body_size = _FRAME.unpack(await self._read_exactly(_FRAME.size))
        if header_size > _MAX_HEADER or body_size > _MAX_BODY:
            raise await self.close_with_fault("sent a frame that is far too large")
        try:
            header = json.loads(await self._read_exactly(header_size))
        except ValueError as error:
            raise await self.close_with_fault("sent a malformed frame") from error
        return header, await self._read_exactly(body_size)

    def take_descriptor(self) -> int:
        """Take the descriptor sent with the last reply. Raises `SandboxFault`."""
        if not self._descriptors:
            raise SandboxFault("the guest sent no descriptor")
        return self._descriptors.pop()

    async def close_with_fault(self, outcome: str = "") -> SandboxFault:
        """End the guest; return the fault to raise, with the last lines of its log."""
        await self.close()
        status = self.process.returncode if self.process is not None else None
        if not outcome and status is None:
            outcome = "ended"
        elif not outcome:
            outcome = f"was killed ({signal.Signals(-status).name})" if status and status < 0 else f"ended ({status})"
        log_end = self._log.read_text(errors="replace").strip()[-600:] if self._log.exists() else ""
        return SandboxFault(f"the sandbox {outcome}" + (f": {log_end}" if log_end else ""))

    async def close(self) -> None:
        """Kill all processes of the sandbox, and wait. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        await self._on_close()
        for each in (self._socket, *(self.port_sockets or ())):
            each.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        if self.pidfd is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            await wait_readable(self.pidfd, 30.0)
            os.close(self.pidfd)
        if self.process is not None:
            deadline = time.monotonic() + 5.0  # without its connection a guest ends by itself, after its children
            while self.process.poll() is None and time.monotonic() < deadline:
                await asyncio.sleep(0.001)
            kill_group(self.process)
            await asyncio.to_thread(self.process.wait)

    async def _on_close(self) -> None:
        """Called first by `close`, perhaps before the guest is ready."""

    async def _read_exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 18, 4)
            except BlockingIOError:
                await wait_readable(self._socket.fileno())
                continue
            except OSError as error:
                raise await self.close_with_fault() from error
            self._descriptors += descriptors
            if not data:
                raise await self.close_with_fault()
            self._buffer += data
        chunk = bytes(self._buffer[:size])
        del self._buffer[:size]
        return chunk


class StartedGuest(GuestProcess):
    """A guest that inherits its end of the socket, started by `start_process`.

    Takes ownership of `port_sockets` and `info`, a pipe to which bubblewrap writes the host pid of the sandbox's init.
    """

    def __init__(
        self,
        command: Command,
        *,
        log: Path,
        user: int | None = None,
        env: Mapping[str, str] | None = None,
        port_sockets: list[socket.socket] | None = None,
        group: Cgroup | None = None,
        prefix: Sequence[str] = (),
        info: int | None = None,
    ) -> None:
        try:
            process, connection = start_process(command, log=log, user=user, env=env, group=group, prefix=prefix)
        except SandboxFault:
            for listener in port_sockets or ():
                listener.close()
            if info is not None:
                os.close(info)
            raise
        super().__init__(connection, log)
        self.process, self.port_sockets, self._info = process, port_sockets, info

    def _on_ready(self, pid: int) -> None:
        if self._info is not None:  # the guest answers, so bubblewrap has written its pid
            with os.fdopen(self._info, "rb") as info:
                self._info = None
                self.pidfd = os.pidfd_open(json.loads(info.read(4096))["child-pid"])
        elif self.port_sockets is not None:  # under a supervisor, which ends the other processes
            with contextlib.suppress(ProcessLookupError):
                self.pidfd = os.pidfd_open(pid)

    async def _on_close(self) -> None:
        if self._info is not None:
            os.close(self._info)


class AwaitedGuest(GuestProcess):
    """A guest that connects to `listener`, because containers inherit no descriptors; closes `listener`.

    Raises `SandboxFault` if `argv` cannot be started.
    """

    def __init__(self, listener: socket.socket, argv: Sequence[str], *, log: Path) -> None:
        try:
            with log.open("ab") as sink:
                self.process = self._starter = subprocess.Popen(
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
        super().__init__(listener, log)

    async def _wait_for_connection(self) -> None:
        # the first connection is the guest's: no other program runs before a request
        listener = self._socket
        while self._socket is listener:
            is_running = self._starter.poll() is None
            try:
                self._socket, _ = listener.accept()
            except BlockingIOError:
                if not is_running:
                    raise await self.close_with_fault() from None
                await asyncio.sleep(_ACCEPT_SECONDS)
        self._socket.setblocking(False)
        listener.close()
        pid, _, _ = struct.unpack("3i", self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        with contextlib.suppress(OSError):  # the guest is in a virtual machine, or has ended
            self.pidfd = os.pidfd_open(pid)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its group: a bubblewrap killed during startup leaves a child that waits forever."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or is about to
        os.killpg(process.pid, signal.SIGKILL)


async def wait_readable(descriptor: int, timeout: float | None = None) -> None:
    """Return once `descriptor` is readable, or after `timeout` seconds."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def on_readable() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(descriptor, on_readable)
    try:
        await asyncio.wait({ready}, timeout=timeout)
    finally:
        loop.remove_reader(descriptor)
