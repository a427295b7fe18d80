"""A short crash test, that it detects each difference and orphan, and that started programs end with crrl."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from coderepairrl.checks import crash
from coderepairrl.learn.stitch import TokenAccount
from coderepairrl.runs import Log, RunFolder
from coderepairrl.runs.storage import SUMS
from commands import CRRL


@pytest.mark.timeout(600)
def test_killed_and_resumed_a_run_comes_to_the_same_weights(isolating: None) -> None:
    """Nothing is lost, trained twice or left behind. `make crash` kills more often."""
    done = subprocess.run([*CRRL, "check", "crash", "everything", "kills=1", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row["detail"] for row in json.loads(done.stdout.splitlines()[-1])}
    assert list(rows) == ["untouched", "everything", "orphans end"]
    assert "1 kills,   1 recovered" in rows["everything"], rows
    assert done.stderr.count("kill ") == 1


EACH_ATTEMPT = (*(f"-{attempt:02d}" for attempt in range(crash.ATTEMPTS - 1)), f"-{crash.ATTEMPTS - 1:02d}-retry2")
TWICE = (*EACH_ATTEMPT[:-1], "-00-retry1")
WHOLE = crash.STEPS * crash.TASKS * crash.ATTEMPTS
ONE_LESS = WHOLE - crash.STEPS * crash.TASKS


def write_run(
    folder: Path,
    *,
    weights: str = "a",
    trained: int = 5,
    attempts: tuple[str, ...] = EACH_ATTEMPT,
    sums: str = "",
    oldest: int = 0,
) -> RunFolder:
    """Write the log of a run of `crash.STEPS` steps."""
    run = RunFolder(folder)
    saved = run.checkpoints / "00003"
    saved.mkdir(parents=True)
    (saved / SUMS).write_text(sums)
    with closing(Log(run.log)) as log:
        for step in range(1, crash.STEPS + 1):
            last = step == crash.STEPS
            groups = [f"train-{step:05d}-{position:03d}" for position in range(crash.TASKS)]
            log.append(
                "step",
                step=step,
                checksum=weights if last else "same",
                metrics={"learn/staleness_max": oldest},
                account=asdict(TokenAccount(sampled=trained if last else 5, trained=trained if last else 5)),
                episodes=[group + attempt for group in groups for attempt in attempts],
            )
    return run


OTHERS = {"weights": "b", "trained": 6, "sums": "c  model.safetensors\n"}


@pytest.mark.parametrize(
    ("changes", "staleness", "differences"),
    [
        ({}, 0, []),
        ({"weights": "b"}, 0, ["other weights after step 3"]),
        ({"trained": 6}, 0, ["step 3 trained 6 tokens"]),
        ({"sums": OTHERS["sums"]}, 0, ["other files in the last checkpoint"]),
        ({"attempts": TWICE}, 0, [f"{WHOLE} attempts trained, {ONE_LESS} different ones"]),
        ({"attempts": EACH_ATTEMPT[:-1]}, 0, [f"{ONE_LESS} attempts trained, {ONE_LESS} different ones"]),
        ({**OTHERS, "oldest": 2}, 2, []),  # they depend on timing
        ({"oldest": 3}, 2, [f"step {step} trained tokens of 3 versions before" for step in range(1, crash.STEPS + 1)]),
        ({"attempts": EACH_ATTEMPT[:-1]}, 2, [f"{ONE_LESS} attempts trained, {ONE_LESS} different ones"]),
    ],
    ids=["equal", "weights", "tokens", "files", "twice", "lost", "stale", "too old", "stale and lost"],
)
def test_the_crash_test_reports_each_difference(
    tmp_path: Path, changes: dict[str, Any], staleness: int, differences: list[str]
) -> None:
    untouched = crash.RunResult.read(write_run(tmp_path / "untouched"))
    assert untouched.differences(write_run(tmp_path / "run", **changes), staleness=staleness) == differences


ORPHANED = """
import asyncio, subprocess, sys
from coderepairrl.checks import crash
with crash.adopt_orphans():
    subprocess.run(["bash", "-c", f"(exec -a '{sys.argv[1]}' sleep {sys.argv[2]}) > /dev/null & exit 0"])
    asyncio.run(crash.wait_until_gone(kill := crash.Kill("controller", 0.0)))
    print(kill.gone, kill.half_started)
"""


@pytest.mark.parametrize(("name", "seconds", "half"), [("learner", "0.7", 0), ("bwrap --unshare-user", "9", 1)])
def test_the_crash_test_waits_for_orphans(name: str, seconds: str, half: int) -> None:
    done = subprocess.run([sys.executable, "-c", ORPHANED, name, seconds], capture_output=True, text=True)
    gone, half_started = done.stdout.split()
    assert int(half_started) == half, done.stderr
    assert float(gone) == 0.0 if half else 0.3 < float(gone) < 60


RECIPE = 'argv = ["{install}/npm/run"]\n[install]\nnpm = ["@a/b@1.2.3"]\n'
MUTANTS = """
[run]
name = "stopped"
[tasks]
source = "mutants"
options = {{ path = "{path}", n = 1, command = "{hanging}", sandbox = "unsafe-local" }}
[reward]
patch_lines = 1.0
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """Make a folder that sandboxes can enter, with a package, a pipe, and an `npm` that holds the pipe open."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        home.chmod(0o755)
        for folder in ("package", "bin", "tmp"):
            (home / folder).mkdir()
        (home / "tmp").chmod(0o711)
        (home / "package" / "ranges.py").write_text("def span(values):\n    return max(values) - min(values)\n")
        os.mkfifo(home / "pipe")
        npm = home / "bin" / "npm"
        npm.write_text(f"#!/bin/sh\nexec sleep infinity > {shlex.quote(str(home / 'pipe'))}\n")
        npm.chmod(0o755)
        yield home


@pytest.mark.parametrize(
    ("command", "number"),
    [
        ("agents install", signal.SIGHUP),
        ("train", signal.SIGINT),
        ("train", signal.SIGTERM),
        ("check tasks", signal.SIGINT),
    ],
)
def test_a_program_ends_with_us(home: Path, command: str, number: signal.Signals) -> None:
    hanging = home / "bin" / "npm"
    (home / "recipe.toml").write_text(RECIPE)
    (home / "run.toml").write_text(MUTANTS.format(path=home / "package", hanging=hanging))
    arguments = {
        "agents install": ["recipe.toml"],
        "train": ["run.toml"],
        "check tasks": ["mutants", "path=package", "n=1", f"command={hanging}", "sandbox=unsafe-local"],
    }
    folders = {"CRRL_CACHE": str(home / "cache"), "TMPDIR": str(home / "tmp")}
    environment = {**os.environ, **folders, "PATH": f"{home / 'bin'}:{os.environ['PATH']}"}
    words, pipe = [*CRRL, *command.split(), *arguments[command]], subprocess.PIPE
    process = subprocess.Popen(words, cwd=home, env=environment, stdout=pipe, stderr=pipe, text=True)
    with process, (home / "pipe").open("rb") as held:  # opens once the program runs
        process.send_signal(number)
        process.send_signal(number)  # the second must not interrupt the cleanup
        assert held.read() == b"", "its last writer has ended"
        output, errors = process.communicate()
    assert (process.returncode, output) == (130, ""), errors
    assert "Traceback" not in errors
    assert not (home / "runs").exists() and not list((home / "tmp").iterdir())
