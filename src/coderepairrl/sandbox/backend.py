"""Base of backends with a guest process: the state folder, opening and destroying sandboxes."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import copy
import fcntl
import logging
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coderepairrl.errors import PrerequisiteError, SandboxFault
from coderepairrl.processes.scratch import create_locked, remove_abandoned_in_thread
from coderepairrl.protocols import SandboxBackend
from coderepairrl.sandbox.cgroups import DELEGATE, Cgroup, CgroupParents, find_cgroups, remove_groups
from coderepairrl.sandbox.contents import Images, make_no_images_error
from coderepairrl.sandbox.guesthost import STARTUP_SECONDS, GuestProcess
from coderepairrl.sandbox.privileges import sandbox_user
from coderepairrl.sandbox.session import GuestSandbox, ResourceLimits
from coderepairrl.sandbox.workspace import (
    PreparedWorkspace,
    WorkspaceCache,
    find_environment,
    pack_prepared,
    prepare_workspace,
)
from coderepairrl.types import SandboxInfo

if TYPE_CHECKING:
    from coderepairrl.types import Task

_log = logging.getLogger(__name__)
_PREFIX = "crrl-sandbox-"
_LOCK = ".lock"
_reported: set[Path] = set()
"""Leftovers of killed processes that cannot be removed, each reported once."""
_GROUPS = "groups"  # file that lists the parents of control groups
_OWN_MEMORY = 64 << 20  # for the guest and the programs that start it
_OWN_PROCESSES = 8
_SOCKET_BYTES = 416 << 10  # unread bytes that a socket can hold; only control groups count them as memory
BASE_ENV = {
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
}
NO_NETWORK = {"npm_config_fetch_retries": "0", "PIP_RETRIES": "0"}
"""Settings for sandboxes without a network, where npm would retry for 70 seconds."""


class StateFolder:
    """A folder under ``$TMPDIR``, removed when this process ends or, if it is killed, by the next one.

    Members of `group` may traverse it (an unprivileged sandbox must).
    """

    def __init__(self, group: int | None = None) -> None:
        self.path = Path(tempfile.gettempdir(), f"{_PREFIX}{secrets.token_hex(4)}")
        self._lock = os.fdopen(create_locked(self.path, _LOCK), "w")
        if group is not None:
            os.chown(self.path, -1, group)
            self.path.chmod(0o710)
        self._pid = os.getpid()
        atexit.register(self.remove)
        remove_abandoned_in_thread(self.path.parent)
        threading.Thread(target=_remove_abandoned_states, args=(self.path.parent,), name="sweep").start()

    @cached_property
    def groups(self) -> CgroupParents:
        """Parents for control groups named after this folder; recorded in it for a later `_remove_abandoned_states`."""
        groups = find_cgroups()
        (self.path / _GROUPS).write_text("".join(f"{parent}\n" for parent in groups.parents.values()))
        return groups

    def remove(self) -> None:
        """Delete it (a no-op in a forked child)."""
        if os.getpid() == self._pid:
            _delete_state(self.path)
            self._lock.close()


def _remove_abandoned_states(folder: Path) -> None:
    """Remove leftovers of killed processes: folders that are empty or unlocked."""
    for stale in folder.glob(f"{_PREFIX}*"):
        try:
            if stale.lstat().st_uid != os.getuid():
                continue
            if not any(stale.iterdir()):  # killed while creating or removing it
                stale.rmdir()
                continue
            with (stale / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if (stale / _GROUPS).exists():
                    remove_groups(stale.name, (stale / _GROUPS).read_text().splitlines())
                _kill_starting_bubblewraps(stale)
                _delete_state(stale)
                if stale.exists() and stale not in _reported:
                    _reported.add(stale)
                    _log.warning("%s, which a killed process left, cannot be removed: delete it", stale)
        except OSError:  # locked by its owner, or being created or removed by it
            continue


def _kill_starting_bubblewraps(folder: Path) -> None:
    """Kill bubblewraps that a killed process was starting in `folder`; they would wait for their user ids forever."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            program, *arguments = (process / "cmdline").read_bytes().split(b"\0")
            if program.endswith(b"bwrap") and any(os.fsencode(folder) in argument for argument in arguments):
                os.kill(int(process.name), signal.SIGKILL)


def _delete_state(state: Path) -> None:
    # delete the lock last, so that leftovers of an interrupted deletion are recognized
    delete_trees(*(path for path in state.glob("*") if path.name != _LOCK))
    delete_trees(state)


def delete_trees(*folders: Path) -> None:
    """Delete trees an agent worked in, possibly deeper than Python can recurse."""
    if not folders:
        return
    if subprocess.run(["rm", "-rf", "--", *folders], stderr=subprocess.DEVNULL).returncode != 0:
        subprocess.run(["chmod", "-R", "u+rwX", "--", *folders], stderr=subprocess.DEVNULL)
        subprocess.run(["rm", "-rf", "--", *folders], stderr=subprocess.DEVNULL)


class GuestBackend(SandboxBackend, ABC):
    """Opens a copy of the task's tree with a guest process on it. Subclasses start the guest."""

    name: str
    startup_seconds = STARTUP_SECONDS
    slowdown = 3.0
    """See `SandboxInfo.slowdown`."""
    archive = ""
    """`PreparedWorkspace.archive` as seen by the guest; empty if files are copied to ``box/work`` instead."""
    memory_folders: Sequence[str] = ()
    """Paths of in-memory file systems in the sandbox."""
    isolated = True
    """Whether the guest is pid 1 of a pid namespace."""
    images: Images | None = None
    """Reader of image files; None for sandboxes that use the programs of this machine."""
    groups_need = DELEGATE
    """Requirement for control groups, reported where they are unavailable."""

    def __init__(self, limits: ResourceLimits, env: Mapping[str, str], binds: Sequence[str] = ()) -> None:
        self.limits = limits
        self.env = BASE_ENV | dict(env)
        self._binds: tuple[str, ...] = ()
        self.show(binds)
        self._checking = threading.Lock()
        self._is_checked = False
        self._state: StateFolder | None = None
        self._workspaces: WorkspaceCache | None = None
        self._opened = 0
        self._has_warned = False

    @property
    def user(self) -> int | None:
        """User id to drop to before running anything of the task, if any."""
        return sandbox_user()

    @property
    def pack_up_to(self) -> int:
        """Largest workspace, in bytes, that is packed into an archive."""
        return sys.maxsize if self.archive else 0

    def show(self, folders: Sequence[str]) -> None:
        """Show host folders in sandboxes (option `binds`)."""
        self._binds += tuple(folders)

    def require(self) -> None:
        """Implement `SandboxBackend.require`: check the machine once until `close`."""
        with self._checking:
            if not self._is_checked:
                self._check_machine()
                self._is_checked = True

    def _check_machine(self) -> None:
        """Raise `PrerequisiteError` unless sandboxes work here."""

    def check_image(self, name: str) -> None:
        """Implement `SandboxBackend.check_image`."""
        if self.images is None:
            raise make_no_images_error(f"image:{name}")

    def prepare(self, workspace: str, root: Path, environment: Path | None) -> PreparedWorkspace:
        """Prepare a workspace in the new folder `root`, packed up to `pack_up_to`. Raises `TaskError`, OSError."""
        prepared = prepare_workspace(workspace, root, owner=self.user, images=self.images, environment=environment)
        if prepared.size <= self.pack_up_to:
            pack_prepared(prepared, prepared.tree)
            shutil.rmtree(prepared.tree)
        return prepared

    @abstractmethod
    def launch(
        self, box: Path, prepared: PreparedWorkspace, group: Cgroup | None, environment: Path | None
    ) -> GuestProcess:
        """Start a guest in `group` that sees `environment` read-only; files may still be arriving in ``box/work``."""

    def reader(self, box: Path) -> Callable[[], GuestProcess] | None:
        """Factory of a guest that makes the diff outside the sandbox; None to use the one inside."""
        return None

    def workdir(self, box: Path, prepared: PreparedWorkspace) -> str:
        """``box/work``, or what takes its place, as seen by the guest."""
        return str((box / "work").resolve())

    def remove_leftovers(self, box: Path) -> None:
        """Remove what other programs left, after the guest was killed."""

    def _open_state(self) -> StateFolder:
        if self._state is None:
            self._state = StateFolder(self.user)
        return self._state

    @property
    def state(self) -> Path:
        """This backend's folder on the host."""
        return self._open_state().path

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[GuestSandbox]:
        """Implement `SandboxBackend.open`; workspaces are read once."""
        workspace, environment = task.workspace, find_environment(task)
        if self._workspaces is None:
            await asyncio.to_thread(self.require)
            self._check_limits()
            # another coroutine may have made it during the `await`
            self._workspaces = self._workspaces or WorkspaceCache(self.state, self.prepare)
        workspaces = self._workspaces
        prepared = workspaces.ready(workspace, environment)
        if prepared is None:
            prepared = await asyncio.to_thread(workspaces.acquire, workspace, environment)
        limited = self._with_task_limits(task)
        self._opened += 1
        box = self.state / f"box-{self._opened}"
        sandbox: GuestSandbox | None = None
        initial_bytes = prepared.size if prepared.packed else 0
        # in a thread, since the kernel may take long
        group_creation = asyncio.create_task(asyncio.to_thread(limited._create_group, box.name, initial_bytes))
        try:
            try:
                box.mkdir()
                box.chmod(0o711)  # whatever the umask: git also runs as the sandbox's user
                if not self.archive:
                    (box / "work").mkdir()
                    if self.user is not None:
                        os.chown(box / "work", self.user, self.user)
                group = await asyncio.shield(group_creation)
                guest = limited.launch(box, prepared, group, environment)
            except OSError as error:
                raise SandboxFault(f"cannot make a sandbox: {error}", fix="check the disk's free space") from error
            workdir = self.workdir(box, prepared)
            sandbox = GuestSandbox(guest, prepared, box, workdir, limited.limits, self.user, self.reader(box))
            settings = _add_environment(environment, limited._guest_settings(box, prepared))
            # The guest starts while its workspace is copied. Both must end before a fault of one is raised.
            for outcome in await asyncio.gather(
                asyncio.to_thread(self._copy_workspace, prepared, box),
                guest.configure(settings, self.startup_seconds),
                return_exceptions=True,
            ):
                if outcome is not None:
                    raise outcome
            yield sandbox
        finally:  # shielded, so that cancellation cannot interrupt the cleanup
            await asyncio.shield(self._clean_up(sandbox, box, prepared, group_creation))

    def _with_task_limits(self, task: Task) -> GuestBackend:
        """Copy of this backend with the `task`'s limits where they are lower; warns once if they are higher."""
        limits = {name: math.ceil(value) for name, value in task.limits.items() if name != "seconds"}
        highest = asdict(self.limits)
        above = [f"sandbox.options.{name}={value}" for name, value in limits.items() if value > highest[name]]
        if above and not self._has_warned:
            self._has_warned = True
            _log.warning("task %s asks for more than sandboxes have (reported once): %s", task.id, " ".join(above))
        limited = copy.copy(self)
        limited.limits = replace(self.limits, **{name: min(value, highest[name]) for name, value in limits.items()})
        return limited

    @property
    def groups(self) -> CgroupParents:
        """Control groups available to sandboxes here."""
        return self._open_state().groups

    @property
    def missing_controllers(self) -> Sequence[str]:
        """Control group controllers unavailable to sandboxes here."""
        return self.groups.missing

    def info(self) -> SandboxInfo:
        """Implement `SandboxBackend.info`. Includes `disk_bytes` only if workspaces are in memory."""
        limits = {
            name: value for name, value in asdict(self.limits).items() if self.memory_folders or name != "disk_bytes"
        }
        return SandboxInfo(
            self.isolated, self.user, limits, self.describe_limits(), self.describe_workspaces(), self.slowdown
        )

    def describe_limits(self) -> str:
        """Describe which limits are enforced, for ``crrl check``."""
        if not (missing := self.missing_controllers):
            return "limits by control groups"
        words = {"pids": "threads", "memory": "memory at once", "cpu": "CPUs at a time"}
        return f"limits per process, none on {', '.join(words[name] for name in missing)} ({self.groups_need})"

    def describe_workspaces(self) -> str:
        """Describe how workspaces are opened, for ``crrl check``."""
        return "copied"

    def _check_limits(self) -> None:
        if self.limits.cpus != ResourceLimits().cpus and "cpu" in self.missing_controllers:
            raise PrerequisiteError("cpus cannot be limited here: no control group can be used", fix=self.groups_need)

    def _create_group(self, name: str, initial_bytes: int = 0) -> Cgroup | None:
        """Create the control group of a sandbox with `initial_bytes` of files in memory. Raises OSError."""
        if not self.groups.parents:
            return None
        return self.groups.make_group(
            f"{self.state.name}-{name}", cpus=self.limits.cpus, **self._group_limits(initial_bytes)
        )

    def _group_limits(self, initial_bytes: int) -> dict[str, int]:
        # a group also counts files in memory, and our own processes
        limits = self.limits
        growth = limits.disk_bytes + 2 * limits.tmp_bytes if self.memory_folders else 0  # 2: /tmp and /dev/shm
        return {
            "processes": limits.processes + _OWN_PROCESSES,
            "memory": limits.memory + initial_bytes + growth + _OWN_MEMORY,
        }

    def _copy_workspace(self, prepared: PreparedWorkspace, box: Path) -> None:
        if self.archive:  # the guest unpacks it
            return
        command: Sequence[str | Path] = ["cp", "-a", "--", f"{prepared.tree}/.", box / "work"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise SandboxFault(f"cannot copy the workspace: {last_error_line(done)}", fix="check the disk's free space")

    async def _clean_up(
        self,
        sandbox: GuestSandbox | None,
        box: Path,
        prepared: PreparedWorkspace,
        group_creation: asyncio.Task[Cgroup | None],
    ) -> None:
        if sandbox is not None:
            await sandbox.close()
            process = sandbox.guest.process
            if process is not None and process.returncode == -signal.SIGKILL:
                await asyncio.to_thread(self.remove_leftovers, box)
        if self._workspaces is not None:
            self._workspaces.release(prepared)
        [group] = await asyncio.gather(group_creation, return_exceptions=True)

        def remove() -> None:
            if isinstance(group, Cgroup):
                group.remove()
            if self.archive:  # the agent's files were never here
                shutil.rmtree(box, ignore_errors=True)
            else:
                delete_trees(box)

        await asyncio.to_thread(remove)

    def _guest_settings(self, box: Path, prepared: PreparedWorkspace) -> dict[str, object]:
        limit_sockets = self.memory_folders and "memory" in self.missing_controllers
        return {
            "workdir": self.workdir(box, prepared),
            "env": self.env,
            "memory": self.limits.memory if self.isolated else 0,
            "sockets": self.limits.memory // _SOCKET_BYTES if limit_sockets else 0,
            "rlimits": self.limits.rlimits(per_user=self.isolated),
            "archive": self.archive if prepared.packed else "",
            "memory_folders": list(self.memory_folders),
            "files": self.limits.files,
        }

    def close(self) -> None:
        """Delete the state folder; the next use checks the machine again and creates a new one."""
        if self._state is not None:
            self._state.remove()
        self._state = self._workspaces = None
        self._is_checked = False


def _add_environment(environment: Path | None, settings: dict[str, Any]) -> dict[str, object]:
    if environment is None:
        return settings
    path = settings["env"].get("PATH", os.defpath)
    env = {**settings["env"], "PATH": f"{environment}/bin:{path}", "VIRTUAL_ENV": str(environment)}
    return settings | {"env": env, "python": f"{environment}/bin/python"}


def last_error_line(done: subprocess.CompletedProcess[str]) -> str:
    """Last line on stderr, or the exit code."""
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
