"""Bugs in a package: its tests get the environment that they need; missing needs are named with a fix."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from coderepairrl import sandbox
from coderepairrl.checks.task_source import study_task
from coderepairrl.errors import TaskError
from coderepairrl.processes.caches import environment_folder
from coderepairrl.tasks import JsonlSource, write_jsonl
from coderepairrl.tasks.mutants.package_tasks import find_bugs
from coderepairrl.tasks.mutants.source import MutantSource
from needs import skip_without_prerequisites
from projects import SHOP, cache, write

__all__ = ["cache"]


async def test_a_published_package_works_with_the_defaults(cache: Path, tmp_path: Path, isolating: None) -> None:
    """With a src layout, options of a missing plugin, a test dependency, and a file that only the build makes."""
    with skip_without_prerequisites():
        made = list(MutantSource(str(write(tmp_path / "shop", SHOP)), n=4))
    assert sorted(task.split for task in made) == ["test", "train", "train", "train"]
    assert {task.id.split(":")[0] for task in made} == {"mutants/src/shop/cart.py"}, "only what the project installs"
    write_jsonl(made, tmp_path / "bugs.jsonl")
    exported = list(JsonlSource(tmp_path / "bugs.jsonl"))
    assert exported == made
    backend = sandbox.make_backend(sandbox.choose_backend().name)
    assert all(task.checks.named for task in exported)
    for task in exported[:2]:
        found = await study_task(task, backend)
        assert all(check.ok for check in found.findings), found.findings
    folder = str(environment_folder(made[0].environment))
    async with backend.open(made[0]) as box:
        assert (await box.exec(["python3", "-c", "import sys; print(sys.prefix)"])).output.decode().strip() == folder
        assert not (await box.exec(["touch", f"{folder}/mine"])).ok
    alone = [f"{folder}/bin/python3", "-c", "import crrl_test_helper, shop"]
    assert b"No module named 'shop'" in subprocess.run(alone, capture_output=True, cwd="/", check=False).stderr
    assert list(MutantSource(str(tmp_path / "shop"), n=4)) == made
    assert len(list((cache / "environments").glob("*/environment.json"))) == 1


def test_a_package_without_declared_needs_gets_no_environment(cache: Path, tmp_path: Path, isolating: None) -> None:
    """No package index is reached."""
    files = {
        "src/cart.py": SHOP["src/shop/cart.py"],
        "test_cart.py": "from cart import cheap\n\nassert cheap(1, 2) and not cheap(2, 2)\n",
    }
    made = list(MutantSource(str(write(tmp_path / "plain", files)), n=1, command="python3 test_cart.py", only="src/*"))
    assert [task.environment for task in made] == [""]
    assert made[0].checks.commands[0].argv == ("env", "PYTHONPATH=src", "python3", "test_cart.py")
    assert not (cache / "environments").exists()


CART = {"cart.py": SHOP["src/shop/cart.py"]}
PASSES = "from cart import cheap\n\n\ndef test_cheap():\n    assert cheap(1, 2) and not cheap(2, 2)\n"


def test_tests_that_find_bugs_see_nothing_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolating: None
) -> None:
    """Neither environment variables, such as a login for the package index, nor files, nor a network."""
    monkeypatch.setenv("UV_INDEX_MINE_PASSWORD", "in the environment")
    secret = write(tmp_path, {"secret": "in a file"}) / "secret"
    look = f"""\
import os, socket

seen = [os.getenv("UV_INDEX_MINE_PASSWORD"), os.path.exists({str(secret)!r}), socket.if_nameindex()[1:]]
if any(seen):
    raise SystemExit(f"seen: {{seen}}")
from cart import cheap

assert cheap(1, 2) and not cheap(2, 2)
"""
    options = {"command": "python3 test_cart.py", "cache": str(tmp_path / "cache")}
    root = write(tmp_path / "curious", {**CART, "test_cart.py": look})
    assert len(list(MutantSource(str(root), n=1, **options))) == 1  # type: ignore[arg-type]


def test_a_legacy_build_names_its_bound_of_setuptools(cache: Path, tmp_path: Path, isolating: None) -> None:
    setup = "import pkg_resources\nfrom setuptools import setup\nsetup(name='legacy', py_modules=['cart'])\n"
    root = write(tmp_path / "legacy", {**CART, "test_cart.py": PASSES, "setup.py": setup})
    with skip_without_prerequisites(), pytest.raises(TaskError) as caught:
        list(MutantSource(str(root), n=1))
    assert "setuptools<81" in caught.value.fix
    assert len(list(MutantSource(str(root), n=1, requirements="setuptools<81"))) == 1


LOCAL = {"environment": False, "sandbox": "unsafe-local"}
"""Options for tests with the pytest that runs this."""
HERE = f"env PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 {sys.executable} -m pytest -x -q -p no:cacheprovider"


@pytest.mark.parametrize(
    ("files", "problem", "fix"),
    [
        ({"test_a.py": "import freezegum\n"}, "fail before any bug", "requirements=freezegum"),
        ({"test_a.py": "def test(mocker):\n    pass\n"}, "fail before any bug", "the fixture 'mocker'.*requirements="),
        ({"pytest.ini": "[pytest]\naddopts = --cov=cart\n"}, "fail before any bug", "'--cov=cart'.*requirements="),
        ({"pytest.ini": "[pytest]\nrequired_plugins = pytest-x\n"}, "fail before any bug", "'pytest-x'.*requirements="),
        ({"test_cart.py": ""}, "there are no tests", "repository"),
    ],
)
def test_failing_tests_are_named_with_their_fix(files: dict[str, str], problem: str, fix: str, tmp_path: Path) -> None:
    root = write(tmp_path / "package", {**CART, "test_cart.py": PASSES, **files})
    with pytest.raises(TaskError, match=problem) as caught:
        list(MutantSource(str(root), n=1, command=HERE, cache=str(tmp_path / "cache"), **LOCAL))  # type: ignore[arg-type]
    assert re.search(fix, caught.value.fix), caught.value.fix


async def test_a_few_tests_that_always_fail_are_left_out_by_default(tmp_path: Path) -> None:
    files = {"cart.py": CART["cart.py"], "test_cart.py": f"{PASSES}\n\ndef test_version():\n    assert cheap(2, 1)\n"}
    options = {"only": "*", "seed": 0, "timeout": 20.0, "most": 1, "leave_out": True}
    contents = {name: text.encode() for name, text in files.items()}
    backend = sandbox.make_backend("unsafe-local")
    [bug] = await find_bugs(contents, shlex.split(HERE), backend, **options)  # type: ignore[arg-type]
    assert bug.command == (*shlex.split(HERE), "--deselect=test_cart.py::test_version")
    assert bug.fail_to_pass == ("test_cart.py::test_cheap",)
    contents["test_cart.py"] += b"\n\ndef test_both():\n    assert cheap(3, 1)\n"
    with pytest.raises(TaskError, match="fail before any bug"):  # more fail than pass
        await find_bugs(contents, shlex.split(HERE), backend, **options)  # type: ignore[arg-type]
