"""Benchmarks without images: environments and scripts by their specifications, verdicts by their own harnesses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coderepairrl import grading, sandbox
from coderepairrl.checks.task_source import study_task
from coderepairrl.environments.build import Specification, build_environment
from coderepairrl.errors import ConfigError, TaskError
from coderepairrl.tasks import make_source
from coderepairrl.tasks.prepare import prepare_tasks
from coderepairrl.tasks.rows import Row
from coderepairrl.tasks.sources.swe_bench import NATIVE
from coderepairrl.tasks.sources.swe_bench_native import (
    adapt_script,
    is_specified,
    make_native_checks,
    specify_instance_environment,
)
from coderepairrl.types import Task
from projects import cache, system_python, write
from rewards.folder import DATA
from rewards.folder import git as run_git

START = ": '>>>>> Start Test Output'"
SCRIPT = """#!/bin/bash
set -uxo pipefail
source /opt/miniconda3/bin/activate
conda activate testbed
cd /testbed
git config --global --add safe.directory /testbed
cd /testbed
git status
git show
git -c core.fileMode=false diff {base}
source /opt/miniconda3/bin/activate
conda activate testbed
python -m pip install -e .[test]
git checkout {base} test_sum.py
git apply -v - <<'EOF_114329324912'
--- a/test_sum.py
+++ b/test_sum.py
@@ -1 +1,3 @@
 # tests
+from sums import add
+print("PASSED test_sum.py::test_add" if add(1, 2) == 3 else "FAILED test_sum.py::test_add - no")

EOF_114329324912
: '>>>>> Start Test Output'
python3 test_sum.py
: '>>>>> End Test Output'
git checkout {base} test_sum.py
"""


def make_row(base: str = "0" * 40, **values: Any) -> Row:
    """Make a row with the columns of SWE-bench."""
    about = {
        "instance_id": "a__b-1",
        "repo": "pytest-dev/pytest",
        "version": "7.2",
        "base_commit": base,
        "eval_script": SCRIPT.format(base=base),
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "FAIL_TO_PASS": '["test_sum.py::test_add"]',
        "PASS_TO_PASS": [],
    }
    return Row("swe_bench", "row 1", {**about, **values})


def specify_environment(row: Row, **options: Any) -> Specification:
    return Specification.parse(specify_instance_environment(row, "https://example.org/{repository}", **options))


def test_a_script_keeps_its_tests_and_loses_lines_about_its_container() -> None:
    kept = adapt_script(make_row()).splitlines()
    assert kept[:3] == ["#!/bin/bash", "set -uxo pipefail", "git checkout HEAD test_sum.py"]
    assert kept[-4:-1] == [START, "python3 test_sum.py", ": '>>>>> End Test Output'"]
    assert not re.search(r"conda|testbed|pip install|0{40}", "\n".join(kept))
    tox = make_row(eval_script="tox --current-env -epy39 -v -- tests/test_a.py tests/test_b.py")
    assert adapt_script(tox) == "python -X dev -m pytest -rA tests/test_a.py tests/test_b.py"
    assert make_native_checks(make_row(), image=True).commands[0].argv[-1] == SCRIPT.format(base="0" * 40), (
        "in its image, as it is"
    )
    assert not make_native_checks(make_row(eval_script=None), image=True)


def test_tests_that_use_a_web_site_get_a_local_server() -> None:
    asked = make_row(repo="psf/requests", version="2.3")
    before, _, tests = adapt_script(asked).partition(START)
    assert "export HTTPBIN_URL=http://localhost:" in before and "python3 test_sum.py" in tests
    assert "httpbin==0.10.2" in specify_environment(asked).requirements
    assert "HTTPBIN" not in adapt_script(make_row())


def test_an_address_that_never_answers_times_out_without_a_network_too(tmp_path: Path) -> None:
    """A connection to it is neither made nor refused."""
    (tmp_path / "test_wait.py").write_text("""\
import socket, urllib.parse
address = urllib.parse.urlsplit("http://10.255.255.1")
try:
    socket.create_connection((address.hostname, address.port or 80), timeout=0.2)
except OSError as error:
    print(type(error).__name__)
""")
    asked = make_row(repo="psf/requests", eval_script=f"#!/bin/bash\n{START}\npython test_wait.py\n")
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-c", adapt_script(asked)], cwd=tmp_path, env=env, stdout=subprocess.PIPE, check=True
    )
    assert done.stdout == b"TimeoutError\n" and b"127.0.0.1" in (tmp_path / "test_wait.py").read_bytes()


def test_django_has_an_environment_a_version_and_needs_no_locale_of_the_machine() -> None:
    head = "cd /testbed\nsed -i '/en_US.UTF-8/s/^# //g' /etc/locale.gen && locale-gen\nexport LANG=en_US.UTF-8\n"
    text = SCRIPT.replace("cd /testbed\n", head, 1).replace(
        "python -m pip install -e .[test]", "python setup.py install"
    )
    django = {"repo": "django/django", "version": "2.2", "environment_setup_commit": "2" * 40}
    one, other = (make_row(base, eval_script=text.format(base=base), **django) for base in ("0" * 40, "1" * 40))
    lines = adapt_script(one).splitlines()
    assert "export LANG=C.UTF-8" in lines and any(line.startswith("unset PYTHONDONTWRITEBYTECODE") for line in lines)
    assert not re.search(r"/etc/|en_US|setup\.py install", adapt_script(one))
    environment = specify_environment(one)
    assert environment == specify_environment(other), "of the version's commit"
    assert environment.workspace == f"git:https://example.org/django/django@{'2' * 40}" and environment.python == "3.6"
    assert environment.files == ("tests/requirements/py3.txt",) and not environment.edits


async def test_the_script_runs_in_a_workspace_with_another_commit(tmp_path: Path, isolating: None) -> None:
    """The workspace's only commit is not the one in the script; a patch cannot replace a test."""
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "sums.py").write_text("def add(a, b):\n    return a - b\n")
    (folder / "test_sum.py").write_text("# tests\n")
    task = Task("a__b-1", "p", "python", f"dir:{folder}", b"", checks=make_native_checks(make_row(), image=False))
    fix = FIX.encode()
    edited = b"--- a/test_sum.py\n+++ b/test_sum.py\n@@ -1 +1 @@\n-# tests\n+print('PASSED test_sum.py::test_add')\n"
    backend = sandbox.make_backend(sandbox.choose_backend().name)
    for patch, resolved in ((fix, True), (b"", False), (edited, False), (edited + fix, True)):
        async with backend.open(task) as box:
            verdict = await grading.grade_patch(box, task, patch)
        assert (not verdict.problem) is resolved, (patch, verdict)
    backend.close()


def test_an_environment_is_what_the_benchmark_specifies() -> None:
    pytest_7 = specify_environment(make_row(base="1" * 40))
    assert pytest_7.workspace == f"git:https://example.org/pytest-dev/pytest@{'1' * 40}" and pytest_7.python == "3.9"
    assert "pluggy==0.13.1" in pytest_7.requirements and pytest_7.before == "2024-12-01" and not pytest_7.extras
    newest = specify_environment(make_row(), newest=True)
    assert "pluggy" in newest.requirements and not any("==" in each for each in newest.requirements)
    assert not newest.before and newest.folder != pytest_7.folder, "built beside what the benchmark specifies"
    sphinx = specify_environment(make_row(repo="sphinx-doc/sphinx", version="3.5"))
    assert sphinx.extras == "[test]" and any("Jinja2<3.0" in edit for edit in sphinx.edits)
    assert not any("apt-get" in edit for edit in sphinx.edits)
    pylint = specify_environment(make_row(repo="pylint-dev/pylint", version="2.15"))
    assert pylint.files == ("requirements_test.txt",)
    xarray = specify_environment(make_row(repo="pydata/xarray", version="0.12", environment_setup_commit="2" * 40))
    assert xarray.conda and xarray.conda.workspace == f"git:https://example.org/pydata/xarray@{'2' * 40}"
    for other in (make_row(repo="a/b"), make_row(version="0.1")):
        assert not is_specified(other)
        with pytest.raises(TaskError, match="a__b-1 has no specification"):
            specify_environment(other)


def test_compiled_projects_are_built_with_what_stays_for_agents() -> None:
    """Without packages that have no wheel; matplotlib with the FreeType that drew its expected images."""
    learn = specify_environment(make_row(repo="scikit-learn/scikit-learn", version="1.3"))
    assert {"numpy==1.19.3", "cython==3.0.10", "joblib"} < set(learn.requirements)
    assert "numpy==1.19.2" not in learn.requirements and learn.programs == ("gcc", "g++") and not learn.sources
    assert learn.install.endswith("pip install --no-build-isolation .") and not learn.version
    plots = specify_environment(make_row(repo="matplotlib/matplotlib", version="3.6"))
    assert plots.sources["build/qhull-2020.2"].startswith("git:https://example.org/qhull/qhull@613debea")
    assert not plots.conda and not plots.edits and "ghostscript" not in plots.requirements and "gs" in plots.programs
    assert "make -j 4 -C build/freetype-2.6.1" in plots.install and "VERSION=3.6.0.dev0" in plots.install
    stars = specify_environment(make_row(repo="astropy/astropy", version="5.2"))
    assert stars.install.endswith(" .[test]") and not stars.extras and "extension-helpers" in stars.requirements


MIRRORS = os.environ.get("CRRL_TEST_MIRRORS", "")
COMPILED = (
    "astropy__astropy-8707",
    "astropy__astropy-12907",
    "matplotlib__matplotlib-20676",
    "matplotlib__matplotlib-24637",
    "scikit-learn__scikit-learn-14141",
    "scikit-learn__scikit-learn-25747",
)
"""One for each kind of recipe, with the fewest tests."""


@pytest.mark.by_hand
@pytest.mark.timeout(4 * 3600)
@pytest.mark.skipif(not MIRRORS, reason="set CRRL_TEST_MIRRORS to a folder of repositories OWNER/NAME")
@pytest.mark.parametrize("instance", COMPILED)
async def test_a_compiled_project_is_built_and_judged(instance: str) -> None:
    options = {"path": str(DATA / "swebench/swebench_verified.jsonl.gz"), "clone": f"{MIRRORS}/{{repository}}"}
    source = make_source("swe_bench", workspace="native", all_native=True, **options)
    [task] = [each for each in source if each.id == instance]
    await build_environment(Specification.parse(task.environment))
    backend = sandbox.make_backend("bwrap", memory=4 << 30, tmp_bytes=2 << 30)
    for patch, resolved in ((task.reference, True), (b"", False)):
        async with backend.open(task) as box:
            verdict = await grading.grade_patch(box, task, patch)
        assert (not verdict.problem) is resolved, verdict
    backend.close()


def test_only_valid_instances_are_taken_unless_all_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def line(name: str, **values: Any) -> str:
        about = {"patch": "", "problem_statement": "p", "created_at": "2024-01-01", **make_row(**values).values}
        return json.dumps({**about, "instance_id": name}) + "\n"

    path = tmp_path / "rows.jsonl"
    valid = sorted(NATIVE)[0]
    path.write_text(line(valid) + line("pytest-dev__pytest-0") + line("a__b-2", repo="a/b"))
    [task] = make_source("swe_bench", path=str(path), workspace="native", clone="https://example.org/{repository}")
    assert task.id == valid and task.environment.startswith("python:") and task.checks
    assert task.workspace == f"git:https://example.org/pytest-dev/pytest@{'0' * 40}"
    every = make_source("swe_bench", path=str(path), workspace="native", all_native=True)
    assert [task.id for task in every] == [valid, "pytest-dev__pytest-0"]
    assert "no environment for them (workspace=image has them): a__b-2" in caplog.text
    assert [task.environment for task in make_source("swe_bench", path=str(path))] == ["", "", ""]
    [newest] = make_source("swe_bench", path=str(path), workspace="native", newest=True)
    assert newest.environment not in ("", task.environment) and newest.checks == task.checks
    for wrong in ({"workspace": "nativ"}, {"newest": True}):
        with pytest.raises(ConfigError, match="workspace|needs an environment built here"):
            make_source("swe_bench", path=str(path), **wrong)


def test_specifications_are_normalised(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    asked = Specification(workspace=f"dir:{tmp_path}", python="3.9")
    spaced = 'python: {"python": "3.9", "extras": "", "workspace": "dir:' + str(tmp_path) + '"}'
    about = {"id": "t", "prompt": "p", "language": "python", "workspace": f"dir:{tmp_path}", "environment": spaced}
    path.write_text(json.dumps(about) + "\n")
    [task] = make_source("jsonl", path=str(path))
    assert task.environment == str(asked)
    path.write_text(json.dumps(about | {"environment": 'python:{"pyton": "3.9"}'}) + "\n")
    with pytest.raises(TaskError, match="environment"):
        list(make_source("jsonl", path=str(path)))


CONSTANTS = """\
MAP_REPO_VERSION_TO_SPECS = {
    "shop/shop": {"1.0": {
        "python": "3.9", "install": "make init", "test_cmd": "python3", "eval_commands": ["export GREETING=hello"],
        "pre_install": ["apt-get -y update && apt-get install -y cmake", "sed -i s/a/b/ Makefile"],
    }},
    "python/mypy": {"1.7": {"python": "3.12", "install": "pip install -e .", "test_cmd": "pytest -rA -k"}},
    "dask/dask": {"2.0": {
        "install": "pip install --no-deps -e .", "test_cmd": "pytest", "packages": "environment.yml",
        "env_patches": ["sed -i /pip/d environment.yml"],
    }},
    "bokeh/bokeh": {"3.0": {"python": "3.10", "install": "npm ci", "test_cmd": "pytest"}},
    "pydantic/pydantic": {"2.0": {"python": "3.8", "install": "pip install .", "test_cmd": "pytest"}},
}
MAP_REPO_TO_REQS_PATHS = {}
MAP_REPO_TO_ENV_YML_PATHS = {"dask/dask": ["ci/environment.yaml"]}
"""
TEST_PATCH = """\
diff --git a/test_sums.py b/test_sums.py
--- a/test_sums.py
+++ b/test_sums.py
@@ -1 +1,4 @@
 # tests
+import os
+from sums import add
+print("PASSED" if add(1, 2) == 3 and os.environ["GREETING"] else "FAILED", "test_sums.py::test_add")
diff --git a/data.json b/data.json
new file mode 100644
--- /dev/null
+++ b/data.json
@@ -0,0 +1 @@
+{}
"""
FIX = "--- a/sums.py\n+++ b/sums.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"


def make_gym_tasks(folder: Path, constants: str = CONSTANTS, **values: Any) -> list[Task]:
    """Make the tasks of one row of SWE-Gym."""
    about = {"instance_id": "shop__shop-1", "repo": "Shop/shop", "version": "1.0", "base_commit": "1" * 40}
    about |= {"patch": FIX, "test_patch": TEST_PATCH, "problem_statement": "p", "created_at": "2024-01-01"}
    about |= {"FAIL_TO_PASS": ["test_sums.py::test_add"], "PASS_TO_PASS": []}
    (folder / "rows.jsonl").write_text(json.dumps(about | values) + "\n")
    (folder / "constants.py").write_text(constants)
    options = {"specifications": str(folder / "constants.py"), "clone": "https://example.org/{repository}"}
    return list(make_source("swe_gym", path=str(folder / "rows.jsonl"), workspace="native", **options))


def test_environments_and_commands_follow_the_specifications(tmp_path: Path) -> None:
    [task] = make_gym_tasks(tmp_path)
    asked = Specification.parse(task.environment)
    assert asked.workspace == f"git:https://example.org/Shop/shop@{'1' * 40}" == task.workspace
    assert (asked.python, asked.install) == ("3.9", "sed -i s/a/b/ Makefile\nmake init"), "nothing of apt-get"
    assert "\npython3 test_sums.py\n" in task.checks.commands[0].argv[-1], "data is not a test"
    cases = "diff --git a/x.test b/x.test\n--- a/x.test\n+++ b/x.test\n@@ -1 +1,2 @@\n [case testA]\n+[case testB]\n"
    [mypy] = make_gym_tasks(tmp_path, repo="python/mypy", version="1.7", test_patch=cases)
    assert '\npytest -rA -k "testA or testB"\n' in mypy.checks.commands[0].argv[-1]
    with pytest.raises(TaskError, match="no column 'PASS_TO_PASS'"):
        make_gym_tasks(tmp_path, PASS_TO_PASS=None)
    [dask] = make_gym_tasks(tmp_path, repo="dask/dask", version="2.0")
    conda = Specification.parse(dask.environment).conda
    assert conda and (conda.paths, conda.edits) == (("ci/environment.yaml",), ("sed -i /pip/d environment.yml",))


@pytest.mark.parametrize(
    ("repository", "version"),
    [("a/b", "1.0"), ("shop/shop", "9"), ("bokeh/bokeh", "3.0"), ("pydantic/pydantic", "2.0")],
)
def test_issues_that_need_more_than_packages_are_left_out(tmp_path: Path, repository: str, version: str) -> None:
    with pytest.raises(TaskError, match="no rows"):
        make_gym_tasks(tmp_path, repo=repository, version=version)


def test_a_missing_or_broken_file_of_specifications_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="specifications"):
        make_source("swe_gym", path="rows.jsonl", workspace="native")
    with pytest.raises(ConfigError, match="no specifications of environments can be read"):
        make_gym_tasks(tmp_path, constants="1 / 0")


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
    return run_git(folder, *words).decode().strip()


def make_checkout(
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


def load_bugs(folder: Path, **options: Any) -> list[Task]:
    """Load the bugs of `make_checkout` with native environments, unless `options` say otherwise."""
    native = {"workspace": "native", "all_native": True} | options
    place = {"path": str(folder / "BugsInPy"), "clone": f"{folder}/clones/{{repository}}"}
    return list(make_source("bugsinpy", **native, **place))


async def test_the_reference_passes_tests_that_no_agent_sees(cache: Path, tmp_path: Path, isolating: None) -> None:
    _, after = make_checkout(tmp_path, system_python())
    [task] = load_bugs(tmp_path, project="wares")
    made = await prepare_tasks([task])
    assert made.environments[0].left_out == ("pkg-resources-nowhere==0.0.0",)
    (tmp_path / "clones").rename(tmp_path / "gone")  # from here on, only what was prepared
    [again] = load_bugs(tmp_path)
    assert again == task
    backend = sandbox.make_backend(sandbox.choose_backend().name)
    found = await study_task(task, backend)
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
    """A comment would swallow the tests, so that they always pass; a pipe would take their input."""
    make_checkout(tmp_path, setup="# what it reads\nprintf 10 | cat > made.txt; cat < made.txt > copy.txt # and why\n")
    [task] = load_bugs(tmp_path)
    [command] = task.checks.commands
    tests = command.argv.index("python")
    done = subprocess.run(
        [*command.argv[:tests], "sh", "-c", "cat made.txt copy.txt; exit 3"], cwd=tmp_path, capture_output=True
    )
    assert (done.returncode, done.stdout) == (3, b"1010"), done.stderr
    for part in ("if true; then touch a; fi", "echo 'a\nb'", "cat <<E", "touch a \\"):
        make_checkout(tmp_path / str(len(part)), setup=part)
        with pytest.raises(TaskError, match=r"setup\.sh has .*, which is not a command by itself"):
            load_bugs(tmp_path / str(len(part)))


def test_an_environment_follows_requirements_setup_and_project(tmp_path: Path) -> None:
    def specify(name: str, **about: str) -> Specification:
        base, _ = make_checkout(tmp_path / name, **about)
        [task] = load_bugs(tmp_path / name)
        return Specification.parse(task.environment.replace(base, "BASE").replace(str(tmp_path / name), "PLACE"))

    frozen = specify("list")
    assert (frozen.python, frozen.workspace) == ("3.8", ""), "not installed: bugs with this list share it"
    assert frozen.frozen == ("pkg-resources-nowhere==0.0.0", "crrl-test-helper==1.0") and not frozen.requirements
    assert specify("released", listed="# of another project\nwares==2.0\nsix==1.15.0\n").frozen == ("six==1.15.0",)
    built = specify("built", listed="", setup="python setup.py install\npip3 install six \n")
    assert (built.requirements, built.workspace) == (("six",), "git:PLACE/clones/o/wares@BASE")
    assert specify("writing", setup_cfg="[scm]\nwrite_to = wares/_version.py\n").workspace, "what it imports is built"
    tox = specify("tox", listed="", run="tox tests/test_total.py\n")
    assert tox.requirements == ("pytest", "crrl-test-helper"), "what the project declares, of any environment"
    assert specify("pinned", listed="pytest==5.4.3\n", run="pytest tests\n").requirements == ()


def test_checks_are_those_of_the_bug(tmp_path: Path) -> None:
    base, after = make_checkout(tmp_path, run="pytest tests/test_total.py\ntox tests/other.py::test\n")
    [task] = load_bugs(tmp_path)
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
        load_bugs(tmp_path)
    info.write_text(text.replace('"3.8.3"', '""'))
    with pytest.raises(TaskError, match="'python_version' is not a version"):
        load_bugs(tmp_path)
    assert base != after


def test_only_valid_bugs_are_taken_unless_all_are(tmp_path: Path) -> None:
    make_checkout(tmp_path)
    with pytest.raises(TaskError, match="no rows"):
        load_bugs(tmp_path, all_native=False)
    with pytest.raises(TaskError, match="no rows"):
        load_bugs(tmp_path, project="thefuck,black")
    [plain] = load_bugs(tmp_path, workspace="git")
    assert not plain.checks and not plain.environment
    (tmp_path / "BugsInPy/projects/wares/bugs/1/setup.sh").write_text("python setup.py build_ext --inplace\n")
    with pytest.raises(TaskError, match="no rows"):
        load_bugs(tmp_path)
