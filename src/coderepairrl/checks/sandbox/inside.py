"""Probes of the exam, run in a sandbox: ``python3 -c <this file> NAME ARGUMENT...``.

Functions print what they saw. Needs Python 3.8 only.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any


def _works(action: Callable[..., Any], *values: Any) -> bool:
    try:
        action(*values)
    except OSError:
        return False
    return True


def _touch(path: str) -> None:
    open(path, "w").close()


def _writes(path: str) -> bool:
    return _works(_touch, path) and _works(os.unlink, path)


def converse(host: str, port: str) -> None:
    """Print two lines of an answer, whether the second came later, and the rest."""
    connection = socket.create_connection((host, int(port)))
    connection.sendall(b"hello\n")
    answer = connection.makefile("rb")
    first, at = answer.readline(), time.monotonic()
    second = answer.readline()
    print(first, second, time.monotonic() - at > 0.1, answer.read())


def hog(mebibytes: str) -> None:
    """Hold memory for ten seconds."""
    block = bytearray(int(mebibytes) << 20)
    print("got it", flush=True)
    time.sleep(10)
    print("kept", len(block), flush=True)


def fill(size: str, each: str) -> None:
    """Fill `size` bytes of disk with deleted files of `each` bytes; print the final errno."""
    left = int(size)
    try:
        while left > 0:
            file = os.open("fill", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            os.unlink("fill")
            room = int(each)
            while room > 0:
                written = os.write(file, bytes(1 << 20))
                room -= written
                left -= written
        print("all of it")
    except OSError as error:
        print(error.errno)


def count_processes() -> None:
    """Print the number of visible processes."""
    print(sum(name.isdigit() for name in os.listdir("/proc")))


def write_outside(name: str, theirs: str) -> None:
    """Print writable places outside, then whether the workspace is writable."""
    tmp = tempfile.gettempdir()
    mine = ("/proc", "/tmp", "/dev/shm", tmp, os.getcwd())
    places = [folder for folder, _, _ in os.walk("/") if not folder.startswith(mine)]
    places += ["/", "/etc", "/usr/local", "/var/tmp", "/run", "/home", "/root", theirs]
    outside = [place for place in places if not os.path.realpath(place).startswith(tmp)]
    print([place for place in outside if _writes(os.path.join(place, name))])
    print([path for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger") if _works(_touch, path)])
    print(_works(os.chmod, theirs, 0o700), _works(os.utime, theirs))
    for place in ("/tmp", "/dev/shm"):
        _works(_touch, os.path.join(place, name))
    print(_writes(os.path.join(tmp, name)), _writes(name), _works(os.chmod, ".", 0o755))


def _reaches(family: int, address: Any) -> bool:
    try:
        with socket.socket(family) as client:
            client.settimeout(1)
            client.connect(address)
            return True
    except OSError:
        return False


def _opens(family: int, kind: int = socket.SOCK_STREAM, protocol: int = 0) -> bool:
    return _works(lambda: socket.socket(family, kind, protocol).close())


def network(port: str, abstract: str) -> None:
    """Print reach of loopback, an abstract socket, the internet, vsock, netlink and raw packets."""
    print(_reaches(socket.AF_INET, ("127.0.0.1", int(port))), _reaches(socket.AF_UNIX, "\0" + abstract))
    print(_reaches(socket.AF_INET, ("1.1.1.1", 53)), _opens(40), _opens(16, socket.SOCK_RAW, 12), _opens(17, 3))


def kernel() -> None:
    """Print allowed system calls and remaining privileges; empty if sound."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    x86 = platform.machine() == "x86_64"
    doors: dict[str, tuple[Any, ...]] = {
        "unshare": (272 if x86 else 97, 0x10000000),
        "ptrace": (101 if x86 else 117, 0, 0, 0, 0),
        "io_uring_setup": (425, 1, 0),
        "bpf": (321 if x86 else 280, 0, 0, 0),
        "keyctl": (250 if x86 else 219, 0, -3, 1),
        "mount": (165 if x86 else 40, 0, 0, 0, 0, 0),
        "clone3": (435, 0, 0),
        "memfd": (319 if x86 else 279, b"m", 0),
        "perf_event_open": (298 if x86 else 241, 0, 0, 0, 0, 0),
        "pidfd_getfd": (438, 0, 0, 0),
    }
    for name, (number, *rest) in doors.items():
        ctypes.set_errno(0)
        result = call(number, *rest)
        if result >= 0 or ctypes.get_errno() not in (1, 38):
            print(name, result, ctypes.get_errno())
    with open("/proc/self/status") as lines:
        status = dict(line.split(":\t") for line in lines if ":\t" in line)
    none = "0" * 16  # the bounding set means nothing where there are no new privileges, and only root can empty it
    for key, want in (("CapEff", none), ("CapPrm", none), ("CapAmb", none), ("NoNewPrivs", "1"), ("Seccomp", "2")):
        if status[key].strip() != want:
            print(key, status[key])


def attack_keeper() -> None:
    """Signal keeper and everybody; print access to the keeper."""
    keeper = os.getppid()
    for pid in (1, keeper):
        for number in (signal.SIGKILL, signal.SIGSTOP):
            _works(os.kill, pid, number)
        names = ["mem", "fd/3", *(["environ"] if pid == 1 else [])]  # a keeper of the same user knows no secrets
        for name in names:
            if _works(lambda pid=pid, name=name: open(f"/proc/{pid}/{name}", "r+b" if name == "mem" else "rb").close()):
                print("opened", pid, name)
    _works(os.kill, -1, 15)
    for name in os.listdir("/proc/self/fd"):
        try:
            if "socket" in os.readlink(f"/proc/self/fd/{name}"):
                print("socket", name)
        except OSError:
            continue


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
