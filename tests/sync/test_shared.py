"""Folders are removed with their owner, however it ends, and no others."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coderepairrl.errors import UsageError
from coderepairrl.processes.scratch import create_owned_folder, remove_abandoned, scratch
from coderepairrl.sandbox.backend import StateFolder
from coderepairrl.sandbox.backend import _remove_abandoned_states as sweep_states
from sweeping import wait_for_sweep

FORK = multiprocessing.get_context("fork")


def run_in_fork(function: Callable[..., None], *arguments: object) -> int | None:
    """Run `function` in a forked process; return its exit code."""
    process = FORK.Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def die_with_folder(folder: Path) -> None:
    with create_owned_folder(folder):
        (folder / "weights").write_bytes(bytes(1000))
        os.kill(os.getpid(), signal.SIGKILL)


def leave_folder_of_killed_owner(folder: Path) -> None:
    assert run_in_fork(die_with_folder, folder) == -signal.SIGKILL
    assert (folder / "weights").exists()


def test_only_folders_of_killed_owners_are_removed(tmp_path: Path) -> None:
    dead, alive, unknown = (tmp_path / f"crrl-{name}" for name in ("dead", "alive", "unknown"))
    leave_folder_of_killed_owner(dead)
    unknown.mkdir()  # made by a version that recorded no owner
    (tmp_path / "crrl-file").touch()
    (tmp_path / "other").mkdir()
    with create_owned_folder(alive):
        remove_abandoned(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["crrl-alive", "crrl-file", "crrl-unknown", "other"]
        assert alive.stat().st_mode & 0o777 == 0o700
        with pytest.raises(UsageError, match="File exists"), create_owned_folder(alive):
            pass
    assert not alive.exists()


def killed_before(calls: int, base: Path) -> None:
    """Make and remove folders of both kinds, but die by SIGKILL after `calls` system calls."""
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


def test_a_process_that_is_killed_at_any_call_leaves_nothing_after_a_sweep(tmp_path: Path) -> None:
    """Even while it makes or removes folders."""
    times_left_behind = 0
    for calls in range(1000):
        exit_code = run_in_fork(killed_before, calls, tmp_path)
        if exit_code == 0:
            break
        assert exit_code == -signal.SIGKILL
        times_left_behind += any(tmp_path.iterdir())
        for _ in range(100):  # a program that it had just begun to start still holds its locks
            remove_abandoned(tmp_path)
            sweep_states(tmp_path)
            if not any(tmp_path.iterdir()):
                break
            time.sleep(0.05)
        assert [str(path) for path in tmp_path.rglob("*")] == [], calls
    assert calls > times_left_behind > 10


def test_temporary_folders_of_killed_processes_are_cleared_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for begin in (lambda: scratch("git"), lambda: closing_state(StateFolder())):
        leave_folder_of_killed_owner(tmp_path / "crrl-git-dead")
        with begin() as folder:
            wait_for_sweep()
            assert [path.name for path in tmp_path.iterdir()] == [folder.name]
        assert not list(tmp_path.iterdir())


@contextmanager
def closing_state(state: StateFolder) -> Iterator[Path]:
    yield state.path
    state.remove()
