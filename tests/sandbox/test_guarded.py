"""A sandbox class of the user's own: its bugs are faults that name it, wherever they are."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from coderepairrl import sandbox
from coderepairrl.errors import SandboxFault
from coderepairrl.types import Task

MODULE = """
import os
from contextlib import asynccontextmanager
from coderepairrl.protocols import SandboxBackend
from coderepairrl.sandbox.fake import ScriptedBackend, ScriptedSandbox


class Broken(ScriptedSandbox):
    async def exec(self, argv, **options):
        if argv == ["nothing"]:
            return None
        raise ValueError("no idea how")

    async def reach(self, address):
        raise KeyError(address)

    async def write(self, path, data, *, follow=True):
        raise PermissionError(path)


class Box(SandboxBackend):
    name = "mine"

    def __init__(self, fails: str = "") -> None:
        self.fails = fails

    def require(self):
        if self.fails == "require":
            raise RuntimeError("cannot be checked")

    @asynccontextmanager
    async def open(self, task):
        if self.fails == "open":
            raise RuntimeError("cannot be opened")
        yield Broken({"a.py": b"x"})
        if self.fails == "end":
            raise RuntimeError("cannot be ended")
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"mine_{os.getpid()}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    return name


async def test_errors_of_a_users_sandbox_are_faults_that_name_it(mine: str, task: Task) -> None:
    """While it is checked, opened, used and closed."""
    backend = sandbox.make_backend(f"{mine}:Box")
    backend.require()
    async with backend.open(task) as box:
        with pytest.raises(SandboxFault, match=rf"{mine}:Box\.exec raised ValueError: no idea how .*{mine}\.py, line"):
            await box.exec(["ls"])
        with pytest.raises(SandboxFault, match=r"Box\.exec returned None, not ExecResult"):
            await box.exec(["nothing"])
        with pytest.raises(SandboxFault, match=r"Box\.reach raised KeyError"):
            await box.reach("/socket")
        with pytest.raises(PermissionError):  # an agent can cause it
            await box.write("/etc/passwd", b"")
        assert await box.read("a.py") == b"x"
    with pytest.raises(ZeroDivisionError):
        async with backend.open(task):
            raise ZeroDivisionError("of whoever uses it")
    for fails in ("open", "end"):
        with pytest.raises(SandboxFault, match=rf"{mine}:Box\.open raised RuntimeError: cannot be {fails}ed"):
            async with sandbox.make_backend(f"{mine}:Box", fails=fails).open(task):
                pass
    with pytest.raises(SandboxFault, match=r"Box\.require raised RuntimeError"):
        sandbox.make_backend(f"{mine}:Box", fails="require").require()
