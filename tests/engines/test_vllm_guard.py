"""The guard of a vLLM server ends all of its processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from coderepairrl.engines.vllm import guard

SERVER = """
import multiprocessing, os, signal, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

def ready(tracker):
    ignored = Path(f"/proc/{{tracker}}/status").read_text().partition("SigIgn:")[2].split()[0]
    return int(ignored, 16) >> (signal.SIGTERM - 1) & 1

def work(wire):
    memory = SharedMemory(create=True, size=4096)
    while not ready(resource_tracker._resource_tracker._pid):
        time.sleep(0.01)
    wire.send((os.getpid(), memory.name))
    signal.pause()

if {deaf}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
here, there = multiprocessing.Pipe()
multiprocessing.Process(target=work, args=(there,)).start()
print(*here.recv(), flush=True)
{then}
"""

GUARD = [sys.executable, "-I", guard.__file__]
OWNER = """
import os, subprocess, sys
guard = subprocess.Popen([*sys.argv[1:4], str(os.getpid()), *sys.argv[4:]], stdin=subprocess.PIPE, text=True)
guard.wait()
"""


@pytest.mark.parametrize("ends", ["owner", "terminated", "server", "stopped"])
def test_no_process_shared_memory_or_folder_is_left(ends: str, tmp_path: Path) -> None:
    folder = tmp_path / "socket"
    folder.mkdir()
    then = "os._exit(7)" if ends == "server" else "signal.pause()"
    program = tmp_path / "server.py"
    program.write_text(SERVER.format(deaf=ends == "terminated", then=then))
    command = [*GUARD, str(os.getpid()), str(folder), sys.executable, str(program)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None and started.stdin is not None
        pid, name = started.stdout.readline().split()
        if ends == "owner":
            started.stdin.close()
        elif ends in ("terminated", "stopped"):
            for process in psutil.Process(started.pid).children(recursive=True) if ends == "stopped" else ():
                process.suspend()
            started.terminate()
        assert started.wait() == {"owner": 128 + 15, "server": 7}.get(ends, 128 + 9)
    assert not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE
    assert not Path("/dev/shm", name).exists()
    assert not folder.exists()


def test_a_server_whose_owner_was_killed_ends_at_once(tmp_path: Path) -> None:
    """Even if it ignores SIGTERM."""
    (tmp_path / "socket").mkdir()
    (tmp_path / "server.py").write_text(SERVER.format(deaf=True, then="signal.pause()"))
    command = [
        sys.executable,
        "-c",
        OWNER,
        *GUARD,
        str(tmp_path / "socket"),
        sys.executable,
        str(tmp_path / "server.py"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        _, name = owner.stdout.readline().split()
        family = psutil.Process(owner.pid).children(recursive=True)
        assert len(family) >= 3
        owner.kill()
        _, left = psutil.wait_procs(family, timeout=guard.GRACE / 2)
    assert left == []
    assert not Path("/dev/shm", name).exists()
    assert not (tmp_path / "socket").exists()
