"""Attacks run inside a sandbox, and controls: ``python3 -ISc <this file> NAME ARGUMENT...``.

`print_word` shows that an attack succeeded. Obstacles raise OSError or end the process. Needs Python 3.9 only.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import json
import mmap
import os
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

E = os.environ  # `probes` says what it holds


def print_word() -> None:
    """Print the secret word."""
    print(E["A"] + E["B"], flush=True)


def _syscalls() -> Any:
    return ctypes.CDLL(None, use_errno=True).syscall


# -- escapes


def plant() -> None:
    """Leave a file on the host."""
    with open(E["OUTSIDE"] + "/plant", "w"):
        pass


def descriptor_of_root() -> None:
    """Read the secret by a descriptor of ``/``."""
    root = os.open("/", os.O_PATH)
    print(os.read(os.open(E["SECRET"].lstrip("/"), os.O_RDONLY, dir_fd=root), 99).decode())


def write_elsewhere() -> None:
    """Write in a folder that is neither the workspace nor a temporary one."""
    ours = ("/proc", "/tmp", "/dev/shm", tempfile.gettempdir(), os.getcwd())

    def folders() -> Iterator[str]:
        yield E["OUTSIDE"]
        yield "/"
        for parent, names, _ in os.walk("/"):
            paths = [os.path.join(parent, name) for name in names]  # also those that cannot be listed
            yield from (path for path in paths if not path.startswith(ours) and not os.path.islink(path))

    for folder in folders():
        path = os.path.join(folder, E["A"])
        try:
            open(path, "x").close()
            os.unlink(path)
        except OSError:
            continue
        print_word()
        return


# -- secrets


def _list_mappings(pid: object, mark: str) -> list[tuple[int, int]]:
    with open(f"/proc/{pid}/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps if mark in line and " rw-p " in line]
    return [(int(low, 16), int(high, 16)) for low, high in ranges]


def memory_of_holder() -> None:
    """Find the word on another process's stack."""
    for low, high in _list_mappings(E["HOLDER"], "[stack]"):
        with open(f"/proc/{E['HOLDER']}/mem", "rb", 0) as memory:
            memory.seek(low)
            if (E["A"] + E["B"]).encode() in memory.read(high - low):
                print_word()


def limits_of_holder() -> None:
    """Change another process's limits."""
    resource.prlimit(int(E["HOLDER"]), resource.RLIMIT_CORE, (0, 0))
    print_word()


# -- network


def connect(family: str, address: str) -> None:
    """Connect to ``inet``, ``inet6`` (the host's loopback), ``unix``, ``abstract``."""
    addresses: dict[str, tuple[socket.AddressFamily, Any]] = {
        "inet": (socket.AF_INET, ("127.0.0.1", address)),
        "inet6": (socket.AF_INET6, ("::ffff:127.0.0.1", address)),
        "unix": (socket.AF_UNIX, address),
        "abstract": (socket.AF_UNIX, "\0" + address),
    }
    kind, where = addresses[family]
    if isinstance(where, tuple):
        where = (where[0], int(where[1]))
    with socket.socket(kind) as client:
        client.settimeout(5)
        client.connect(where)
        print_word()


def route() -> None:
    """Look for an internet route; connecting a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(5)
        client.connect(("192.0.2.1", 53))
        print_word()


def open_socket(family: str, kind: str, protocol: str = "0") -> None:
    """Open a socket."""
    socket.socket(int(family), int(kind), int(protocol, 0))
    print_word()


# -- the kernel

CALLS: dict[str, tuple[int, int, tuple[Any, ...]]] = {  # numbers on x86_64 and aarch64, arguments
    "ptrace": (101, 117, (0, 0, 0, 0)),
    "process_vm_readv": (310, 270, (os.getpid(), 0, 0, 0, 0, 0)),
    "kcmp": (312, 272, (os.getpid(), os.getpid(), 2, 0, 0)),
    "pidfd_getfd": (438, 438, (-1, 0, 0)),
    "unshare of the user": (272, 97, (0x10000000,)),
    "clone of a user namespace": (56, 220, (0x50000000, 0, 0, 0, 0)),
    "clone3": (435, 435, (0, 0)),
    "setns": (308, 268, (-1, 0)),
    "io_uring_setup": (425, 425, (1, 0)),
    "keyctl": (250, 219, (0, -3, 1)),
    "add_key": (248, 217, (0, 0, 0, 0, 0)),
    "perf_event_open": (298, 241, (0, 0, 0, 0, 0)),
    "userfaultfd": (323, 282, (1,)),
    "memfd_create": (319, 279, (b"m", 0xFFFF)),
    "shmget": (29, 194, (0, 0, 0)),
    "msgget": (68, 186, (0x43525245, 0)),
    "semget": (64, 190, (0x43525245, 0, 0)),
    "request_key": (249, 218, (0, 0, 0, 0)),
    "name_to_handle_at": (303, 264, (-1, 0, 0, 0, 0)),
    "process_madvise": (440, 440, (-1, 0, 0, 0, 0)),
    "disk priority of all of a user's processes": (251, 30, (3, 0, 7 << 13)),
    "mount (root)": (165, 40, (0, 0, 0, 0, 0)),
    "umount (root)": (166, 39, (0, 0)),
    "pivot_root (root)": (155, 41, (0, 0)),
    "chroot (root)": (161, 51, (b"/",)),
    "fsopen (root)": (430, 430, (b"tmpfs", 0xFF)),
    "open_tree (root)": (428, 428, (b"/", 0, 0xFFFFFF)),
    "move_mount (root)": (429, 429, (-1, 0, -1, 0, 0)),
    "mount_setattr (root)": (442, 442, (-1, 0, 0, 0, 0)),
    "bpf (root)": (321, 280, (0, 0, 0)),
    "open_by_handle_at (root)": (304, 265, (-1, 0, 0)),
    "init_module (root)": (175, 105, (0, 0, 0)),
    "kexec_load (root)": (246, 104, (0, 0, 0, 0xFF)),
    "swapon (root)": (167, 224, (0, 0)),
    "reboot (root)": (169, 142, (0, 0, 0, 0)),
    "syslog (root)": (103, 116, (10, 0, 0)),
    "clock_settime (root)": (227, 112, (0, 0)),
    "clock_adjtime (root)": (305, 266, (0, 0)),
    "settimeofday (root)": (164, 170, (0, 0)),
    "adjtimex (root)": (159, 171, (0,)),
    "acct (root)": (163, 89, (b"/nonexistent",)),
    "fsmount (root)": (432, 432, (-1, 0, 0)),
    "fanotify_init (root)": (300, 262, (0xFFFFFF, 0)),
    "delete_module (root)": (176, 106, (b"nothing", 0x800)),
    "kexec_file_load (root)": (320, 294, (-1, -1, 0, 0, 0xFF)),
}
"""System calls, harmless with these arguments."""


def call(name: str) -> None:
    """Make system call `name` of `CALLS`; EPERM, EACCES and ENOSYS are refusals."""
    x86_64, aarch64, arguments = CALLS[name]
    result = _syscalls()(x86_64 if os.uname().machine == "x86_64" else aarch64, *arguments)
    if result >= 0 or ctypes.get_errno() not in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        print_word()


def priority_of_all() -> None:
    """Raise the priority of all our user's processes; EACCES: the kernel looked at each."""
    setpriority = ctypes.CDLL(None, use_errno=True).setpriority
    if os.getuid() and setpriority(os.PRIO_USER, 0, -20) and ctypes.get_errno() == errno.EACCES:
        print_word()


def writable(*folders: str) -> None:
    """Find a writable file below `folders`."""

    def files(folder: str) -> Iterator[str]:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from files(entry.path)
                else:
                    yield entry.path

    for folder in folders:
        try:
            for path in files(folder):
                try:
                    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                except OSError:
                    continue
                print_word()
                return
        except OSError:
            continue


def set_user_id() -> None:
    """Make a program that runs as root."""
    shutil.copy("/usr/bin/id", "id")
    os.chown("id", 0, 0)
    os.chmod("id", 0o4755)
    if subprocess.run(["./id", "-u"], capture_output=True).stdout == b"0\n":
        print_word()


# -- the keeper: the parent, which runs commands and sends their results


def kill_by_descriptors() -> None:
    """Kill the keeper if its descriptors can be listed."""
    os.listdir(f"/proc/{os.getppid()}/fd")
    os.kill(os.getppid(), 9)


def forged_frame() -> None:
    """Answer in the keeper's place, on any descriptor."""
    word = (E["A"] + E["B"]).encode()
    head = json.dumps({"code": 0, "output": word.decode()}).encode()
    frame = struct.pack(">II", len(head), len(word)) + head + word
    for number in range(3, 256):
        try:
            os.write(number, frame)
        except OSError:
            pass
    for pid in (1, os.getppid()):
        for number in range(3, 64):
            try:
                open(f"/proc/{pid}/fd/{number}", "wb", 0).write(frame)
            except OSError:
                pass


def limits_of_keeper() -> None:
    """Lower the keeper's limits."""
    for which, value in ((resource.RLIMIT_NOFILE, 3), (resource.RLIMIT_DATA, 4096), (resource.RLIMIT_CPU, 1)):
        resource.prlimit(os.getppid(), which, (value, value))


def priority_of_keeper() -> None:
    """Lower the keeper's priority, or bind it to one processor."""

    def attempt(action: Callable[..., object], *values: object) -> None:
        try:
            action(*values)
        except OSError:
            return
        print_word()

    attempt(os.setpriority, os.PRIO_PROCESS, os.getppid(), 19)
    attempt(os.sched_setscheduler, os.getppid(), os.SCHED_IDLE, os.sched_param(0))
    attempt(os.sched_setaffinity, os.getppid(), {0})


def signal_by_descriptor() -> None:
    """Kill the keeper by a process descriptor."""
    for pid in (os.getppid(), 1):
        signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGKILL)


def trace() -> None:
    """Trace the keeper so that it ends with us."""
    ptrace = ctypes.CDLL(None).ptrace
    ptrace.argtypes = [ctypes.c_long] * 4
    ptrace(0x4206, os.getppid(), 0, 0x100000)  # PTRACE_SEIZE, PTRACE_O_EXITKILL


def copy_descriptors() -> None:
    """Write to copies of the keeper's descriptors."""
    keeper = os.pidfd_open(os.getppid())
    for number in range(3, 64):
        if (copy := _syscalls()(438, keeper, number, 0)) >= 0:
            try:
                os.write(copy, (E["A"] + E["B"]).encode())
            except OSError:
                continue
            print_word()


def memory_of_keeper() -> None:
    """Clear the keeper's heap."""
    for low, high in _list_mappings(os.getppid(), "[heap]"):
        with open(f"/proc/{os.getppid()}/mem", "r+b", 0) as memory:
            memory.seek(low)
            memory.write(bytes(high - low))


def daemon_of_threads() -> None:
    """Start a daemon whose first thread has ended: shown as a zombie, yet alive."""

    def stay() -> None:
        lock = open("lock", "w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        time.sleep(300)

    if not os.fork():
        os.setsid()
        with open("/dev/null", "w") as null:
            for number in (1, 2):
                os.dup2(null.fileno(), number)
        threading.Thread(target=stay).start()
        time.sleep(0.2)
        with open("started", "w") as file:
            file.write(str(os.getpid()))
        ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)  # exit of this thread alone
    while not os.path.exists("started") or not os.path.getsize("started"):
        time.sleep(0.01)


# -- limits: bounded, for use on a host; a limit raises OSError or MemoryError, or ends the process


def _fork_children(action: Callable[[], object], count: int) -> list[int]:
    children = []
    for _ in range(count):
        if not (pid := os.fork()):
            try:
                action()
            except BaseException:
                os._exit(1)
            os._exit(0)
        children.append(pid)
    return children


def _all_ended_well(children: list[int]) -> bool:
    statuses = [os.waitpid(pid, 0)[1] for pid in children]
    return not any(statuses)


def processes() -> None:
    """Exceed the limit of processes."""
    children = []
    try:
        for _ in range(int(E["PROCESSES"]) + 16):
            pid = os.fork()
            if pid == 0:
                signal.pause()
                os._exit(0)
            children.append(pid)
        print_word()
    finally:
        for pid in children:
            os.kill(pid, 9)
        for pid in children:
            os.waitpid(pid, 0)


def threads() -> None:
    """Exceed the limit of threads."""
    end = threading.Event()
    count = int(E["PROCESSES"]) + 16
    threading.stack_size(1 << 16)
    try:
        for _ in range(count):
            threading.Thread(target=end.wait, daemon=True).start()
        end.wait(2)
        print_word()
    finally:
        end.set()


def processes_that_left() -> None:
    """Exceed the limit of processes, in other sessions with other parents."""
    count = int(E["PROCESSES"]) + 16
    read, write = os.pipe()
    for _ in range(count):
        if os.fork():
            continue
        os.setsid()
        if os.fork():
            os._exit(0)
        os.close(read)
        os.write(write, b"%8d" % os.getpid())
        signal.pause()
    os.close(write)
    pids: list[int] = []
    while len(pids) < count and select.select([read], [], [], 3)[0]:
        pids.append(int(os.read(read, 8)))
    for pid in pids:
        os.kill(pid, 9)
    if len(pids) >= count:
        print_word()


def memory_of_one() -> None:
    """Take twice the memory in one process."""
    block = b"x" * (2 * int(E["MEMORY"]))
    print_word()
    del block


def memory_of_many() -> None:
    """Take 1.8 times the memory in three processes."""
    size = int(E["MEMORY"]) * 6 // 10

    def hold() -> None:
        block = b"x" * size
        time.sleep(6)
        del block

    if all(os.waitpid(pid, 0)[1] == 0 for pid in _fork_children(hold, 3)):
        print_word()


def memory_that_is_shared() -> None:
    """Take twice the memory in shared mappings."""
    maps = []
    for _ in range(8):
        maps.append(mmap.mmap(-1, int(E["MEMORY"]) // 4))
        maps[-1].write(b"x" * len(maps[-1]))
    time.sleep(4)
    print_word()


def memory_in_sockets() -> None:
    """Take thrice the memory in socket buffers, in several processes."""

    def hold() -> None:
        pairs, left = [], int(E["MEMORY"]) // 8
        while left > 0:
            pairs.append(socket.socketpair())
            pairs[-1][0].setblocking(False)
            try:
                while True:
                    left -= pairs[-1][0].send(bytes(1 << 16))
            except BlockingIOError:
                pass
        time.sleep(4)

    if _all_ended_well(_fork_children(hold, 24)):
        print_word()


def fill(limit: str, where: str, deleted: str = "") -> None:
    """Write 1 MiB beyond `limit` to files in `where`, unlinked if `deleted`."""
    size = int(E[limit]) + (1 << 20)
    folder = tempfile.mkdtemp(dir=where)
    try:
        files: list[io.FileIO] = []
        while size > 0:
            files.append(open(os.path.join(folder, str(len(files))), "wb", 0))
            if deleted:
                os.unlink(files[-1].name)
            for _ in range(4):
                files[-1].write(bytes(1 << 20))
                size -= 1 << 20
        print_word()
    finally:
        shutil.rmtree(folder)


def _make_entry(what: str, at: str, number: int) -> None:
    if what == "files":
        os.close(os.open(f"{at}/{number}", os.O_CREAT))
    elif what == "folders":
        os.mkdir(f"{at}/{number}")
    elif what == "nested":
        os.chdir("d" if number else at)
        os.mkdir("d")
    elif what == "links":
        os.symlink("x" * 900, f"{at}/{number}")
    elif what == "names":
        os.link("app.py", f"{at}/{number}")
    else:
        os.setxattr(at, f"user.{number}", bytes(9000))


def many(what: str, where: str = ".") -> None:
    """Exceed the limit of files: ``files``, ``folders``, ``nested``, ``links``, ..."""
    at = os.path.abspath(tempfile.mkdtemp(dir=where))
    try:
        for number in range(int(E["FILES"]) + 99):
            _make_entry(what, at, number)
        time.sleep(4)
        print_word()
    finally:
        subprocess.run(["timeout", "5", "rm", "-rf", at], cwd="/")


def cpu_time() -> None:
    """Exceed the limit of CPU time."""
    while time.process_time() < int(E["CPU_SECONDS"]) + 2:
        pass
    print_word()


def terminals() -> None:
    """Open 400 terminals."""

    def hold() -> None:
        pairs = [os.openpty() for _ in range(100)]
        time.sleep(4)
        del pairs

    if _all_ended_well(_fork_children(hold, 4)):
        print_word()


def open_files() -> None:
    """Exceed the limit of open files."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for _ in range(int(E["OPEN_FILES"])):
        os.dup(0)
    print_word()


# -- controls: naive counterparts of our keeper and our diff


def keeper(descriptor: str, script: str) -> None:
    """Run a bash script that inherits our socket; answer ``fine`` unless our priority changed."""
    ours = socket.socket(fileno=int(descriptor))
    before = read_priority()
    subprocess.run(["bash", "-c", script], pass_fds=[ours.fileno()], stdin=subprocess.DEVNULL)
    open("/dev/null").close()
    if read_priority() == before:
        ours.sendall(b"fine\n")


def read_priority() -> tuple[int, int]:
    """Our priority and scheduling."""
    return os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)


def diff() -> None:
    """Print a diff: read files as text, name them by line, and trust the repository's git."""
    for folder, folders, files in os.walk("."):
        folders[:] = [name for name in folders if name != ".git"]
        for name in "\n".join(files).split("\n"):
            if name:
                open(os.path.join(folder, name), encoding="utf-8").read()
                name.encode()
    subprocess.run(["git", "add", "-A"], check=True)
    changes = subprocess.run(["git", "diff", "--cached", "HEAD"], check=True, capture_output=True).stdout
    sys.stdout.buffer.write(changes)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
