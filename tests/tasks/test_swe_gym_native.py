"""SWE-Gym without images: environments and tests by its own specifications, verdicts by the harness of SWE-bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coderepairrl.environments import Specification
from coderepairrl.errors import ConfigError, TaskError
from coderepairrl.tasks import make_source
from coderepairrl.types import Task

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


def made(folder: Path, constants: str = CONSTANTS, **values: Any) -> list[Task]:
    """The tasks of one row."""
    about = {"instance_id": "shop__shop-1", "repo": "Shop/shop", "version": "1.0", "base_commit": "1" * 40}
    about |= {"patch": FIX, "test_patch": TEST_PATCH, "problem_statement": "p", "created_at": "2024-01-01"}
    about |= {"FAIL_TO_PASS": ["test_sums.py::test_add"], "PASS_TO_PASS": []}
    (folder / "rows.jsonl").write_text(json.dumps(about | values) + "\n")
    (folder / "constants.py").write_text(constants)
    options = {"specifications": str(folder / "constants.py"), "clone": "https://example.org/{repository}"}
    return list(make_source("swe_gym", path=str(folder / "rows.jsonl"), workspace="native", **options))


def test_environments_and_commands_are_those_of_the_specifications(tmp_path: Path) -> None:
    [task] = made(tmp_path)
    asked = Specification.parse(task.environment)
    assert asked.workspace == f"git:https://example.org/Shop/shop@{'1' * 40}" == task.workspace
    assert (asked.python, asked.install) == ("3.9", "sed -i s/a/b/ Makefile\nmake init"), "nothing of apt-get"
    assert "\npython3 test_sums.py\n" in task.checks.commands[0].argv[-1], "data is not a test"
    cases = "diff --git a/x.test b/x.test\n--- a/x.test\n+++ b/x.test\n@@ -1 +1,2 @@\n [case testA]\n+[case testB]\n"
    [mypy] = made(tmp_path, repo="python/mypy", version="1.7", test_patch=cases)
    assert '\npytest -rA -k "testA or testB"\n' in mypy.checks.commands[0].argv[-1]
    with pytest.raises(TaskError, match="no column 'PASS_TO_PASS'"):
        made(tmp_path, PASS_TO_PASS=None)
    [dask] = made(tmp_path, repo="dask/dask", version="2.0")
    conda = Specification.parse(dask.environment).conda
    assert conda and (conda.paths, conda.edits) == (("ci/environment.yaml",), ("sed -i /pip/d environment.yml",))


@pytest.mark.parametrize(
    ("repository", "version"),
    [("a/b", "1.0"), ("shop/shop", "9"), ("bokeh/bokeh", "3.0"), ("pydantic/pydantic", "2.0")],
)
def test_what_takes_more_than_packages_is_left_out(tmp_path: Path, repository: str, version: str) -> None:
    with pytest.raises(TaskError, match="no rows"):
        made(tmp_path, repo=repository, version=version)


def test_the_file_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="specifications"):
        make_source("swe_gym", path="rows.jsonl", workspace="native")
    with pytest.raises(ConfigError, match="no specifications of environments can be read"):
        made(tmp_path, constants="1 / 0")
