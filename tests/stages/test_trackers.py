"""A tracker has a process of its own: whatever becomes of it, the run goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from coderepairrl.config import Config, to_toml
from coderepairrl.runs import RunFolder
from coderepairrl.stages import trackers


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


async def test_without_trackers_nothing_is_started(folder: RunFolder) -> None:
    async with trackers.following(folder, (), print):
        assert not list(folder.logs.iterdir())
