"""A forked `crrl` (`warm`) is the one that is started."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import warm
from e2e.conftest import Project, until


@pytest.mark.parametrize("words", ["--version", "trian", "train e2e.toml run.steps=-1", "report runs/none"])
def test_it_says_the_same(project: Project, words: str) -> None:
    forked, started = (replace(project, forked=way).crrl(*words.split(), check=False) for way in (True, False))
    assert (forked.returncode, forked.stdout, forked.stderr) == (started.returncode, started.stdout, started.stderr)


def test_what_cannot_begin_ends_alone(project: Project, tmp_path: Path) -> None:
    """In its own process, and says why; the next is forked from the same."""
    command = [*warm.CRRL, "--version"]
    failed = warm.run(command, capture_output=True, text=True, cwd=tmp_path / "missing")
    assert failed.returncode == 1 and "FileNotFoundError" in failed.stderr
    with warm.Popen(command, stdout=subprocess.PIPE) as abandoned:
        abandoned._status.close()  # as when its test is interrupted
        abandoned.returncode = 0
    assert warm.run(command, capture_output=True).returncode == 0


async def test_its_processes_have_names_a_folder_and_an_end(project: Project) -> None:
    """Killed, it takes engine and learner along, whose parent it is."""
    with replace(project, forked=True).started("train", str(project.config)) as process:
        run = psutil.Process(process.pid)

        def words() -> set[str]:
            shown: set[str] = set()
            for child in run.children():
                with contextlib.suppress(psutil.Error):  # a passing one has ended
                    shown.update(child.cmdline())
            return shown

        await until(process, lambda: words() >= {"coderepairrl.engines.tiny.server", "coderepairrl.learn.learner"})
        assert [word for word in run.cmdline() if word] == project.command("train", str(project.config))
        assert run.cwd() == str(project.path.resolve())
        family = run.children(recursive=True)
        process.kill()
    assert process.returncode == -9
    await asyncio.to_thread(psutil.wait_procs, family)
