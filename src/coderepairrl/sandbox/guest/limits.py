"""Limits on all processes of a sandbox together."""

from __future__ import annotations

import os
import resource

from coderepairrl.sandbox.guest.kernel import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

TERMINALS = "/dev/pts"
MOST_TERMINALS = 64  # of the 3,072 that all sandboxes of a machine share


class Limits:
    """Limits on all processes of the sandbox together."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.memory, self.sockets = settings["memory"], settings.get("sockets", 0)
        self.held = settings.get("held", ())
        self.files = settings.get("files", 0) + self._count()  # those that are there from the start are not counted

    def exceeded(self) -> str:
        """Name of an exceeded limit, or empty."""
        if self.memory and self.used() > self.memory:
            return "memory"
        if self.sockets and self._sockets() > self.sockets:
            return "sockets"
        if self.held and len(os.listdir(TERMINALS)) > MOST_TERMINALS:
            return "terminals"
        return "files" if self.held and self._count() > self.files else ""

    def used(self) -> int:
        """Bytes held by all other processes; counts shared pages once when near the limit."""
        pids = [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
        page, resident = resource.getpagesize(), 0
        for pid in pids:
            resident += page * int(look(f"/proc/{pid}/statm", b"0 0").split()[1])
        if resident <= self.memory:
            return resident
        return sum(
            1024 * int(look(f"/proc/{pid}/smaps_rollup", b"Pss: 0").split(b"Pss:")[1].split()[0]) for pid in pids
        )

    def _count(self) -> int:
        file_systems = (os.statvfs(path) for path in self.held)
        return sum(entry.f_files - entry.f_ffree for entry in file_systems)

    def _sockets(self) -> int:
        # counts Unix sockets and those in transit through one
        return int(look("/proc/net/sockstat", b"sockets: used 0").split()[2])


def look(path: str, gone: bytes) -> bytes:
    """Read a /proc file; returns `gone` if its process has ended."""
    try:
        with open(path, "rb") as file:
            return file.read() or gone
    except OSError:
        return gone


def descendants() -> list[int]:
    """Processes below this one, without a pid namespace."""
    parents = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdigit():
            fields = look(f"/proc/{name}/stat", b") Z 0").rsplit(b")", 1)[1].split()
            parents[int(name)] = int(fields[1])
    pids, fresh = [], {os.getpid()}
    while fresh:
        fresh = {pid for pid, parent in parents.items() if parent in fresh}
        pids += sorted(fresh)
    return pids
