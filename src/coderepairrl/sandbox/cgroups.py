"""Control groups: kernel-enforced limits on all processes of a sandbox together.

Version 1 nests groups in our own where that is writable. Version 2 allows processes in leaves only, so groups become
siblings of ours, under the nearest writable parent that delegates the controllers. Without delegation users get
per-process limits only; the exam and ``crrl check`` report `CgroupParents.missing`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger(__name__)

CONTROLLERS = ("pids", "memory", "cpu")
DELEGATE = "systemd-run --user --scope -p Delegate=yes crrl ..."
"""Command that gives a user delegated groups, with systemd."""
_PERIOD_US = 100_000
# Enters the groups whose folders come before `--`, and runs the command after it.
_ENTER = 'while [ "$1" != -- ]; do echo 0 > "$1/cgroup.procs" || exit 1; shift; done; shift; exec "$@"'
REMOVAL_SECONDS = 5.0


@dataclass(frozen=True)
class CgroupParents:
    """Places to create groups: parent folder by controller, and the controllers of version 2."""

    parents: Mapping[str, Path]
    unified: frozenset[str] = frozenset()

    @property
    def missing(self) -> tuple[str, ...]:
        """Unavailable controllers."""
        return tuple(name for name in CONTROLLERS if name not in self.parents)

    def make_group(self, name: str, *, processes: int, memory: int, cpus: int) -> Cgroup:
        """Create group `name` with these limits (bytes, CPUs). Raises OSError and removes partial results."""
        group = Cgroup(tuple(dict.fromkeys(parent / name for parent in self.parents.values())))
        try:
            for folder in group.folders:
                folder.mkdir()
            for controller, parent in self.parents.items():
                version_2 = controller in self.unified
                for file, value in _cgroup_settings(controller, version_2, processes, memory, cpus).items():
                    with contextlib.suppress(FileNotFoundError):  # the kernel does not account for swap
                        (parent / name / file).write_text(f"{value}\n")
        except OSError:
            group.remove()
            raise
        return group


@dataclass(frozen=True)
class Cgroup:
    """The group of one sandbox: one folder per hierarchy."""

    folders: tuple[Path, ...]

    def enter_command(self) -> list[str]:
        """Prefix for an argv that starts the program inside the group."""
        return ["/bin/sh", "-c", _ENTER, "sh", *map(str, self.folders), "--"]

    def open_entrances(self) -> list[int]:
        """Open descriptors, owned by the caller; a process enters the group by writing 0 to each. Raises OSError.

        The kernel checks the rights of the opener, so the process needs none.
        """
        entrances: list[int] = []
        try:
            for folder in self.folders:
                entrances.append(os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
        except OSError:
            for descriptor in entrances:
                os.close(descriptor)
            raise
        return entrances

    def remove(self) -> None:
        """Kill the remaining processes and remove it. Blocks briefly; safe to call twice."""
        deadline = time.monotonic() + REMOVAL_SECONDS
        for folder in self.folders:
            while folder.exists():
                try:
                    folder.rmdir()
                except OSError as error:  # busy: the kernel removes killed processes a little later
                    if time.monotonic() > deadline:
                        _log.warning("cannot remove the control group %s: %s", folder, error)
                        break
                    _kill_processes(folder)
                    time.sleep(0.005)


def _kill_processes(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for pid in (folder / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)


def remove_groups(name: str, parents: list[str]) -> None:
    """Remove groups under `parents` whose names begin with `name`, left by a killed process."""
    for parent in parents:
        for folder in Path(parent).glob(f"{name}-*"):
            Cgroup((folder,)).remove()


def find_cgroups(own: Path = Path("/proc/self/cgroup"), mounts: Path = Path("/proc/self/mountinfo")) -> CgroupParents:
    """Find where this process can create groups; empty if nowhere."""
    if not own.exists():  # not Linux
        return CgroupParents({})
    groups: dict[str, str] = {}  # the groups of this process, by controller
    for line in own.read_text().splitlines():
        _, names, path = line.split(":", 2)  # version 2 has no names
        groups |= dict.fromkeys(names.split(","), path)
    parents: dict[str, Path] = {}
    unified = set()
    for line in mounts.read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        root, point = fields.split()[3:5]  # see proc(5): the mounted group, and where it is mounted
        kind, _, options = rest.split(" ", 2)
        if kind == "cgroup":
            for name in set(CONTROLLERS) & set(options.split(",")) & set(groups) - set(parents):
                folder = _resolve_in_mount(Path(point), root, groups[name])
                if folder is not None and _can_create_groups(folder):
                    parents[name] = folder
        elif kind == "cgroup2" and "" in groups:
            folder = _resolve_in_mount(Path(point), root, groups[""])
            for name, parent in _find_delegated(folder, Path(point)).items():
                if parents.setdefault(name, parent) == parent:
                    unified.add(name)
    return CgroupParents(parents, frozenset(unified))


def _resolve_in_mount(point: Path, root: str, path: str) -> Path | None:
    prefix = root.rstrip("/")
    if path != prefix and not path.startswith(f"{prefix}/"):
        return None
    folder = point / path[len(prefix) :].lstrip("/")
    return folder if folder.is_dir() else None


def _find_delegated(folder: Path | None, point: Path) -> dict[str, Path]:
    """Version 2 controllers, each with the nearest writable parent that delegates it."""
    delegated: dict[str, Path] = {}
    if folder is None:
        return delegated
    for parent in (folder, *folder.parents):
        if not parent.is_relative_to(point):
            break
        if parent == folder and (parent / "cgroup.type").exists():
            continue  # it holds this process, and only the root group may hold processes and groups
        if _can_create_groups(parent):
            for name in set(CONTROLLERS) & set((parent / "cgroup.subtree_control").read_text().split()):
                delegated.setdefault(name, parent)
    return delegated


def _can_create_groups(folder: Path) -> bool:
    # create a group: the mount may be read-only
    probe = folder / f"crrl-probe-{secrets.token_hex(8)}"  # other processes may probe at the same time
    try:
        if not os.access(folder / "cgroup.procs", os.W_OK):
            return False
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True


def _cgroup_settings(controller: str, version_2: bool, processes: int, memory: int, cpus: int) -> dict[str, int | str]:
    if controller == "pids":
        return {"pids.max": processes}
    if controller == "memory":
        if version_2:
            return {"memory.max": memory, "memory.swap.max": 0}
        return {"memory.limit_in_bytes": memory, "memory.memsw.limit_in_bytes": memory}
    quota = cpus * _PERIOD_US
    if version_2:
        return {"cpu.max": f"{quota} {_PERIOD_US}"}
    return {"cpu.cfs_period_us": _PERIOD_US, "cpu.cfs_quota_us": quota}
