"""`crrl hello` shows an episode while it runs, then the curve, a headline, and commands that work."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from coderepairrl import sandbox
from coderepairrl.runs import open_run
from coderepairrl.stages.hello import format_headline
from commands import CRRL


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CompletedProcess[str]]:
    """A finished run: the folder that it was started in, and what it printed."""
    home = tmp_path_factory.mktemp("hello")
    small = ("run.steps=2", "eval.tasks=6", "rollout.tasks_per_step=2", "rollout.group_size=4")
    return home, subprocess.run([*CRRL, "hello", *small], cwd=home, capture_output=True, text=True)


def test_hello(done: tuple[Path, CompletedProcess[str]]) -> None:
    """Where it is no terminal: plain text, in the strongest sandbox, and what is printed last can be typed."""
    home, printed = done
    assert printed.returncode == 0, printed.stderr
    assert "\x1b" not in printed.stderr + printed.stdout
    lines = printed.stderr.splitlines()
    chosen = sandbox.choose_backend()
    records = list(open_run(home / "runs/hello").records())
    assert lines.count(str(chosen)) == 1
    assert [record["sandbox"] for record in records if record["type"] == "start"] == [chosen.name]
    assert {record["metrics"]["void"] for record in records if record["type"] == "step"} == {0}
    [began] = [number for number, line in enumerate(lines) if line.startswith("an episode, before any training")]
    shown = "\n".join(lines[began : began + 20])
    assert all(re.search(rf"^ +{name}\b", shown, re.MULTILINE) for name in ("issue", "shell", "diff", "reward")), shown
    assert began < next(number for number, line in enumerate(lines) if line.startswith("step "))

    assert re.search(r"^step 1 +0\.\d{3}  #*\nstep 2 +0\.\d{3}", printed.stdout, re.MULTILINE)
    *_, head, following, first, second = printed.stdout.splitlines()
    assert re.fullmatch(r"held-out bugs repaired .* -> .*, [+-]\d+ points \[95 % interval .* to .*\]", head)
    assert following == "next:"
    for line in (first, second):
        command = shlex.split(line.strip().split("   ")[0].split("  ")[0])
        ran = subprocess.run([*CRRL, *command[1:]], cwd=home, capture_output=True, text=True)
        assert ran.returncode == 0, (line, ran.stderr)


def test_one_function_alone_has_no_interval() -> None:
    change = {"before": 0.0, "after": 1.0, "delta": 1.0, "ci95": [None, None]}
    assert format_headline({"tests_passing": change}).endswith("+100 points [95 % interval unknown to unknown]")
