"""Repair commits of a repository as tasks: which are taken, verification in a sandbox, and refusals."""

from __future__ import annotations

import json
import shutil
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from coderepairrl.environments.build import Specification
from coderepairrl.errors import ConfigError, TaskError
from coderepairrl.tasks import make_source
from coderepairrl.tasks.sources.git_history import GitHistory
from commands import CRRL
from hostile_repository import Hostile
from rewards.folder import Files, Repository, git

HEAD = "def add(a, b):\n    return a + b\n"
BUG = HEAD.replace("a + b", "a - b")
TEST = "import unittest\n\nfrom calc import add\n\n\nclass T(unittest.TestCase):\n    def test_add(self):\n"
UNITTEST = "python3 -m unittest -q {tests}"


class DatedRepository(Repository):
    """A repository whose commits are a day apart, from 2024-01-01 on."""

    day = 0

    def git(self, *words: str, stdin: bytes = b"") -> str:
        with pytest.MonkeyPatch.context() as environment:
            for who in ("AUTHOR", "COMMITTER"):
                environment.setenv(f"GIT_{who}_DATE", f"2024-01-{self.day or 1:02}T12:00:00+0000")
            return git(self.folder, *words, stdin=stdin).decode()

    def record(self, message: str, files: Files) -> str:
        """Commit `files` a day later; return the commit."""
        self.day += 1
        self.put(files)
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", message)
        return self.git("rev-parse", "HEAD").strip()


@pytest.fixture
def repository(tmp_path: Path) -> DatedRepository:
    (tmp_path / "calc").mkdir()
    repository = DatedRepository(tmp_path / "calc")
    repository.git("symbolic-ref", "HEAD", "refs/heads/main")
    repository.record("Start", {"calc.py": BUG, "helper.py": "x = 1\n"})
    return repository


def mine(repository: DatedRepository, **options: Any) -> GitHistory:
    source = make_source("git_history", path=str(repository.folder), **options)
    assert isinstance(source, GitHistory)
    source.prepare()
    return source


def record_repair(repository: DatedRepository, message: str = "Fix add(), see #3") -> str:
    test = f"{TEST}        self.assertEqual(add(1, 2), 3)\n"
    return repository.record(message, {"calc.py": HEAD, "tests/test_calc.py": test})


def test_only_repairs_with_tests_are_tasks(repository: DatedRepository) -> None:
    repository.record("Fix the helper", {"helper.py": "x = 2\n"})
    parent = repository.git("rev-parse", "HEAD").strip()
    trailers = "Signed-off-by: A <a@b>\nCo-authored-by: C <c@d>"
    sha = record_repair(repository, f"Fix add()\n\nIt subtracted, see #3.\n\n{trailers}")
    repository.record("Add mul()", {"mul.py": "def mul(a, b): ...\n", "tests/test_mul.py": "import mul\n"})
    wrong = repository.record("Fix mul() again", {"mul.py": "mul = 1\n", "tests/test_mul.py": "from mul import mul\n"})
    repository.git("revert", "--no-edit", wrong)
    repository.git("checkout", "-q", "-b", "other", "HEAD~1")
    repository.record("On a branch", {"other.py": ""})
    repository.git("checkout", "-q", "main")
    repository.git("merge", "-q", "-m", "Merge the fix of bug #4", "other")
    source = mine(repository, python="3.8")
    [task] = source
    assert task.id == f"calc/{sha[:12]}"
    assert task.prompt == "Fix add()\n\nIt subtracted, see #3."
    assert task.workspace == f"git:{repository.folder}@{parent}"
    assert task.reference == repository.git("diff", "--full-index", parent, sha, "--", "calc.py").encode()
    assert set(task.checks.restore) == {"tests/test_calc.py"}
    assert task.checks.commands[0].argv[-1] == "tests/test_calc.py"
    assert (task.language, task.created, task.repository) == ("python", "2024-01-03", "calc")
    assert source.left_out == {
        "have a message that does not match": 2, "change no tests": 1, "revert others": 1, "were reverted later": 1,
    }  # fmt: skip
    asked = Specification.parse(task.environment)
    assert (asked.workspace, asked.before, asked.requirements) == (task.workspace, "2024-01-03", ("pytest",))


def test_verification_in_a_sandbox_keeps_sound_tasks_and_counts_the_others(
    repository: DatedRepository, tmp_path: Path, isolating: None
) -> None:
    sha = record_repair(repository)
    failing = f"{TEST}        self.fail()\n"
    repository.record("Fix a typo", {"calc.py": HEAD + "\n# a comment\n", "tests/test_other.py": failing})
    more = f"{TEST}        self.assertEqual(add(2, 2), 4)\n"
    repository.record("Fix the test of #5", {"calc.py": HEAD + "\n# a note\n", "tests/test_calc.py": more})
    target = tmp_path / "settled.jsonl"
    options = [f"path={repository.folder}", f"command={UNITTEST}", "environment=false", "--output", str(target)]
    command = [*CRRL, "tasks", "verify", "git_history", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    [settled] = [json.loads(line) for line in target.read_text().splitlines()]
    assert settled["id"] == f"calc/{sha[:12]}"
    assert settled["checks"]["fail_to_pass"]
    why = "1 the checks fail on the bug: no; 1 the checks pass on the reference: no"
    assert f"settled.jsonl: 1 task; left out: {why}" in done.stderr


def test_the_newest_quarter_is_split_test(repository: DatedRepository) -> None:
    for number in range(8):
        repository.record(f"Fix bug {number}", {"calc.py": f"x = {number}\n", "test_calc.py": f"# {number}\n"})
    tasks = list(mine(repository))
    assert [task.split for task in tasks] == ["test"] * 2 + ["train"] * 6
    assert min(t.created for t in tasks if t.split == "test") > max(t.created for t in tasks if t.split == "train")
    assert [task.created for task in mine(repository, n=2, before="2024-01-05")] == ["2024-01-04", "2024-01-03"]
    assert len(list(mine(repository, since=date(2024, 1, 5), match=r"bug [67]"))) == 2


def test_commits_that_cannot_be_references_are_left_out(repository: DatedRepository) -> None:
    test = {"test_calc.py": "# 1\n"}
    repository.record("Fix a picture", {**test, "picture.png": b"\x89PNG\0\1"})
    repository.record("Fix much", {"test_calc.py": "# 2\n", "calc.py": "x = 1\n" * 600})
    repository.record("Fix the notes", {"test_calc.py": "# 3\n", "notes.md": "It works.\n"})
    (repository.folder / "link.py").symlink_to("calc.py")
    repository.record("Fix a link", {"test_calc.py": "# 4\n"})
    repository.record("Fix data of tests", {"tests/data.txt": "1\n", "helper.py": "x = 3\n"})
    repository.git("update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},sub")
    (repository.folder / "sub").mkdir()
    repository.record("Fix a submodule", {"test_calc.py": "# 5\n"})
    with pytest.raises(TaskError, match="no commit can be used") as caught:
        mine(repository)
    for reason in (
        "1 change a binary file", "1 are larger than max_files or max_lines", "1 change tests and no other code",
        "2 change a symbolic link or a submodule", "1 touch no module of tests that the command could run",
    ):  # fmt: skip
        assert reason in str(caught.value)
    assert len(list(mine(repository, max_lines=700))) == 1


def test_unusual_bytes_and_file_names_are_kept(repository: DatedRepository) -> None:
    repository.git("config", "i18n.commitEncoding", "ISO-8859-1")
    repository.day += 1
    (repository.folder / "tests").mkdir()
    (repository.folder / "tests/data.bin").write_bytes(bytes(range(256)))
    (repository.folder / "tests/test_\n[1].py").write_text("pass\n")
    (repository.folder / "ca lc\n[1]*.py").write_bytes(b"x = '\xff'\n")
    repository.git("add", "-A")
    repository.git("commit", "-q", "-F", "-", stdin="Fix the gr\u00fcn bug".encode("latin-1"))
    (repository.folder / "tests/test_\n[1].py").rename(repository.folder / "tests/test_moved.py")
    (repository.folder / "ca lc\n[1]*.py").rename(repository.folder / "moved.py")
    repository.record("Fix names, #2", {})
    moved, task = mine(repository)
    assert task.prompt == "Fix the grün bug"
    assert task.checks.restore["tests/data.bin"].encode("utf-8", "surrogateescape") == bytes(range(256))
    assert "tests/test_\n[1].py" in task.checks.restore
    assert b"\xff" in task.reference
    assert set(moved.checks.restore) == {"tests/test_moved.py"}
    assert b"deleted file" in moved.reference and b"new file" in moved.reference  # not a rename


def test_an_environment_is_that_declared_by_the_parent_commit(repository: DatedRepository) -> None:
    project = "[project]\nname = 'calc'\n[dependency-groups]\ntests = ['pytest', 'six']\n"
    extra = "[project.optional-dependencies]\ntest = ['six']\n"
    repository.record("Build", {"pyproject.toml": project + extra})
    repository.git("tag", "v1.2.3")
    record_repair(repository)
    repository.record("Break the build", {"pyproject.toml": "["})
    repository.record("Fix in between", {"calc.py": "x = 1\n", "test_calc.py": "# 1\n"})
    source = mine(repository, python="3.12", requirements="attrs", packages_before="2024-06-01", edits="true")
    [task] = source
    assert Specification.parse(task.environment) == Specification(
        workspace=task.workspace, python="3.12", requirements=("pytest", "six", "attrs"), extras="[test]",
        before="2024-06-01", edits=("true",), version="1.2.3",
    )  # fmt: skip
    assert source.left_out["follow a state whose pyproject.toml or setup.cfg cannot be read"] == 1
    [late] = mine(repository, python="3.12")
    assert Specification.parse(late.environment).before == "2024-04-02"  # no package of January need work with it
    assert not next(iter(mine(repository, command="make test"))).environment


def test_bare_repositories_work_and_shallow_ones_are_refused(repository: DatedRepository, tmp_path: Path) -> None:
    record_repair(repository)
    bare, shallow = tmp_path / "bare.git", tmp_path / "shallow"
    repository.git("clone", "-q", "--bare", ".", str(bare))
    repository.git("clone", "-q", "--depth=1", f"file://{repository.folder}", str(shallow))
    [task] = make_source("git_history", path=str(bare))
    assert task.id.startswith("bare/")
    [named] = make_source("git_history", path=str(bare), repository="me/calc")
    assert (named.id.rpartition("/")[0], named.repository) == ("me/calc", "me/calc")
    for path, says in ((shallow, "shallow clone"), (tmp_path / "none", "not a usable git repository")):
        with pytest.raises(TaskError, match=says):
            make_source("git_history", path=str(path)).prepare()
    shutil.rmtree(bare / "objects")
    (bare / "objects").mkdir()
    with pytest.raises(TaskError):
        make_source("git_history", path=str(bare)).prepare()


def test_no_program_of_the_repository_runs(tmp_path: Path) -> None:
    hostile = Hostile(tmp_path / "hostile", tmp_path / "marks")
    with pytest.raises(TaskError):
        make_source("git_history", path=str(hostile.root)).prepare()
    assert hostile.ran == set()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"since": "May"}, "not a date"),
        ({"match": "("}, "match"),
        ({"command": "'"}, "command"),
        ({"max_files": 0}, "or more"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        make_source("git_history", path=str(tmp_path), **options)
