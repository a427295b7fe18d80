"""Being told to stop while a program of somebody else's runs: it ends with us, and the exit code says why."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from commands import CRRL

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
    """A folder that sandboxes of root can enter, with a package, a pipe, and `npm`, which holds the pipe for ever."""
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


def crrl(home: Path, arguments: Sequence[str]) -> subprocess.Popen[str]:
    own = {
        "CRRL_CACHE": str(home / "cache"),
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
        "TMPDIR": str(home / "tmp"),
    }
    return subprocess.Popen(
        [*CRRL, *arguments],
        cwd=home,
        env={**os.environ, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


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
    process = crrl(home, [*command.split(), *arguments[command]])
    with process, (home / "pipe").open("rb") as held:  # which waits until the program runs
        process.send_signal(number)
        process.send_signal(number)  # the second must not tear what the first tidies up
        assert held.read() == b"", "until the last one is gone"
        output, errors = process.communicate()
    assert (process.returncode, output) == (130, ""), errors
    assert "Traceback" not in errors
    assert not (home / "runs").exists() and not list((home / "tmp").iterdir())
