"""Folders on their way to the engine go with their owner, however it ends; nobody else's do."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coderepairrl.errors import UsageError
from coderepairrl.processes.scratch import create_owned_folder, remove_abandoned, scratch
from coderepairrl.sandbox.backend import StateFolder
from coderepairrl.sandbox.backend import _remove_abandoned_states as sweep_states
from sweeping import wait_for_sweep

OWNER = """
import sys
from pathlib import Path
from coderepairrl.processes.scratch import create_owned_folder
with create_owned_folder(Path(sys.argv[1])):
    Path(sys.argv[1], "weights").write_bytes(bytes(1000))
    print("there", flush=True)
    sys.stdin.read()
"""


def owner_of(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    return process


def test_what_a_killed_owner_left_is_cleared_away_and_nothing_else(tmp_path: Path) -> None:
    dead, alive, unknown = (tmp_path / f"crrl-{name}" for name in ("dead", "alive", "unknown"))
    killed, living = owner_of(dead), owner_of(alive)
    unknown.mkdir()  # of a version that left no word of its owner
    (tmp_path / "crrl-file").touch()
    (tmp_path / "other").mkdir()
    remove_abandoned(tmp_path)
    assert (dead / "weights").exists() and (alive / "weights").exists()
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert (dead / "weights").exists(), "nobody was there to clear it away"
    remove_abandoned(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["crrl-alive", "crrl-file", "crrl-unknown", "other"]
    assert (alive / "weights").exists()
    living.communicate()
    assert living.returncode == 0 and not alive.exists()


def test_a_folder_is_ours_until_we_leave_it(tmp_path: Path) -> None:
    folder = tmp_path / "crrl-ours"
    with create_owned_folder(folder):
        remove_abandoned(tmp_path)
        assert folder.is_dir() and folder.stat().st_mode & 0o777 == 0o700
        with pytest.raises(UsageError, match="File exists"), create_owned_folder(folder):
            pass
    assert not folder.exists()


def killed_before(calls: int, base: Path) -> None:
    """Make and remove folders of both kinds, as a process that is killed before it has done so many `calls`."""
    left = calls

    def killed(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event.split(".")[0] in ("open", "os", "shutil", "fcntl", "subprocess"):
            left -= 1
            if left == -1:
                os.kill(os.getpid(), signal.SIGKILL)

    tempfile.tempdir = str(base)
    sys.addaudithook(killed)
    with scratch("git") as folder:
        (folder / "file").touch()
        (folder / "folder").mkdir()
        (folder / "folder" / "file").touch()
    state = StateFolder()
    (state.path / "file").touch()
    state.remove()


def test_nothing_is_left_of_who_is_killed_before_any_of_its_calls(tmp_path: Path) -> None:
    """Also in the middle of making or removing its folders, or those of another one."""
    something = 0
    for calls in range(1000):
        process = multiprocessing.get_context("fork").Process(target=killed_before, args=(calls, tmp_path))
        process.start()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        something += any(tmp_path.iterdir())
        for _ in range(100):  # a program that it had just begun to start still holds its locks
            remove_abandoned(tmp_path)
            sweep_states(tmp_path)
            if not any(tmp_path.iterdir()):
                break
            time.sleep(0.05)
        assert [str(path) for path in tmp_path.rglob("*")] == [], calls
    assert calls > something > 10


def test_temporary_folders_of_killed_processes_are_cleared_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for begin in (lambda: scratch("git"), lambda: closing_state(StateFolder())):
        killed = owner_of(tmp_path / "crrl-git-dead")
        killed.kill()
        killed.communicate()
        with begin() as folder:
            wait_for_sweep()
            assert [path.name for path in tmp_path.iterdir()] == [folder.name]
        assert not list(tmp_path.iterdir())


@contextmanager
def closing_state(state: StateFolder) -> Iterator[Path]:
    yield state.path
    state.remove()
