"""What bubblewrap shows by its options, and what it refuses to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coderepairrl import sandbox
from coderepairrl.errors import ConfigError, PrerequisiteError
from coderepairrl.sandbox.bwrap import Bubblewrap
from coderepairrl.types import Task

TASK = Task("t", "", "python", "dir:/nowhere", b"")


async def test_what_is_bound_is_seen_and_read_only(bwrap: Bubblewrap, task: Task, tmp_path: Path) -> None:
    tools = Path("/opt") if Path("/opt").is_dir() else Path("/srv")
    async with bwrap.open(task) as box:
        assert not (await box.exec(["ls", str(tools)])).ok  # control
    backend = Bubblewrap(binds=[str(tools)], env={"PATH": "/usr/bin", "MINE": "1"})
    async with backend.open(task) as box:
        assert (await box.exec(["ls", str(tools)])).ok
        assert not (await box.exec(["touch", f"{tools}/x"])).ok
        assert (await box.exec(["bash", "-c", "echo $PATH $MINE"])).output == b"/usr/bin 1\n"
    backend.close()


@pytest.mark.parametrize(
    "place", ["/tmp/checks", "/var/tmp/checks", "/tmp", "/dev/shm/x", "/workspace", "/opt/../tmp/x"]
)
def test_what_a_sandbox_would_hide_is_refused(place: str) -> None:
    with pytest.raises(ConfigError, match=f"{place}, for it has a") as caught:
        sandbox.make_backend("bwrap", [place])
    assert "CRRL_CACHE" in caught.value.fix
    with pytest.raises(ConfigError, match="'checks' does not begin with a slash"):
        sandbox.make_backend("bwrap", binds=["/opt", "checks"])


def test_what_cannot_be_bound_is_named(bwrap: Bubblewrap) -> None:
    backend = Bubblewrap(binds=["/nowhere"])
    with pytest.raises(PrerequisiteError, match="nowhere") as caught:
        backend.require()
    assert "sandbox.options.binds" in caught.value.fix
    backend.close()


async def test_an_allow_list_leaves_no_other_program(bwrap: Bubblewrap, task: Task) -> None:
    """The commands of the original's shell, and ways to what is not among them."""
    allowed = ["ls", "cd", "pwd", "find", "cat", "head", "tail", "grep", "awk", "sed", "sort", "git"]
    others = ("touch x", "python3 -c pass", "env true", "perl -e 1")
    async with bwrap.open(task) as box:
        assert [(await box.exec(["bash", "-c", command])).ok for command in others[:3]] == [True] * 3  # control
    backend = Bubblewrap(commands=allowed)
    async with backend.open(task) as box:
        script = "cd bin && pwd && cd .. && find . -name app.py | head -1 && grep -c return app.py && git status -s"
        done = await box.exec(["bash", "-c", f"{script}; git log --oneline | awk '{{ print NF }}'"])
        assert done.output == b"/workspace/bin\n./app.py\n1\n2\n", done.output
        assert [(await box.exec(["bash", "-c", command])).exit_code for command in others] == [127] * 4
        await box.exec(["bash", "-c", "find . -maxdepth 0 -exec touch x \\;; awk 'BEGIN { system(\"touch x\") }'"])
        assert not (await box.exec(["cat", "x"])).ok
        await box.write("app.py", b"x\n")
        assert b"+x\n" in await box.diff()
    backend.close()
    with pytest.raises(PrerequisiteError, match="no nonsense here"):
        Bubblewrap(commands=["nonsense"]).require()


@pytest.mark.parametrize("options", [{"memry": 1}, {"memory": "2G"}, {"processes": 0}])
def test_limits_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        sandbox.make_backend("bwrap", **options)


@pytest.mark.parametrize("limit", ["processes", "tmp_bytes"])
def test_unsafe_local_refuses_limits_it_could_not_keep(limit: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot bound {limit}"):
        sandbox.make_backend("unsafe-local", **{limit: 8})
