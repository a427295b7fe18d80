"""Whole files and functions in fences: the reference written in a format makes the reference's patch, and replies as
small models write them are read."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nano_play import FILES, Outcome, play

from coderepairrl.agents.agentless import apply_in_memory
from coderepairrl.agents.direct import read_edits
from coderepairrl.agents.fences import (
    FORMATS,
    Format,
    Unreadable,
    express_as_edit,
    format_reply,
    group_by_file,
    parse_fences,
    replace_functions,
    replace_functions_by_block,
    replace_whole_file,
)
from coderepairrl.agents.patching import Ambiguous, Inexpressible, replace_lines, replace_once
from coderepairrl.agents.scripted import Answer
from coderepairrl.printable import fence_code
from coderepairrl.tasks.mutants.corpus_tasks import load_mutants, make_exercise
from coderepairrl.tasks.mutants.mutations import list_mutations
from coderepairrl.tasks.patches import apply_to_text
from folder_sandbox import FolderSandbox
from rewards.folder import DATA, read_data_rows

_LINES = st.sampled_from(("", "x", "    x", "# a", "```", "````py", "~~~", "x\x0c\x85", "é"))
ADD = {"add.py": FILES["add.py"]}


async def direct(folder: Path, text: str, form: Format, files: dict[str, bytes] = FILES, **more: Any) -> Outcome:
    return await play(folder, Answer(text), agent="direct", format=form, files=files, **more)


def load_repairs() -> Iterator[tuple[str, bytes, bytes]]:
    """Broken files and what they should be, by id: a mutant of each function of HumanEval and of the corpus,
    QuixBugs."""
    for row in read_data_rows("humaneval/HumanEval.jsonl.gz"):
        fixed = row["prompt"] + row["canonical_solution"]
        mutation = random.Random(row["task_id"]).choice(list_mutations(fixed))
        yield row["task_id"], mutation.apply(fixed).encode(), fixed.encode()
    for line in (DATA / "quixbugs/quixbugs_python.jsonl").read_text().splitlines():
        row = json.loads(line)
        before = row["files"][row["buggy_file"]].encode()
        after = apply_to_text(before, row["patch"].encode())
        assert after is not None
        yield row["instance_id"], before, after
    yield from load_corpus_repairs()


def load_corpus_repairs(most: int = 1000) -> Iterator[tuple[str, bytes, bytes]]:
    for _, mutant in zip(range(most), {each.function.key: each for each in load_mutants()}.values(), strict=False):
        made = make_exercise(mutant, random.Random(0), quoted=False)
        assert made is not None
        yield mutant.key, made.files[made.path].encode(), made.fixed.encode()


async def list_changes_not_made(folder: Path, form: Format, changes: list[tuple[str, bytes, bytes]]) -> list[str]:
    """Ids of the changes that the replies of `format_reply` do not make."""
    (root := folder / "repo").mkdir(parents=True)
    sandbox = FolderSandbox(root, {f"{number}.py": before for number, (_, before, _) in enumerate(changes)})
    there = [f"{number}.py" for number in range(len(changes))]
    wrong = []
    for path, (task, before, after) in zip(there, changes, strict=True):
        try:
            reply = f"The repair:\n\n{format_reply(form, path, before, after)}\nThat is all."
        except Inexpressible:
            wrong.append(task)
            continue
        found = await apply_in_memory(sandbox, await read_edits(form, reply, sandbox, there, there, cut_off=False))
        wrong += [] if found is not None and found.files == {path: after} else [task]
    return wrong


@pytest.mark.parametrize("form", FORMATS)
async def test_the_reference_in_a_format_makes_its_patch(tmp_path: Path, form: Format) -> None:
    changes = list(load_corpus_repairs(12))
    changes += [(f"{task}, CRLF", *(text.replace(b"\n", b"\r\n") for text in texts)) for task, *texts in changes[:3]]
    assert await list_changes_not_made(tmp_path, form, changes) == []


@pytest.mark.real
@pytest.mark.parametrize("form", FORMATS)
async def test_the_reference_of_three_hundred_tasks_makes_its_patch(tmp_path: Path, form: Format) -> None:
    changes = list(load_repairs())
    comments = ["quixbugs-python__possible_change"] if form == "function" else []  # also above the function
    assert len(changes) > 300 and await list_changes_not_made(tmp_path, form, changes) == comments


METHODS = """\
import os


class Shop:
    @property
    def total(self):
        return sum(self.prices) - 1

    @total.setter
    def total(self, value):
        self.prices = [value + 1]

    async def fetch(self):
        text = '''
a
'''
        return text


class Bank:
    def total(self):
        return 0


def outer(x):
    def inner(y):
        return y - 1

    return inner(x)
"""


def edit(*pairs: tuple[str, str], text: str = METHODS) -> str:
    for old, new in pairs:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


FETCH = ("\na\n", "\nb\n")
INNER = ("y - 1", "y + 1")
SUM = ("sum(self.prices) - 1", "sum(self.prices)")


@pytest.mark.parametrize(
    ("code", "after"),
    [
        ("async def fetch(self):\n    text = '''\nb\n'''\n    return text", edit(FETCH)),
        ("async def fetch(self):\n        text = '''\nb\n'''\n        return text", edit(FETCH)),
        (" async def fetch(self):\n        text = '''\nb\n'''\n        return text", edit(FETCH)),
        ("class Shop:\n    @property\n    def total(self):\n        return sum(self.prices)", edit(SUM)),
        ("@property\n    def total(self):\n        return sum(self.prices)", edit(SUM)),
        ("def inner(y):\n    return y + 1", edit(INNER)),
        ("def outer(x):\n    def inner(y):\n        return y + 1\n\n    return inner(x)\n\nouter(2)", edit(INNER)),
        (
            "import os\nimport re\nfrom math import ceil, floor\n\ndef inner(y):\n    return ceil(y) + 1",
            edit(("y - 1", "ceil(y) + 1"), ("import os\n", "import os\nfrom math import ceil\n")),
        ),
        (
            "def more(y):\n    return y + 1\n\ndef outer(x):\n    return more(x)",
            edit(
                ("def outer(x):\n    def inner(y):\n        return y - 1\n\n    return inner(x)\n",
                 "def more(y):\n    return y + 1\n\n\ndef outer(x):\n    return more(x)\n"),
            ),
        ),
        (
            "class Bank:\n    def total(self):\n        return self.half()\n\n    def half(self):\n        return 2",
            edit(("    def total(self):\n        return 0\n",
                     "    def half(self):\n        return 2\n\n    def total(self):\n        return self.half()\n")),
        ),
        (edit(FETCH, INNER), edit(FETCH, INNER)),
    ],
)  # fmt: skip
def test_functions_are_put_where_they_belong(code: str, after: str) -> None:
    assert replace_functions(METHODS, code) == after


def test_a_block_without_the_imports_and_classes_of_the_file_is_not_the_whole_file() -> None:
    before = "import os\n\nclass P:\n    x = 1\n\nN = 3\n\ndef f():\n    return os.sep * N\n"
    after = replace_functions(before, "N = 4\n\ndef f():\n    return os.sep * (N + 1)\n")
    assert after == before.replace("os.sep * N", "os.sep * (N + 1)")


def test_a_whole_file_may_stand_where_a_function_was_asked_for() -> None:
    text = "RATE = 2\n\n\ndef f(x):\n    return x * RATE\n"
    assert replace_functions(text, "RATE = 3\n\ndef f(x):\n    return x * RATE\n\nprint(f(2))") == (
        "RATE = 3\n\ndef f(x):\n    return x * RATE\n\nprint(f(2))\n"
    )
    assert replace_functions(text, "RATE = 2\n\ndef f(x):\n    return x / RATE") == text.replace("*", "/")
    alone = "def f(x):\n    return x\n"
    assert replace_functions(
        f'"""Text."""\n{alone}', f"import re\n{alone.replace('return x', 'return re.escape(x)')}"
    ) == (f'"""Text."""\nimport re\n\n\n{alone.replace("return x", "return re.escape(x)")}')


def test_imports_stay_outside_a_string_that_begins_on_the_line_of_the_last_import() -> None:
    before = 'import os; TEXT = """\nhello\n"""\n\ndef f(x):\n    return x\n'
    after = replace_functions(before, "import re\ndef f(x):\n    return re.escape(x)")
    assert after == 'import os; TEXT = """\nhello\n"""\nimport re\n\ndef f(x):\n    return re.escape(x)\n'


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("def total(self):\n    return 1", "the file has 3 functions total"),
        ("def nothing():\n    pass", "no function nothing"),
        ("x = 1", "no function"),
        ("def outer(x)\n    return", "not Python"),
        ("def outer(x):\n" + "".join(" " * n + "if x:\n" for n in range(4, 400, 4)), "not Python"),
        ("x = " + "(" * 5000, "not Python|cannot be parsed"),
        ("x = " + "-" * 100_000 + "1\ndef outer(x):\n    return 1", "cannot be parsed|not Python"),
    ],
)
def test_what_makes_no_edit_says_why(code: str, problem: str) -> None:
    with pytest.raises(Unreadable, match=problem):
        replace_functions(METHODS, code)


@pytest.mark.parametrize(
    ("reply", "path"),
    [
        ("```python\nx\n```", "pkg/add.py"),
        ("**add.py**:\n\n~~~~py\nx\n~~~~", "pkg/add.py"),
        ("### File: `./pkg/add.py`\n```\nx\n```", "pkg/add.py"),
        ('```python title="pkg/add.py"\nx\n```', "pkg/add.py"),
        ("```python:path/to/notes.txt\nx\n```", "notes.txt"),
        ("1. Change\n   ```py\n   x\n   ```", "pkg/add.py"),
        ("```python\n# pkg/add.py\nx\n```", "pkg/add.py"),
        ("```bash\npython add.py\n```\nthen\n```\nx\n```", "pkg/add.py"),
        ("<think>```\ny\n```</think><answer>\n```\nx\n```\n</answer>", "pkg/add.py"),
        ("new/file.py\n````\nx\n````", "new/file.py"),
        (
            "In add.py this is wrong:\n```\n\n```\nIt should be\n```py\nx\n```\nTry add.py:\n```sh\npython\n```",
            "pkg/add.py",
        ),
        ("add.py\n```\nx\n```\nFor the use of add.py:\n```\nprint(1)\n```", "pkg/add.py"),
        ("```python\nx\n", "pkg/add.py"),
    ],
)
def test_blocks_name_their_file_in_many_ways(reply: str, path: str) -> None:
    assert group_by_file("whole", reply, ["pkg/add.py", "notes.txt"], "pkg/add.py") == [(path, ["x\n"])]


def test_an_unnamed_block_of_several_files_or_none_makes_no_edit() -> None:
    for reply, problem in (
        ("```\nx\n```", "more than one"),
        ("I do not know.", "no fenced"),
        ("```sh\nls\n```", "no block"),
    ):
        with pytest.raises(Unreadable, match=problem):
            group_by_file("function", reply, ["a.py", "b.py"])
    with pytest.raises(Unreadable, match="a fence within"):
        group_by_file("whole", "```\nx\n```\ny\n```", ["a.py"], "a.py")
    with pytest.raises(Unreadable, match="cut off"):
        group_by_file("whole", "```\nx = ", ["a.py"], "a.py", cut_off=True)
    assert [
        path
        for path, _ in group_by_file("whole", "a.py\n```\n1\n```\n```\n2\n```\na.py\n```\n3\n```", ["a.py"], "a.py")
    ]


@settings(deadline=None)
@given(st.lists(_LINES, max_size=8), st.lists(_LINES, max_size=8), st.booleans(), st.booleans())
def test_any_whole_file_is_made(before: list[str], after: list[str], old_end: bool, fenced_in: bool) -> None:
    old = "\n".join(before) + "\n" * old_end
    reply = fence_code("\n".join(after)) if fenced_in else "```\n" + "\n".join(after) + "\n"
    try:
        [(_, [code])] = group_by_file("whole", reply, [], "a")
    except Unreadable as problem:
        assert "fence within" in str(problem) and not fenced_in
        return
    if not code.strip():
        with pytest.raises(Unreadable, match="empty"):
            replace_whole_file(old, code)
        return
    wanted = replace_whole_file(old, code)
    assert wanted.strip("\n") == code.strip("\n")
    if old == wanted or not old:
        return
    made = express_as_edit("a", old, wanted)
    assert replace_lines(old.encode(), made["old_content"], made["new_content"]) == wanted.encode()


async def test_one_reply_one_edit_and_a_reply_that_cannot_be_read_is_counted(tmp_path: Path) -> None:
    body = "def add(a, b):\n    return a + b\n"
    for number, (form, reply, files) in enumerate(
        [
            ("whole", f"```python\n{body}```", ADD),
            ("function", f"So `add.py`:\n```\n{body}```", FILES),
            ("function", f"```\n{body}```", FILES),  # the only file that defines add
        ]
    ):
        run = await direct(tmp_path / str(number), reply, form, files)
        assert [(call.name, call.ok) for call in run.calls] == [("edit", True)]
        assert b"-    return a - b\n+    return a + b\n" in await run.sandbox.diff()
        system = run.requests[0]["messages"][0]["content"]
        assert f"the whole {'file' if form == 'whole' else form}\n```" in system and "SEARCH" not in system
    for number, (reply, problem) in enumerate(
        [
            ("I do not know.", "no fenced block"),
            ("```\ndef sub(): pass\n```", "no function sub"),
            ("```\ndef other(a, b): pass\n```", "no block names its file"),
        ]
    ):
        run = await direct(tmp_path / f"bad{number}", reply, "function", ADD if number < 2 else FILES)
        [call] = run.calls
        assert (run.report.exit, call.ok) == ("submitted", False) and problem in call.arguments
        assert await run.sandbox.diff() == b""
    unchanged = await direct(tmp_path / "same", f"```\n{FILES['add.py'].decode()}```", "whole", ADD)
    assert unchanged.ok == [True], "it can be read, and repairs nothing"
    assert await unchanged.sandbox.diff() == b""


def test_a_hostile_reply_takes_no_time() -> None:
    began = time.process_time()
    names = " ".join(f"a{n}.b" for n in range(50))  # each was compared with each path
    headed = f"{names}\n```\nx\n```\n" * 200
    opened = "~~~\n" + "```\n~~~~\n" * 4_999
    for reply in (headed, "```\n" * 10_000, "`" * 50_000, "a.py " * 20_000 + "\n```\nx\n```", opened):
        assert all(len(fence) == 4 for fence in parse_fences(reply))
        group_by_file("whole", reply + "\n```\nx\n```", [f"{n}.py" for n in range(2000)], "1.py")
    with pytest.raises(Unreadable, match="200 blocks are too many"):  # the file is parsed for each
        replace_functions_by_block("def f():\n    pass\n" * 2000, ["def f():\n    return 1\n"] * 200)
    with pytest.raises(Ambiguous):  # each of 100,000 places was compared over its whole length
        replace_once(b" " * 200_000, " " * 100_000, "x")
    same = "x\n" * 10_000
    express_as_edit("a.py", same, same + "x\n")
    replace_functions_by_block(
        "def f():\n    pass\n" * 500 + "def g():\n    pass\n", ["def g():\n    return 1\n" * 500]
    )
    assert time.process_time() - began < 4
