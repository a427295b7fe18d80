"""A running guest from which others are forked, for a quarter of a start's processor time.

It runs `guest.main.ForkServer`. Each thread that opens sandboxes has its own template, which dies with the thread.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import json
import os
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from coderepairrl.sandbox.cgroups import Cgroup
from coderepairrl.sandbox.guesthost import Command, GuestProcess, kill_group, start_process

PROBE_SECONDS = 60.0
_END_SECONDS = 5.0
_NOT_NOW = (errno.EAGAIN, errno.ETOOMANYREFS)
"""Errors of a socket that takes no further descriptors until earlier ones have arrived."""


class Template:
    """A running template. Raises `SandboxFault` if it cannot start."""

    def __init__(self, command: Command, *, log: Path, user: int | None) -> None:
        self._log = log
        self._process, self._request_socket = start_process(command, log=log, user=user, kind=socket.SOCK_SEQPACKET)
        self._request_socket.setblocking(False)
        self._owner = os.getpid()
        atexit.register(self.close)

    @property
    def is_alive(self) -> bool:
        """Whether it is running."""
        return self._process.poll() is None

    def fork(self, sizes: Mapping[str, int], archive: Path, group: Cgroup | None, *, log: Path) -> ForkedGuest:
        """Prepare a guest in `group` with in-memory file systems of these `sizes`; it is forked when configured."""
        return ForkedGuest(lambda guest_end: self._send_fork_request(guest_end, sizes, archive, group, log), log)

    def _send_fork_request(
        self, guest_end: socket.socket, sizes: Mapping[str, int], archive: Path, group: Cgroup | None, log: Path
    ) -> None:
        group_files = group.open_entrances() if group is not None else []
        try:
            with archive.open("rb") as files, log.open("ab") as errors:
                message = json.dumps({"sizes": dict(sizes)}).encode()
                socket.send_fds(
                    self._request_socket, [message], [guest_end.fileno(), files.fileno(), errors.fileno(), *group_files]
                )
        finally:
            for descriptor in group_files:
                os.close(descriptor)

    def try_fork(self, sizes: Mapping[str, int], group: Cgroup | None) -> str:
        """Try to fork a guest; returns the reason if that fails, else empty."""
        ours, guest_end = socket.socketpair()
        with ours:
            with guest_end, contextlib.suppress(OSError):
                self._send_fork_request(guest_end, sizes, Path(os.devnull), group, self._log)
            ours.settimeout(PROBE_SECONDS)
            with contextlib.suppress(TimeoutError):
                if ours.recv(1):
                    return ""
        lines = self._log.read_text(errors="replace").strip().splitlines() if self._log.exists() else []
        return lines[-1] if lines else "the template ended without a message"

    def close(self) -> None:
        """End it and every guest forked from it (a no-op in a forked child)."""
        if os.getpid() == self._owner:
            atexit.unregister(self.close)
            self._request_socket.close()
            # it ends when its socket is closed; waiting adds the processor time of its guests to ours
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
            if self._process.returncode is None:  # else its id may belong to another group
                kill_group(self._process)
                self._process.wait()


class ForkedGuest(GuestProcess):
    """A guest that exists once it is configured: `request_fork` sends its end of the socket to the template."""

    def __init__(self, request_fork: Callable[[socket.socket], None], log: Path) -> None:
        ours, self._guest_end = socket.socketpair()
        super().__init__(ours, log)
        self._request_fork = request_fork

    async def _wait_for_connection(self) -> None:
        while True:
            try:
                self._request_fork(self._guest_end)
                break
            except OSError as error:
                if error.errno not in _NOT_NOW:
                    raise await self.close_with_fault(f"cannot be forked ({error})") from error
                await asyncio.sleep(0.005)
        self._guest_end.close()
        await self.receive()  # the frame of `guest.main.Forked`, with its pidfd
        self.pidfd = self.take_descriptor()

    async def _on_close(self) -> None:
        # a guest that is still being forked ends when our end is closed: wait until no process holds its end
        self._guest_end.close()
        if self.pidfd is None:
            with contextlib.suppress(OSError, TimeoutError):
                self._socket.shutdown(socket.SHUT_WR)
                async with asyncio.timeout(5.0):
                    while await asyncio.get_running_loop().sock_recv(self._socket, 1 << 16):
                        pass
