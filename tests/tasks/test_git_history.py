"""A repository's own repairs as tasks: which commits are taken, that they hold in a sandbox, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from coderepairrl.environments.build import Specification
from coderepairrl.errors import ConfigError, TaskError
from coderepairrl.tasks import make_source
from coderepairrl.tasks.sources.git_history import GitHistory
from hostile_repository import Hostile

HEAD = "def add(a, b):\n    return a + b\n"
BUG = HEAD.replace("a + b", "a - b")
TEST = "import unittest\n\nfrom calc import add\n\n\nclass T(unittest.TestCase):\n    def test_add(self):\n"
UNITTEST = "python3 -m unittest -q {tests}"


class Repository:
    """A repository that a test writes; each commit is a day later than the one before."""

    def __init__(self, root: Path) -> None:
        self.root, self.day = root, 0
        root.mkdir()
        self.git("init", "-q", "-b", "main")

    def git(self, *args: str, stdin: bytes = b"") -> str:
        when = f"2024-01-{self.day or 1:02}T12:00:00+0000"
        names = {f"GIT_{who}_{what}": "t" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        plain = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}
        env = plain | names | {"GIT_AUTHOR_DATE": when, "GIT_COMMITTER_DATE": when}
        return subprocess.run(
            ["git", *args], cwd=self.root, env=env, input=stdin, capture_output=True, check=True, timeout=60
        ).stdout.decode()

    def commit(self, message: str, **files: str | bytes | None) -> str:
        """A commit of these files, in whose names ``__`` is a slash and the last ``_`` a dot; None removes one."""
        self.day += 1
        for key, content in files.items():
            stem, _, ending = key.replace("__", "/").rpartition("_")
            path = self.root / f"{stem}.{ending}"
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                path.unlink()
            else:
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", message)
        return self.git("rev-parse", "HEAD").strip()


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path / "calc")
    made.commit("Start", calc_py=BUG, helper_py="x = 1\n")
    return made


def mined(repository: Repository, **options: Any) -> GitHistory:
    source = make_source("git_history", path=str(repository.root), **options)
    assert isinstance(source, GitHistory)
    source.prepare()
    return source


def repair(repository: Repository, message: str = "Fix add()\n\nIt subtracted, see #3.") -> str:
    return repository.commit(
        message, calc_py=HEAD, tests__test_calc_py=f"{TEST}        self.assertEqual(add(1, 2), 3)\n"
    )


def test_a_repair_with_tests_is_a_task_and_the_others_are_not(repository: Repository) -> None:
    repository.commit("Fix the helper", helper_py="x = 2\n")
    parent = repository.git("rev-parse", "HEAD").strip()
    sha = repair(repository, "Fix add()\n\nIt subtracted, see #3.\n\nSigned-off-by: A <a@b>\nCo-authored-by: C <c@d>")
    repository.commit("Add mul()", mul_py="def mul(a, b):\n    return a * b\n", tests__test_mul_py="import mul\n")
    wrong = repository.commit("Fix mul() again", mul_py="mul = 1\n", tests__test_mul_py="from mul import mul\n")
    repository.git("revert", "--no-edit", wrong)
    repository.git("checkout", "-q", "-b", "other", "HEAD~1")
    repository.commit("On a branch", other_py="")
    repository.git("checkout", "-q", "main")
    repository.git("merge", "-q", "-m", "Merge the fix of bug #4", "other")
    source = mined(repository, python="3.8")
    [task] = source
    assert task.id == f"calc/{sha[:12]}"
    assert task.prompt == "Fix add()\n\nIt subtracted, see #3."
    assert task.workspace == f"git:{repository.root}@{parent}"
    assert task.reference == repository.git("diff", "--full-index", parent, sha, "--", "calc.py").encode()
    assert set(task.checks.restore) == {"tests/test_calc.py"}
    assert task.checks.commands[0].argv[-1] == "tests/test_calc.py"
    assert (task.language, task.created, task.repository) == ("python", "2024-01-03", "calc")
    assert source.left_out == {
        "have a message that does not match": 2, "change no tests": 1, "revert others": 1, "were reverted later": 1,
    }  # fmt: skip
    asked = Specification.parse(task.environment)
    assert (asked.workspace, asked.before, asked.requirements) == (task.workspace, "2024-01-03", ("pytest",))


def test_what_is_mined_holds_in_a_sandbox_and_what_does_not_is_counted(
    repository: Repository, tmp_path: Path, isolating: None
) -> None:
    sha = repair(repository)
    repository.commit(
        "Fix a typo", calc_py=HEAD + "\n# a comment\n", tests__test_other_py=f"{TEST}        self.fail()\n"
    )
    more = f"{TEST}        self.assertEqual(add(2, 2), 4)\n"
    repository.commit("Fix the test of #5", calc_py=HEAD + "\n# a note\n", tests__test_calc_py=more)
    target = tmp_path / "settled.jsonl"
    command = [str(Path(sys.executable).with_name("crrl")), "tasks", "verify", "git_history", f"path={repository.root}"]
    command += [f"command={UNITTEST}", "environment=false", "--output", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    [settled] = [json.loads(line) for line in target.read_text().splitlines()]
    assert settled["id"] == f"calc/{sha[:12]}"
    assert settled["checks"]["fail_to_pass"]
    why = "1 the checks fail on the bug: no; 1 the checks pass on the reference: no"
    assert f"settled.jsonl: 1 task; left out: {why}" in done.stderr


def test_the_newest_quarter_is_the_test(repository: Repository) -> None:
    for number in range(8):
        repository.commit(f"Fix bug {number}", calc_py=f"x = {number}\n", test_calc_py=f"# {number}\n")
    tasks = list(mined(repository))
    assert [task.split for task in tasks] == ["test"] * 2 + ["train"] * 6
    assert min(t.created for t in tasks if t.split == "test") > max(t.created for t in tasks if t.split == "train")
    assert [task.created for task in mined(repository, n=2, before="2024-01-05")] == ["2024-01-04", "2024-01-03"]
    assert len(list(mined(repository, since=date(2024, 1, 5), match=r"bug [67]"))) == 2


def test_what_cannot_be_a_reference_is_left_out(repository: Repository) -> None:
    test = {"test_calc_py": "# 1\n"}
    repository.commit("Fix a picture", **test, picture_png=b"\x89PNG\0\1")
    repository.commit("Fix much", test_calc_py="# 2\n", calc_py="x = 1\n" * 600)
    repository.commit("Fix the notes", test_calc_py="# 3\n", notes_md="It works.\n")
    (repository.root / "link.py").symlink_to("calc.py")
    repository.commit("Fix a link", test_calc_py="# 4\n")
    repository.commit("Fix data of tests", tests__data_txt="1\n", helper_py="x = 3\n")
    repository.git("update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},sub")
    (repository.root / "sub").mkdir()
    repository.commit("Fix a submodule", test_calc_py="# 5\n")
    with pytest.raises(TaskError, match="no commit can be used") as caught:
        mined(repository)
    for reason in (
        "1 change a binary file", "1 are larger than max_files or max_lines", "1 change tests and no other code",
        "2 change a symbolic link or a submodule", "1 touch no module of tests that the command could run",
    ):  # fmt: skip
        assert reason in str(caught.value)
    assert len(list(mined(repository, max_lines=700))) == 1


def test_bytes_and_names_of_any_kind_come_through(repository: Repository) -> None:
    repository.git("config", "i18n.commitEncoding", "ISO-8859-1")
    repository.day += 1
    (repository.root / "tests").mkdir()
    (repository.root / "tests/data.bin").write_bytes(bytes(range(256)))
    (repository.root / "tests/test_\n[1].py").write_text("pass\n")
    (repository.root / "ca lc\n[1]*.py").write_bytes(b"x = '\xff'\n")
    repository.git("add", "-A")
    repository.git("commit", "-q", "-F", "-", stdin="Fix the gr\u00fcn bug".encode("latin-1"))
    (repository.root / "tests/test_\n[1].py").rename(repository.root / "tests/test_moved.py")
    (repository.root / "ca lc\n[1]*.py").rename(repository.root / "moved.py")
    repository.commit("Fix names, #2")
    moved, task = mined(repository)
    assert task.prompt == "Fix the grün bug"
    assert task.checks.restore["tests/data.bin"].encode("utf-8", "surrogateescape") == bytes(range(256))
    assert "tests/test_\n[1].py" in task.checks.restore
    assert b"\xff" in task.reference
    assert set(moved.checks.restore) == {"tests/test_moved.py"}
    assert b"deleted file" in moved.reference and b"new file" in moved.reference  # renames are none


def test_environments_are_what_the_parent_declares(repository: Repository) -> None:
    project = "[project]\nname = 'calc'\n[dependency-groups]\ntests = ['pytest', 'six']\n"
    extra = "[project.optional-dependencies]\ntest = ['six']\n"
    repository.commit("Build", pyproject_toml=project + extra)
    repository.git("tag", "v1.2.3")
    repair(repository)
    repository.commit("Break the build", pyproject_toml="[")
    repository.commit("Fix in between", calc_py="x = 1\n", test_calc_py="# 1\n")
    source = mined(repository, python="3.12", requirements="attrs", packages_before="2024-06-01", edits="true")
    [task] = source
    assert Specification.parse(task.environment) == Specification(
        workspace=task.workspace, python="3.12", requirements=("pytest", "six", "attrs"), extras="[test]",
        before="2024-06-01", edits=("true",), version="1.2.3",
    )  # fmt: skip
    assert source.left_out["follow a state whose pyproject.toml or setup.cfg cannot be read"] == 1
    [late] = mined(repository, python="3.12")
    assert Specification.parse(late.environment).before == "2024-04-02"  # no package of January need work with it
    assert not mined(repository, command="make test").__iter__().__next__().environment


def test_bare_repositories_serve_and_shallow_ones_say_what_to_do(repository: Repository, tmp_path: Path) -> None:
    repair(repository)
    bare, shallow = tmp_path / "bare.git", tmp_path / "shallow"
    repository.git("clone", "-q", "--bare", ".", str(bare))
    repository.git("clone", "-q", "--depth=1", f"file://{repository.root}", str(shallow))
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


def test_nothing_of_the_repository_runs(tmp_path: Path) -> None:
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
