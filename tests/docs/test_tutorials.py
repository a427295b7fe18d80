"""The tutorials work as they are printed: their files are written and their commands run, in order, in one folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

START = Path(__file__).parents[2] / "docs" / "start"
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```", re.MULTILINE | re.DOTALL)
pytestmark = pytest.mark.timeout(900)


def play(page: str, folder: Path) -> str:
    """Write the files of a page and run its commands; what they print."""
    printed = []
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for language, title, body in BLOCK.findall((START / page).read_text()):
        if title:
            file = folder / title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(body)
        elif language == "sh":
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", body],
                cwd=folder,
                env={**os.environ, "PATH": path},
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, f"{body}\n{done.stdout}\n{done.stderr}"
            printed.append(done.stdout)
    return "\n".join(printed)


@pytest.mark.usefixtures("isolating")
def test_hello(tmp_path: Path) -> None:
    play("hello.md", tmp_path)
    assert "train-00001-000-04" in (tmp_path / "episode.html").read_text()
    assert (tmp_path / "runs" / "short" / "report" / "index.html").is_file()


@pytest.mark.usefixtures("isolating")
def test_repository_then_agent_and_reward(tmp_path: Path) -> None:
    printed = play("repository.md", tmp_path)
    assert "+    return price - price * rate // 100" in (tmp_path / "fix.patch").read_text()
    assert " 0 failed" in printed
    printed = play("agent-and-reward.md", tmp_path)
    assert "+    return price - price * rate // 100" in printed
    assert "as expected" in printed
    assert "small" in (tmp_path / "runs" / "own" / "metrics.jsonl").read_text()
