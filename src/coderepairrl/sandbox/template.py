"""One warm guest that others are forked from: a quarter of the processor time of starting each anew.

The template is started once for each thread that opens sandboxes, since it dies with the thread that started it. What
it does inside is `guest.Template`. Each guest serves one sandbox and ends with it; only the template stays.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from coderepairrl.sandbox.guesthost import Command, GuestProcess, Join, kill_group, started

PROBE_SECONDS = 60.0


class Template:
    """A template that runs. Started as `guesthost.started` does it. Raises `SandboxFault`."""

    def __init__(self, command: Command, *, log: Path, user: int | None) -> None:
        self._log = log
        self._process, self._asking = started(command, log=log, user=user, kind=socket.SOCK_SEQPACKET)
        self._asking.setblocking(False)
        self._owner = os.getpid()
        atexit.register(self.close)

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def fork(self, sizes: Mapping[str, int], archive: Path, join: Join | None, *, log: Path) -> GuestProcess:
        """A guest to configure, for the workspace in `archive`, with file systems of these `sizes` in memory.

        `join` as for `GuestProcess.forked`.
        """
        return GuestProcess.forked(lambda theirs: self._ask(theirs, sizes, archive, log), join, log=log)

    def _ask(self, theirs: socket.socket, sizes: Mapping[str, int], archive: Path, log: Path) -> None:
        with archive.open("rb") as files, log.open("ab") as errors:
            message = json.dumps({"sizes": dict(sizes)}).encode()
            socket.send_fds(self._asking, [message], [theirs.fileno(), files.fileno(), errors.fileno()])

    def refusal(self, sizes: Mapping[str, int]) -> str:
        """Why no guest can be forked here; empty if one can. Tries it, which takes a moment."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs, contextlib.suppress(OSError):
                self._ask(theirs, sizes, Path(os.devnull), self._log)
            ours.settimeout(PROBE_SECONDS)
            with contextlib.suppress(TimeoutError):
                if ours.recv(1):
                    return ""
        words = self._log.read_text(errors="replace").strip().splitlines() if self._log.exists() else []
        return words[-1] if words else "it ended without a word"

    def close(self) -> None:
        """End it, and with it every guest that was forked from it (not in a forked child)."""
        if os.getpid() == self._owner:
            atexit.unregister(self.close)
            self._asking.close()
            if self._process.returncode is None:  # else the number may be another group's by now
                kill_group(self._process)
                self._process.wait()
