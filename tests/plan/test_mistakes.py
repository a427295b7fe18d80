"""Every command reports all mistakes of a configuration in one message, before anything is opened."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from coderepairrl.errors import ExitCode, Several
from coderepairrl.stages import evaluation

CONFIG = """
run.name = "wrong"
model.path = "nowhere"
agent = "nanoo"
sandbox = "bwrapp"
engine = "tyni"
tasks = { source = "jsonl", options = { path = "absent.jsonl" } }
reward = "patch_line"
"""
OF_ALL = ["nowhere", "tyni"]
OF_AGENTS = [*OF_ALL, "nanoo", "bwrapp"]
OF_TASKS = [*OF_AGENTS, "absent.jsonl", "patch_line"]


@pytest.fixture
def wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "wrong.toml"
    path.write_text(CONFIG)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/mine.txt").touch()
    (tmp_path / "empty.md").touch()
    return path


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["train", "wrong.toml"], OF_TASKS),
        (["train", "wrong.toml", "--dry-run"], OF_TASKS),
        (["fix", ".", "--issue", "empty.md", "--policy", "wrong.toml"], [*OF_AGENTS, "repository", "empty.md"]),
        (["fix", "absent", "--issue", "empty.md", "--policy", "runs/x", "agent=nanoo"], ["absent", "runs", "nanoo"]),
        (["serve", "wrong.toml", "--log", "taken"], [*OF_ALL, "taken"]),
        (["serve", "nowhere", "engine=tyni", "train.lr=1"], [*OF_ALL, "train.lr"]),
        (
            ["fix", ".", "--issue", "empty.md", "--policy", "http://me:key@127.0.0.1:9/v1", "engine.options.attempt=0"],
            ["secret", "'attempt'", "repository"],
        ),
    ],
    ids=lambda each: " ".join(each[:3]) if each[0].isalpha() else "",
)
def test_a_command_reports_all_mistakes_at_once(wrong: Path, arguments: list[str], named: list[str]) -> None:
    before = sorted(wrong.parent.rglob("*"))
    done = subprocess.run([sys.executable, "-m", "coderepairrl.cli", *arguments], capture_output=True, text=True)
    assert done.returncode == ExitCode.USAGE and "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert [sum(name in line for line in errors) >= 1 for name in named] == [True] * len(named), done.stderr
    assert len(errors) >= len(named) >= 3
    assert sorted(wrong.parent.rglob("*")) == before, "nothing was opened"


def test_so_does_an_evaluation(wrong: Path) -> None:
    with pytest.raises(Several) as refused:
        evaluation.plan_evaluation("wrong.toml")
    assert [sum(name in str(each) for each in refused.value.problems) for name in OF_TASKS] == [1] * len(OF_TASKS)
