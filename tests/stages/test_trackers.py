"""A tracker has a process of its own: whatever becomes of it, the run goes on."""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coderepairrl.config import Config, to_toml
from coderepairrl.report import trackers
from coderepairrl.runs import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    config = Config.model_validate({"run": {"name": "run"}})
    folder.create(to_toml(config), {"name": "run", "config": config.model_dump(mode="json")})
    return folder


def package(folder: Path, name: str, code: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(code)


async def test_a_tracker_that_breaks_is_reported_once(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path / "broken", "wandb", "raise OSError('api.wandb.ai cannot be reached')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    said: list[str] = []
    async with trackers.following(folder, ["wandb"], said.append):
        while not said:  # while the run goes on
            await asyncio.sleep(0.02)
    assert said == [
        "wandb is sent nothing more: OSError: api.wandb.ai cannot be reached; the run folder has all metrics:"
        f" crrl export {folder.path} --to wandb"
    ]


async def test_a_tracker_that_hangs_holds_nothing_up(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "_PATIENCE", 0.01)
    package(tmp_path / "hangs", "trackio", "import time; time.sleep(1000)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "hangs"))
    said: list[str] = []
    async with trackers.following(folder, ["trackio"], said.append):
        pass
    assert said == [f"trackio has not got all metrics yet: crrl export {folder.path} --to trackio"]


def test_what_a_killed_run_has_logged_is_still_sent(folder: RunFolder) -> None:
    """By kill -9: the tracker's process takes what is left, and ends."""
    if importlib.util.find_spec("tensorboard") is None and not os.environ.get("CI"):
        pytest.skip("needs tensorboard (the extra dev)")
    code = (
        "import asyncio, os, signal, sys; from pathlib import Path; from coderepairrl.runs import RunFolder\n"
        "from coderepairrl.report.trackers import following\n"
        "async def main(folder):\n"
        "    log, sent = folder.writer(), folder.path / 'tensorboard' / 'sent'\n"
        "    async with following(folder, ['tensorboard'], print):\n"
        "        log.append('step', step=1, metrics={'reward': 0.5})\n"
        "        while not (sent.exists() and sent.read_text()): await asyncio.sleep(0.02)\n"
        "        log.append('step', step=2, metrics={'reward': 0.7})\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main(RunFolder(Path(sys.argv[1]))))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder.path)], check=False)
    assert done.returncode == -signal.SIGKILL
    with (folder.path / "tensorboard" / "sent").open() as sent:
        fcntl.flock(sent, fcntl.LOCK_SH)  # which it holds until it ends
        assert int(sent.read()) == folder.log.stat().st_size
