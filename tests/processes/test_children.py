"""Frames of any size arrive, also after cancellations; children die with their parent; errors quote a child's log."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from coderepairrl.processes.children import Child, ChildDied, run_child

ECHO = """
    import os, subprocess
    from coderepairrl.processes.children import Parent
    parent = Parent.connect()
    try:
        while True:
            frame = parent.receive()
            if frame.get("say"):
                print(frame["say"], flush=True)
            if frame.get("daemon"):
                subprocess.Popen(["sleep", "30"], close_fds=False)
            if frame.get("die"):
                os._exit(7)
            parent.send(frame)
    except EOFError:
        pass
"""


@pytest.fixture
def modules(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "crrl_echo.py").write_text(textwrap.dedent(ECHO))
    return {"PYTHONPATH": str(tmp_path)}


async def spawn(modules: dict[str, str], tmp_path: Path) -> Child:
    return await Child.spawn("crrl_echo", log=tmp_path / "logs" / "echo.log", env=modules)


@pytest.fixture
async def child(modules: dict[str, str], tmp_path: Path) -> AsyncIterator[Child]:
    child = await spawn(modules, tmp_path)
    yield child
    await child.close()


async def test_frames_of_any_size_arrive_in_order(child: Child) -> None:
    async def send_all() -> None:
        for frame in frames:
            await child.send(frame)

    frames = [{"n": n, "text": "é\n" * size} for n, size in enumerate((0, 1, 70_000, 3, 1_500_000, 2))]
    sending = asyncio.create_task(send_all())
    assert [await child.receive() for _ in frames] == frames
    await sending
    await child.close(grace=240.0)
    assert child.process.returncode == 0


async def test_nothing_is_imported_from_the_current_folder(
    modules: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``crrl fix`` runs in repositories of others."""
    repository, mark = tmp_path / "repository", tmp_path / "mark"
    for name in ("json.py", "ctypes/__init__.py", "coderepairrl/__init__.py"):
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(f"open({str(mark)!r}, 'w').close()\n")
    monkeypatch.chdir(repository)
    subprocess.run([sys.executable, "-c", "import json"], check=True)  # the positive control
    assert mark.exists()
    mark.unlink()
    child = await spawn(modules, tmp_path)
    await child.send({"n": 1})
    assert await child.receive() == {"n": 1}
    await child.close()
    assert not mark.exists()


async def test_a_cancelled_receive_loses_no_frame(child: Child) -> None:
    received = []
    for n in range(20):
        await child.send({"n": n, "padding": "x" * 100_000})
        while len(received) <= n:
            try:
                received.append((await asyncio.wait_for(child.receive(), 0.0005))["n"])
            except TimeoutError:
                await asyncio.sleep(0)
    assert received == list(range(20))


@pytest.mark.parametrize("words", ["first and last", ""])
async def test_the_error_of_a_death_has_the_end_of_the_childs_log(child: Child, words: str) -> None:
    await child.send({"say": words, "die": True})
    with pytest.raises(ChildDied, match="exited with 7") as death:
        await child.receive()
    assert ("first and last" in str(death.value)) == bool(words)


async def test_a_kill_is_noticed_while_a_grandchild_lives(child: Child) -> None:
    await child.send({"daemon": True})
    await child.receive()
    started = time.monotonic()
    os.kill(child.process.pid, signal.SIGKILL)
    with pytest.raises(ChildDied, match="killed by SIGKILL"):
        await child.receive()
    assert time.monotonic() - started < 5.0
    os.killpg(child.process.pid, signal.SIGKILL)  # the grandchild


STARTING = """
import asyncio, os, signal, sys
from pathlib import Path
from coderepairrl.processes.children import Child
async def main():
    child = await Child.spawn(sys.argv[2], log=Path(sys.argv[1]))
    print(child.process.pid, flush=True)
    if sys.argv[2] == "crrl_echo":
        await child.send({})
        await child.receive()
    await asyncio.sleep(float(sys.argv[3]))
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


@pytest.mark.parametrize(("module", "seconds"), [("crrl_echo", 0.0), ("crrl_slow", 0.0), ("crrl_slow", 0.3)])
def test_a_child_dies_with_its_parent(module: str, seconds: float, modules: dict[str, str], tmp_path: Path) -> None:
    """Also while it still starts."""
    (tmp_path / "crrl_slow.py").write_text("import time\ntime.sleep(30)\n")
    command = [sys.executable, "-c", STARTING, str(tmp_path / "log"), module, str(seconds)]
    done = subprocess.run(command, env=os.environ | modules, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert gone(int(done.stdout), within=5.0)  # Python itself has to start, and the machine may be busy


def gone(pid: int, within: float) -> bool:
    """Whether the process ends in time; a zombie counts as ended."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


async def test_a_cancelled_start_leaves_no_process(tmp_path: Path) -> None:
    mine = Path(f"/proc/self/task/{os.getpid()}/children")
    before = set(mine.read_text().split())
    starting = asyncio.create_task(Child.spawn("http.server", ["0"], log=tmp_path / "log"))
    await asyncio.sleep(0)  # now it has forked, and waits for its connection
    [pid] = set(mine.read_text().split()) - before
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("late", [False, True], ids=["within Popen", "before communicate"])
def test_a_signal_leaves_no_program(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class InterruptedPopen(subprocess.Popen[bytes]):
        def __init__(self, command: Sequence[str], **options: Any) -> None:
            super().__init__(command, **options)
            started.append(self)
            if not late:
                signal.raise_signal(signal.SIGINT)

        def communicate(self, *arguments: Any, **options: Any) -> tuple[bytes, bytes]:
            if late and self.poll() is None and not interrupted:
                interrupted.append(True)
                signal.raise_signal(signal.SIGINT)
            return super().communicate(*arguments, **options)

    interrupted: list[bool] = []
    monkeypatch.setattr(subprocess, "Popen", InterruptedPopen)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_child(["sleep", "1000"], stdout=subprocess.PIPE)
    [process] = started
    assert process.returncode == -signal.SIGKILL
    assert signal.getsignal(signal.SIGINT) is handler


def test_background_processes_of_a_program_end_with_it() -> None:
    done = run_child(["sh", "-c", "sleep 1000 > /dev/null 2>&1 & echo $!"], stdout=subprocess.PIPE)
    assert done.returncode == 0
    assert gone(int(done.stdout), within=5.0)
