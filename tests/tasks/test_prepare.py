"""Preparing tasks: commits in few fetches, and references in the form of a sandbox's diff."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from coderepairrl import rewards
from coderepairrl.checks.task_source import examine_source
from coderepairrl.errors import CodeRepairError, SandboxFault
from coderepairrl.processes.caches import git_cache
from coderepairrl.processes.hostgit import DIFF, git
from coderepairrl.sandbox import contents
from coderepairrl.sandbox.contents import Entry, Images
from coderepairrl.tasks import JsonlSource, patches, write_jsonl
from coderepairrl.tasks import prepare as preparing
from coderepairrl.tasks.prepare import rewrite_references
from coderepairrl.types import Task
from rewards.conftest import repository
from rewards.folder import Repository


@pytest.fixture(autouse=True)
def git_cache_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(preparing, "_WAITS", (0.0, 0.0))


def make_mirror(folder: Path, count: int) -> list[str]:
    """Make a repository of `count` commits; return their ids."""
    folder.mkdir()
    mirror = Repository(folder)
    for number in range(count):
        mirror.commit({"number": f"{folder.name} {number}"})
    return git("rev-list", "--reverse", "HEAD", folder=folder / ".git").decode().split()


def tasks_at(url: str, commits: list[str]) -> list[Task]:
    return [Task(f"{url}/{commit}", "repair it", "python", f"git:{url}@{commit}", b"") for commit in commits]


def prepare_commits(some: list[Task]) -> tuple[list[str], list[str]]:
    said: list[str] = []
    return asyncio.run(preparing.prepare_tasks(some, say=said.append)).commits, said


def count_packs() -> int:
    return len(list(git_cache().glob("*/objects/pack/*.pack")))


def test_commits_of_a_repository_are_fetched_at_once_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = [task for name in "ab" for task in tasks_at(f"file://{tmp_path}/{name}", make_mirror(tmp_path / name, 3))]
    here, said = prepare_commits([*some[:2], *some])
    assert here == [task.workspace for task in some] and count_packs() == 2
    assert len(said) == 3 and said[0].startswith("6 commits, ") and "6 of 6 are here" in said[2]
    for name in "ab":
        (tmp_path / name).rename(tmp_path / f"{name}-away")
    assert prepare_commits(some)[0] == here
    monkeypatch.setattr(preparing, "_BATCH", 2)
    more = tasks_at(f"file://{tmp_path}/c", make_mirror(tmp_path / "c", 5))
    assert prepare_commits(more)[0] == [task.workspace for task in more] and count_packs() == 2 + 3


def test_a_missing_commit_does_not_keep_others_from_being_fetched(tmp_path: Path) -> None:
    commits = make_mirror(tmp_path / "a", 5)
    asked = [*commits[:2], "1" * 40, *commits[2:], "1234567"]
    with pytest.raises(CodeRepairError) as caught:
        prepare_commits([*tasks_at("file:///no/such/mirror", commits), *tasks_at(f"file://{tmp_path}/a", asked)])
    text = str(caught.value)
    assert f"has no commit {'1' * 40}" in text and "'1234567'" in text and "no such folder" in text
    assert not any(commit in text for commit in commits)
    here, said = prepare_commits(tasks_at(f"file://{tmp_path}/a", commits))
    assert len(here) == 5 and len(said) == 1


def test_a_failing_server_is_asked_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some = tasks_at(f"file://{tmp_path}/a", make_mirror(tmp_path / "a", 3))
    fetch, failures = preparing.fetch_commits, [1000]

    def failing(url: str, commits: list[str]) -> None:
        failures[0] -= 1
        if failures[0] >= 0:
            raise SandboxFault("503")
        fetch(url, commits)

    monkeypatch.setattr(preparing, "fetch_commits", failing)
    with pytest.raises(SandboxFault, match="503"):
        prepare_commits(some)
    failures[0] = 2
    here, said = prepare_commits(some)
    assert len(here) == 3 and sum("trying again" in line for line in said) == 2


__all__ = ["repository"]

OLD = b"def f(a):\n    x = a\n    return x\n\n\ndef g():\n    return 2\n\n\ndef h():\n    return 3\n"
NEW = OLD.replace(b"x = a\n", b"x = a + 1\n")
FILES = {"old.py": OLD, "größe n.py": OLD, "crlf.txt": b"a\r\nb\r\n"}
MOVED: dict[str, bytes | None] = {"old.py": None, "new.py": NEW}
COPIED: dict[str, bytes | None] = {"old.py": OLD.replace(b"3", b"4"), "copy.py": NEW}
PLAIN: dict[str, bytes | None] = {"old.py": NEW.replace(b"def h", b"def i():\n    return 5\n\n\ndef h")}
ODD: dict[str, bytes | None] = {"größe n.py": NEW, "crlf.txt": b"a\r\nc\r\n"}
FORMS: dict[str, tuple[dict[str, bytes | None], tuple[str, ...]]] = {
    "rename": (MOVED, ("-M",)),
    "copy": (COPIED, ("-C", "--find-copies-harder")),
    "mnemonic": (PLAIN, ("--src-prefix=i/", "--dst-prefix=w/")),
    "no prefix": (PLAIN, ("--no-prefix",)),
    "context": (PLAIN, ("-U9",)),
    "another heuristic": (PLAIN, ("--no-indent-heuristic", "--patience", "--inter-hunk-context=9")),
    "quoted": (ODD, ("--no-prefix", "--abbrev=5")),
}


def make_task(folder: Path, reference: bytes) -> Task:
    return Task("t", "p", "python", f"dir:{folder}", reference)


def rewrite_reference(task: Task) -> bytes:
    [found] = rewrite_references([task])
    return found.reference


def test_references_get_the_form_of_the_sandboxs_diff(repository: Repository) -> None:
    repository.commit(FILES)
    for form, (files, options) in FORMS.items():
        expected, reference = (repository.edit(files, *each) for each in (DIFF[1:], options))
        assert reference != expected, form
        assert rewrite_reference(make_task(repository.folder, reference)) == expected, form
    assert rewrite_reference(make_task(repository.folder, expected.replace(b"\n", b"\r\n"))) == expected


def test_references_that_do_not_apply_stay(repository: Repository, tmp_path: Path) -> None:
    repository.commit(FILES)
    lost = b"--- a/gone\n+++ b/gone\n@@ -1 +1 @@\n-a\n+b\n"
    for folder in (repository.folder, tmp_path / "gone"):
        assert rewrite_reference(make_task(folder, lost)) == lost


def test_patches_with_other_prefixes_are_read_alike(repository: Repository) -> None:
    repository.commit(FILES)
    files = {"old.py": None, "c/new.py": NEW, "größe n.py": NEW}
    for sides in (("c/", "i/"), ("i/", "w/"), ("1/", "2/")):
        patch = repository.edit(files, f"--src-prefix={sides[0]}", f"--dst-prefix={sides[1]}", "--no-renames")
        assert rewards.parse_patch(patch) == rewards.parse_patch(repository.edit(files, "--no-renames"))


def test_a_plain_folder_is_imported_once_for_many_references(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they change one file or several."""
    repository.commit(FILES)
    files = (PLAIN, {"crlf.txt": b"a\r\nc\r\n\r\n"}, {"größe n.py": OLD[:-1]}, MOVED, COPIED, ODD)
    expected = [repository.edit(each, *DIFF[1:]) for each in files]
    given = [repository.edit(each, "-C", "-U9") for each in files]
    (repository.folder / ".git").rename(tmp_path / "git")
    imported = list[str]()

    def read_workspace_entries(workspace: str, images: Images | None) -> Iterable[Entry]:
        imported.append(workspace)
        return contents.read_workspace_entries(workspace, images)

    monkeypatch.setattr(preparing, "read_workspace_entries", read_workspace_entries)
    tasks = [replace(make_task(repository.folder, each), id=str(number)) for number, each in enumerate(given)]
    assert [each.reference for each in rewrite_references(tasks)] == expected
    assert imported == [tasks[0].workspace]


def test_the_exam_of_a_source_rewrites_references(repository: Repository, tmp_path: Path) -> None:
    """Its folder need not be a repository."""
    repository.commit(FILES)
    expected, reference = (repository.edit(MOVED, *options) for options in (DIFF[1:], ("-M",)))
    (repository.folder / ".git").rename(tmp_path / "git")
    write_jsonl([make_task(repository.folder, reference)], tmp_path / "tasks.jsonl")
    _, [task] = examine_source(JsonlSource(tmp_path / "tasks.jsonl"))
    assert task.reference == expected


def test_patches_with_quoted_paths_are_read_and_reversed() -> None:
    head = b'diff --git "a/\\303\\244.py" "b/\\303\\244.py"\n'
    patch = head + b'--- "a/\\303\\244.py"\n+++ "b/\\303\\244.py"\n@@ -1 +1 @@\n-a\n+b\n'
    assert patches.list_changed_paths(patch) == ["ä.py"]
    turned = patches.reverse_patch(patch.decode()).splitlines()[1:3]
    assert turned == ['--- "a/\\303\\244.py"', '+++ "b/\\303\\244.py"']
