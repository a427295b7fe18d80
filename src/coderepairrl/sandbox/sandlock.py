"""`sandlock`: Landlock and a supervisor of system calls, where user namespaces are blocked.

PyPI ``sandlock`` on Linux 6.12 or later (Landlock ABI 6). Layers, each with a probe in ``tests/sandbox``:

- *user*: an unprivileged user id (root switches to one) without groups or capabilities;
- *files*: Landlock, default deny: the workspace and one temporary folder are writable, ``/usr``, ``/proc`` and a few
  other files readable. The supervisor changes modes and times, which Landlock does not govern, in those folders only;
- *network*: no UDP, no servers, Unix sockets in the workspace only; TCP only to the bridge's ports on 127.0.0.1;
- *system calls*: the filter of `seccomp`, plus what namespaces would otherwise cover;
- *processes*: nested Landlock domains (supervisor, guest, command) confine signals and tracing to what is below;
- *lifetime*: the guest ends what outlives a command; if guest or supervisor dies, the other ends the rest.

Weaker than `bwrap`, as there are no namespaces:

- existence and size of files can be probed by guessing paths;
- ``/proc`` is filtered by the supervisor: mounts and connections of the host are readable, other processes' memory,
  environment and descriptors are not. Commands can read the guest's memory, which has no secrets;
- the bridge listens on the host's loopback, where other users can connect (without the episode's key); nothing inside
  can listen, so a test that starts a local server fails;
- ``/tmp``, ``/dev/shm`` and so POSIX semaphores are refused rather than private;
- without a control group, threads and total memory are checked every 0.1 s only; disk use is bounded per file only;
- files with names that are not UTF-8 cannot be opened (the diff, taken outside, has them).

Each opened file, socket and process costs a round trip to the supervisor.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coderepairrl.errors import ConfigError, PrerequisiteError, SandboxFault
from coderepairrl.sandbox import contents, seccomp
from coderepairrl.sandbox.backend import NO_NETWORK, GuestBackend, delete_trees
from coderepairrl.sandbox.bwrap import ETC
from coderepairrl.sandbox.cgroups import Cgroup
from coderepairrl.sandbox.guesthost import GuestProcess, StartedGuest
from coderepairrl.sandbox.interpreter import find_prefix, find_python, install_command, make_search_path
from coderepairrl.sandbox.session import ResourceLimits
from coderepairrl.sandbox.workspace import PreparedWorkspace, find_cached_interpreter

PACKAGE = "sandlock==0.9.0"
MACHINES = ("x86_64", "aarch64")
"""Machines with wheels of `PACKAGE`."""
PORTS = 4
"""Addresses that one sandbox can `reach`; sandlock needs the ports in advance."""
_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_ESCAPES = Path(__file__).with_name("escapes.py")
_FLAGS = ("-I", "-S", "-B", "-X", "utf8")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/proc")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
# git fails if it may not read the system's configuration
_ENV = {"USER": "agent", "LOGNAME": "agent", "GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1"}


class Sandlock(GuestBackend):
    """Sandboxes of sandlock; options as for `Bubblewrap`, without disk limits, which cannot be enforced."""

    name = "sandlock"
    slowdown = 20.0
    """Limit of the exam on the time of a short command, relative to a plain one (measured: 5 to 16 by machine)."""

    def __init__(self, *, env: Mapping[str, str] | None = None, binds: Sequence[str] = (), **limits: int) -> None:
        for name in ("tmp_bytes", "disk_bytes", "files"):
            if name in limits:
                raise ConfigError(f"sandlock cannot bound {name}", fix=f"leave out {name}, or use bwrap")
        super().__init__(ResourceLimits.parse(limits), _ENV | NO_NETWORK | dict(env or {}), binds)
        self._user_env = dict(env or {})
        self._python = Path()
        self._package = ""
        self._readable: list[str] = []

    def _check_machine(self) -> None:
        """Raise `PrerequisiteError` unless package and kernel are suitable and every escape attempt fails."""
        self._package = _find_package()
        _check_kernel()
        self._python = find_python(self.state / "guest", self.user)
        (self.state / "guest" / "filter").write_bytes(seccomp.assemble_filter(shared=True))
        (self.state / "guest" / "filter").chmod(0o644)
        self.env["PATH"] = self._user_env.get("PATH", make_search_path(self._python))
        paths = [*_SYSTEM, *(f"/etc/{name}" for name in ETC), *_DEVICES, *self._binds, str(self.state / "guest")]
        paths += [str(prefix)] if (prefix := find_prefix(self._python)) else []
        self._readable = [path for path in paths if Path(path).exists()]
        if exposed := contents.find_visible_answers(self._readable):
            visible, hidden = exposed[0]
            raise PrerequisiteError(
                f"a sandbox of sandlock sees all of {visible}, and so the answers to tasks in {hidden}",
                fix=f"install CodeRepairRL into a virtual environment outside {visible}, or "
                f"{install_command('bubblewrap')}",
            )
        self._try_escapes()

    def reader(self, box: Path) -> Callable[[], GuestProcess]:
        """Factory of an unsandboxed guest, as sandlock cannot open file names that are not UTF-8."""
        argv = [str(self._python), *_FLAGS, str(self.state / "guest/guest.pyc")]

        def start() -> GuestProcess:
            return StartedGuest(
                lambda descriptor: ([*argv, str(descriptor)], ()), log=box / "reader.log", user=self.user
            )

        return start

    def launch(
        self, box: Path, prepared: PreparedWorkspace, group: Cgroup | None, environment: Path | None
    ) -> GuestProcess:
        """Start the supervisor, which starts the guest; reserves ports for its bridges."""
        self._make_tmp(box)
        port_sockets = [_reserve_port() for _ in range(PORTS)]
        ports = [listener.getsockname()[1] for listener in port_sockets]
        environment_folders = [environment, find_cached_interpreter(environment)] if environment else []
        shown_folders = [str(folder) for folder in environment_folders if folder]
        guest = self.state / "guest"
        argv = [str(self._python), *_FLAGS, f"{guest}/guest.pyc", "0", f"{guest}/filter"]

        def command(descriptor: int) -> tuple[list[str], list[int]]:
            return self._supervisor_command(box, argv, ports, descriptor, shown_folders), []

        return StartedGuest(
            command, log=box / "guest.log", env=self._environment, port_sockets=port_sockets, group=group
        )

    @property
    def _environment(self) -> dict[str, str]:
        return {"HOME": str(self.state)}  # sandlock needs one

    def _guest_settings(self, box: Path, prepared: PreparedWorkspace) -> dict[str, object]:
        tmp = str((box / "tmp").resolve())
        return super()._guest_settings(box, prepared) | {
            "env": {"HOME": tmp, "TMPDIR": tmp, **self.env},
            "memory": 0,  # the supervisor watches it
            "rlimits": self.limits.rlimits(per_user=False),
        }

    def _make_tmp(self, box: Path) -> None:
        (box / "tmp").mkdir()
        if self.user is not None:
            os.chown(box / "tmp", self.user, self.user)

    def _supervisor_command(
        self, box: Path, argv: list[str], ports: list[int], control: int, shown: Sequence[str] = ()
    ) -> list[str]:
        work, tmp = (str((box / name).resolve()) for name in ("work", "tmp"))
        settings: dict[str, Any] = {
            "control": control,
            "package": self._package,
            "user": self.user,
            "argv": argv,
            "cwd": work,
            "env": self.env,
            "readable": [*self._readable, *shown],
            "writable": ["/dev/null", tmp, work],
            "ports": ports,
            "processes": self.limits.processes,
            "memory": self.limits.memory,
        }
        return [sys.executable, "-I", "-B", "-X", "utf8", str(_SUPERVISOR), json.dumps(settings)]

    def _try_escapes(self) -> None:
        """Run `escapes` under sandlock. Raises `PrerequisiteError` if one works."""
        box = self.state / "trial"
        delete_trees(box)
        (box / "work").mkdir(parents=True)
        box.chmod(0o755)
        self._make_tmp(box)
        for name in ("secret", "outside"):
            (box / name).write_text("a secret\n")
            (box / name).chmod(0o644)
        for name in ("work", "outside"):
            os.chown(box / name, self.user or -1, self.user or -1)
        with (
            _reserve_port() as listener,
            socket.create_server(("127.0.0.1", 0)) as other,
            socket.socket(socket.AF_UNIX) as unix,
        ):
            address = str(box / "socket")
            unix.bind(address)
            unix.listen()
            Path(address).chmod(0o777)
            listener.listen()
            port = listener.getsockname()[1]
            targets = (box / "secret", box / "outside", address, port, other.getsockname()[1])
            argv = [str(self._python), "-I", "-S", "-c", _ESCAPES.read_text(encoding="utf-8"), *map(str, targets)]
            try:
                done = subprocess.run(
                    self._supervisor_command(box, argv, [port], 0),
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    cwd="/",
                    env=self._environment,
                    timeout=60,
                )
            except subprocess.TimeoutExpired as error:
                raise PrerequisiteError("sandlock does not answer here", fix=install_command("bubblewrap")) from error
        lines = done.stdout.splitlines()
        if not lines or lines[-1] != "WORKSPACE works BRIDGE works":
            words = (done.stderr.strip().splitlines() or lines or [f"exit code {done.returncode}"])[-1]
            raise PrerequisiteError(f"sandlock does not work here: {words}", fix=install_command("bubblewrap"))
        holes = [line.removesuffix(" works") for line in lines[:-1] if line.endswith(" works")]
        if holes:
            raise PrerequisiteError(
                f"sandlock does not isolate here: a command {', '.join(holes)}", fix=install_command("bubblewrap")
            )


def _find_package() -> str:
    spec = importlib.util.find_spec("sandlock")
    if spec is None or spec.origin is None:
        if platform.machine() not in MACHINES:
            raise PrerequisiteError(
                f"there is no sandlock for {platform.machine()} machines", fix=install_command("bubblewrap")
            )
        raise PrerequisiteError("sandlock is not installed", fix=f"{sys.executable} -m pip install {PACKAGE}")
    return str(Path(spec.origin).parent.parent)


def _check_kernel() -> None:
    try:
        import sandlock
    except (ImportError, OSError, RuntimeError) as error:  # its library is built for few machines
        raise PrerequisiteError(f"sandlock cannot be loaded: {error}", fix=install_command("bubblewrap")) from error
    has, needs = sandlock.landlock_abi_version(), sandlock.min_landlock_abi()
    if has < needs:
        offers = f"Landlock ABI {has}" if has > 0 else "no Landlock"
        raise PrerequisiteError(
            f"the kernel, Linux {os.uname().release}, offers {offers}; sandlock needs ABI {needs}",
            fix=f"{install_command('bubblewrap')} (or boot Linux 6.12 or later with landlock among its lsm= modules)",
        )


def _reserve_port() -> socket.socket:
    # the port is reserved, and refuses connections until the socket listens
    listener = socket.socket()
    try:
        listener.bind(("127.0.0.1", 0))
    except OSError as error:
        listener.close()
        raise SandboxFault(f"no port of the loopback is free: {error}") from error
    return listener
