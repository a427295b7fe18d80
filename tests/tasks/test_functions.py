"""`find_functions`: specified functions, masked as the original masks them, judged by their own examples."""

from __future__ import annotations

import ast
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coderepairrl import sandbox
from coderepairrl.agents.patching import Block, apply_blocks
from coderepairrl.checks.task_source import examine_task_source
from coderepairrl.config import load_config
from coderepairrl.errors import ConfigError, TaskError
from coderepairrl.plan import plan_run
from coderepairrl.tasks.masking import find_functions, is_valid_python
from coderepairrl.tasks.sources.functions import Functions
from coderepairrl.types import Task

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
def test_which_functions_make_good_tasks(problem: str, source: str) -> None:
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
def test_what_is_masked_is_the_function_with_its_decorators(crlf: bool, ended: bool) -> None:
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
    """Return the text in small letters. Nothing else is changed. It has no example.

    The second paragraph.
    """
    small = text.lower()
    for mark in "!?":
        small = small.replace(mark, "")
    return small


def wrong(text):
    """Return the text as it is, whatever it is. Its example is wrong. It is left out.

    >>> wrong("a")
    'b'
    """
    kept = text
    if not kept:
        return text
    return kept


def idle(text):
    """Return the text as it is, whatever it is. Its example does not call it. It is left out.

    >>> 1 + 1
    2
    """
    kept = text
    if not kept:
        return text
    return kept
''',
    "pkg/letters.py": "def upper(text):\n    return text.upper()\n",
    "pkg/broken.py": "def f(:\n",
    "tests/test_words.py": "from pkg.words import shout\n",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in PACKAGE.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "project"


def made(tmp_path: Path, path: Path, **options: Any) -> tuple[Functions, list[Task]]:
    source = Functions(str(path), cache=str(tmp_path / "cache"), **options)
    return source, list(source)


async def test_examples_tell_which_functions_can_be_judged(tmp_path: Path, package: Path, isolating: None) -> None:
    source, [task] = made(tmp_path, package)
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
    findings = await examine_task_source(source, sandbox.make_backend(sandbox.choose().name))
    assert [finding for finding in findings if not finding.ok] == []
    assert list(Functions(str(package), cache=str(tmp_path / "cache"))) == [task]


def test_without_examples_similarity_judges(tmp_path: Path, package: Path) -> None:
    _, found = made(tmp_path, package, examples=False)
    assert [task.id.rpartition(":")[2] for task in found] == ["shout", "whisper", "wrong", "idle"]
    assert not any(task.checks for task in found)


def test_rows_as_the_stack_has_them(tmp_path: Path) -> None:
    rows = [
        {"content": MODULE, "max_stars_repo_path": "a.py", "max_stars_repo_name": "o/one"},
        {"content": MODULE, "max_stars_repo_path": "a.py", "max_stars_repo_name": "o/two", "license": "MIT"},
        {"content": GOOD, "path": "b.py"},
        {"content": "def f(:", "path": "c.py"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    source, found = made(tmp_path, path, examples=False)
    ids = ["functions/o/one/a.py:count", "functions/o/two/a.py:count", "functions/2/b.py:count"]
    assert [task.id for task in found] == ids
    assert [task.licence for task in found] == ["", "MIT", ""]
    assert source.left_out["files cannot be parsed"] == 1


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="path is empty"):
        Functions("")
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "rows.jsonl").write_text('{"text": "x"}\n')
    for name, says in (("a.py", "no function can be used"), ("gone.py", "gone"), ("rows.jsonl", "no column 'path'")):
        with pytest.raises(TaskError, match=says):
            made(tmp_path, tmp_path / name)


def records() -> list[dict[str, Any]]:
    if not RECORDS.exists():
        pytest.skip("needs the records beside the repository")
    with gzip.open(RECORDS / "function_tasks.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


def files(tmp_path: Path, *only: str) -> Path:
    """The files of the records, of these packages, and what two packages lack there to be imported."""
    with gzip.open(RECORDS / "files.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    rows = [row | {"package": "inflection.py"} if row["path"] == "inflection.py" else row for row in rows]
    rows += [
        {"package": "toolz", "path": "toolz/utils.py", "content": "no_default = '__no__default__'\n"},
        {
            "package": "more_itertools",
            "path": "more_itertools/__init__.py",
            "content": "from .more import *\nfrom .recipes import *\n",
        },
    ]
    path = tmp_path / "files.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows if not only or row["package"] in only))
    return path


def test_comments_are_those_of_the_original(tmp_path: Path) -> None:
    known = {(row["path"], row["function_name"]): row for row in records()}
    for row in map(json.loads, files(tmp_path).read_text().splitlines()):
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


EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["implement/implement.toml", "implement/incremental.toml", "repair/one_turn.toml"])
def test_the_examples_are_runs(name: str, monkeypatch: pytest.MonkeyPatch, isolating: None) -> None:
    monkeypatch.chdir((EXAMPLES / name).parent)
    plan = plan_run(load_config(Path(name).name, ["tasks.verify=false"]))
    kind = name.partition("/")[0]
    found = [*plan.train_tasks, *(task for some in plan.eval_tasks.values() for task in some)]
    assert {task.kind for task in found} == {kind} and len(plan.train_tasks) >= 4
