"""`docker` and `podman`: containers of an image with what the task needs.

The guest is the container's pid 1 and connects to a Unix socket that only this container sees. A container is isolated
as by `bwrap`: the runtime's namespaces, its filter of system calls and that of `seccomp`, a read-only image, the
workspace and ``/tmp`` in memory, and control groups where possible. Closing the connection removes the container.

The image must have ``python3`` (3.9 or later), ``bash`` and ``git``, and is never pulled. A container starts in 0.5 to
1 s.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import tarfile
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import IO, Any

from coderepairrl.errors import PrerequisiteError, SandboxFault, TaskError
from coderepairrl.sandbox import contents, guest, seccomp
from coderepairrl.sandbox.backend import NO_NETWORK, GuestBackend, last_error_line
from coderepairrl.sandbox.cgroups import CONTROLLERS, Cgroup, CgroupParents
from coderepairrl.sandbox.contents import Entry, check_path
from coderepairrl.sandbox.guesthost import AwaitedGuest, GuestProcess
from coderepairrl.sandbox.interpreter import install_command
from coderepairrl.sandbox.session import ResourceLimits
from coderepairrl.sandbox.workspace import PreparedWorkspace

IMAGE = "docker.io/library/python:3.12"
"""Default image for workspaces that are not images: Python, git and a compiler."""
WORKDIR = "/workspace"
_GUEST, _SOCKET, _ARCHIVE = "/run/crrl/guest", "/run/crrl/socket", "/run/crrl/workspace"
_USER_PROCESSES = 16_384
"""RLIMIT_NPROC of Podman's containers: Podman's own default may exceed this user's hard limit."""
_NEVER_STARTED = (125, 126)
"""Exit codes if the container program or its runtime fails."""
_PROBE = f"""
import glob, shutil, sys
print(*(path for where in {contents.IN_IMAGES!r} for path in glob.glob(where)), sep="\\n")
sys.exit(" ".join(p for p in ("bash", "git") if not shutil.which(p)) or 0)
"""
"""Prints the image's copies of this package, to be hidden; fails with the names of missing programs."""


class Container(GuestBackend):
    """Sandboxes of a container program, named by subclasses.

    `image` is the image to run (default: `IMAGE`). A task whose workspace is an image runs in that one, in its working
    folder. `flags` precede the program's subcommand (``["--runtime", "runc"]``), `binds` are more host paths to
    show read-only, `env` more variables for every command; the rest are the fields of `ResourceLimits`.
    """

    package: str
    """Package name in the distribution."""
    start_fix: str
    """Fix if the program is installed but does not answer."""
    archive = _ARCHIVE
    memory_folders = (WORKDIR, "/tmp", "/dev/shm")
    startup_seconds = 120.0
    groups_need = "a rootless runtime needs control groups of version 2, delegated to its user"

    def __init__(
        self,
        *,
        image: str = "",
        env: Mapping[str, str] | None = None,
        binds: Sequence[str] = (),
        flags: Sequence[str] = (),
        **limits: int,
    ) -> None:
        super().__init__(ResourceLimits.parse(limits), {"HOME": "/tmp", **NO_NETWORK, **(env or {})}, binds)
        self.images = self._read_image_files
        self._image = image
        self._inspected_images: dict[str, tuple[str, list[str]]] = {}
        """By name: the working folder, and the paths to hide since they hold references of tasks."""
        self._flags = tuple(flags)
        self._controllers: Set[str] = frozenset()

    @property
    def groups(self) -> CgroupParents:
        """Empty: the runtime creates control groups itself."""
        return CgroupParents({})

    def workdir(self, box: Path, prepared: PreparedWorkspace) -> str:
        """`WORKDIR`, or the working folder of the image."""
        kind, _, image = prepared.workspace.partition(":")
        return self._inspect_image(image)[0] if kind == "image" else WORKDIR

    @property
    def missing_controllers(self) -> Sequence[str]:
        """Controllers that the runtime reports as unavailable and that have no substitute."""
        limited = self._controllers | ({"pids"} if self._has_own_user_ids else set())
        return tuple(name for name in CONTROLLERS if name not in limited)

    @property
    def _has_own_user_ids(self) -> bool:
        """Whether containers have other user ids than ours, so that a resource limit can count their processes."""
        return False

    def _check_machine(self) -> None:
        """Raise `PrerequisiteError` unless program, daemon and image are usable."""
        if shutil.which(self.name) is None:
            raise PrerequisiteError(f"{self.name} is not installed", fix=install_command(self.package))
        answer = self._call("info", "--format", "{{json .}}")
        # docker may exit with 0 although its daemon does not answer
        if answer.returncode != 0 or '"ServerErrors":["' in answer.stdout:
            raise PrerequisiteError(f"{self.name} does not answer: {last_error_line(answer)}", fix=self.start_fix)
        self._controllers = self._read_controllers(json.loads(answer.stdout))
        guest_folder = self.state / "guest"
        for folder in (guest_folder, self.state / "empty"):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o755)
        (guest_folder / "filter").write_bytes(seccomp.assemble_filter())
        (guest_folder / "guest.py").write_text(guest.join_guest_source(), "utf-8")
        for file in guest_folder.iterdir():
            file.chmod(0o644)
        if self._image:
            self._inspect_image(self._image)

    def _inspect_image(self, image: str) -> tuple[str, list[str]]:
        """Return the working folder of `image` and the paths to hide in it. Raises `PrerequisiteError`."""
        if image not in self._inspected_images:
            inspected = self._call("image", "inspect", "--format", "{{.Config.WorkingDir}}", image)
            if inspected.returncode != 0:
                raise PrerequisiteError(f"{self.name} has no image {image}", fix=f"{self.name} pull {image}")
            isolation = self._isolation_arguments(WORKDIR, 0)
            trial = self._call("run", "--rm", *isolation, "--entrypoint", "python3", image, "-ISc", _PROBE)
            if trial.returncode in _NEVER_STARTED:
                raise PrerequisiteError(
                    f"{self.name} cannot start containers here: {last_error_line(trial)}",
                    fix='name another runtime that is installed: sandbox.options.flags=["--runtime", "runc"]',
                )
            if trial.returncode != 0:
                raise PrerequisiteError(
                    f"{self.name} cannot run {image} as a sandbox: {last_error_line(trial)}",
                    fix="name an image with python3, bash and git in sandbox.options.image",
                )
            self._inspected_images[image] = inspected.stdout.strip(), trial.stdout.split()
        return self._inspected_images[image]

    def _read_image_files(self, image: str) -> Iterator[Entry]:
        # copied out of a container that is created, and never started
        workdir, _ = self._inspect_image(image)
        if workdir in ("", "/"):
            raise TaskError(f"image {image} has no working folder", fix="build it with WORKDIR set to the repository")
        created = self._call("create", "--pull", "never", "--network", "none", image, "true")
        if created.returncode != 0:
            raise SandboxFault(f"cannot read the files of {image}: {last_error_line(created)}")
        name = created.stdout.strip()
        try:
            argv = self._argv("cp", f"{name}:{workdir}/.", "-")
            with subprocess.Popen(argv, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as copy:
                assert copy.stdout is not None
                yield from _read_tar_entries(copy.stdout, f"image {image}")
            if copy.returncode != 0:
                raise SandboxFault(f"cannot read the files of {image}: exit code {copy.returncode}")
        finally:
            self._call("rm", "--force", name)

    def launch(
        self, box: Path, prepared: PreparedWorkspace, group: Cgroup | None, environment: Path | None
    ) -> GuestProcess:
        """Start a container with the guest as pid 1."""
        if environment is not None:  # built for this machine's Python, which the image lacks
            raise TaskError(
                f"{self.name} cannot use {environment}, the environment of a task",
                fix="sandbox=bwrap, or environment=false for its source and an image that has what its tests need",
            )
        kind, _, location = prepared.workspace.partition(":")
        image = location if kind == "image" else self._image or IMAGE
        _, hidden_in_image = self._inspect_image(image)
        socket_folder = box / "sock"
        socket_folder.mkdir()
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(str(socket_folder / "control"))
            if self.user is not None:
                for path in (socket_folder, socket_folder / "control"):
                    os.chown(path, self.user, self.user)
            listener.listen(1)
        except OSError as error:
            listener.close()
            raise SandboxFault(
                f"cannot make the socket {socket_folder}/control: {error}", fix="set TMPDIR to a shorter path"
            ) from error
        empty_folder = self.state / "empty"
        mounts = [(socket_folder, _SOCKET), (prepared.archive, _ARCHIVE), (self.state / "guest", _GUEST)]
        for bind in contents.sort_outermost_first(self._binds):
            hidden = [target for _, target in contents.find_visible_answers([bind])]
            mounts += [(Path(bind), bind), *((empty_folder, target) for target in hidden)]
        mounts += [(empty_folder, target) for target in hidden_in_image]
        volumes = [word for source, target in mounts for word in ("-v", f"{source}:{target}:ro")]
        start = ["--entrypoint", "python3", image, "-I", "-S", "-B", "-X", "utf8"]
        start += [f"{_GUEST}/guest.py", f"{_SOCKET}/control", f"{_GUEST}/filter"]
        isolation = self._isolation_arguments(self.workdir(box, prepared), prepared.size)
        argv = self._argv("run", "--rm", "--name", self._container_name(box), *volumes, *isolation, *start)
        return AwaitedGuest(listener, argv, log=box / "guest.log")

    def remove_leftovers(self, box: Path) -> None:
        """Remove the container, if the program that should have done so was killed."""
        self._call("rm", "--force", self._container_name(box))

    def close(self) -> None:
        """Close as `GuestBackend.close`; the next use inspects images again."""
        super().close()
        self._inspected_images = {}

    def _guest_settings(self, box: Path, prepared: PreparedWorkspace) -> dict[str, object]:
        # With user ids of the host, the resource limit would count processes of other sandboxes, too.
        return super()._guest_settings(box, prepared) | {
            "inherit": True,
            "rlimits": self.limits.rlimits(per_user=self._has_own_user_ids),
            "memory_folders": [self.workdir(box, prepared), *self.memory_folders[1:]],
        }

    def _container_name(self, box: Path) -> str:
        return f"{self.state.name}-{box.name}"

    def _argv(self, *arguments: str) -> list[str]:
        return [self.name, *self._flags, *arguments]

    def _call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self._argv(*arguments), capture_output=True, text=True, stdin=subprocess.DEVNULL)

    def _isolation_arguments(self, workdir: str, size: int) -> list[str]:
        """Options that restrict a container; `size` is the initial size in bytes of the files in `workdir`."""
        limits = self.limits
        user, group = (self.user, self.user) if self.user is not None else (os.getuid(), os.getgid())
        options = ["--pull", "never", "--network", "none", "--read-only", "--user", f"{user}:{group}"]
        options += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--hostname", "sandbox"]
        options += ["--workdir", workdir]
        options += self._tmpfs_arguments(workdir, size + limits.disk_bytes, user or 0, group or 0)
        options += ["--tmpfs", f"/tmp:rw,exec,nosuid,nodev,mode=1777,size={limits.tmp_bytes}"]
        options += ["--tmpfs", "/dev/mqueue:ro,size=4096"]  # otherwise every user may write there
        options += ["--shm-size", f"{limits.tmp_bytes}b", "--ulimit", f"nofile={limits.open_files}:{limits.open_files}"]
        group_limits = self._group_limits(size)
        memory = f"{group_limits['memory']}b"
        by_controller = {
            "pids": ["--pids-limit", str(group_limits["processes"])],
            "memory": ["--memory", memory, "--memory-swap", memory],
            "cpu": ["--cpus", str(min(limits.cpus, os.cpu_count() or 1))],
        }
        return [
            *options,
            *(word for name, words in by_controller.items() if name in self._controllers for word in words),
        ]

    @abstractmethod
    def _read_controllers(self, info: dict[str, Any]) -> Set[str]:
        """Available controllers, from the runtime's ``info``."""

    @abstractmethod
    def _tmpfs_arguments(self, path: str, size: int, user: int, group: int) -> list[str]:
        """Options for an in-memory file system at `path`, owned by `user`."""


class Docker(Container):
    """Sandboxes of Docker; options as in `Container`. ``DOCKER_HOST`` selects another daemon.

    Rootless daemons are rejected: they map our user to another id, which could not connect to the guest's socket.
    """

    name = "docker"
    package = "docker.io"
    start_fix = "sudo systemctl start docker (and sudo usermod -aG docker $USER, once)"

    def _read_controllers(self, info: dict[str, Any]) -> Set[str]:
        if "name=rootless" in (info.get("SecurityOptions") or ()):
            raise PrerequisiteError("this docker is rootless, which sandboxes cannot use", fix="sandbox=podman")
        info_keys = {"pids": "PidsLimit", "memory": "MemoryLimit", "cpu": "CpuCfsQuota"}
        return {name for name, key in info_keys.items() if info.get(key)}

    def _tmpfs_arguments(self, path: str, size: int, user: int, group: int) -> list[str]:
        return ["--tmpfs", f"{path}:rw,exec,nosuid,nodev,mode=755,uid={user},gid={group},size={size}"]


class Podman(Container):
    """Sandboxes of Podman, as root or rootless; options as in `Container`."""

    name = "podman"
    package = "podman"
    start_fix = "podman info"

    @property
    def _has_own_user_ids(self) -> bool:
        return os.geteuid() != 0  # `keep-id` gives every container its own user namespace

    def _read_controllers(self, info: dict[str, Any]) -> Set[str]:
        return set(info["host"].get("cgroupControllers") or ())

    def _tmpfs_arguments(self, path: str, size: int, user: int, group: int) -> list[str]:
        return ["--mount", f"type=tmpfs,destination={path},tmpfs-size={size},tmpfs-mode=0755,U=true,notmpcopyup"]

    def _isolation_arguments(self, workdir: str, size: int) -> list[str]:
        _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        limit = _USER_PROCESSES if hard == resource.RLIM_INFINITY else min(_USER_PROCESSES, hard)
        arguments = super()._isolation_arguments(workdir, size)
        arguments += ["--read-only-tmpfs=false", "--ulimit", f"nproc={limit}:{limit}"]
        return arguments + (["--userns", "keep-id"] if self._has_own_user_ids else [])


def _read_tar_entries(stream: IO[bytes], source: str) -> Iterator[Entry]:
    """Files and links of a tar archive. Raises `TaskError` for a path that `check_path` refuses."""
    files: dict[str, tuple[str, bytes]] = {}  # by path, for hard links to them
    with tarfile.open(fileobj=stream, mode="r|", errors="surrogateescape") as archive:
        for member in archive:
            path = os.path.normpath(member.name)
            if path == "." or {".git", "__pycache__"} & set(path.split("/")):
                continue
            check_path(path, source)
            if member.issym():
                yield path, "120000", os.fsencode(member.linkname)
            elif member.islnk():
                yield path, *files[os.path.normpath(member.linkname)]
            elif (file := archive.extractfile(member)) is not None:
                files[path] = ("100755" if member.mode & 0o100 else "100644", file.read())
                yield path, *files[path]
