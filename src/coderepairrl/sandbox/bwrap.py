"""`bwrap`: unprivileged bubblewrap.

Layers, each with a probe in ``tests/sandbox`` that fails without it:

- *user*: an unprivileged user id (root switches to one) without groups, capabilities or the right to gain any;
- *namespaces*: user, pid, network (loopback only), ipc, uts, mount, cgroup;
- *files*: read-only ``/usr``, needed files of ``/etc``, ``/dev``, ``/`` and ``/proc/sys``; a bounded ``/tmp``; a
  private ``/proc``; no home, ``/run`` or ``/sys``; an empty folder over each copy of this package (`contents`);
- *system calls*: the filter of `seccomp`;
- *limits*: `ResourceLimits`, set inside, where the kernel counts processes per user namespace (Linux 5.14+), and
  again by a control group where possible (`cgroups`); the workspace is an in-memory file system of a fixed size;
- *lifetime*: the guest is pid 1, so all processes end with it; and it dies with its parent.

Sandboxes that differ only in their in-memory files share one bubblewrap, which forks guests (`template`) into nested
namespaces with the same filter and limits. The kernel is shared: this is not a virtual machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coderepairrl.errors import ConfigError, PrerequisiteError, TaskError
from coderepairrl.processes.signals import raise_open_file_limit
from coderepairrl.sandbox import contents, imageview, interpreter, rootfs, seccomp
from coderepairrl.sandbox.backend import BASE_ENV, NO_NETWORK, GuestBackend, last_error_line
from coderepairrl.sandbox.cgroups import Cgroup
from coderepairrl.sandbox.guesthost import GuestProcess, StartedGuest
from coderepairrl.sandbox.interpreter import find_prefix, find_python, install_command, make_search_path
from coderepairrl.sandbox.privileges import SANDBOX_USER, command_as
from coderepairrl.sandbox.rootfs import Image
from coderepairrl.sandbox.session import ResourceLimits
from coderepairrl.sandbox.template import Template
from coderepairrl.sandbox.workspace import PreparedWorkspace, find_cached_interpreter, prepare_image

WORKDIR = "/workspace"
_GUEST_INSIDE = "/run/guest.pyc"
_ARCHIVE_INSIDE = "/run/workspace"
_INNER_ID = "1000"
_PYTHON = ("-I", "-S", "-B", "-X", "utf8")
OVERLAY_ABOVE = 2 << 20
"""Bytes (plus 4 KiB per file) above which an overlay mount is cheaper than copying the workspace."""
# arguments: the sandbox's folder, size of changes, owner, name of the lower folder next to it, mount options, command
_OVERLAY = """
cd "$1" && mount -t tmpfs -o size="$2",mode=755,nosuid,nodev tmpfs layers && mkdir layers/work layers/upper &&
chown "$3:$3" layers/upper && mount -t overlay -o \
"lowerdir=../$4/tree,upperdir=layers/upper,workdir=layers/work,nosuid,nodev,$5" overlay merged && shift 5 && exec "$@"
"""

_PROTECT_PROC_SYS = ("--ro-bind", "/proc/sys", "/proc/sys")
"""Not for a template, which mounts a ``/proc`` per guest: the kernel refuses if the template's has submounts."""
_PRIVATE_FOLDERS = (WORKDIR, "/tmp", "/var/tmp", "/dev", "/proc", "/etc")
"""Folders private to each sandbox: a bind below one would be hidden, or could be moved by the sandbox."""
_PROGRAMS = ("/usr/local/bin", "/usr/local/sbin", "/usr/bin", "/usr/sbin", "/usr/games", "/bin", "/sbin")


ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types", "nsswitch.conf",
       "services", "protocols", "ssl/certs", "ssl/openssl.cnf", "ca-certificates", "pki", "java-17-openjdk",
       "java-21-openjdk", "maven", "php", "perl", "lua")  # fmt: skip
"""Entries of ``/etc`` that programs need and that are safe to show."""
_MANY_FILES = ("alternatives", "ssl/certs", "pki")  # mounted (0.2 ms each), since copying them takes 0.5 s
_FILES = {
    "passwd": f"root:x:0:0:root:/:/usr/sbin/nologin\nagent:x:{_INNER_ID}:{_INNER_ID}:agent:/tmp:/bin/bash\n",
    "group": f"root:x:0:\nagent:x:{_INNER_ID}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
}


class Bubblewrap(GuestBackend):
    """Sandboxes of bubblewrap.

    `binds` are further host paths to show read-only, not below `_PRIVATE_FOLDERS`; `env` are variables of commands;
    `commands`, if given, are the only programs besides ``bash``; `copy` disables overlays for large workspaces; without
    `fork`, every sandbox starts its own bubblewrap; the rest are the fields of `ResourceLimits`.

    `commands` is not a security boundary: the guest's interpreter can be called by its path, and a shell can write
    files without any program.
    """

    name = "bwrap"
    archive = _ARCHIVE_INSIDE
    memory_folders = (WORKDIR, "/tmp", "/dev/shm")

    def __init__(
        self,
        *,
        env: Mapping[str, str] | None = None,
        binds: Sequence[str] = (),
        commands: Sequence[str] = (),
        copy: bool = False,
        fork: bool = True,
        **limits: int,
    ) -> None:
        super().__init__(ResourceLimits.parse(limits), {"HOME": "/tmp", **NO_NETWORK, **(env or {})}, binds)
        self._commands = tuple(commands)
        self._user_env = dict(env or {})
        # reasons against overlays and forks: an option or the kernel's refusal; empty if they work
        self._no_overlay = "option copy" if copy else ""
        self._no_fork = "" if fork else "option fork"
        self._templates: dict[int, Template] = {}
        self._python = Path()
        self._arguments: list[str] = []
        self._filter = b""
        self._image_python: list[str] = []

    def show(self, folders: Sequence[str]) -> None:
        """Add to option `binds`. Raises `ConfigError`."""
        for folder in folders:
            _check_bind(folder)
        super().show(folders)

    def workdir(self, box: Path, prepared: PreparedWorkspace) -> str:
        """`WORKDIR`, or the working folder of the image."""
        return prepared.image.workdir if prepared.image is not None else WORKDIR

    def check_image(self, name: str) -> None:
        """Implement `SandboxBackend.check_image`: the image must be prepared."""
        rootfs.check_image_complete(name, self.user)

    @property
    def pack_up_to(self) -> int:
        """`OVERLAY_ABOVE` if overlays work: larger workspaces use them."""
        return super().pack_up_to if self._no_overlay else OVERLAY_ABOVE

    def describe_workspaces(self) -> str:
        """Override `GuestBackend.describe_workspaces`."""
        if self._no_overlay:
            return f"copied (no overlay: {self._no_overlay}); images read-only but for a copied working folder"
        caveat = "" if self.user is not None else ", whose folders can be moved but not renamed"
        return f"up to {OVERLAY_ABOVE >> 20} MiB copied, larger ones and images an overlay{caveat}"

    def _check_machine(self) -> None:
        """Raise `PrerequisiteError` unless bubblewrap and an interpreter work here."""
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise PrerequisiteError("bubblewrap is not installed", fix=install_command("bubblewrap"))
        self._filter = seccomp.assemble_filter()
        self._python = find_python(self.state / "guest", self.user)
        self._arguments = [bwrap, *self._common_arguments()]
        self._probe()
        raise_open_file_limit()
        if not self._no_overlay:
            self._probe_overlay()
        if not self._no_fork:
            self._probe_template()

    def launch(
        self, box: Path, prepared: PreparedWorkspace, group: Cgroup | None, environment: Path | None
    ) -> GuestProcess:
        """Start bubblewrap with the guest as pid 1, or fork a guest if only in-memory files differ."""
        if not self._no_fork and environment is None and prepared.image is None and prepared.packed:
            sizes = self._tmp_sizes | {WORKDIR: prepared.size + self.limits.disk_bytes}
            return self._template().fork(sizes, prepared.archive, group, log=box / "guest.log")
        if environment is not None:
            _check_bind(str(environment))
        if prepared.image is not None:
            bubblewrap = self._image_arguments(box, prepared, prepared.image, environment)
            python = self._image_python
        else:
            bubblewrap = self._workspace_arguments(box, prepared, environment)
            python = [str(self._python), *_PYTHON, _GUEST_INSIDE]
        info_read, info_write = os.pipe()

        def command(descriptor: int) -> tuple[list[str], list[int]]:
            filter_pipe = _write_to_pipe(self._filter)
            options = ["--seccomp", str(filter_pipe), "--info-fd", str(info_write)]
            return [*bubblewrap, *options, "--", *python, str(descriptor)], [filter_pipe, info_write]

        prefix = self._overlay_command(box, prepared.root) if not prepared.packed and not prepared.in_place else ()
        log = box / "guest.log"
        return StartedGuest(command, log=log, user=self.user, group=group, prefix=prefix, info=info_read)

    def _workspace_arguments(self, box: Path, prepared: PreparedWorkspace, environment: Path | None) -> list[str]:
        if prepared.packed:
            mounts = ["--size", str(prepared.size + self.limits.disk_bytes), "--tmpfs", WORKDIR]
            mounts += ["--ro-bind", str(prepared.archive), _ARCHIVE_INSIDE]
        else:
            mounts = ["--bind", str(box / "merged"), WORKDIR]
        if environment is not None:
            for folder in filter(None, (environment, find_cached_interpreter(environment))):
                mounts += ["--ro-bind", str(folder), str(folder)]
        return [*self._arguments, *_PROTECT_PROC_SYS, *mounts, "--chdir", WORKDIR, "--remount-ro", "/"]

    def _template(self) -> Template:
        # one per thread: a template dies with the thread that started it
        template = self._templates.get(threading.get_ident())
        if template is None or not template.is_alive:
            if template is not None:
                template.close()
            template = self._templates[threading.get_ident()] = self._new_template()
        return template

    def _new_template(self) -> Template:
        def command(descriptor: int) -> tuple[list[str], list[int]]:
            filter_pipe = _write_to_pipe(self._filter)
            bubblewrap = [*self._arguments, "--dir", WORKDIR, "--remount-ro", "/", "--"]
            guest = [str(self._python), *_PYTHON, _GUEST_INSIDE, str(descriptor), str(filter_pipe)]
            return [*bubblewrap, *guest], [filter_pipe]

        return Template(command, log=self.state / "template.log", user=self.user)

    @property
    def _tmp_sizes(self) -> dict[str, int]:
        return dict.fromkeys(("/tmp", "/dev/shm"), self.limits.tmp_bytes)

    def _image_arguments(
        self, box: Path, prepared: PreparedWorkspace, image: Image, environment: Path | None
    ) -> list[str]:
        if environment is not None:  # a virtual environment needs this machine's Python
            raise TaskError(
                f"{environment}, the environment of a task, cannot be used in image {image.name}",
                fix="set environment=false for its source, and use an image that has what its tests need",
            )
        if self._commands:
            raise TaskError(f"sandbox option commands cannot select programs of image {image.name}", fix="leave it out")
        files = prepared.tree if prepared.packed or prepared.in_place else box / "merged"
        isolation = _namespace_arguments(str(image.user), str(image.group))
        isolation += ["--cap-add", "CAP_DAC_OVERRIDE"] if prepared.in_place and image.user == 0 else []
        mounts = imageview.mount_arguments(image, prepared, files, self.limits, self._inside, self._binds)
        return [self._arguments[0], *isolation, *mounts]

    def prepare(self, workspace: str, root: Path, environment: Path | None) -> PreparedWorkspace:
        """Override `GuestBackend.prepare`: images are unpacked already."""
        if not workspace.startswith("image:"):
            return super().prepare(workspace, root, environment)
        self._copy_guest()
        return prepare_image(workspace, root, self.user, packed=bool(self._no_overlay))

    def _copy_guest(self) -> None:
        with self._checking:
            if not self._image_python:
                guest = self.state / "guest"
                python = interpreter.copy_python(
                    guest / "guest.py", self._inside / "python", f"{imageview.MOUNTED}/python", self.user
                )
                shutil.copy(guest / "guest.pyc", self._inside)
                (self._inside / Path(imageview.ARCHIVE).name).touch()  # a mount point
                self._image_python = [*python, *_PYTHON, f"{imageview.MOUNTED}/guest.pyc"]

    @property
    def _inside(self) -> Path:
        # sandboxes of images see this host folder as `imageview.MOUNTED`
        return self.state / "inside"

    def _guest_settings(self, box: Path, prepared: PreparedWorkspace) -> dict[str, object]:
        settings = super()._guest_settings(box, prepared)
        if (image := prepared.image) is None:
            return settings
        home = "/tmp" if prepared.packed else image.home  # if packed, the image's home is read-only
        defaults = {**BASE_ENV, **NO_NETWORK, "PATH": rootfs.PATH, "HOME": home}
        settings["env"] = defaults | dict(image.env) | self._user_env
        settings["memory_folders"] = ["/dev/shm"]
        if not prepared.in_place:
            settings["memory_folders"] = [image.workdir if prepared.packed else "/", "/tmp", "/dev/shm"]
        return settings | {"archive": imageview.ARCHIVE if prepared.packed else ""}

    def close(self) -> None:
        """Close as `GuestBackend.close`, and all templates."""
        for template in self._templates.values():
            template.close()
        self._templates.clear()
        super().close()
        self._image_python = []

    def _overlay_command(self, box: Path, lower: Path) -> list[str]:
        """Command prefix that mounts ``lower/tree`` at ``box/merged``, with changes in memory.

        Root mounts before it drops its rights, since only then the kernel lets folders be renamed; other users need a
        user namespace.
        """
        for name in ("layers", "merged"):
            (box / name).mkdir()
            (box / name).chmod(0o755)
        enter, options = (["--user", "--map-root-user"], "userxattr") if self.user is None else ([], "redirect_dir=on")
        size, owner = str(self.limits.disk_bytes), str(self.user or 0)
        return ["unshare", "--mount", *enter, "sh", "-c", _OVERLAY, "sh", str(box), size, owner, lower.name, options]

    def _common_arguments(self) -> list[str]:
        """Options of bubblewrap common to all sandboxes."""
        size = str(self.limits.tmp_bytes)
        arguments = [*_namespace_arguments(_INNER_ID, _INNER_ID), "--ro-bind", "/usr", "/usr"]
        for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
            path = Path("/", name)
            if path.is_symlink():
                arguments += ["--symlink", str(path.readlink()), str(path)]
            elif path.is_dir():
                arguments += ["--ro-bind", str(path), str(path)]
        arguments += self._etc_arguments()
        prefix = find_prefix(self._python)
        visible = [*([str(prefix)] if prefix is not None else []), *self._binds]
        hidden: list[str] = []  # made read-only last: a bind may need a mount point in it
        for folder in ("/usr", *contents.sort_outermost_first(visible)):
            arguments += ["--ro-bind", folder, folder] if folder in visible else []
            for _, at in contents.find_visible_answers([folder]):
                arguments += ["--size", "4096", "--tmpfs", at]
                hidden += ["--remount-ro", at]
        arguments += hidden
        programs = make_search_path(self._python)
        if self._commands:
            arguments += self._program_arguments()
            programs = ":".join(_PROGRAMS)
        self.env["PATH"] = self._user_env.get("PATH", programs)
        arguments += ["--proc", "/proc", "--dev", "/dev"]
        arguments += ["--size", size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev", "--size", size, "--tmpfs", "/tmp"]
        arguments += ["--symlink", "/tmp", "/var/tmp", "--ro-bind", str(self.state / "guest/guest.pyc"), _GUEST_INSIDE]
        return arguments

    def _etc_arguments(self) -> list[str]:
        """Options that show parts of ``/etc`` as a copy, since bubblewrap's work is quadratic in mounts.

        Modes and owners are kept; unreadable files are left out.
        """
        etc = self.state / "etc"
        etc.mkdir(exist_ok=True)
        present = [name for name in ETC if Path("/etc", name).exists()]
        command = ["cp", "-aH", "--parents", "--", *(name for name in present if name not in _MANY_FILES), str(etc)]
        done = subprocess.run(command, cwd="/etc", env={"PATH": os.defpath, "LC_ALL": "C"}, capture_output=True)
        for line in done.stderr.decode(errors="replace").splitlines():
            if not line.endswith("Permission denied"):
                raise PrerequisiteError(f"cannot copy parts of /etc: {line}", fix="free some disk space")
        for name, text in _FILES.items():
            (etc / name).write_text(text)
            (etc / name).chmod(0o644)
        arguments = ["--ro-bind", str(etc), "/etc"]
        for name in (name for name in present if name in _MANY_FILES):
            (etc / name).mkdir(parents=True, exist_ok=True)
            (etc / name).parent.chmod(0o755)
            arguments += ["--ro-bind", f"/etc/{name}", f"/etc/{name}"]
        etc.chmod(0o755)
        return arguments

    def _program_arguments(self) -> list[str]:
        # of the folders `_PROGRAMS`, show only `commands` and shells
        builtin = subprocess.run(
            ["bash", "-c", "compgen -b"], capture_output=True, text=True, check=True
        ).stdout.split()
        programs = [name for name in self._commands if name not in builtin]
        arguments = []
        for folder in (Path(name) for name in _PROGRAMS if not Path(name).is_symlink() and Path(name).is_dir()):
            arguments += ["--size", str(1 << 20), "--tmpfs", str(folder)]
            for name in {"bash", "sh", *programs, *([self._python.name] if self._python.parent == folder else [])}:
                if (folder / name).exists():
                    arguments += ["--ro-bind", str((folder / name).resolve()), str(folder / name)]
            arguments += ["--remount-ro", str(folder)]
        missing = [name for name in programs if not any(Path(folder, name).exists() for folder in _PROGRAMS)]
        if missing:
            raise PrerequisiteError(f"sandbox option commands: no {', '.join(missing)} here", fix="leave it out")
        return arguments

    def _probe(self) -> None:
        filter_pipe = _write_to_pipe(self._filter)
        command = [*self._arguments, "--seccomp", str(filter_pipe), "--", str(self._python), "-ISc", "pass"]
        try:
            done = subprocess.run(
                command_as(self.user, command),
                capture_output=True,
                text=True,
                pass_fds=[filter_pipe],
                cwd="/",
                env={},
                timeout=60,
            )
        finally:
            os.close(filter_pipe)
        if done.returncode != 0:
            message = last_error_line(done)
            fix = _suggest_bubblewrap_fix(message, self.state, self._binds)
            raise PrerequisiteError(f"bubblewrap does not work here: {message}", fix=fix)

    def _probe_template(self) -> None:
        """Try to fork a guest: the kernel may refuse nested namespaces.

        Before 5.16 it also checks who writes to a control group instead of who opened it.
        """
        group = self._create_group("probe")
        template = self._new_template()
        try:
            self._no_fork = template.try_fork(self._tmp_sizes, group)
        finally:
            template.close()
            if group is not None:
                group.remove()

    def _probe_overlay(self) -> None:
        box, lower = self.state / "box-probe", self.state / "task-probe"
        for folder in (box, lower / "tree"):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o755)
        lower.chmod(0o755)
        (lower / "tree/folder").mkdir()
        (lower / "tree/folder/file").touch()
        if self.user is not None:
            subprocess.run(["chown", "-R", f"{self.user}:{self.user}", lower / "tree"], check=True)
        # older kernels cannot replace a folder of the lower layer
        replace = ["sh", "-c", 'rm -rf "$1" && mkdir "$1"', "sh", str(box / "merged/folder")]
        command = [*self._overlay_command(box, lower), *command_as(self.user, replace)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, cwd="/", env={}, timeout=60)
            self._no_overlay = last_error_line(done) if done.returncode != 0 else ""
        except FileNotFoundError as error:
            self._no_overlay = f"no program {error.filename}"
        except subprocess.TimeoutExpired:
            self._no_overlay = "the attempt took more than 60 s"
        finally:
            for folder in (box, lower):
                shutil.rmtree(folder)


class ImageBuilder(Bubblewrap):
    """Sandboxes whose commands change `tree` in place, to build an `image`; the workspace is ``image:`` and any name.

    Calls that need a real root succeed without effect (`seccomp`), and root may read and write all of `tree`. `files`
    are shown in `imageview.MOUNTED`. Nothing else may use `tree` meanwhile or share its files by hard links.
    """

    def __init__(self, tree: Path, image: Image, files: Mapping[str, bytes], **options: Any) -> None:
        super().__init__(**options)
        self._tree, self._image, self._files = tree, image, files

    def _check_machine(self) -> None:
        super()._check_machine()
        self._filter = seccomp.assemble_filter(root=True)

    def prepare(self, workspace: str, root: Path, environment: Path | None) -> PreparedWorkspace:
        """Link `tree` as the workspace."""
        self._copy_guest()
        for name, data in self._files.items():
            (self._inside / name).write_bytes(data)
            (self._inside / name).chmod(0o644)
        root.mkdir()
        root.chmod(0o755)
        (root / "tree").symlink_to(self._tree)
        return PreparedWorkspace(root, "", b"{}", image=self._image, in_place=True)


def _namespace_arguments(user: str, group: str) -> list[str]:
    isolation = ["--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    isolation += ["--unshare-cgroup-try", "--uid", user, "--gid", group, "--hostname", "sandbox"]
    return [*isolation, "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv", "--cap-drop", "ALL"]


def _check_bind(bind: str) -> None:
    if not bind.startswith("/"):
        raise ConfigError(f"sandbox.options.binds: {bind!r} does not begin with a slash", fix="write the whole path")
    for private in _PRIVATE_FOLDERS:
        if Path(os.path.normpath(bind)).is_relative_to(private):
            raise ConfigError(
                f"a sandbox cannot show {bind}, since it has its own {private}",
                fix="move it, and name the new place in sandbox.options.binds (CRRL_CACHE for agents and environments)",
            )


def _write_to_pipe(data: bytes) -> int:
    # needs no reader: the filter has 3 KB, and a pipe holds 64 KB
    read, write = os.pipe()
    try:
        os.write(write, data)
    finally:
        os.close(write)
    return read


def _suggest_bubblewrap_fix(message: str, state: Path, binds: Sequence[str]) -> str:
    lower = message.lower()
    if refused := [bind for bind in binds if bind in message]:
        return f"sandbox.options.binds: {refused[0]} must exist and be readable (for root: by user {SANDBOX_USER})"
    if "namespace" in lower or "uid map" in lower or "loopback" in lower:
        restricted = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
        if restricted.exists() and restricted.read_text().strip() == "1":
            return "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
        clone = Path("/proc/sys/kernel/unprivileged_userns_clone")
        if clone.exists() and clone.read_text().strip() == "0":
            return "sudo sysctl -w kernel.unprivileged_userns_clone=1"
        return "sudo sysctl -w user.max_user_namespaces=15000 (in a container: allow user namespaces and unmask /proc)"
    if str(state) in message:
        return f"set TMPDIR to a folder that user {SANDBOX_USER} can reach, such as /tmp"
    return f"{install_command('bubblewrap')} (0.8 or later is needed)"
