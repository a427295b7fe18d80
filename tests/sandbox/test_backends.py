"""Options of sandboxes: what they show, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coderepairrl import sandbox
from coderepairrl.errors import ConfigError, PrerequisiteError
from coderepairrl.sandbox.bwrap import Bubblewrap
from coderepairrl.types import Task

from .conftest import Make


async def test_bound_folders_are_visible_and_read_only(bwrap: Bubblewrap, task: Task, make: Make) -> None:
    tools = Path("/opt") if Path("/opt").is_dir() else Path("/srv")
    async with bwrap.open(task) as box:
        assert not (await box.exec(["ls", str(tools)])).ok  # control
    async with make("bwrap", binds=[str(tools)], env={"PATH": "/usr/bin", "MINE": "1"}).open(task) as box:
        assert (await box.exec(["ls", str(tools)])).ok
        assert not (await box.exec(["touch", f"{tools}/x"])).ok
        assert (await box.exec(["bash", "-c", "echo $PATH $MINE"])).output == b"/usr/bin 1\n"


@pytest.mark.parametrize(
    "place", ["/tmp/checks", "/var/tmp/checks", "/tmp", "/dev/shm/x", "/workspace", "/opt/../tmp/x"]
)
def test_binds_that_a_sandbox_would_hide_are_refused(place: str) -> None:
    with pytest.raises(ConfigError, match=f"{place}, since it has its own") as caught:
        sandbox.make_backend("bwrap", [place])
    assert "CRRL_CACHE" in caught.value.fix
    with pytest.raises(ConfigError, match="'checks' does not begin with a slash"):
        sandbox.make_backend("bwrap", binds=["/opt", "checks"])


def test_missing_binds_and_commands_are_named(bwrap: Bubblewrap, make: Make) -> None:
    with pytest.raises(PrerequisiteError, match="nowhere") as caught:
        make("bwrap", binds=["/nowhere"]).require()
    assert "sandbox.options.binds" in caught.value.fix
    with pytest.raises(PrerequisiteError, match="no nonsense here"):
        make("bwrap", commands=["nonsense"]).require()


async def test_an_allow_list_leaves_no_other_program(bwrap: Bubblewrap, task: Task, make: Make) -> None:
    """Commands of the thesis' shell, and ways to other programs."""
    allowed = ["ls", "cd", "pwd", "find", "cat", "head", "tail", "grep", "awk", "sed", "sort", "git"]
    others = ("touch x", "python3 -c pass", "env true", "perl -e 1")
    async with bwrap.open(task) as box:
        assert [(await box.exec(["bash", "-c", command])).ok for command in others[:3]] == [True] * 3  # control
    async with make("bwrap", commands=allowed).open(task) as box:
        script = "cd bin && pwd && cd .. && find . -name app.py | head -1 && grep -c return app.py && git status -s"
        done = await box.exec(["bash", "-c", f"{script}; git log --oneline | awk '{{ print NF }}'"])
        assert done.output == b"/workspace/bin\n./app.py\n1\n2\n", done.output
        assert [(await box.exec(["bash", "-c", command])).exit_code for command in others] == [127] * 4
        await box.exec(["bash", "-c", "find . -maxdepth 0 -exec touch x \\;; awk 'BEGIN { system(\"touch x\") }'"])
        assert not (await box.exec(["cat", "x"])).ok
        await box.write("app.py", b"x\n")
        assert b"+x\n" in await box.diff()


@pytest.mark.parametrize(
    ("name", "limits", "words"),
    [
        ("bwrap", {"memry": 1}, "memry"),
        ("bwrap", {"memory": "2G"}, "memory"),
        ("bwrap", {"processes": 0}, "processes"),
        ("unsafe-local", {"tmp_bytes": 8}, "cannot bound tmp_bytes"),
    ],
)
def test_limits_that_cannot_be_are_refused(name: str, limits: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sandbox.make_backend(name, **limits)
