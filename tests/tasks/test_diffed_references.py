"""References in all forms that git writes are what a sandbox's diff says of the same change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from coderepairrl import rewards
from coderepairrl.checks.task_source import about_source
from coderepairrl.processes.hostgit import DIFF
from coderepairrl.rewards.verify import Trial, answers
from coderepairrl.sandbox import contents
from coderepairrl.sandbox.contents import Entry, Images
from coderepairrl.tasks import JsonlSource, patches, prepare, write_jsonl
from coderepairrl.tasks.prepare import with_diffed_references
from coderepairrl.types import Task
from rewards.conftest import repository
from rewards.folder import Local, Repository

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


def made(folder: Path, reference: bytes) -> Task:
    return Task("t", "p", "python", f"dir:{folder}", reference)


def diffed(task: Task) -> bytes:
    [found] = with_diffed_references([task])
    return found.reference


def test_references_are_as_the_sandbox_writes_them(repository: Repository) -> None:
    repository.commit(FILES)
    for form, (files, options) in FORMS.items():
        expected, reference = (repository.edit(files, *each) for each in (DIFF[1:], options))
        assert reference != expected, form
        assert diffed(made(repository.folder, reference)) == expected, form
    assert diffed(made(repository.folder, expected.replace(b"\n", b"\r\n"))) == expected


def test_what_does_not_apply_stays(repository: Repository, tmp_path: Path) -> None:
    repository.commit(FILES)
    lost = b"--- a/gone\n+++ b/gone\n@@ -1 +1 @@\n-a\n+b\n"
    assert diffed(made(repository.folder, lost)) == diffed(made(tmp_path / "gone", lost)) == lost


def test_other_sides_are_read_without_a_workspace(repository: Repository) -> None:
    repository.commit(FILES)
    files = {"old.py": None, "c/new.py": NEW, "größe n.py": NEW}
    for sides in (("c/", "i/"), ("i/", "w/"), ("1/", "2/")):
        patch = repository.edit(files, f"--src-prefix={sides[0]}", f"--dst-prefix={sides[1]}", "--no-renames")
        assert rewards.parse_patch(patch) == rewards.parse_patch(repository.edit(files, "--no-renames"))


def test_many_that_change_a_file_of_a_plain_folder_are_one_question(repository: Repository, tmp_path: Path) -> None:
    repository.commit(FILES)
    files = (PLAIN, {"crlf.txt": b"a\r\nc\r\n\r\n"}, {"größe n.py": OLD[:-1]})
    expected = [repository.edit(each, *DIFF[1:]) for each in files]
    given = [repository.edit(each, "-U9") for each in files]
    (repository.folder / ".git").rename(tmp_path / "git")
    tasks = [replace(made(repository.folder, each), id=str(number)) for number, each in enumerate(given)]
    assert [each.reference for each in with_diffed_references(tasks)] == expected


def test_a_plain_folder_is_imported_once_for_all_its_references(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.commit(FILES)
    expected = [repository.edit(each, *DIFF[1:]) for each in (MOVED, COPIED, ODD)]
    given = [repository.edit(each, "-C", "-U9") for each in (MOVED, COPIED, ODD)]
    (repository.folder / ".git").rename(tmp_path / "git")
    imported = list[str]()

    def entries_of(workspace: str, images: Images | None) -> Iterable[Entry]:
        imported.append(workspace)
        return contents.entries_of(workspace, images)

    monkeypatch.setattr(prepare, "entries_of", entries_of)
    tasks = [replace(made(repository.folder, each), id=str(number)) for number, each in enumerate(given)]
    assert [each.reference for each in with_diffed_references(tasks)] == expected
    assert imported == [tasks[0].workspace]


def test_the_exam_of_a_source_asks_with_them(repository: Repository, tmp_path: Path) -> None:
    """Its folder need not be a repository."""
    repository.commit(FILES)
    expected, reference = (repository.edit(MOVED, *options) for options in (DIFF[1:], ("-M",)))
    (repository.folder / ".git").rename(tmp_path / "git")
    write_jsonl([made(repository.folder, reference)], tmp_path / "tasks.jsonl")
    _, [task] = about_source(JsonlSource(tmp_path / "tasks.jsonl"))
    assert task.reference == expected


async def test_verification_tries_what_an_attempt_would_leave(repository: Repository) -> None:
    """A reference in another form earns less than 1 by similarity, so that training on it would be refused."""
    repository.commit(FILES)
    [(reward, _)] = rewards.make_rewards("patch_edits")
    task = made(repository.folder, repository.edit(MOVED, "-M"))
    first, _ = await answers(Trial(task, reward), Local())
    assert not first.ok
    first, _ = await answers(Trial(replace(task, reference=diffed(task)), reward), Local())
    assert first.ok


def test_quoted_paths_are_read_and_turned_round() -> None:
    head = b'diff --git "a/\\303\\244.py" "b/\\303\\244.py"\n'
    patch = head + b'--- "a/\\303\\244.py"\n+++ "b/\\303\\244.py"\n@@ -1 +1 @@\n-a\n+b\n'
    assert patches.changed_paths(patch) == ["ä.py"]
    turned = patches.reverse_patch(patch.decode()).splitlines()[1:3]
    assert turned == ['--- "a/\\303\\244.py"', '+++ "b/\\303\\244.py"']
