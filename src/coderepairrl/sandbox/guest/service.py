"""Requests, replies, running commands, and limits on all processes together."""

from __future__ import annotations

import os
import resource
import select
import sys
import time

from coderepairrl.sandbox.guest.files import DiffWalk, Files, blob_id, read_git_content, unpack
from coderepairrl.sandbox.guest.frames import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    TYPE_CHECKING,
    Control,
    check_call,
    decode,
    describe_failure,
    signal,
    socket,
)

if TYPE_CHECKING:
    from typing import Any

    Reply = tuple[dict[str, Any], bytes, int | None]
    """Header, body and a descriptor that goes with them."""

TERMINALS = "/dev/pts"
MOST_TERMINALS = 64  # out of the 3,072 that all sandboxes of a machine share


class Limits:
    """Limits on all processes of the sandbox together."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.memory, self.sockets = settings["memory"], settings.get("sockets", 0)
        self.memory_folders = settings.get("memory_folders", ())
        # files that exist at the start do not count towards the limit
        self.files = settings.get("files", 0) + self._count_files()

    def find_exceeded(self) -> str:
        """Name of an exceeded limit, or empty."""
        if self.memory and self._measure_memory() > self.memory:
            return "memory"
        if self.sockets and self._count_sockets() > self.sockets:
            return "sockets"
        # without file systems of its own, a sandbox shows the machine's terminals
        if self.memory_folders and len(os.listdir(TERMINALS)) > MOST_TERMINALS:
            return "terminals"
        return "files" if self.memory_folders and self._count_files() > self.files else ""

    def _measure_memory(self) -> int:
        """Bytes held by all other processes; RSS, or if that exceeds the limit PSS, which divides shared pages."""
        pids = [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
        page, resident = resource.getpagesize(), 0
        for pid in pids:
            resident += page * int(read_proc(f"/proc/{pid}/statm", b"0 0").split()[1])
        if resident <= self.memory:
            return resident
        return sum(
            1024 * int(read_proc(f"/proc/{pid}/smaps_rollup", b"Pss: 0").split(b"Pss:")[1].split()[0]) for pid in pids
        )

    def _count_files(self) -> int:
        file_systems = (os.statvfs(path) for path in self.memory_folders)
        return sum(entry.f_files - entry.f_ffree for entry in file_systems)

    def _count_sockets(self) -> int:
        # counts Unix sockets and those in transit through one
        return int(read_proc("/proc/net/sockstat", b"sockets: used 0").split()[2])


def read_proc(path: str, gone: bytes) -> bytes:
    """Read a /proc file; returns `gone` if its process has ended."""
    try:
        with open(path, "rb") as file:
            return file.read() or gone
    except OSError:
        return gone


def list_descendants() -> list[int]:
    """Process ids of all descendants; used without a pid namespace."""
    parents = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdigit():
            fields = read_proc(f"/proc/{name}/stat", b") Z 0").rsplit(b")", 1)[1].split()
            parents[int(name)] = int(fields[1])
    pids, generation = [], {os.getpid()}
    while generation:
        generation = {pid for pid, parent in parents.items() if parent in generation}
        pids += sorted(generation)
    return pids


SPAWN_ERRORS = {2: 127, 20: 127}  # ENOENT, ENOTDIR as a shell reports them; everything else is 126
STRAYS = 20  # a diff visits at most this many entries for each new file that is allowed
WATCH_SECONDS = 0.1
# signals that Python or the guest ignores or handles, and commands must not
DEFAULT_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGINT, signal.SIGTERM)


class Guest:
    """Serves the requests ``exec read write listen settle collect`` until the host hangs up."""

    def __init__(self, control: Control) -> None:
        os.umask(0o022)
        self.control = control
        control.hung_up = self.kill_all
        self.pid = os.getpid()
        self.is_alone = self.pid == 1  # kill(-1) reaches this sandbox only
        self.null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        self.wake, self._wake_writer = socket.socketpair()
        self.wake.setblocking(False)
        self._wake_writer.setblocking(False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # else a command could end us through Python's own handler
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler, nothing is written to the descriptor below
        # restart interrupted calls: with sandlock's supervisor, signals interrupt more of them
        signal.siginterrupt(signal.SIGCHLD, False)
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        self.oom_file: int | None = None  # new processes inherit the score in it
        if sys.platform == "linux":
            self._prepare()

    def _prepare(self) -> None:
        # Linux only
        self.oom_file = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)  # not readable once undumpable
        self.own_oom_score = os.pread(self.oom_file, 16, 0).strip()
        import ctypes

        setting = (PR_SET_DUMPABLE, 0) if self.is_alone else (PR_SET_CHILD_SUBREAPER, 1)
        check_call(ctypes.CDLL(None, use_errno=True).prctl(*setting, 0, 0, 0), "prctl")

    def serve(self) -> None:
        """Receive the settings, report ready, then answer requests until the host hangs up."""
        settings, _ = self.control.receive()
        self.drop_rights()
        self.workdir = os.path.realpath(settings["workdir"])
        self.env = {**(os.environ if settings.get("inherit") else {}), **settings["env"]}
        if settings.get("archive"):
            self._unpack(settings["archive"])
        self.files, self.limits = Files(self.workdir), Limits(settings)
        self.rlimits = settings["rlimits"]
        python = settings.get("python", "")
        self.control.send({"ready": self.pid, "cannot_run": "" if os.access(python, os.X_OK) else python})
        while True:
            request, body = self.control.receive()
            operation = request.pop("op")
            if operation != "stop":  # it arrived after the command had ended, and needs no reply
                self.answer(operation, body, request)

    def _apply_rlimits(self) -> None:
        # Only at the first command: before it, a listening socket is sent to the host. With few open files allowed, the
        # kernel refuses that while other processes of our user are sending many descriptors.
        for name, value in self.rlimits.items():
            which = getattr(resource, "RLIMIT_" + name)
            hard = resource.getrlimit(which)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(which, (value, value))
        self.rlimits = {}

    def drop_rights(self) -> None:
        """Drop rights before touching anything of the task; here none are left."""

    def answer(self, operation: str, body: bytes | None, arguments: dict[str, Any]) -> None:
        """Handle a request and send exactly one reply; otherwise all later ones would be mismatched."""
        try:
            if body is None:
                raise MemoryError
            header, data, descriptor = getattr(self, "on_" + operation)(body, **arguments)
        except Exception as error:
            header, data, descriptor = describe_failure(error), b"", None
            if operation == "exec" and isinstance(error, MemoryError):  # a command can cause it
                header, data = {"code": 126}, b"Cannot allocate memory\n"
        os.chdir("/")  # the one folder that agents can neither remove nor make inaccessible
        self.control.send(header, data, descriptor)
        if descriptor is not None:
            os.close(descriptor)

    def _unpack(self, archive: str) -> None:
        unpack(os.open(archive, os.O_RDONLY), self.workdir)

    def on_exec(
        self, body: bytes, argv: list[str], env: dict[str, str], timeout: float, max_bytes: int, cwd: str
    ) -> Reply:
        """Run a command with `body` as its input; all its processes are dead before the reply."""
        started = time.monotonic()
        self._apply_rlimits()
        out, child_out = os.pipe()
        child_in, feed = os.pipe() if body else (self.null, -1)
        try:
            os.chdir(os.path.join(self.workdir, cwd))
            pid = self._spawn(argv, {**self.env, **env}, child_in, child_out)
        except (OSError, ValueError) as error:
            for descriptor in {out, child_out, feed, child_in} - {-1, self.null}:
                os.close(descriptor)
            code = SPAWN_ERRORS.get(getattr(error, "errno", 0) or 0, 126)
            text = getattr(error, "strerror", None) or str(error)
            return {"code": code}, f"{argv[0]}: {text}\n".encode(errors="replace")[:max_bytes], None
        os.close(child_out)
        if body:
            os.close(child_in)
        command = RunningCommand(self, pid, out, feed, body, started + timeout, max_bytes)
        header = command.run_to_end()
        header["seconds"] = time.monotonic() - started
        return header, bytes(command.output), None

    def on_read(self, body: bytes, path: str) -> Reply:
        """Send a regular file of the workspace."""
        return {}, self.files.read(path), None

    def on_write(self, body: bytes, path: str, follow: bool = True) -> Reply:
        """Write a regular file of the workspace; without `follow`, follow no link."""
        self.files.write(path, body, follow)
        return {}, b"", None

    def on_listen(self, body: bytes) -> Reply:
        """Listen on our loopback and hand the listening socket to the host."""
        server = socket.socket(socket.AF_INET)
        try:
            server.bind(("127.0.0.1", 0))
            server.listen(128)
            return {"port": server.getsockname()[1]}, b"", os.dup(server.fileno())
        finally:
            server.close()

    def on_settle(self, body: bytes) -> Reply:
        """Kill every other process of the sandbox."""
        self.kill_all()
        return {}, b"", None

    def on_collect(self, body: bytes, max_bytes: int, max_files: int) -> Reply:
        """Send files that differ from the manifest (`PreparedWorkspace.manifest`), then the deleted paths.

        Omits what exceeds the limits and what cannot be opened by its path.
        """
        self.kill_all()
        base = decode(body)
        walk = DiffWalk(self.workdir, base, STRAYS * max_files)
        present = dict(sorted(walk.list_files(), key=lambda entry: (entry[0] not in base, entry[0])))
        new = 0
        for path, mode in present.items():
            base_entry = base.get(path)
            room = max_bytes if base_entry is not None or new < max_files else -1  # -1: leave it out
            data = read_git_content(os.path.join(self.workdir, path), mode, room)
            if data is None:
                walk.left_out.append(path)
            elif base_entry is None or base_entry != [mode, blob_id(data)]:
                max_bytes -= len(data)
                new += base_entry is None
                self.control.send({"path": path, "mode": mode}, data)
        gone = [path for path, entry in base.items() if entry is not None and path not in present]
        return {"done": True, "deleted": gone, "left_out": walk.left_out[:20]}, b"", None

    # -- processes

    def _spawn(self, argv: list[str], env: dict[str, str], stdin: int, stdout: int) -> int:
        program = argv[0]
        if "/" not in program:
            for folder in env.get("PATH", "").split(":"):
                if os.access(os.path.join(folder, program), os.X_OK):
                    program = os.path.join(folder, program)
                    break
            else:
                raise FileNotFoundError(2, "command not found")
        if self.oom_file is not None:  # so that the kernel kills commands before us
            os.pwrite(self.oom_file, b"900", 0)
        try:
            return self._start(program, argv, env, stdin, stdout)
        finally:
            if self.oom_file is not None:
                os.pwrite(self.oom_file, self.own_oom_score, 0)

    def _start(self, program: str, argv: list[str], env: dict[str, str], stdin: int, stdout: int) -> int:
        return os.posix_spawn(
            program,
            argv,
            env,
            file_actions=[(os.POSIX_SPAWN_DUP2, stdin, 0)] + [(os.POSIX_SPAWN_DUP2, stdout, n) for n in (1, 2)],
            setsid=True,
            setsigdef=DEFAULT_SIGNALS,
            setsigmask=(),
        )

    def has_children(self) -> bool:
        """Whether unreaped processes remain; False where Python cannot ask (macOS before 3.13)."""
        if not hasattr(os, "waitid"):
            return False
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True

    def kill_all(self) -> None:
        """Kill and reap every other process of the sandbox.

        ``kill(-1)`` holds the lock that forks need, so no fork bomb escapes; orphans become ours before their parent is
        reaped, so none is missed.
        """
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] != 0:
                    continue
            except ChildProcessError:
                return
            try:
                if self.is_alone:
                    os.kill(-1, signal.SIGKILL)
                else:
                    for pid in list_descendants():
                        os.kill(pid, signal.SIGKILL)
                os.waitpid(-1, 0)
            except (ProcessLookupError, ChildProcessError):
                pass


class RunningCommand:
    """A running command: collects its output, watches its time and memory."""

    def __init__(
        self, guest: Guest, pid: int, out: int, feed: int, body: bytes, deadline: float, max_bytes: int
    ) -> None:
        self.guest, self.pid, self.out, self.feed = guest, pid, out, feed
        self.body, self.deadline, self.max_bytes = memoryview(body), deadline, max_bytes
        self.output, self.truncated = bytearray(), False
        os.set_blocking(out, False)
        if feed >= 0:
            os.set_blocking(feed, False)

    def run_to_end(self) -> dict[str, Any]:
        """Wait for the command or end it; returns the header of the reply."""
        status, cause = self._watch()
        if self.guest.has_children():  # ending them may take long: the kernel frees their memory
            self.guest.control.send({"ending": True})
        self.guest.kill_all()
        self._drain_output()  # every writer is dead, so the output is complete
        os.close(self.out)
        if self.feed >= 0:
            os.close(self.feed)
        if cause not in ("", "time", "stop"):
            self.output += b"\n[sandbox] killed: the limit on %s was exceeded\n" % cause.encode()
        if cause:
            code = 124 if cause == "time" else 137
        else:
            code = os.waitstatus_to_exitcode(status)
            code = code if code >= 0 else 128 - code  # -n: ended by signal n
        return {"code": code, "timed_out": cause == "time", "truncated": self.truncated}

    def _watch(self) -> tuple[int, str]:
        """Wait for the command; returns its status and the reason to end it."""
        poll = select.poll()
        for source in (self.guest.control.socket.fileno(), self.guest.wake.fileno(), self.out):
            poll.register(source, select.POLLIN)
        if self.feed >= 0:
            poll.register(self.feed, select.POLLOUT)
        checked = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= self.deadline:
                return 0, "time"
            if now - checked >= WATCH_SECONDS:
                checked = now
                if over := self.guest.limits.find_exceeded():
                    return 0, over
            for source, event in poll.poll(1000 * min(self.deadline - now, WATCH_SECONDS)):
                ended = self._handle_event(poll, source, event)
                if ended is not None:
                    return ended

    def _handle_event(self, poll: select.poll, source: int, event: int) -> tuple[int, str] | None:
        """Handle a ready descriptor; returns as `_watch`, or None while the command goes on."""
        if source == self.out:
            if not self._read_output():
                poll.unregister(self.out)
        elif source == self.feed:
            if event & select.POLLERR or not self._write_input():
                poll.unregister(self.feed)
                os.close(self.feed)
                self.feed = -1
        elif source == self.guest.wake.fileno():
            self.guest.wake.recv(4096)
            status = self._reap()
            return None if status is None else (status, "")
        else:
            self.guest.control.receive()  # the host only ever interrupts with "stop"
            return 0, "stop"
        return None

    def _reap(self) -> int | None:
        """Reap ended processes; returns the command's status if it has ended."""
        command_status = None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return command_status
            if pid == 0:
                return command_status
            if pid == self.pid:
                command_status = status

    def _read_output(self) -> bool:
        """Read some output; returns whether more may follow."""
        try:
            data = os.read(self.out, 1 << 16)
        except BlockingIOError:
            return True
        room = self.max_bytes - len(self.output)
        self.truncated |= len(data) > room
        self.output += data[: max(room, 0)]
        return bool(data)

    def _drain_output(self) -> None:
        while True:
            before = len(self.output), self.truncated
            try:
                if not self._read_output():
                    return
            except OSError:
                return
            # nothing was read, and nothing is left: a process that escaped may still hold the pipe open
            if before == (len(self.output), self.truncated) and not select.select([self.out], [], [], 0)[0]:
                return

    def _write_input(self) -> bool:
        """Write some of the input; returns whether more is left."""
        try:
            self.body = self.body[os.write(self.feed, self.body[: 1 << 16]) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False
        return len(self.body) > 0
