"""Errors with which commands end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from coderepairrl.engines.vllm import server
from coderepairrl.errors import exit_on_error, replace_crrl
from coderepairrl.gateway import remote_answer
from coderepairrl.stages import trace

CRRL = Path(sys.executable).parent / "crrl"


@pytest.mark.parametrize("activated", [False, True])
def test_a_fix_names_crrl_as_this_shell_finds_it(activated: bool, tmp_path: Path) -> None:
    """`make hello` runs `.venv/bin/crrl` without an activated environment."""
    path = f"{CRRL.parent}{os.pathsep}/usr/bin:/bin" if activated else "/usr/bin:/bin"
    run = ["crrl" if activated else CRRL, "check", "agent", "aider"]
    env = {"PATH": path, "HOME": str(tmp_path), "CRRL_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(run, env=env, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert f"  fix: {'crrl' if activated else CRRL} agents install aider" in done.stderr


def test_what_only_looks_like_a_command_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(sys, "argv", [".venv/bin/crrl"])
    assert replace_crrl("crrl train runs/a b --resume") == ".venv/bin/crrl train runs/a b --resume"
    assert (
        replace_crrl("rm -r /home/crrl /tmp/crrl-sandbox; mycrrl x") == "rm -r /home/crrl /tmp/crrl-sandbox; mycrrl x"
    )
    monkeypatch.setattr(sys, "argv", ["/usr/bin/pytest"])
    assert replace_crrl("crrl check") == "crrl check"


@pytest.mark.parametrize("read", [lambda text: json.loads(text), lambda text: tomllib.loads(f"a = {text}")])
def test_a_file_that_is_nested_too_deep_is_no_traceback(
    read: Callable[[str], object], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, exit_on_error():
        read("[" * 100_000)
    assert ended.value.code == 2 and "nested too deep" in capsys.readouterr().err


def test_an_endless_recursion_of_ours_keeps_its_traceback() -> None:
    def again() -> None:
        again()

    with pytest.raises(RecursionError), exit_on_error():
        again()


def test_what_a_policy_or_a_server_nests_too_deep_is_text() -> None:
    """It ended the attempt of `crrl fix`, and `crrl hello`."""
    deep = "[" * 100_000
    assert trace.format_call("shell", deep)
    assert not remote_answer.is_json(deep.encode())
    assert server._read_reason(deep)
