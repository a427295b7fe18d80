"""`direct`: one request, one reply, its edits in the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nano_play import FILES, ISSUE, Outcome, play

from coderepairrl import agents
from coderepairrl.agents.direct import choose_files
from coderepairrl.agents.scripted import Answer
from coderepairrl.errors import ConfigError
from coderepairrl.types import Limits, Task

REPAIR = (
    "It subtracts.\n\nadd.py\n```python\n"
    "<<<<<<< SEARCH\n    return a - b\n=======\n    return a + b\n>>>>>>> REPLACE\n```\n"
)
NEW = "\n`new/file.py`\n<<<<<<< SEARCH\n=======\nx = 1\n>>>>>>> REPLACE\n"
WRONG = "\nadd.py\n<<<<<<< SEARCH\nnothing\n=======\nx = 1\n>>>>>>> REPLACE\n"


async def direct(folder: Path, *answers: Answer, **options: Any) -> Outcome:
    return await play(folder, *answers, agent="direct", **options)


async def test_one_turn_repairs(tmp_path: Path) -> None:
    run = await direct(tmp_path, Answer(REPAIR + NEW + WRONG))
    assert (run.report.exit, len(run.requests)) == ("submitted", 1)
    assert "tools" not in run.requests[0] or run.requests[0]["tools"] == []
    assert [(call.turn, call.name, call.ok) for call in run.calls] == [
        (0, "edit", True),
        (0, "edit", True),
        (0, "edit", False),
    ]
    diff = await run.sandbox.diff()
    assert b"-    return a - b\n+    return a + b\n" in diff
    assert b"+++ b/new/file.py" in diff


async def test_it_is_shown_text_files_up_to_a_limit(tmp_path: Path) -> None:
    files = FILES | {"picture": bytes(range(256)), "sub/z.py": b"z = 1\n"}
    run = await direct(tmp_path, Answer("I do not know."), files=files)
    shown = run.requests[0]["messages"][1]["content"]
    assert shown.startswith(f"{ISSUE}\n\nadd.py\n```\ndef add(a, b):\n")
    assert "sub/z.py" in shown, "the issue names no file, so all are shown"
    assert "picture" not in shown
    assert [(call.name, call.ok) for call in run.calls] == [("edit", False)], "it makes no edit"
    assert "no search/replace block" in run.calls[0].arguments
    run = await direct(tmp_path / "b", Answer("I do not know."), files=files, context_chars=35, system="")
    [only] = run.requests[0]["messages"]
    assert "add.py" in only["content"] and "notes.txt" not in only["content"]


def test_which_files_are_shown() -> None:
    oracle = b"diff --git a/x/b.py b/x/b.py\n--- a/x/b.py\n+++ b/x/b.py\n@@ -1 +1 @@\n-a\n+b\n"
    task = Task("t", "see c.py", "python", "dir:x", oracle)
    paths = ["a.py", "x/b.py", "x/c.py"]
    assert choose_files("all", task, paths) == paths
    assert choose_files("mentioned", task, paths) == ["x/c.py"]
    assert choose_files("oracle", task, [*paths, "\udcff.py"]) == ["x/b.py"], "a file name may be in Latin-1"
    assert choose_files("none", task, paths) == []
    assert choose_files("oracle", Task("t", "", "python", "dir:x", b""), paths) == paths
    with pytest.raises(ConfigError, match="files"):
        agents.make_agent("direct", files="some")


@pytest.mark.parametrize("name", ["direct", "agentless"])
async def test_what_is_shown_leaves_room_for_a_reply(tmp_path: Path, name: str) -> None:
    code = {"add.py": b"".join(b"x = %d\n" % number for number in range(300)), "b.py": b"y = 1\n" * 2000}
    run = await play(tmp_path, Answer("b.py"), agent=name, files=code, limits=Limits(tokens=2_000))
    assert run.requests and all(len(request["messages"][-1]["content"]) < 5_000 for request in run.requests)


TAGGED = f"<think>\nIt adds? {WRONG}\n</think>\n<answer>\n{REPAIR}</answer>\n"
PATHLESS = "<<<< SEARCH\n    return a - b\n=====\n    return a + b\n>>>> REPLACE\n"


async def test_a_thought_and_an_answer(tmp_path: Path) -> None:
    run = await direct(tmp_path, Answer(TAGGED), tags=True)
    assert "<answer>" in run.requests[0]["messages"][0]["content"]
    assert run.ok == [True]
    assert b"+    return a + b\n" in await run.sandbox.diff()


async def test_the_only_file_needs_no_name(tmp_path: Path) -> None:
    run = await direct(tmp_path, Answer(PATHLESS), files={"add.py": FILES["add.py"]})
    assert run.ok == [True]
    run = await direct(tmp_path / "b", Answer(PATHLESS))
    assert run.ok == [False], "which of several files is not known"
