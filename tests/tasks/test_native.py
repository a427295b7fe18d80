"""SWE-bench without images: environments by its specifications, tests by its script, verdicts by its harness."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coderepairrl import grading, sandbox
from coderepairrl.environments import Specification
from coderepairrl.errors import ConfigError, TaskError
from coderepairrl.tasks import make_source
from coderepairrl.tasks.rows import Row
from coderepairrl.tasks.sources.swe_bench import NATIVE
from coderepairrl.tasks.sources.swe_bench_native import instance_environment, native_checks, script, specified
from coderepairrl.types import Task

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


def row(base: str = "0" * 40, **values: Any) -> Row:
    """A row of the benchmark's own shape."""
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


def test_a_script_keeps_its_tests_and_loses_its_container() -> None:
    kept = script(row()).splitlines()
    assert kept[:3] == ["#!/bin/bash", "set -uxo pipefail", "git checkout HEAD test_sum.py"]
    assert kept[-4:-1] == [START, "python3 test_sum.py", ": '>>>>> End Test Output'"]
    assert not re.search(r"conda|testbed|pip install|0{40}", "\n".join(kept))
    tox = row(eval_script="tox --current-env -epy39 -v -- tests/test_a.py tests/test_b.py")
    assert script(tox) == "python -X dev -m pytest -rA tests/test_a.py tests/test_b.py"
    assert native_checks(row(), image=True).commands[0].argv[-1] == SCRIPT.format(base="0" * 40), (
        "in its image, as it is"
    )
    assert not native_checks(row(eval_script=None), image=True)


def test_tests_that_ask_a_web_site_are_served_here() -> None:
    asked = row(repo="psf/requests", version="2.3")
    before, _, tests = script(asked).partition(START)
    assert "export HTTPBIN_URL=http://localhost:" in before and "python3 test_sum.py" in tests
    assert "httpbin==0.10.2" in Specification.parse(instance_environment(asked, "https://example.org/r")).requirements
    assert "HTTPBIN" not in script(row())


def test_an_address_that_never_answers_does_not_without_a_network(tmp_path: Path) -> None:
    """A connection to it is neither made nor refused: one that waits for it gives up by itself."""
    (tmp_path / "test_wait.py").write_text("""\
import socket, urllib.parse
address = urllib.parse.urlsplit("http://10.255.255.1")
try:
    socket.create_connection((address.hostname, address.port or 80), timeout=0.2)
except OSError as error:
    print(type(error).__name__)
""")
    asked = row(repo="psf/requests", eval_script=f"#!/bin/bash\n{START}\npython test_wait.py\n")
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", script(asked)], cwd=tmp_path, env=env, stdout=subprocess.PIPE, check=True)
    assert done.stdout == b"TimeoutError\n" and b"127.0.0.1" in (tmp_path / "test_wait.py").read_bytes()


def test_django_has_an_environment_a_version_and_needs_no_locale_of_the_machine() -> None:
    head = "cd /testbed\nsed -i '/en_US.UTF-8/s/^# //g' /etc/locale.gen && locale-gen\nexport LANG=en_US.UTF-8\n"
    text = SCRIPT.replace("cd /testbed\n", head, 1).replace(
        "python -m pip install -e .[test]", "python setup.py install"
    )
    django = {"repo": "django/django", "version": "2.2", "environment_setup_commit": "2" * 40}
    one, other = (row(base, eval_script=text.format(base=base), **django) for base in ("0" * 40, "1" * 40))
    lines = script(one).splitlines()
    assert "export LANG=C.UTF-8" in lines and any(line.startswith("unset PYTHONDONTWRITEBYTECODE") for line in lines)
    assert not re.search(r"/etc/|en_US|setup\.py install", script(one))
    environments = {instance_environment(each, "https://example.org/r") for each in (one, other)}
    [asked] = map(Specification.parse, environments)
    assert (asked.workspace, asked.python) == (f"git:https://example.org/r@{'2' * 40}", "3.6")
    assert asked.files == ("tests/requirements/py3.txt",) and not asked.edits


async def test_the_script_runs_where_its_commit_has_another_name(tmp_path: Path, isolating: None) -> None:
    """The workspace's only commit is not the one that the script names; no patch keeps its own version of a test."""
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "sums.py").write_text("def add(a, b):\n    return a - b\n")
    (folder / "test_sum.py").write_text("# tests\n")
    task = Task("a__b-1", "p", "python", f"dir:{folder}", b"", checks=native_checks(row(), image=False))
    fix = b"--- a/sums.py\n+++ b/sums.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"
    edited = b"--- a/test_sum.py\n+++ b/test_sum.py\n@@ -1 +1 @@\n-# tests\n+print('PASSED test_sum.py::test_add')\n"
    backend = sandbox.make_backend(sandbox.choose().name)
    for patch, resolved in ((fix, True), (b"", False), (edited, False), (edited + fix, True)):
        async with backend.open(task) as box:
            verdict = await grading.grade_patch(box, task, patch)
        assert (not verdict.problem) is resolved, (patch, verdict)
    backend.close()


def test_an_environment_is_what_the_benchmark_specifies() -> None:
    asked = Specification.parse(instance_environment(row(base="1" * 40), "https://example.org/r"))
    assert (asked.workspace, asked.python) == (f"git:https://example.org/r@{'1' * 40}", "3.9"), "of its own commit"
    assert "pluggy==0.13.1" in asked.requirements and asked.before == "2024-12-01" and not asked.extras
    sphinx = Specification.parse(
        instance_environment(row(repo="sphinx-doc/sphinx", version="3.5"), "https://example.org/r")
    )
    assert sphinx.extras == "[test]" and any("Jinja2<3.0" in edit for edit in sphinx.edits)
    assert not any("apt-get" in edit for edit in sphinx.edits)
    pylint = Specification.parse(
        instance_environment(row(repo="pylint-dev/pylint", version="2.15"), "https://example.org/r")
    )
    assert pylint.files == ("requirements_test.txt",)
    about = {"repo": "pydata/xarray", "version": "0.12", "environment_setup_commit": "2" * 40}
    xarray = Specification.parse(instance_environment(row(**about), "https://example.org/r"))
    assert xarray.conda and xarray.conda.workspace == f"git:https://example.org/r@{'2' * 40}"
    for other in (row(repo="scikit-learn/scikit-learn", version="1.3"), row(repo="a/b"), row(version="0.1")):
        assert not specified(other)
        with pytest.raises(TaskError, match="a__b-1 has no specification"):
            instance_environment(other, "https://example.org/r")


def test_only_what_holds_is_taken_unless_all_is_asked_for(tmp_path: Path) -> None:
    def line(name: str, **values: Any) -> str:
        about = {"patch": "", "problem_statement": "p", "created_at": "2024-01-01", **row(**values).values}
        return json.dumps({**about, "instance_id": name}) + "\n"

    path = tmp_path / "rows.jsonl"
    held = sorted(NATIVE)[0]
    path.write_text(line(held) + line("pytest-dev__pytest-0") + line("a__b-2", repo="a/b"))
    there = make_source("swe_bench", path=str(path), workspace="native", clone="https://example.org/{repository}")
    [task] = there
    assert task.id == held and task.environment.startswith("python:") and task.checks
    assert task.workspace == f"git:https://example.org/pytest-dev/pytest@{'0' * 40}"
    every = make_source("swe_bench", path=str(path), workspace="native", all_native=True)
    assert [task.id for task in every] == [held, "pytest-dev__pytest-0"]
    assert [task.environment for task in make_source("swe_bench", path=str(path))] == ["", "", ""]
    with pytest.raises(ConfigError, match="workspace"):
        make_source("swe_bench", path=str(path), workspace="nativ")


def test_a_specification_is_the_same_however_it_is_written(tmp_path: Path) -> None:
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
