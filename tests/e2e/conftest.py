"""A whole run on a random miniature: real agent, real sandbox, real HTTP, real engine and learner processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coderepairrl.runs import RunFolder
from commands import CRRL

HERE = Path(__file__).parent

CONFIG = """
[run]
name = "e2e"
steps = 3
checkpoint_every = 2

[tasks]
source = "handmade"

[agent]
name = "nano"
options = {{ system = "compact", tools = "compact", user_template = "{{prompt}}" }}

[model]
path = "{model}"

[reward]
"e2e_rewards:LowBytes" = 1.0

[rollout]
tasks_per_step = 2
group_size = 3
calls = 3
tokens = 3000
turn_tokens = 12
seconds = 30

[train]
lr = 1e-3
max_grad_norm = 1.0
weight_decay = 0.0

[eval]
split = "train"
tasks = 2
before = false
after = false
"""


@dataclass(frozen=True)
class Project:
    """A folder with a config in which `crrl` is run as a user would."""

    path: Path
    config: Path

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.path / "runs" / "e2e")

    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(HERE), "COLUMNS": "200"}

    def command(self, *arguments: str) -> list[str]:
        return [*CRRL, *arguments]

    def crrl(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command(*arguments), cwd=self.path, env=self.environment(), capture_output=True, text=True, timeout=280
        )
        assert not check or done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def summary(self) -> dict[str, Any]:
        """Read the summary that `finished` printed."""
        summary: dict[str, Any] = json.loads((self.path / "stdout").read_text().splitlines()[-1])
        return summary

    def train(self, *overrides: str, source: Path | None = None) -> dict[str, Any]:
        done = self.crrl("train", str(source or self.config), *overrides, "--json")
        summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return summary

    def resume(self, *overrides: str) -> dict[str, Any]:
        """Resume the run by its folder, which verifies its weights."""
        return self.train(*overrides, "--resume", source=self.run.path)

    @contextmanager
    def started(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Start `crrl`, and kill it (SIGKILL) in the end."""
        process = subprocess.Popen(
            self.command(*arguments),
            cwd=self.path,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def records(self) -> list[Mapping[str, Any]]:
        return list(self.run.records()) if self.run.log.exists() else []

    def steps(self) -> list[Mapping[str, Any]]:
        return [record for record in self.records() if record["type"] == "step"]


def new_project(folder: Path, model: Path) -> Project:
    (folder / "e2e.toml").write_text(CONFIG.format(model=model))
    return Project(folder, folder / "e2e.toml")


@pytest.fixture
def project(tmp_path: Path, miniature: Path) -> Project:
    return new_project(tmp_path, miniature)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, miniature: Path) -> Project:
    """One run of three steps, evaluated before and after them on mutants, and greedily. Its tests only read it."""
    folder = tmp_path_factory.mktemp("finished")
    project = new_project(folder, miniature)
    mutants = ("eval.source=mutants", 'eval.options={split="test", n=12}', "eval.split=test", "eval.tasks=0")
    greedy = "eval.also={greedy={temperature=0, tasks=1, attempts=2}}"
    done = project.crrl("train", str(project.config), *mutants, greedy, "eval.before=true", "eval.after=true", "--json")
    (folder / "stdout").write_text(done.stdout)
    (folder / "stderr").write_text(done.stderr)
    return project


async def wait_until(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds; fails if `process` ends before."""
    while not condition():
        assert process.poll() is None, f"it ended before that moment: {process.communicate()}"
        await asyncio.sleep(0.02)


async def freeze_when(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    """Stop `process` (SIGSTOP) while `condition` holds."""
    while True:
        await wait_until(process, condition)
        process.send_signal(signal.SIGSTOP)
        if condition():
            return
        process.send_signal(signal.SIGCONT)


def make_completion(text: str | None, model: str = "m-1", **more: Any) -> dict[str, Any]:
    """A reply in the form of Chat Completions, with 10 prompt and 3 completion tokens."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **more}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}
    return {"id": "c", "model": model, "choices": [choice], "usage": usage}
