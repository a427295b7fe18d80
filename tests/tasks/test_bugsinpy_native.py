"""BugsInPy in environments that this machine builds: a checkout of its shape, of a project with two commits."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from coderepairrl import grading, sandbox
from coderepairrl.checks.task_source import study
from coderepairrl.environments import Specification
from coderepairrl.errors import TaskError
from coderepairrl.tasks import make_source
from coderepairrl.tasks.prepare import prepare_tasks
from projects import cache, system_python, write

__all__ = ["cache"]

WARES = {
    "wares/__init__.py": "import crrl_test_helper\n\n\ndef total(prices):\n    return sum(prices[1:])\n",
    "tests/test_total.py": "# nothing yet\n",
    "tox.ini": "[testenv]\ndeps =\n    -rmore.txt\n    crrl-test-helper\n    py38: nowhere\n",
}
TESTS = """\
import pathlib
import unittest

import tests.helping
import wares


class TestTotal(unittest.TestCase):
    def test_total(self):
        prices = pathlib.Path(__file__).with_name("prices.txt").read_text().split()
        self.assertEqual(wares.total([int(each) for each in prices]), 60)
"""
LISTED = "pkg-resources-nowhere==0.0.0\r\ncrrl-test-helper==1.0\r\n-e git+https://github.com/o/Wares.git@{base}#egg=wares\r\n"


def git(folder: Path, *words: str) -> str:
    own = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    return subprocess.run([*own, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def checkout(
    folder: Path, python: str = "3.8.3", setup: str = "", run: str = "", listed: str = LISTED, setup_cfg: str = ""
) -> list[str]:
    """Make the repository ``o/wares`` and a checkout of the benchmark with a bug of it; its commits: before, after."""
    repository = write(folder / "clones/o/wares", {**WARES, "setup.cfg": setup_cfg})
    git(repository, "init", "-q")
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "bug")
    fixed = {"wares/__init__.py": WARES["wares/__init__.py"].replace("[1:]", ""), "tests/test_total.py": TESTS}
    write(repository, {**fixed, "tests/prices.txt": "10 20 30\n", "tests/helping.py": ""})
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "the repair")
    base, after = git(repository, "rev-parse", "HEAD~1", "HEAD").split()
    write(
        folder / "BugsInPy/projects/wares",
        {
            "project.info": 'github_url="https://github.com/o/wares"\nstatus="OK"\n',
            "bugs/1/bug.info": f'python_version="{python}"\nbuggy_commit_id="{base}"\nfixed_commit_id ="{after}"\n'
            'test_file="tests/test_total.py"\n',
            "bugs/1/bug_patch.txt": git(repository, "diff", "HEAD~1", "HEAD", "--", "wares"),
            "bugs/1/run_test.sh": run or "python -m unittest -q tests.test_total.TestTotal.test_total\n",
            "bugs/1/setup.sh": setup or "touch tests/__init__.py\r\npip install unittest\n",
        },
    )
    # as PowerShell writes it
    (folder / "BugsInPy/projects/wares/bugs/1/requirements.txt").write_bytes(
        b"\xff\xfe" + listed.format(base=base).encode("utf-16-le")
    )
    return [base, after]


def options(folder: Path) -> dict[str, str]:
    return {"path": str(folder / "BugsInPy"), "clone": f"{folder}/clones/{{repository}}"}


async def test_the_reference_repairs_a_bug_by_tests_that_no_agent_sees(
    cache: Path, tmp_path: Path, isolating: None
) -> None:
    _, after = checkout(tmp_path, system_python())
    [task] = make_source("bugsinpy", workspace="native", all_native=True, project="wares", **options(tmp_path))
    made = await prepare_tasks([task])
    assert made.environments[0].left_out == ("pkg-resources-nowhere==0.0.0",)
    (tmp_path / "clones").rename(tmp_path / "gone")  # from here on, only what was prepared
    [again] = make_source("bugsinpy", workspace="native", all_native=True, **options(tmp_path))
    assert again == task
    backend = sandbox.make_backend(sandbox.choose().name)
    found = await study(task, backend)
    assert all(check.ok for check in found.findings), found.findings
    async with backend.open(task) as box:
        assert not (await grading.grade_patch(box, task, task.reference)).problem
    async with backend.open(task) as box:
        assert "test_total" in (await grading.grade_patch(box, task, b"")).problem
    async with backend.open(task) as box:
        seen = await box.exec(["sh", "-c", f"cat tests/*; git cat-file -t {after}; git log --all --format=%s"])
    assert b"# nothing yet" in seen.output and b"prices" not in seen.output and b"the repair" not in seen.output
    backend.close()


def test_a_line_of_the_setup_ends_before_the_tests(tmp_path: Path) -> None:
    """A comment would swallow the tests, which then pass whatever they are; a pipe would lose what it is given."""
    checkout(tmp_path, setup="# what it reads\nprintf 10 | cat > made.txt; cat < made.txt > copy.txt # and why\n")
    [task] = make_source("bugsinpy", workspace="native", all_native=True, **options(tmp_path))
    [command] = task.checks.commands
    tests = command.argv.index("python")
    done = subprocess.run(
        [*command.argv[:tests], "sh", "-c", "cat made.txt copy.txt; exit 3"], cwd=tmp_path, capture_output=True
    )
    assert (done.returncode, done.stdout) == (3, b"1010"), done.stderr
    for part in ("if true; then touch a; fi", "echo 'a\nb'", "cat <<E", "touch a \\"):
        checkout(tmp_path / str(len(part)), setup=part)
        with pytest.raises(TaskError, match=r"setup\.sh has .*, which is not a command by itself"):
            list(make_source("bugsinpy", workspace="native", all_native=True, **options(tmp_path / str(len(part)))))


def test_an_environment_follows_the_list_the_setup_and_the_project(tmp_path: Path) -> None:
    def asked(name: str, **about: str) -> Specification:
        base, _ = checkout(tmp_path / name, **about)
        [task] = make_source("bugsinpy", workspace="native", all_native=True, **options(tmp_path / name))
        return Specification.parse(task.environment.replace(base, "BASE").replace(str(tmp_path / name), "PLACE"))

    frozen = asked("list")
    assert (frozen.python, frozen.workspace) == ("3.8", ""), "not installed: bugs with this list share it"
    assert frozen.frozen == ("pkg-resources-nowhere==0.0.0", "crrl-test-helper==1.0") and not frozen.requirements
    assert asked("released", listed="# of another project\nwares==2.0\nsix==1.15.0\n").frozen == ("six==1.15.0",)
    built = asked("built", listed="", setup="python setup.py install\npip3 install six \n")
    assert (built.requirements, built.workspace) == (("six",), "git:PLACE/clones/o/wares@BASE")
    assert asked("writing", setup_cfg="[scm]\nwrite_to = wares/_version.py\n").workspace, "what it imports is built"
    tox = asked("tox", listed="", run="tox tests/test_total.py\n")
    assert tox.requirements == ("pytest", "crrl-test-helper"), "what the project declares, of any environment"
    assert asked("pinned", listed="pytest==5.4.3\n", run="pytest tests\n").requirements == ()


def test_checks_are_the_bugs_own(tmp_path: Path) -> None:
    base, after = checkout(tmp_path, run="pytest tests/test_total.py\ntox tests/other.py::test\n")
    [task] = make_source("bugsinpy", workspace="native", all_native=True, **options(tmp_path))
    argv = [" ".join(command.argv) for command in task.checks.commands]
    prepared = 'sh -c touch tests/__init__.py </dev/null && exec "$@" sh pytest '
    assert argv == [f"{prepared}tests/test_total.py", f"{prepared}tests/other.py::test"]
    assert [command.results for command in task.checks.commands] == ["pytest", "pytest"]
    assert dict(task.checks.restore) == {
        "tests/test_total.py": TESTS,
        "tests/prices.txt": "10 20 30\n",
        "tests/helping.py": "",
    }
    info = tmp_path / "BugsInPy/projects/wares/bugs/1/bug.info"
    text = info.read_text()
    info.write_text(text.replace("test_total.py", "test_gone.py"))
    with pytest.raises(TaskError, match=r"wares-1: its repaired commit has no tests/test_gone\.py"):
        list(make_source("bugsinpy", workspace="native", all_native=True, **options(tmp_path)))
    info.write_text(text.replace('"3.8.3"', '""'))
    with pytest.raises(TaskError, match="'python_version' is not a version"):
        list(make_source("bugsinpy", workspace="native", all_native=True, **options(tmp_path)))
    assert base != after


def test_only_what_holds_is_taken_unless_all_is_asked_for(tmp_path: Path) -> None:
    checkout(tmp_path)
    with pytest.raises(TaskError, match="no rows"):
        list(make_source("bugsinpy", workspace="native", **options(tmp_path)))
    with pytest.raises(TaskError, match="no rows"):
        list(make_source("bugsinpy", project="thefuck,black", **options(tmp_path)))
    [plain] = make_source("bugsinpy", **options(tmp_path))
    assert not plain.checks and not plain.environment
    (tmp_path / "BugsInPy/projects/wares/bugs/1/setup.sh").write_text("python setup.py build_ext --inplace\n")
    with pytest.raises(TaskError, match="no rows"):
        list(make_source("bugsinpy", workspace="native", all_native=True, **options(tmp_path)))
