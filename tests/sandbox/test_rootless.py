"""Podman without root, as on a shared cluster: the exam and the attacks run as an account that the test creates."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import coderepairrl
from coderepairrl.checks import redteam
from coderepairrl.checks import sandbox as exam

from .conftest import FAMILIES, LIMITS, find_shared_python
from .images import import_image

Run = Callable[[str], Any]
PREAMBLE = """
import asyncio, json, os
from coderepairrl.checks import redteam
from coderepairrl.checks import sandbox as exam
from coderepairrl.sandbox.container import Podman
assert os.getuid() != 0
def make(**limits): return Podman(image="localhost/crrl-test:1", flags=FLAGS, **limits)
def say(value): print(json.dumps(value))
"""


@pytest.fixture(scope="session")
def rootless(root: Path) -> Iterator[Run]:
    """Runs a program as an account with ids for containers; returns the JSON that it prints."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("podman", "newuidmap", "useradd", "setpriv"))):
        pytest.skip("needs root and Podman with newuidmap (sudo apt-get install podman uidmap)")
    name = f"crrl-test-{os.getpid()}"
    subprocess.run(["useradd", "--create-home", name], check=True, capture_output=True)
    home = Path(f"~{name}").expanduser()
    ids = ["setpriv", f"--reuid={name}", f"--regid={name}", "--init-groups", "--"]
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(home), "XDG_RUNTIME_DIR": str(home / "run")}
    runtime = ["--runtime=runc"] if shutil.which("runc") else []
    flags = ["--cgroup-manager=cgroupfs", "--storage-driver=overlay", *runtime]

    def as_user(argv: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*ids, *argv], env=env | {"PYTHONPATH": str(home)}, cwd=home, **options)

    def run(program: str) -> Any:
        argv = [*find_shared_python(ids), "-c", PREAMBLE.replace("FLAGS", repr(flags)) + program]
        done = as_user(argv, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    try:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(coderepairrl.__file__).parent, home / "coderepairrl", ignore=ignored)
        (home / "run").mkdir()
        for path in home.rglob("*"):
            shutil.chown(path, name, name)
        import_image([*ids, "env", *(f"{key}={value}" for key, value in env.items()), "podman", *flags], root)
        yield run
    finally:
        as_user(["podman", *flags, "system", "migrate"])  # ends the process that holds its user namespace
        subprocess.run(["pkill", "-KILL", "-u", name])  # left by a test that was interrupted
        subprocess.run(["userdel", "--force", "--remove", name], check=True, capture_output=True)


def test_the_exam(rootless: Run) -> None:
    checks = rootless(f"say(asyncio.run(exam.examine_sandbox(make(**{LIMITS}))))")
    assert [check for check in checks if not check[1]] == []
    assert len(checks) == len(exam.QUESTIONS)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_attack_succeeds(rootless: Run, family: str) -> None:
    """With the controls that do not need root."""
    program = f"say([r._asdict() for r in asyncio.run(redteam.run_attacks(make(**redteam.TIGHT), [{family!r}]))])"
    outcomes = [redteam.AttackResult(**outcome) for outcome in rootless(program)]
    assert [outcome for outcome in outcomes if outcome.succeeded or outcome.control is False] == []
    assert any(outcome.control for outcome in outcomes)
