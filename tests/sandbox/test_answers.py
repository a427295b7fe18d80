"""No sandbox shows this package's answers, wherever it is installed."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from coderepairrl.errors import PrerequisiteError
from coderepairrl.processes import caches
from coderepairrl.processes.caches import agents_cache, git_cache, user_cache
from coderepairrl.sandbox import contents, make_backend
from coderepairrl.sandbox.backend import GuestBackend
from coderepairrl.types import Task

PACKAGE = contents._PACKAGE


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Site-packages that hold a copy of this package beside another one, as pip makes them."""
    with tempfile.TemporaryDirectory(prefix="crrl-site-", dir="/opt") as name:
        site = Path(name, "lib/site-packages")
        shutil.copytree(PACKAGE / "tasks", site / "coderepairrl/tasks")
        (site / "other").mkdir()
        (site / "other/module.py").write_text("x = 1\n")
        Path(name).chmod(0o755)
        monkeypatch.setattr(contents, "_PACKAGE", site / "coderepairrl")
        monkeypatch.delenv("CRRL_CACHE", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", f"{name}/cache")
        tool = Path(name, "cache/coderepairrl/agents/tool")
        tool.mkdir(parents=True)
        (tool / "run").write_text("tool\n")
        (tool.parent.parent / "mutants").mkdir()
        (tool.parent.parent / "mutants/original.py").write_text("answer\n")
        yield site


def opened(name: str, binds: list[Path], task: Task, script: str) -> bytes:
    async def run() -> bytes:
        async with backend.open(task) as box:
            return (await box.exec(["bash", "-c", script])).output

    with closing(make_backend(name, binds=[str(bind) for bind in binds])) as backend:
        return asyncio.run(run())


def test_our_package_is_an_empty_folder_in_a_shown_one(
    bwrap: GuestBackend, installed: Path, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = installed.parents[1]
    script = f"find {root} -type f | sort; touch {installed}/coderepairrl/x"
    shown = opened("bwrap", [root], task, script)
    assert f"{installed}/other/module.py\n".encode() in shown
    assert b"fix.patch" not in shown and b"original.py" not in shown and b"Read-only" in shown
    again = opened("bwrap", [root / "cache/coderepairrl/agents/tool", root], task, script)
    assert b"agents/tool/run" in again and b"original.py" not in again, "an agent's own folder is shown, no other"
    monkeypatch.setattr(contents, "list_answer_folders", tuple)
    control = opened("bwrap", [root], task, script)
    assert b"fix.patch" in control and b"original.py" in control


ENVIRONMENTS = (
    "lib/python3.11/site-packages",  # a virtual environment
    "envs/repair/lib/python3.12/site-packages",  # conda
    "uv/tools/coderepairrl/lib/python3.13/site-packages",
    "pipx/venvs/coderepairrl/lib64/python3.11/site-packages",
)


@pytest.fixture
def environments() -> Iterator[Path]:
    """A folder below ``/usr`` with further copies of this package."""
    if not os.access("/usr/local", os.W_OK):
        pytest.skip("needs to write below /usr")
    with tempfile.TemporaryDirectory(prefix="crrl-env-", dir="/usr/local") as name:
        Path(name).chmod(0o755)
        for place in ENVIRONMENTS:
            answer = Path(name, place, "coderepairrl/tasks/handmade/add/fix.patch")
            answer.parent.mkdir(parents=True)
            answer.write_text("+    return a + b\n")
        contents.find_installed_packages.cache_clear()
        yield Path(name)
    contents.find_installed_packages.cache_clear()


def test_no_other_copy_of_the_package_is_shown_either(
    bwrap: GuestBackend, environments: Path, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"find {environments} -type f; find {environments} -type d -name coderepairrl | wc -l"
    shown = opened("bwrap", [], task, script)
    assert shown == f"{len(ENVIRONMENTS) + 2}\n".encode(), "empty folders; two are those of the tools"
    monkeypatch.setattr(contents, "find_installed_packages", lambda shown: ())
    assert opened("bwrap", [], task, script).count(b"fix.patch") == len(ENVIRONMENTS), "control"


def test_a_link_to_the_package_shows_no_answers(bwrap: GuestBackend, installed: Path, task: Task) -> None:
    link = installed.parents[1].with_name(f"{installed.parents[1].name}-link")
    link.symlink_to(installed.parent)
    try:
        shown = opened("bwrap", [link], task, f"find {link}/ -type f")
    finally:
        link.unlink()
    assert b"module.py" in shown and b"fix.patch" not in shown


def test_sandlock_refuses_folders_with_answers(sandlock: GuestBackend, installed: Path, task: Task) -> None:
    with pytest.raises(PrerequisiteError, match="answers to tasks") as refused:
        opened("sandlock", [installed], task, "true")
    assert "virtual environment" in refused.value.fix
    assert opened("sandlock", [installed / "other"], task, f"cat {installed}/other/module.py") == b"x = 1\n"


def test_a_user_without_a_home_has_no_cache_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "CRRL_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 987_654)
    with pytest.raises(PrerequisiteError, match="home"):
        user_cache()
    assert PACKAGE in contents.list_answer_folders()
    monkeypatch.setenv("CRRL_CACHE", "~nobody-of-this-name/cache")
    assert PACKAGE in contents.list_answer_folders()


def test_every_cache_follows_one_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "CRRL_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("HOME", "/home/somebody")
    where = ["/home/somebody/.cache/coderepairrl", "/xdg/coderepairrl", "/chosen"]
    for variable, base in zip(("HOME", "XDG_CACHE_HOME", "CRRL_CACHE"), where, strict=True):
        if variable != "HOME":
            monkeypatch.setenv(variable, base.removesuffix("/coderepairrl"))
        assert user_cache() == Path(base)
        assert [git_cache(), agents_cache()] == [Path(base, "git"), Path(base, "agents")]
        assert Path(base) in caches.list_cache_folders()
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert agents_cache() == Path("/chosen/agents")
    monkeypatch.delenv("CRRL_CACHE")
    assert agents_cache() == Path("/var/cache/coderepairrl/agents") and git_cache() == Path("/xdg/coderepairrl/git")
