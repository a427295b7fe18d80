# ruff: noqa: PTH101, PTH102, PTH108, PTH109, PTH112, PTH114, PTH115, PTH118, PTH123, PTH208, PTH211
"""The one process that lives in a sandbox: it runs commands, reads and writes files, and lists what changed.

Standard library only, and no import of this project: the file is compiled by the interpreter inside and run
there alone, whenever a sandbox opens. Hence the modules in C behind ``json``, ``signal`` and ``socket``: those import
``re`` and ``enum``, which take longer than the interpreter itself, and so half of an episode's cost. It serves
requests from one inherited socket, one after another. A frame is two lengths (4 bytes each, big endian), a JSON
object and a body of raw bytes.

From top to bottom: frames to and from the host (`Control`), requests and their replies (`Guest`), one command while it
runs (`Run`), limits on all of them together (`Limits`), files (`Files`), what a diff has to take in (`Walk`), what
differs inside sandlock (`Confined`), and guests that are forked instead of started (`ForkServer`).

Trust: commands run under the same user id as this process, so it must be out of their reach. In a pid namespace
of its own it is pid 1, which no signal from inside can stop; it is not dumpable, so ``/proc/1/mem`` and
``/proc/1/fd`` are closed to them; the socket is close-on-exec, so no command ever holds it. Without one (`Confined`)
every command starts in a Landlock domain of its own, from which neither signals nor traces lead out.
"""

from __future__ import annotations

import _json
import os
import resource
import select
import stat
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    import socket
    from collections.abc import Callable, Iterator
    from typing import IO, Any

    Reply = tuple[dict[str, Any], bytes, int | None]
    """Header, body and a descriptor that goes with them."""
else:
    import _signal as signal
    import _socket as socket

FRAME = struct.Struct(">II")
SPAWN_ERRORS = {2: 127, 20: 127}  # ENOENT, ENOTDIR as a shell reports them; everything else is 126
WATCH_SECONDS = 0.1
READ_BYTES = 64 << 20
NO_ROOM = (27, 28, 122)  # EFBIG, ENOSPC, EDQUOT
LINKS = 40  # as many as the kernel follows
TERMINALS = "/dev/pts"
MOST_TERMINALS = 64  # of the 3,072 that all sandboxes of a machine share
LONG = 256  # characters of a path that count as an entry
STRAYS = 20  # entries looked at for every new file that a diff may take in
DROPPINGS = frozenset(("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache"))
RESTORED = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGINT, signal.SIGTERM)
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
PATH_BENEATH, FS_REFER, SCOPES = 1, 1 << 13, 3  # of abstract Unix sockets and signals
NEW_MOUNTS, NEW_CGROUP, NEW_NAMES, NEW_IPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEW_USER, NEW_PIDS, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
READ_ONLY, NO_SUID, NO_DEVICES, NO_PROGRAMS, REMOUNT, BIND = 1, 2, 4, 8, 32, 4096
SET_FLAGS, UP, RUNNING = 0x8914, 0x1, 0x40  # of a network interface
CAPABILITIES, PR_CAPBSET_DROP = 0x20080522, 24
MOST_RIGHTS = 16  # descriptors in one message


# -- Frames to and from the host


class _Decoding:
    """What ``json.loads`` sets by default."""

    strict, object_hook, object_pairs_hook, parse_float, parse_int, parse_constant = True, None, None, float, int, float


def decode(data: bytes) -> Any:
    """`data` as the host's ``json.dumps`` made it."""
    return _json.make_scanner(_Decoding)(data.decode(), 0)[0]  # type: ignore[arg-type]


def encode(value: object) -> str:
    """JSON of what we send: text, numbers, truth values, and lists and dictionaries of these."""
    if isinstance(value, str):
        return str(_json.encode_basestring_ascii(value))
    if isinstance(value, dict):
        return "{" + ",".join(f"{encode(name)}:{encode(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(encode, value)) + "]"
    return repr(value).lower()


class Control:
    """The guest's end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.hung_up: Callable[[], None] = lambda: None
        os.set_inheritable(connection.fileno(), False)

    def receive(self) -> tuple[dict[str, Any], bytes | None]:
        """The next frame, without a body that there is no memory for; ends this process when there will be none."""
        header, body = FRAME.unpack(self._exactly(FRAME.size))
        request = decode(self._exactly(header))
        try:
            return request, self._exactly(body)
        except MemoryError:  # our limit on memory is that of the commands
            return request, None

    def send(self, header: dict[str, Any], body: bytes = b"", descriptor: int | None = None) -> None:
        """Send a frame, and with it an open descriptor."""
        text = encode(header).encode()
        message = FRAME.pack(len(text), len(body)) + text
        if descriptor is not None:  # before any byte of the frame is out, so that it arrives with the first
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor))]
            sent = self.socket.sendmsg([message], rights)
            message = message[sent:]
        self.socket.sendall(message + body if len(body) < 1 << 16 else message)
        if len(body) >= 1 << 16:
            self.socket.sendall(body)

    def _exactly(self, size: int) -> bytes:
        parts: list[bytes] = []
        try:
            while size:
                parts.append(self._some(size))
                size -= len(parts[-1])
            return b"".join(parts)
        except MemoryError:
            parts.clear()
            while size:  # so that the next frame begins where we look for it
                size -= len(self._some(min(size, 1 << 16)))
            raise

    def _some(self, size: int) -> bytes:
        data = self.socket.recv(min(size, 1 << 20))
        if not data:
            self.hung_up()
            os._exit(0)
        return data


def connected(where: str) -> socket.socket:
    """Our end of the socket: a descriptor that we inherited, or a path to connect to."""
    if where.isdigit():
        return socket.socket(fileno=int(where))
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(where)
    return connection


def failure(error: Exception) -> dict[str, Any]:
    """The reply to a request that could not be carried out."""
    if isinstance(error, OSError) and error.errno:
        return {"errno": error.errno, "error": error.strerror or str(error)}
    if isinstance(error, ValueError):  # a path with a NUL, or text that is no name
        return {"errno": 22, "error": str(error)}
    if isinstance(error, MemoryError):
        return {"errno": 12, "error": "Cannot allocate memory"}
    return {"errno": 5, "error": f"{type(error).__name__}: {error}"}


# -- Requests and replies


class Guest:
    """Serves the requests ``exec read write listen settle collect`` until the host hangs up."""

    def __init__(self, control: Control) -> None:
        os.umask(0o022)
        self.control = control
        control.hung_up = self.kill_all
        self.pid = os.getpid()
        self.alone = self.pid == 1
        self.null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        self.wake, wake = socket.socketpair()
        self.wake.setblocking(False)
        wake.setblocking(False)
        self._kept = wake
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # else Python's own handler lets a command end us by it
        signal.signal(signal.SIGCHLD, lambda *_: None)  # any handler will do: the descriptor below is what wakes us
        signal.siginterrupt(signal.SIGCHLD, False)  # a supervised system call is interrupted where others are not
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        self.oom: int | None = None
        if sys.platform == "linux":
            self._prepare()

    def _prepare(self) -> None:
        """What only Linux has."""
        self.oom = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)  # closed to us once undumpable
        self.oom_own = os.pread(self.oom, 16, 0).strip()
        import ctypes

        prctl = ctypes.CDLL(None, use_errno=True).prctl
        wish = (PR_SET_DUMPABLE, 0) if self.alone else (PR_SET_CHILD_SUBREAPER, 1)
        if prctl(*wish, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")

    def serve(self) -> None:
        """Take the settings, report ready, then answer requests for ever."""
        settings, _ = self.control.receive()
        self.confine()
        self.workdir = os.path.realpath(settings["workdir"])
        self.env = {**(os.environ if settings.get("inherit") else {}), **settings["env"]}
        if settings.get("archive"):
            self._unpack(settings["archive"])
        self.files, self.limits = Files(self.workdir), Limits(settings)
        for name, value in settings["rlimits"].items():
            which = getattr(resource, "RLIMIT_" + name)
            hard = resource.getrlimit(which)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(which, (value, value))
        self.control.send({"ready": self.pid})
        while True:
            request, body = self.control.receive()
            operation = request.pop("op")
            if operation != "stop":  # a stop that crossed the reply that it meant to hasten needs none
                self.answer(operation, body, request)

    def confine(self) -> None:
        """What is left to give up before anything of the task is touched."""

    def answer(self, operation: str, body: bytes | None, arguments: dict[str, Any]) -> None:
        """Carry out a request and send its one reply, whatever happens: with none, or two, all later ones are wrong."""
        try:
            if body is None:
                raise MemoryError
            header, data, descriptor = getattr(self, "on_" + operation)(body, **arguments)
        except Exception as error:
            header, data, descriptor = failure(error), b"", None
            if operation == "exec" and isinstance(error, MemoryError):  # what a command may bring about
                header, data = {"code": 126}, b"Cannot allocate memory\n"
        os.chdir("/")  # the one folder that no agent can close or remove
        self.control.send(header, data, descriptor)
        if descriptor is not None:
            os.close(descriptor)

    def _unpack(self, archive: str) -> None:
        """Fill the workspace, which is an empty file system in memory."""
        unpack(os.open(archive, os.O_RDONLY), self.workdir)

    def on_exec(
        self, body: bytes, argv: list[str], env: dict[str, str], timeout: float, max_bytes: int, cwd: str
    ) -> Reply:
        """Run a command with `body` as its input; everything it started is gone when the reply leaves."""
        started = time.monotonic()
        out, child_out = os.pipe()
        child_in, feed = os.pipe() if body else (self.null, -1)
        try:
            os.chdir(os.path.join(self.workdir, cwd))
            main = self._spawn(argv, {**self.env, **env}, child_in, child_out)
        except (OSError, ValueError) as error:
            for descriptor in {out, child_out, feed, child_in} - {-1, self.null}:
                os.close(descriptor)
            code = SPAWN_ERRORS.get(getattr(error, "errno", 0) or 0, 126)
            text = getattr(error, "strerror", None) or str(error)
            return {"code": code}, f"{argv[0]}: {text}\n".encode(errors="replace")[:max_bytes], None
        os.close(child_out)
        if body:
            os.close(child_in)
        run = Run(self, main, out, feed, body, started + timeout, max_bytes)
        header = run.to_the_end()
        header["seconds"] = time.monotonic() - started
        return header, bytes(run.output), None

    def on_read(self, body: bytes, path: str) -> Reply:
        """Send a regular file of the workspace."""
        return {}, self.files.read(path), None

    def on_write(self, body: bytes, path: str, follow: bool = True) -> Reply:
        """Write a regular file of the workspace; without `follow`, through no link."""
        self.files.write(path, body, follow)
        return {}, b"", None

    def on_listen(self, body: bytes) -> Reply:
        """Listen on our loopback and hand the listening socket to the host, which accepts from it."""
        server = socket.socket(socket.AF_INET)
        try:
            server.bind(("127.0.0.1", 0))
            server.listen(128)
            return {"port": server.getsockname()[1]}, b"", os.dup(server.fileno())
        finally:
            server.close()

    def on_settle(self, body: bytes) -> Reply:
        """Answer once no other process of the sandbox is left."""
        self.kill_all()
        return {}, b"", None

    def on_collect(self, body: bytes, max_bytes: int, max_files: int) -> Reply:
        """Send every file that is not as in the manifest (``{path: [mode, blob id]}``), then what is deleted.

        Left out is what does not fit, and what cannot be opened by its path, not even by git.
        """
        self.kill_all()
        base = decode(body)
        walk = Walk(self.workdir, base, STRAYS * max_files)
        present = dict(sorted(walk.files(), key=lambda entry: (entry[0] not in base, entry[0])))
        new = 0
        for path, mode in present.items():
            known = base.get(path)
            room = max_bytes if known is not None or new < max_files else -1
            data = content(os.path.join(self.workdir, path), mode, room)
            if data is None:
                walk.left_out.append(path)
            elif known is None or known != [mode, blob_id(data)]:
                max_bytes -= len(data)
                new += known is None
                self.control.send({"path": path, "mode": mode}, data)
        gone = [path for path in base if path not in present]
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
        if self.oom is not None:  # the kernel shall take the commands before it takes us
            os.pwrite(self.oom, b"900", 0)
        try:
            return self._start(program, argv, env, stdin, stdout)
        finally:
            if self.oom is not None:
                os.pwrite(self.oom, self.oom_own, 0)

    def _start(self, program: str, argv: list[str], env: dict[str, str], stdin: int, stdout: int) -> int:
        return os.posix_spawn(
            program,
            argv,
            env,
            file_actions=[(os.POSIX_SPAWN_DUP2, stdin, 0)] + [(os.POSIX_SPAWN_DUP2, stdout, n) for n in (1, 2)],
            setsid=True,
            setsigdef=RESTORED,
            setsigmask=(),
        )

    def kill_all(self) -> None:
        """End and reap every other process of the sandbox. On return none is left.

        The kernel delivers ``kill(-1)`` under the lock that a fork needs, so a fork bomb does not slip through,
        and orphans are ours before their parent can be reaped.
        """
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] != 0:
                    continue
            except ChildProcessError:
                return
            try:
                if self.alone:
                    os.kill(-1, signal.SIGKILL)
                else:
                    for pid in descendants():
                        os.kill(pid, signal.SIGKILL)
                os.waitpid(-1, 0)
            except (ProcessLookupError, ChildProcessError):
                pass


# -- One command


class Run:
    """One command while it runs: its output is read as it comes, its time and memory are watched."""

    def __init__(self, guest: Guest, main: int, out: int, feed: int, body: bytes, deadline: float, cap: int) -> None:
        self.guest, self.main, self.out, self.feed = guest, main, out, feed
        self.body, self.deadline, self.cap = memoryview(body), deadline, cap
        self.output, self.truncated = bytearray(), False
        os.set_blocking(out, False)
        if feed >= 0:
            os.set_blocking(feed, False)

    def to_the_end(self) -> dict[str, Any]:
        """Wait until the command has ended, or end it; the reply's header."""
        status, why = self._watch()
        self.guest.kill_all()
        self._drain()  # every writer is dead, so this is all there will ever be
        os.close(self.out)
        if self.feed >= 0:
            os.close(self.feed)
        if why not in ("", "time", "stop"):
            self.output += b"\n[sandbox] killed: the limit on %s was exceeded\n" % why.encode()
        code = {"": None, "time": 124}.get(why, 137)
        if code is None:
            code = os.waitstatus_to_exitcode(status)
            code = code if code >= 0 else 128 - code
        return {"code": code, "timed_out": why == "time", "truncated": self.truncated}

    def _watch(self) -> tuple[int, str]:
        """Wait for the command; returns its status, or why it must be ended."""
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
                if over := self.guest.limits.exceeded():
                    return 0, over
            for source, event in poll.poll(1000 * min(self.deadline - now, WATCH_SECONDS)):
                ended = self._handle(poll, source, event)
                if ended is not None:
                    return ended

    def _handle(self, poll: select.poll, source: int, event: int) -> tuple[int, str] | None:
        """Act on what is ready at a descriptor; as `_watch` returns, or None while the command goes on."""
        if source == self.out:
            if not self._take():
                poll.unregister(self.out)
        elif source == self.feed:
            if event & select.POLLERR or not self._give():
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
        """Reap what has ended; the status of the command itself, if it has."""
        found = None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return found
            if pid == 0:
                return found
            if pid == self.main:
                found = status

    def _take(self) -> bool:
        """Read some of the output; whether there may be more."""
        try:
            data = os.read(self.out, 1 << 16)
        except BlockingIOError:
            return True
        room = self.cap - len(self.output)
        self.truncated |= len(data) > room
        self.output += data[: max(room, 0)]
        return bool(data)

    def _drain(self) -> None:
        """Read the output that is left."""
        while True:
            before = len(self.output), self.truncated
            try:
                if not self._take():
                    return
            except OSError:
                return
            if before == (len(self.output), self.truncated) and not select.select([self.out], [], [], 0)[0]:
                return

    def _give(self) -> bool:
        """Write some of the input; whether there is more."""
        try:
            self.body = self.body[os.write(self.feed, self.body[: 1 << 16]) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False
        return len(self.body) > 0


# -- All processes together


class Limits:
    """What all processes of the sandbox together may use; the host's settings say how much."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.memory, self.sockets = settings["memory"], settings.get("sockets", 0)
        self.held = settings.get("held", ())
        self.files = settings.get("files", 0) + self._count()  # those that are there from the start are not counted

    def exceeded(self) -> str:
        """Which limit is exceeded, if one is."""
        if self.memory and self.used() > self.memory:
            return "memory"
        if self.sockets and self._sockets() > self.sockets:
            return "sockets"
        if self.held and len(os.listdir(TERMINALS)) > MOST_TERMINALS:
            return "terminals"
        return "files" if self.held and self._count() > self.files else ""

    def used(self) -> int:
        """Bytes that all processes but this one hold, shared pages counted once if it comes close."""
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
        """Files and folders in the file systems that are held in memory."""
        found = (os.statvfs(path) for path in self.held)
        return sum(entry.f_files - entry.f_ffree for entry in found)

    def _sockets(self) -> int:
        """Sockets of the sandbox's network, Unix sockets and those on their way through one included."""
        return int(look("/proc/net/sockstat", b"sockets: used 0").split()[2])


def look(path: str, gone: bytes) -> bytes:
    """A file of /proc whose process may just have ended."""
    try:
        with open(path, "rb") as file:
            return file.read() or gone
    except OSError:
        return gone


def descendants() -> list[int]:
    """Processes below this one, when there is no pid namespace to ask."""
    parents = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdigit():
            fields = look(f"/proc/{name}/stat", b") Z 0").rsplit(b")", 1)[1].split()
            parents[int(name)] = int(fields[1])
    found, fresh = [], {os.getpid()}
    while fresh:
        fresh = {pid for pid, parent in parents.items() if parent in fresh}
        found += sorted(fresh)
    return found


# -- Files


class Files:
    """Regular files of the workspace, never one outside. Paths are relative to `workdir`, or absolute."""

    def __init__(self, workdir: str) -> None:
        self.workdir = workdir

    def read(self, path: str) -> bytes:
        """The content of a file. Raises OSError."""
        descriptor = os.open(self._enter(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                raise PermissionError(13, "not a regular file")
            if info.st_size > READ_BYTES:
                raise OSError(27, "larger than can be read at once")
            return file.read(READ_BYTES)

    def write(self, path: str, body: bytes, follow: bool) -> None:
        """Write a file, its folders too; its mode stays, and all of it where that fails. Raises OSError."""
        name, had = (self._enter(path, make=True), 0) if follow else self._enter_without_links(path)
        try:
            mode = os.lstat(name).st_mode
        except FileNotFoundError:
            mode = 0
        if mode and not stat.S_ISREG(mode):
            raise IsADirectoryError(21, "is a directory") if stat.S_ISDIR(mode) else PermissionError(13, "no file")
        locked = mode and not mode & stat.S_IWUSR
        if locked:
            os.chmod(name, stat.S_IMODE(mode) | stat.S_IWUSR)
        try:
            self._replace(name, body)
        except OSError:
            if not mode and os.path.lexists(name):
                os.unlink(name)
            raise
        finally:
            if locked:
                os.chmod(name, stat.S_IMODE(mode))
        if had:
            os.chmod(name, had)

    def _replace(self, name: str, body: bytes) -> None:
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        with open(descriptor, "wb") as file:
            size = os.fstat(descriptor).st_size
            if body and sys.platform == "linux":  # what there is no room for must not cost what is there
                try:
                    os.posix_fallocate(descriptor, 0, len(body))
                except OSError as error:
                    os.ftruncate(descriptor, size)
                    if error.errno in NO_ROOM:
                        raise
            file.write(body)
            file.truncate()

    def _enter(self, path: str, make: bool = False) -> str:
        """Go to the folder of the file `path`, links followed; its name there. `make`: folders that lack are made.

        The kernel says where that is. A call for each folder of a path would take minutes for the deepest ones.
        """
        for _ in range(LINKS):
            folder, name = os.path.split(os.path.join(self.workdir, path))
            if name in ("", ".", ".."):
                folder, name = os.path.join(folder, name), ""
            self._go(folder, make)
            if not name:
                raise IsADirectoryError(21, "is a directory")
            try:
                path = os.path.join(os.getcwd(), os.readlink(name))
            except OSError:  # no link
                return name
        raise OSError(40, "too many links")

    def _go(self, folder: str, make: bool) -> None:
        try:
            os.chdir(folder)
        except FileNotFoundError:
            os.chdir("/")
            for part in filter(None, folder.split("/")):
                try:
                    os.chdir(part)
                except FileNotFoundError:
                    self._stay_inside()
                    if not make:
                        raise
                    os.mkdir(part)
                    os.chdir(part)
        self._stay_inside()

    def _stay_inside(self) -> None:
        if not (os.getcwd() + "/").startswith(self.workdir + "/"):
            raise PermissionError(13, "outside the workspace")

    def _enter_without_links(self, path: str) -> tuple[str, int]:
        """Go to the folder of the file `path`, every link on the way replaced by a folder, and take away what else
        leads to its content: a link in its place, or further names. Its name there, and the mode that it had then.
        """
        full = os.path.join(self.workdir, path)
        *folders, name = os.path.relpath(full, self.workdir).split("/")
        if name in ("", ".", "..") or ".." in folders or full.endswith("/"):
            raise PermissionError(13, "outside the workspace")
        os.chdir(self.workdir)
        for part in folders:
            if os.path.islink(part):
                os.unlink(part)
            if not os.path.lexists(part):
                os.mkdir(part)
            os.chdir(part)
        found = os.lstat(name) if os.path.lexists(name) else None
        if found is None or not (stat.S_ISLNK(found.st_mode) or (stat.S_ISREG(found.st_mode) and found.st_nlink > 1)):
            return name, 0
        os.unlink(name)
        return name, 0 if stat.S_ISLNK(found.st_mode) else stat.S_IMODE(found.st_mode)


def unpack(archive: int, root: str) -> None:
    """Fill the folder `root` from what `packing` wrote, to be read from a descriptor, which is closed."""
    folders = []
    with open(archive, "rb") as source:
        while length := source.read(4):
            entry = decode(source.read(int.from_bytes(length, "big")))
            path, mode = os.path.join(root, entry["path"]), entry["mode"]
            if "same" in entry:
                os.link(os.path.join(root, entry["same"]), path, follow_symlinks=False)
                continue
            if stat.S_ISDIR(mode):
                folders.append((path, mode, entry["time"]))
                if entry["path"]:
                    os.mkdir(path, 0o700)
                continue
            if stat.S_ISLNK(mode):
                os.symlink(entry["target"], path)
            elif stat.S_ISREG(mode):
                _fill(source, path, entry["size"], stat.S_IMODE(mode))
            else:  # a pipe, or what an unprivileged process cannot make
                os.mknod(path, mode)
            os.utime(path, ns=(entry["time"], entry["time"]), follow_symlinks=False)
    for path, mode, when in reversed(folders):  # may be closed to us, and change with what is put in
        os.chmod(path, stat.S_IMODE(mode))
        os.utime(path, ns=(when, when))


def _fill(source: IO[bytes], path: str, size: int, mode: int) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file:
        while size:
            data = source.read(min(size, 1 << 20))
            if not data:
                raise EOFError("the archive of the workspace is cut off")
            size -= len(data)
            while data:
                data = data[file.write(data) :]
        os.fchmod(file.fileno(), mode)


# -- What a diff has to take in


class Walk:
    """Files and links under `root` that a diff may hold: no `.git`, and none that tools drop on the way.

    Of what is not in `base`, `strays` entries are looked at: an agent can make more than there is time for. What cannot
    be looked at is added to `left_out`.
    """

    def __init__(self, root: str, base: dict[str, Any], strays: int) -> None:
        self.root, self.base, self.strays = root, base, strays
        self.left_out: list[str] = []
        self.homes = {""}  # the folders of base
        for path in base:
            while path := path.rpartition("/")[0]:
                self.homes.add(path)

    def files(self) -> Iterator[tuple[str, str]]:
        """Each as ``(path, git mode)``."""
        here = os.lstat(self.root).st_mode if os.path.lexists(self.root) else 0
        folders = [("", here)] if stat.S_ISDIR(here) else []
        while folders:
            deeper = []
            for path, mode in self._inside(*folders.pop()):
                if stat.S_ISDIR(mode):
                    deeper.append((path, mode))
                elif stat.S_ISLNK(mode):
                    yield path, "120000"
                elif stat.S_ISREG(mode):
                    yield path, "100755" if mode & stat.S_IXUSR else "100644"
            folders += sorted(deeper, key=lambda each: each[0] in self.homes)  # the last is next: ours before strays

    def _inside(self, folder: str, mode: int) -> Iterator[tuple[str, int]]:
        """The entries of a folder, by path, with their modes."""
        full = os.path.join(self.root, folder)
        try:
            if mode & 0o500 != 0o500:
                os.chmod(full, 0o700)
            found = os.scandir(full)
        except OSError:  # a path too long for the kernel, and so for git
            self.left_out.append(folder + "/")
            return
        with found:
            for entry in found:
                path = os.path.join(folder, entry.name)
                if not self._counts(path, entry.name):
                    continue
                try:
                    mode = os.lstat(os.path.join(self.root, path)).st_mode
                except OSError:
                    self.left_out.append(path)
                    continue
                if stat.S_ISLNK(mode) and entry.name.lower() == ".gitmodules":  # git refuses a patch that has one
                    self.left_out.append(path)
                elif not (stat.S_ISDIR(mode) and entry.name in DROPPINGS and path not in self.homes):
                    yield path, mode

    def _counts(self, path: str, name: str) -> bool:
        """Whether to look at an entry."""
        if name.lower() == ".git":
            return False
        if path in self.base or path in self.homes:
            return True
        if self.strays <= 0:
            return False
        self.strays -= 1 + len(path) // LONG  # their names take memory
        if self.strays <= 0:
            self.left_out.append("(more files than are looked at)")
        return not name.endswith(".pyc")


def content(path: str, mode: str, most: int) -> bytes | None:
    """What git would store of a file or link; None if it is larger than `most` bytes, or cannot be read."""
    try:
        if os.lstat(path).st_size > most:
            return None
        return os.fsencode(os.readlink(path)) if mode == "120000" else _readable(path)
    except OSError as error:
        if error.errno == 5:  # the disk, not the name
            raise
    except MemoryError:
        pass
    return None


def _readable(path: str) -> bytes:
    """The content of a file, also of one that its mode closes to us."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # mode 000 and the like: git would not get in, and so lose the file
        before = stat.S_IMODE(os.lstat(path).st_mode)
        os.chmod(path, before | stat.S_IRUSR)
        descriptor = os.open(path, os.O_RDONLY)
        os.chmod(path, before)
    with open(descriptor, "rb") as file:
        return file.read()


def blob_id(data: bytes) -> str:
    """Git's name for this content."""
    try:
        from _sha1 import sha1  # type: ignore[import-not-found]  # hashlib would load all of OpenSSL
    except ImportError:
        from hashlib import sha1

    return str(sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest())


# -- Inside sandlock


class Confined(Guest):
    """The guest inside sandlock: it shares the host's process ids, and keeps apart by nested Landlock domains.

    ``kill(-1)`` reaches what is in our domain or below it, which is the sandbox.
    """

    def __init__(self, control: Control, rules: str) -> None:
        super().__init__(control)
        self.alone = True
        # Any domain denies links and renames between folders unless it allows them: this one does, everywhere.
        attributes = struct.pack("QQQ", FS_REFER, 0, SCOPES)
        self.ruleset = self._checked(self.libc.syscall(LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0))
        os.set_inheritable(self.ruleset, False)
        root = os.open("/", os.O_PATH)
        beneath = struct.pack("=Qi", FS_REFER, root)
        self._checked(self.libc.syscall(LANDLOCK_ADD_RULE, self.ruleset, PATH_BENEATH, beneath, 0))
        os.close(root)
        with open(rules, "rb") as file:
            refuse_calls(file.read())

    def _prepare(self) -> None:
        import ctypes

        self.libc = ctypes.CDLL(None, use_errno=True)
        signal.signal(signal.SIGTERM, self.end)
        self._checked(self.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
        self._checked(self.libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0))

    def _checked(self, result: int) -> int:
        if result < 0:
            import ctypes

            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result

    def end(self, *_: object) -> None:
        """The supervisor is gone, and with it most system calls: end everything, as we may do still."""
        try:
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(1)

    def _start(self, program: str, argv: list[str], env: dict[str, str], stdin: int, stdout: int) -> int:
        report, failure = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                self._checked(self.libc.syscall(LANDLOCK_RESTRICT_SELF, self.ruleset, 0))
                for number in RESTORED:
                    signal.signal(number, signal.SIG_DFL)
                for target, source in enumerate((stdin, stdout, stdout)):
                    os.dup2(source, target)
                os.execve(program, argv, env)
            except (OSError, ValueError) as error:
                os.write(failure, struct.pack("I", getattr(error, "errno", None) or 22))
            finally:
                os._exit(127)
        os.close(failure)
        with open(report, "rb") as file:
            failed = file.read(4)
        if failed:
            os.waitpid(pid, 0)
            code = struct.unpack("I", failed)[0]
            raise OSError(code, os.strerror(code))
        return pid


def refuse_calls(program: bytes) -> None:
    """Put the filter `program` on this process and all that it starts."""
    import ctypes

    code = ctypes.create_string_buffer(program, len(program))
    filter_ = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 or prctl(PR_SET_SECCOMP, 2, filter_, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


# -- Forked instead of started


class ForkServer:
    """A process with all that a guest needs loaded; guests are forked from it. It runs nothing of any task itself.

    bubblewrap has started it in a sandbox like the others, but with no workspace, no filter of system calls and a
    bare ``/proc``. A fork enters namespaces of its own, mounts there what no two sandboxes share, and then gives up
    what it needed for that (`Forked.confine`). Whatever bubblewrap mounted read-only it can neither remove nor make
    writable, as its user namespace is not the one that owns those mounts; and when the server ends, so do they all.
    """

    def __init__(self, asking: socket.socket, rules: int) -> None:
        import ctypes
        import fcntl
        import gc

        self.asking, self.ioctl, self.libc = asking, fcntl.ioctl, ctypes.CDLL(None, use_errno=True)
        with open(rules, "rb") as file:
            self.filter = file.read()
        signal.signal(signal.SIGCHLD, self._reap)
        gc.freeze()

    def serve(self) -> None:
        """Fork a guest for each message until the host hangs up.

        A message is JSON (``sizes``: bytes of each file system in memory, by where it is mounted) and comes with
        descriptors: the guest's end of its socket, the archive of its workspace, where its errors go, and the
        entrances of its control group.
        """
        while True:
            message, rights, flags, _ = self.asking.recvmsg(
                1 << 16, socket.CMSG_SPACE(4 * MOST_RIGHTS), socket.MSG_CMSG_CLOEXEC
            )
            if not message:
                os._exit(0)
            data = rights[0][2] if rights else b""
            descriptors = struct.unpack(f"{len(data) // 4}i", data)
            if len(descriptors) >= 3 and not flags & socket.MSG_CTRUNC:
                self._fork(message, descriptors)
            else:  # no guest, as the host learns by its socket, which is closed with the rest
                os.write(2, b"malformed: %d descriptors, flags %d\n" % (len(descriptors), flags))
            for descriptor in descriptors:
                os.close(descriptor)

    def _fork(self, message: bytes, descriptors: tuple[int, ...]) -> None:
        try:
            forked = os.fork()
        except OSError as error:  # no more processes: this guest's fault, not that of the others
            forked = -1
            try:  # noqa: SIM105  # contextlib takes long to import
                os.write(descriptors[2], f"cannot fork a guest: {error}\n".encode())
            except OSError:  # the disk is full, too: the host learns of this guest's fault by its closed socket
                pass
        if forked == 0:
            try:
                os.dup2(descriptors[2], 2)
                self._become_guest(decode(message)["sizes"], *descriptors)
            except BaseException as error:
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(1)

    def _reap(self, *_: object) -> None:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass

    def _become_guest(self, sizes: dict[str, int], control: int, archive: int, errors: int, *entrances: int) -> None:
        self.asking.close()
        os.close(errors)
        os.setsid()
        user, group = os.getuid(), os.getgid()
        self.checked(self.libc.unshare(NEW_USER | NEW_MOUNTS | NEW_PIDS | NEW_NETWORK | NEW_IPC | NEW_NAMES), "unshare")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        if os.fork() != 0:  # only a child is in the new namespace of processes: the first in it
            os._exit(0)
        for entrance in entrances:
            os.write(entrance, b"0")
            os.close(entrance)
        self._mount(b"proc", b"/proc", NO_SUID | NO_DEVICES | NO_PROGRAMS)
        self._mount(b"/proc/sys", b"/proc/sys", BIND)
        self._mount(b"/proc/sys", b"/proc/sys", BIND | REMOUNT | READ_ONLY | NO_SUID | NO_DEVICES | NO_PROGRAMS)
        self._mount(b"devpts", b"/dev/pts", NO_SUID | NO_PROGRAMS, b"newinstance,ptmxmode=0666,mode=620")
        for folder, size in sizes.items():
            self._mount(b"tmpfs", folder.encode(), NO_SUID | NO_DEVICES, b"mode=0755,size=%d" % size)
        loopback = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.ioctl(loopback.fileno(), SET_FLAGS, struct.pack("16sh14x", b"lo", UP | RUNNING))
        loopback.close()
        Forked(self, Control(socket.socket(fileno=control)), archive).serve()

    def _mount(self, source: bytes, target: bytes, flags: int, options: bytes | None = None) -> None:
        kind = None if flags & BIND else source
        self.checked(self.libc.mount(source, target, kind, flags, options), f"mount {target.decode()}")

    def checked(self, result: int, what: str) -> None:
        """Raise OSError if a call into C failed."""
        if result < 0:
            import ctypes

            raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


class Forked(Guest):
    """A guest that a `ForkServer` became. Until it is configured it has every capability over its own namespaces."""

    def __init__(self, server: ForkServer, control: Control, archive: int) -> None:
        super().__init__(control)
        self.server, self.content = server, archive
        ours = os.pidfd_open(self.pid)
        control.send({"forked": True}, descriptor=ours)  # by which the host ends us
        os.close(ours)

    def confine(self) -> None:
        """Give up every capability and the right to gain any, and most system calls."""
        libc = self.server.libc
        if os.access("/proc/self/ns/cgroup", os.F_OK):  # where the kernel has them, as with bubblewrap
            self.server.checked(libc.unshare(NEW_CGROUP), "unshare cgroup")
        for capability in range(64):
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails beyond the kernel's last one
        self.server.checked(libc.capset(struct.pack("Ii", CAPABILITIES, 0), bytes(24)), "capset")
        refuse_calls(self.server.filter)

    def _unpack(self, archive: str) -> None:
        unpack(self.content, self.workdir)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        Guest(Control(connected(sys.argv[1]))).serve()
    if sys.argv[2].isdigit():
        ForkServer(connected(sys.argv[1]), int(sys.argv[2])).serve()
    end_of_ours = Control(connected(sys.argv[1]))
    if not sys.argv[1].isdigit():  # in a container
        with open(sys.argv[2], "rb") as rules:
            refuse_calls(rules.read())
        Guest(end_of_ours).serve()
    confined = Confined(end_of_ours, sys.argv[2])
    try:
        confined.serve()
    finally:
        confined.end()
