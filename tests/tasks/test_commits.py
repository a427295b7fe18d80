"""The commits of tasks: many in one fetch, several repositories at a time, whatever one of them lacks."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from coderepairrl.errors import CodeRepairError, SandboxFault
from coderepairrl.processes.caches import git_cache
from coderepairrl.processes.hostgit import git
from coderepairrl.tasks import prepare as preparing
from coderepairrl.types import Task

WHO = ["-c", "user.name=t", "-c", "user.email=t@t"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(preparing, "_WAITS", (0.0, 0.0))


def mirror(folder: Path, count: int) -> list[str]:
    """A repository of `count` commits; their ids."""
    subprocess.run(["git", "init", "-q", "-b", "main", folder], check=True)
    for number in range(count):
        (folder / "number").write_text(f"{folder.name} {number}")
        for words in (["add", "-A"], [*WHO, "commit", "-qm", "x"]):
            subprocess.run(["git", "-C", folder, *words], check=True)
    return git("rev-list", "--reverse", "main", folder=folder / ".git").decode().split()


def tasks(url: str, commits: list[str]) -> list[Task]:
    return [Task(f"{url}/{commit}", "repair it", "python", f"git:{url}@{commit}", b"") for commit in commits]


def prepare(some: list[Task]) -> tuple[list[str], list[str]]:
    said: list[str] = []
    return asyncio.run(preparing.prepare_tasks(some, say=said.append)).commits, said


def packs() -> int:
    return len(list(git_cache().glob("*/objects/pack/*.pack")))


def test_commits_of_a_repository_come_in_one_fetch_and_are_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = [task for name in "ab" for task in tasks(f"file://{tmp_path}/{name}", mirror(tmp_path / name, 3))]
    here, said = prepare([*some[:2], *some])
    assert here == [task.workspace for task in some] and packs() == 2
    assert len(said) == 3 and said[0].startswith("6 commits, ") and "6 of 6 are here" in said[2]
    for name in "ab":
        (tmp_path / name).rename(tmp_path / f"{name}-away")
    assert prepare(some)[0] == here
    monkeypatch.setattr(preparing, "_AT_ONCE", 2)
    more = tasks(f"file://{tmp_path}/c", mirror(tmp_path / "c", 5))
    assert prepare(more)[0] == [task.workspace for task in more] and packs() == 2 + 3


def test_a_commit_that_is_not_there_costs_no_other(tmp_path: Path) -> None:
    commits = mirror(tmp_path / "a", 5)
    asked = [*commits[:2], "1" * 40, *commits[2:], "1234567"]
    with pytest.raises(CodeRepairError) as caught:
        prepare([*tasks("file:///no/such/mirror", commits), *tasks(f"file://{tmp_path}/a", asked)])
    text = str(caught.value)
    assert f"has no commit {'1' * 40}" in text and "'1234567'" in text and "no such folder" in text
    assert not any(commit in text for commit in commits)
    here, said = prepare(tasks(f"file://{tmp_path}/a", commits))
    assert len(here) == 5 and len(said) == 1


def test_a_server_that_fails_is_asked_again_and_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some = tasks(f"file://{tmp_path}/a", mirror(tmp_path / "a", 3))
    fetch, failures = preparing.fetch_commits, [1000]

    def failing(url: str, commits: list[str]) -> None:
        failures[0] -= 1
        if failures[0] >= 0:
            raise SandboxFault("503")
        fetch(url, commits)

    monkeypatch.setattr(preparing, "fetch_commits", failing)
    with pytest.raises(SandboxFault, match="503"):
        prepare(some)
    failures[0] = 2
    here, said = prepare(some)
    assert len(here) == 3 and sum("trying again" in line for line in said) == 2
