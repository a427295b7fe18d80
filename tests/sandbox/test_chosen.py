"""Which sandbox is chosen where bubblewrap is missing or may not make namespaces, and what is printed."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from coderepairrl import sandbox
from coderepairrl.checks import machine
from coderepairrl.errors import ExitCode, PrerequisiteError
from coderepairrl.registry import Finding
from coderepairrl.runs import open_run
from coderepairrl.sandbox.bwrap import Bubblewrap
from coderepairrl.sandbox.interpreter import install_command
from coderepairrl.sandbox.sandlock import Sandlock
from commands import CRRL

ONE_STEP = (
    "run.steps=1",
    "rollout.tasks_per_step=2",
    "rollout.group_size=4",
    "eval.options={split='test',n=6,quoted=1}",
)
BLOCKED = "bwrap: setting up uid map: Permission denied"
LISTENER = """
about = "stands for a program that serves its own tools"
argv = ["true"]
not_in = { sandlock = "it starts a server" }
"""


@pytest.fixture(scope="session")
def path_without_bwrap() -> Iterator[str]:
    """A folder of all usual programs except ``bwrap``, which root's sandboxes can run, too."""
    with tempfile.TemporaryDirectory(prefix="crrl-test-") as folder:
        tools = Path(folder)
        tools.chmod(0o755)
        for usual in ("/usr/bin", "/bin", "/usr/sbin"):
            for program in Path(usual).iterdir():
                if program.name != "bwrap" and not os.path.lexists(tools / program.name):
                    (tools / program.name).symlink_to(program)
        yield folder


def crrl(folder: Path, path: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in `folder` on a machine with the programs of `path`."""
    env = {**os.environ, "PATH": path, "COLUMNS": "200", **env}
    return subprocess.run([*CRRL, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=280)


def test_bubblewrap_is_chosen_where_it_works(bwrap: Bubblewrap) -> None:
    """`tests/stages/hello/test_shown.py` has a whole run in it."""
    assert sandbox.choose_backend() == sandbox.BackendChoice("bwrap", "the strongest that works here")


def test_hello_without_bubblewrap_runs_in_sandlock(sandlock: Sandlock, tmp_path: Path, path_without_bwrap: str) -> None:
    """Training and evaluation of one step are all in it."""
    done = crrl(tmp_path, path_without_bwrap, "hello", *ONE_STEP, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["episodes"] == 2 * 4 + 2 * 6
    records = list(open_run(tmp_path / told["run"]).records())
    assert [record["sandbox"] for record in records if record["type"] == "start"] == ["sandlock"]
    [step] = [record for record in records if record["type"] == "step"]
    assert step["version"] == 1 and step["metrics"]["void"] == 0
    # tools and tests ran: a policy that was warm-started repairs some of these, and none by chance
    assert told["tool_success"]["before"] > 0.5 and told["tests_passing"]["before"] > 0
    [line] = [line for line in done.stderr.splitlines() if line.startswith("sandbox ")]
    assert line.startswith("sandbox sandlock: bubblewrap is not installed; inside, nothing can listen")
    assert line.endswith(install_command("bubblewrap"))


def test_hello_without_any_sandbox_names_the_command_to_install_one(tmp_path: Path, path_without_bwrap: str) -> None:
    """Here sandlock's library is of another machine."""
    (tmp_path / "other" / "sandlock").mkdir(parents=True)
    (tmp_path / "other" / "sandlock" / "__init__.py").write_text("raise ImportError('wrong ELF class')\n")
    done = crrl(tmp_path, path_without_bwrap, "hello", *ONE_STEP, PYTHONPATH=str(tmp_path / "other"))
    assert done.returncode == ExitCode.PREREQUISITE == 3, done.stderr
    assert "bwrap: bubblewrap is not installed; sandlock: sandlock cannot be loaded: wrong ELF class" in done.stderr
    assert done.stderr.endswith(f"  fix: {install_command('bubblewrap')}\n")
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def path_with_blocked_bwrap(path_without_bwrap: str) -> Iterator[str]:
    """Programs of a Docker container, where user namespaces are not allowed."""
    with tempfile.TemporaryDirectory(prefix="crrl-test-") as folder:
        Path(folder).chmod(0o755)
        program = Path(folder, "bwrap")
        program.write_text(f"#!/bin/sh\necho '{BLOCKED}' >&2; exit 1\n")
        program.chmod(0o755)
        yield f"{folder}:{path_without_bwrap}"


def test_a_bubblewrap_that_may_not_make_namespaces_gives_way_to_sandlock(
    sandlock: Sandlock, monkeypatch: pytest.MonkeyPatch, path_with_blocked_bwrap: str
) -> None:
    monkeypatch.setenv("PATH", path_with_blocked_bwrap)
    choice = sandbox.choose_backend()
    assert choice.name == "sandlock" and f"bubblewrap does not work here: {BLOCKED}" in str(choice)
    assert "sysctl" in choice.fix
    with pytest.raises(PrerequisiteError, match="uid map"):
        sandbox.make_backend(sandbox.choose_backend("bwrap").name).require()  # who names one gets that or nothing


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        (["agent=listener.toml"], 3, ["'listener' does not work in the sandbox sandlock: it starts a server"]),
        (["sandbox.options.tmp_bytes=1048576"], 2, ["sandlock cannot bound tmp_bytes", "bubblewrap is not installed"]),
    ],
    ids=["agent", "option"],
)
def test_what_sandlock_cannot_run_is_refused_before_the_run_folder(
    sandlock: Sandlock, tmp_path: Path, path_without_bwrap: str, given: Sequence[str], code: int, words: Sequence[str]
) -> None:
    (tmp_path / "listener.toml").write_text(LISTENER)
    done = crrl(tmp_path, path_without_bwrap, "train", "hello", *given)
    assert done.returncode == code, done.stderr
    for text in (*words, install_command("bubblewrap")):
        assert text in done.stderr
    assert not (tmp_path / "runs").exists()


def test_check_does_not_take_a_container_for_a_sandbox_that_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("bwrap", "sandlock", "docker")
    here = [Finding(name, name == "docker", "", f"install {name}") for name in names]
    monkeypatch.setattr(sandbox, "_check_isolating", lambda: iter(here[:2]))
    for offered, expected in ((here, (True, "only when named: sandbox=docker")), (here[:2], (False, "none"))):
        monkeypatch.setattr(sandbox, "check_backends", lambda offered=offered: offered)
        [entry] = [entry for entry in machine.examine_machine() if entry.name == "a sandbox that isolates"]
        assert (entry.ok, entry.detail) == expected
    assert entry.fix == "install bwrap; or: install sandlock"
