"""A user's repository with a bug, and `crrl fix` on it as the user would call it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from commands import CRRL

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Home:
    """A folder with a repository `repo` and an issue."""

    path: Path
    tmp: Path

    @property
    def repo(self) -> Path:
        return self.path / "repo"

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(HERE), "COLUMNS": "100", "TMPDIR": str(self.tmp)}

    def git(self, *arguments: str) -> str:
        who = ["-c", "user.name=me", "-c", "user.email=me@here"]
        return subprocess.run(
            ["git", "-C", str(self.repo), *who, *arguments], check=True, capture_output=True, text=True
        ).stdout

    def command(self, model: str | Path, *more: str, repo: Path | None = None) -> list[str]:
        fixed = ["fix", str(repo or self.repo), "--issue", str(self.path / "issue.md"), "--policy", str(model)]
        return [*CRRL, *fixed, *more]

    def fix(
        self, model: str | Path, *more: str, code: int = 0, repo: Path | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        command = self.command(model, *more, repo=repo)
        done = subprocess.run(command, cwd=self.path, env=self.environment, capture_output=True, timeout=120)
        assert done.returncode == code, f"exit {done.returncode}\n{done.stdout!r}\n{done.stderr.decode()}"
        return done

    @property
    def state(self) -> tuple[str, str, str]:
        """Commit, changes and stash, which must not change."""
        return self.git("rev-parse", "HEAD"), self.git("status", "--porcelain", "--ignored"), self.git("stash", "list")


@pytest.fixture
def home(tmp_path: Path, isolating: None) -> Iterator[Home]:
    tmp = Path(tempfile.mkdtemp())  # pytest's own folder is closed to the user that root's sandboxes run as
    tmp.chmod(0o711)
    home = Home(tmp_path, tmp)
    home.repo.mkdir()
    (home.repo / "add.py").write_bytes(b"def add(a, b):\r\n    return a - b\r\n")
    (home.repo / "old.txt").write_text("away with it\n")
    (home.repo / "run.sh").write_text("echo run\n")
    home.git("init", "-q")
    home.git("config", "core.autocrlf", "false")
    home.git("add", "-A")
    home.git("commit", "-q", "-m", "start")
    (tmp_path / "issue.md").write_text("add() subtracts.\n")
    yield home
    shutil.rmtree(tmp)


def make_call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def set_replies(*texts: str) -> list[str]:
    """Overrides for an engine that replies with `texts`."""
    return ["engine=fix_engines:Says", f"engine.options.texts={json.dumps(texts)}"]


PATCH = make_call("apply_patch", file_path="add.py", old_content="a - b", new_content="a + b")
SHORT = ["agent.options.system=compact", "agent.options.tools=compact"]
