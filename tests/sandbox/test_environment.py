"""The virtual environment that a task names: visible, first on `PATH`, read-only."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coderepairrl.errors import TaskError
from coderepairrl.processes.caches import environments_cache
from coderepairrl.sandbox.backend import GuestBackend
from coderepairrl.sandbox.workspace import find_environment
from coderepairrl.types import Task


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the program `greet`, where sandboxes can be shown something."""
    monkeypatch.delenv("CRRL_CACHE", raising=False)
    usual = environments_cache().parent.parent
    usual.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="crrl-test-", dir=usual) as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "bin").mkdir()
        (folder / "bin/python").symlink_to("/usr/bin/python3")
        (folder / "pyvenv.cfg").touch()
        (folder / "bin/greet").write_text("#!/bin/sh\necho hello from $VIRTUAL_ENV\n")
        (folder / "bin/greet").chmod(0o755)
        yield folder


async def test_programs_of_the_environment_come_first_and_are_read_only(
    backend: GuestBackend, task: Task, environment: Path
) -> None:
    async with backend.open(replace(task, environment=f"venv:{environment}")) as box:
        assert (await box.exec(["greet"])).output == f"hello from {environment}\n".encode()
        assert (await box.exec(["sh", "-c", 'echo "$PATH"'])).output.startswith(f"{environment}/bin:".encode())
        if backend.name != "unsafe-local":
            assert not (await box.exec(["touch", str(environment / "mine")])).ok
            assert not (await box.exec(["mv", str(environment), f"{environment}-moved"])).ok
    async with backend.open(replace(task, environment="sha256:a fingerprint")) as box:
        assert not (await box.exec(["greet"])).ok
        if backend.name != "unsafe-local":
            assert not (await box.exec(["cat", str(environment / "bin/greet")])).ok


async def test_a_python_that_is_out_of_sight_is_refused(
    backend: GuestBackend, task: Task, environment: Path, tmp_path: Path
) -> None:
    """Pyenv and uv install it in a home; commands would silently run another one."""
    python = environment / "bin/python"
    python.unlink()
    python.symlink_to(tmp_path / "python3")
    if backend.name != "unsafe-local":
        (tmp_path / "python3").write_bytes(Path("/bin/true").read_bytes())
        (tmp_path / "python3").chmod(0o755)
    with pytest.raises(TaskError, match=f"cannot run {python}, which is {tmp_path}/python3"):
        async with backend.open(replace(task, environment=f"venv:{environment}")):
            pass


def test_a_file_of_tasks_cannot_show_any_folder(task: Task, environment: Path) -> None:
    """Not by a relative path either."""
    (environment / "pyvenv.cfg").unlink()
    for where in ("/", "/usr", str(environment), os.path.relpath(environment)):
        with pytest.raises(TaskError, match="not a virtual environment"):
            find_environment(replace(task, environment=f"venv:{where}"))


def test_one_that_is_not_on_this_machine_is_named(tmp_path: Path, task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRRL_CACHE", str(tmp_path))
    for asked, problem in ((f"venv:{tmp_path}/gone", "is not there"), ("python:{}", "is not built on this machine")):
        with pytest.raises(TaskError, match=f"{task.id}: its environment .*{problem}") as caught:
            find_environment(replace(task, environment=asked))
        assert "tasks prepare" in caught.value.fix
