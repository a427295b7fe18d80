"""Attacks on limits: ``python3 -ISc <this file> NAME ARGUMENT...``, as `inside`.

Bounded, for use on a host. Limits raise OSError or MemoryError here, or end the process.
"""

from __future__ import annotations

import io
import mmap
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

E = os.environ


def found() -> None:
    """Print the word."""
    print(E["A"] + E["B"], flush=True)


def _children(status: Callable[[], object], count: int) -> list[int]:
    children = []
    for _ in range(count):
        if not (pid := os.fork()):
            try:
                status()
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
        found()
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
        found()
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
        found()


def memory_of_one() -> None:
    """Take twice the memory in one process."""
    block = b"x" * (2 * int(E["MEMORY"]))
    found()
    del block


def memory_of_many() -> None:
    """Take 1.8 times the memory in three processes."""
    size = int(E["MEMORY"]) * 6 // 10

    def hold() -> None:
        block = b"x" * size
        time.sleep(6)
        del block

    if all(os.waitpid(pid, 0)[1] == 0 for pid in _children(hold, 3)):
        found()


def memory_that_is_shared() -> None:
    """Take twice the memory in shared mappings."""
    maps = []
    for _ in range(8):
        maps.append(mmap.mmap(-1, int(E["MEMORY"]) // 4))
        maps[-1].write(b"x" * len(maps[-1]))
    time.sleep(4)
    found()


def memory_in_sockets() -> None:
    """Take thrice the memory in the kernel, with few descriptors each."""

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

    if _all_ended_well(_children(hold, 24)):
        found()


def fill(limit: str, where: str, deleted: str = "") -> None:
    """Write 1 MiB beyond `limit` to files in `where`, perhaps `deleted`."""
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
        found()
    finally:
        shutil.rmtree(folder)


def _make(what: str, at: str, number: int) -> None:
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
            _make(what, at, number)
        time.sleep(4)
        found()
    finally:
        subprocess.run(["timeout", "5", "rm", "-rf", at], cwd="/")


def cpu_time() -> None:
    """Exceed the limit of CPU time."""
    while time.process_time() < int(E["CPU_SECONDS"]) + 2:
        pass
    found()


def terminals() -> None:
    """Open 400 terminals."""

    def hold() -> None:
        pairs = [os.openpty() for _ in range(100)]
        time.sleep(4)
        del pairs

    if _all_ended_well(_children(hold, 4)):
        found()


def open_files() -> None:
    """Exceed the limit of open files."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for _ in range(int(E["OPEN_FILES"])):
        os.dup(0)
    found()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
