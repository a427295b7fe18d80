"""Functions to implement, checked by their docstrings' examples, and one-turn repairs with the code in the prompt."""

from __future__ import annotations

import ast
import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coderepairrl import sandbox, tasks
from coderepairrl.agents.patching import Block, apply_blocks
from coderepairrl.checks.task_source import examine_task_source
from coderepairrl.config import load_config
from coderepairrl.errors import ConfigError, TaskError
from coderepairrl.plan import plan_run
from coderepairrl.tasks.masking import find_functions, is_valid_python
from coderepairrl.tasks.patches import apply_to_text, format_diff
from coderepairrl.tasks.sources.functions import Functions
from coderepairrl.tasks.sources.repair import Repair
from coderepairrl.types import Task
from projects import write
from published import write_rows

RECORDS = Path(__file__).parents[2] / "../shared/data/stack_style"

DOC = """Say how often each thing occurs.

    Args:
        things: what is counted; equal things are one.
    """
GOOD = f'''
@cached
def count(things):
    """{DOC}"""
    found = {{}}
    for thing in things:
        found[thing] = found.get(thing, 0) + 1
    return found
'''
VARIABLES = "".join(f"    v{n} = things\n" for n in range(16))
POOR = {
    "": GOOD,
    "have a docstring of less than 50 characters": GOOD.replace(DOC, "Count.\n\n    Args: things"),
    "have a docstring of one line": GOOD.replace(DOC, DOC.replace("\n", " ")),
    "have a docstring of set phrases": GOOD.replace("Say how", "Gets the number how"),
    "have a docstring with no section and less than 3 sentences": GOOD.replace("Args:", "More of"),
    "are properties": GOOD.replace("@cached", "@property"),
    "are simple": GOOD.replace("    for thing in things:\n        found[thing] = found.get(thing, 0) + 1\n", ""),
    "have SQL in them": GOOD.replace("found = {}", "found = {'query': 'select a\\nfrom b'}"),
    "have more than 15 variables": GOOD.replace("    found = {}\n", f"    found = {{}}\n{VARIABLES}"),
}


@pytest.mark.parametrize(("problem", "source"), POOR.items(), ids=POOR)
def test_functions_that_make_poor_tasks_are_named_with_the_reason(problem: str, source: str) -> None:
    [found] = find_functions(source)
    assert (found.name, found.problem) == ("count", problem)


MODULE = f'''"""A module."""
import functools
{GOOD}

class Box:
    """A box."""

    @staticmethod
    def size(
        side,
    ):
        """{DOC}"""
        return side

    async def close(self):
        """Close."""
'''


@given(st.booleans(), st.booleans())
def test_a_function_is_masked_with_its_decorators(crlf: bool, ended: bool) -> None:
    source = MODULE.replace("\n", "\r\n") if crlf else MODULE
    source = source if ended else source.rstrip()
    found = find_functions(source)
    assert [each.name for each in found] == ["count", "Box.size", "Box.close"]
    for each in found:
        assert each.comment == f"# MASKED: {each.name.split('.')[-1]} function (lines {each.start}-{each.end})"
        masked = each.mask(source)
        assert is_valid_python(masked) == (each.name != "Box")
        lines = source.split("\n")[each.start - 1 : each.end]
        assert masked.split("\n")[each.start - 1].rstrip("\r") == each.comment
        assert each.header.split("\n")[0].startswith(("@cached", "    @staticmethod", "    async def"))
        again = Block("", (each.comment,), tuple(line.rstrip("\r") for line in lines))
        assert apply_blocks(masked.encode(), [again]) == source.encode()


PACKAGE = {
    "pkg/__init__.py": "",
    "pkg/words.py": '''from pkg.letters import upper


def shout(text, times=1):
    """Return the text in capitals, with marks of exclamation.

    Args:
        text: what is shouted.
        times: how many marks.

    >>> shout("no")
    'NO!'
    >>> shout("no", times=...)
    Traceback (most recent call last):
    ...
    TypeError: can't multiply sequence by non-int of type 'ellipsis'
    """
    marks = "!" * times
    if not text:
        return marks
    return upper(text) + marks


cry = shout


def whisper(text):
    """Return the text in small letters; without an example."""
    return text.lower()


def wrong(text):
    """Return the text; with a wrong example.

    >>> wrong("a")
    'b'
    """
    return text


def idle(text):
    """Return the text; with an example that does not call it.

    >>> 1 + 1
    2
    """
    return text
''',
    "pkg/letters.py": "def upper(text):\n    return text.upper()\n",
    "pkg/broken.py": "def f(:\n",
    "tests/test_words.py": "from pkg.words import shout\n",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return write(tmp_path / "project", PACKAGE)


def read_functions(tmp_path: Path, path: Path, **options: Any) -> tuple[Functions, list[Task]]:
    source = Functions(str(path), cache=str(tmp_path / "cache"), **options)
    return source, list(source)


async def test_examples_tell_which_functions_can_be_judged(tmp_path: Path, package: Path, isolating: None) -> None:
    source, [task] = read_functions(tmp_path, package, quality=False)
    assert task.id == "functions/pkg/words.py:shout" and task.kind == "implement"
    assert dict(source.left_out) == {
        "files cannot be parsed": 1,
        "have no examples": 1,
        "have examples that fail": 1,
        "have examples that pass without them": 1,
    }
    workspace = Path(task.workspace.removeprefix("dir:"))
    masked = (workspace / "pkg/words.py").read_text()
    assert "# MASKED: shout function (lines 4-21)\n\n\ncry = shout" in masked and "def shout" not in masked
    assert "def shout(text, times=1):\n" in task.prompt and "marks of exclamation" in task.prompt
    assert "upper(text)" not in task.prompt
    assert (workspace / "tests/test_words.py").exists()
    findings = await examine_task_source(source, sandbox.make_backend(sandbox.choose_backend().name))
    assert [finding for finding in findings if not finding.ok] == []
    assert read_functions(tmp_path, package, quality=False)[1] == [task], "from the cache"


def test_without_examples_similarity_judges(tmp_path: Path, package: Path) -> None:
    _, found = read_functions(tmp_path, package, examples=False, quality=False)
    assert [task.id.rpartition(":")[2] for task in found] == ["shout", "whisper", "wrong", "idle"]
    assert not any(task.checks for task in found)


def test_rows_with_the_columns_of_the_stack_are_read(tmp_path: Path) -> None:
    rows = [
        {"content": MODULE, "max_stars_repo_path": "a.py", "max_stars_repo_name": "o/one"},
        {"content": MODULE, "max_stars_repo_path": "a.py", "max_stars_repo_name": "o/two", "license": "MIT"},
        {"content": GOOD, "path": "b.py"},
        {"content": "def f(:", "path": "c.py"},
    ]
    write_rows(tmp_path / "rows.jsonl", *rows)
    source, found = read_functions(tmp_path, tmp_path / "rows.jsonl", examples=False)
    ids = ["functions/o/one/a.py:count", "functions/o/two/a.py:count", "functions/2/b.py:count"]
    assert [task.id for task in found] == ids
    assert [task.licence for task in found] == ["", "MIT", ""]
    assert source.left_out["files cannot be parsed"] == 1


def test_code_without_usable_functions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="path is empty"):
        Functions("")
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "rows.jsonl").write_text('{"text": "x"}\n')
    for name, says in (("a.py", "no function can be used"), ("gone.py", "gone"), ("rows.jsonl", "no column 'path'")):
        with pytest.raises(TaskError, match=says):
            read_functions(tmp_path, tmp_path / name)


def read_records(name: str) -> list[dict[str, Any]]:
    if not RECORDS.exists():
        pytest.skip("needs the records beside the repository")
    with gzip.open(RECORDS / f"{name}.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


def test_comments_are_those_of_the_original() -> None:
    known = {(row["path"], row["function_name"]): row for row in read_records("function_tasks")}
    for row in read_records("files"):
        for found in find_functions(row["content"]):
            record = known.pop((row["path"], found.name), None)
            if record is not None:
                assert found.comment == record["mask_comment"]
                assert found.docstring == record["docstring"]
                lines = row["content"].split("\n")[found.start - 1 : found.end]
                assert "\n".join(lines) == record["implementation"]
                assert ast.get_docstring(ast.parse(found.header).body[0]) == found.docstring  # type: ignore[arg-type]
    assert known == {}


EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["implement/implement.toml", "implement/incremental.toml", "repair/one_turn.toml"])
def test_the_examples_are_runs(name: str, monkeypatch: pytest.MonkeyPatch, isolating: None) -> None:
    monkeypatch.chdir((EXAMPLES / name).parent)
    plan = plan_run(load_config(Path(name).name, ["tasks.verify=false"]))
    kind = name.partition("/")[0]
    found = [*plan.train_tasks, *(task for some in plan.eval_tasks.values() for task in some)]
    assert {task.kind for task in found} == {kind} and len(plan.train_tasks) >= 4


BEFORE = "".join(f"line {n}\n" for n in range(12))
AFTER = BEFORE.replace("line 5\n", "line five\n")


def make_repairs(tmp_path: Path, *rows: Mapping[str, Any], **options: Any) -> Repair:
    return Repair(write_rows(tmp_path / "rows.jsonl", *rows), cache=str(tmp_path / "cache"), **options)


def make_row(**values: Any) -> dict[str, Any]:
    return {"id": "a", "before": BEFORE, "after": AFTER, "prompt": "Say it in words.", "path": "a/b.txt", **values}


def test_rows_of_code_before_and_after_become_tasks(tmp_path: Path) -> None:
    [task] = make_repairs(tmp_path, make_row())
    assert (task.id, task.kind, task.language) == ("repair/a", "repair", "text")
    assert task.prompt == f"Say it in words.\n\na/b.txt\n```\n{BEFORE}```\n"
    assert (Path(task.workspace.removeprefix("dir:")) / "a/b.txt").read_text() == BEFORE
    assert apply_to_text(BEFORE.encode(), task.reference) == AFTER.encode()
    patch = format_diff("a/b.txt", BEFORE, AFTER).decode()
    [same] = make_repairs(tmp_path, {"id": "a", "before": BEFORE, "patch": patch, "path": "a/b.txt"})
    assert (same.reference, same.workspace) == (task.reference, task.workspace)
    assert same.prompt.startswith("There is a defect in a/b.txt.\n")


def test_the_prompt_may_show_only_lines_around_the_change(tmp_path: Path) -> None:
    [task] = make_repairs(tmp_path, make_row(), context_lines=1)
    assert task.prompt == "Say it in words.\n\na/b.txt\n```\nline 4\nline 5\nline 6\n```\n"
    again = BEFORE.replace("line 4", "line 5").replace("line 6", "line 5")
    [task] = make_repairs(
        tmp_path, make_row(before=again, after=again.replace("line 5\nline 7", "line 6\nline 7")), context_lines=0
    )
    assert "```\nline 5\nline 5\nline 7\n```\n" in task.prompt, "what is shown occurs once"
    [task] = make_repairs(tmp_path, make_row(before="x = '''\n```\n'''\n", after="x = 1\n"))
    assert task.prompt.endswith("````\nx = '''\n```\n'''\n````\n")


def test_repairs_that_cannot_be_tasks_are_counted_by_reason(tmp_path: Path) -> None:
    source = make_repairs(
        tmp_path,
        make_row(),
        make_row(id="b", after=BEFORE),
        make_row(id="c", after=None, patch=format_diff("a/b.txt", "other\n", "text\n").decode()),
        make_row(id="d", before="x\r\ny\r\n", after="x\ny\n"),
        make_row(id="e", before="\udcff\n", after="x\n"),
    )
    assert [task.id for task in source] == ["repair/a"]
    assert dict(source.left_out) == {
        "change nothing": 1,
        "have a patch that does not apply": 1,
        "cannot be written as search/replace blocks": 1,
        "change a file that is not UTF-8": 1,
    }


async def test_tasks_of_another_source_get_their_code_in_the_prompt(isolating: None) -> None:
    source = Repair(source="handmade", options={"split": "train"})
    found = list(source)
    others = {task.id: task for task in tasks.make_source("handmade", split="train")}
    assert found and sum(source.left_out.values()) == len(others) - len(found)
    for task in found:
        other = others[task.id]
        assert task.prompt.startswith(other.prompt.rstrip()) and len(task.prompt) > len(other.prompt)
        assert (task.workspace, task.reference, task.checks) == (other.workspace, other.reference, other.checks)
        assert task.kind == "repair"
    findings = await examine_task_source(source, sandbox.make_backend(sandbox.choose_backend().name), limit=1)
    assert [finding for finding in findings if not finding.ok] == []


@pytest.mark.parametrize("options", [{}, {"path": "x", "source": "handmade"}, {"path": "x", "context_lines": -1}])
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Repair(**options)


def test_half_a_character_in_a_row_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="column 'after' has an unpaired surrogate at 1"):
        make_repairs(tmp_path, make_row(after="x\ud800")).prepare()


def test_repairs_of_an_evaluation_set_are_one(tmp_path: Path) -> None:
    benchmark = {"source": "swe_bench", "options": {"name": "lite", "path": "x"}}
    assert (
        Repair(**benchmark).evaluation_set == tasks.make_source("swe_bench", name="lite", path="x").evaluation_set != ""
    )


_TEXT = st.lists(st.sampled_from(("", "a", "b", "\x0c", "-", "+ x", "\\ No newline at end of file"))).map("\n".join)


@settings(deadline=None)
@given(_TEXT, _TEXT)
def test_patches_apply_only_at_their_lines(old: str, new: str) -> None:
    patch = format_diff("x", old, new)
    assert apply_to_text(old.encode(), patch) == new.encode()
    if old != new and old:
        assert apply_to_text(b"other\n" + old.encode(), patch) in (None, b"other\n" + new.encode())
