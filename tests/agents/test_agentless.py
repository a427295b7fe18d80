"""`agentless`: questions that narrow a place, several repairs, a vote; and no answer that breaks it."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from nano_play import Outcome, play

from coderepairrl import agents, sandbox, tokens
from coderepairrl.agents.agentless import SYSTEM, apply_in_memory, run_tests_on
from coderepairrl.agents.localising import Source, find_elements, find_lines
from coderepairrl.agents.scripted import Answer, ScriptedEndpoint
from coderepairrl.engines import ScriptedEngine
from coderepairrl.errors import ConfigError
from coderepairrl.gateway.side import find_side_turns
from coderepairrl.types import Limits, Task
from folder_sandbox import FolderSandbox
from gateways import open_session

MORE = "\n\ndef unrelated():\n    return 0\n" * 9
CODE = {
    "add.py": b"def add(a, b):\n    return a - b\n" + MORE.encode(),
    "test_add.py": b"from add import add\n\nassert add(2, 2) == 4\n",
    "notes.txt": b"one\ntwo\n",
}


def edit(new: str, old: str = "    return a - b", path: str = "add.py") -> str:
    return f"{path}\n```\n<<<<<<< SEARCH\n{old}\n=======\n{new}\n>>>>>>> REPLACE\n```\n"


WHERE = ("1. `add.py`", "add.py: add", "add.py: 2")
RIGHT, WRONG, BROKEN = (edit(f"    return {code}") for code in ("a + b", "a * b", "(a"))


async def agentless(folder: Path, *answers: str, limits: Limits | None = None, **options: Any) -> Outcome:
    script = tuple(Answer(text) for text in answers)
    return await play(folder, *script, agent="agentless", files=CODE, limits=limits, **options)


async def test_it_asks_where_and_lets_repairs_vote(tmp_path: Path) -> None:
    spaced = edit("    # sum\n    return a  +  b\n")
    run = await agentless(tmp_path, *WHERE, WRONG, RIGHT, BROKEN, spaced, samples=4, around=1)
    assert run.report.exit == "submitted"
    assert [(call.name, call.ok) for call in run.calls] == [
        *[("files", True), ("elements", True), ("lines", True)],
        *[("repair", True), ("repair", True), ("repair", False), ("repair", True)],
    ]
    assert b"+    return a + b\n" in await run.sandbox.diff(), "two votes to one; of equal ones the first"
    asked = [request["messages"] for request in run.requests]
    assert all(len(each) == 2 and each[0]["content"] == SYSTEM for each in asked)
    assert "test_add.py" in asked[0][1]["content"]
    assert "```\ndef add(a, b):\ndef unrelated():" in asked[1][1]["content"], "an outline"
    assert "2|    return a - b" in asked[2][1]["content"] and "unrelated" not in asked[2][1]["content"]
    assert "```\ndef add(a, b):\n    return a - b\n\n```" in asked[3][1]["content"]
    assert asked[3] == asked[4] == asked[5] == asked[6]


async def test_tests_of_the_repository_decide_before_votes_do(tmp_path: Path) -> None:
    command = "python3 test_add.py && echo x > left.txt"
    run = await agentless(tmp_path, *WHERE, WRONG, WRONG, edit("    return sum((a, b))"), samples=3, tests=command)
    assert [call.ok for call in run.calls if call.name == "tests"] == [True, True], "2 * 2 is 4"
    diff = await run.sandbox.diff()
    assert b"a * b" in diff and b"left.txt" not in diff
    run = await agentless(
        tmp_path / "b", *WHERE, edit("    return 0"), edit("    return 0"), RIGHT, samples=3, tests=command
    )
    assert [call.ok for call in run.calls if call.name == "tests"] == [False, True]
    diff = await run.sandbox.diff()
    assert b"+    return a + b" in diff and b"left.txt" not in diff
    run = await agentless(tmp_path / "c", *WHERE, RIGHT, samples=1, tests="sleep 30", test_seconds=0.2)
    assert b"+    return a + b" in await run.sandbox.diff(), "where none pass, all vote"


async def test_tests_leave_the_workspace_as_it_was_in_every_sandbox(tmp_path: Path, isolating: None) -> None:
    tmp_path.chmod(0o755)
    for name, data in CODE.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "run.sh").write_text("python3 test_add.py && rm -r sub notes.txt && echo x > add.pyc\n")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/link").symlink_to("../add.py")
    task = Task("toy/add", "It subtracts.", "python", f"dir:{tmp_path}", b"")
    right = {"file_path": "add.py", "old_content": "    return a - b\n", "new_content": "    return a + b\n"}
    new = {"file_path": "new/file.py", "old_content": "", "new_content": "x = 1\n"}
    for choice in sandbox.check_backends():
        if not choice.ok or choice.name not in ("bwrap", "sandlock"):
            continue
        async with sandbox.make_backend(choice.name).open(task) as box:
            good, other = await apply_in_memory(box, [right]), await apply_in_memory(box, [new])
            assert good is not None and other is not None
            assert [await run_tests_on(box, each, "./run.sh", 30) for each in (good, other)] == [True, False], (
                choice.name
            )
            assert not await run_tests_on(box, good, "sleep 30", 0.2)
            assert await box.diff() == b"", choice.name


_GARBAGE = ["", "I do not know.", "add.py: 0-99999999999", "nothing.py: f", "```" * 50, "<<<<<<< SEARCH\n=======\n"]


@pytest.mark.parametrize("garbage", [*_GARBAGE, edit("x = 1", path="../out.py", old=""), edit("x", "absent")])
@pytest.mark.parametrize("stage", range(4))
async def test_garbage_at_any_stage_is_an_empty_patch_or_a_repair(tmp_path: Path, garbage: str, stage: int) -> None:
    answers = [*WHERE[:stage], garbage]
    run = await agentless(tmp_path, *answers, samples=2)
    assert run.report.exit == "submitted"
    assert await run.sandbox.diff() == b""
    if stage < 3:  # a place that is not found is not an end: the repair is asked for all the same
        run = await agentless(tmp_path / "b", *answers, *WHERE[stage + 1 :], RIGHT, samples=1)
        assert b"+    return a + b" in await run.sandbox.diff()


async def test_a_limit_of_calls_ends_it_and_earlier_samples_vote(tmp_path: Path) -> None:
    run = await agentless(tmp_path, *WHERE, RIGHT, limits=Limits(calls=4))
    assert (run.report.exit, len(run.requests)) == ("calls", 4)
    assert b"+    return a + b" in await run.sandbox.diff(), "what was sampled by then votes"
    run = await agentless(tmp_path / "b", *WHERE, RIGHT, limits=Limits(calls=2))
    assert (run.report.exit, len(run.requests), await run.sandbox.diff()) == ("calls", 2, b"")
    for options in ({"samples": 0}, {"files": "all"}, {"test_seconds": 0}, {"sample": 2}):
        with pytest.raises(ConfigError):
            agents.make_agent("agentless", **options)


async def test_the_reference_may_say_which_files(tmp_path: Path) -> None:
    """An agent declares beforehand that it reads the reference."""
    agent = agents.make_agent("agentless", files="oracle", samples=1)
    assert agent.reads_reference and agents.make_agent("direct", files="oracle").reads_reference
    assert not agents.make_agent("agentless").reads_reference and not agents.make_agent("nano").reads_reference
    (tmp_path / "repo").mkdir()
    box = FolderSandbox(tmp_path / "repo", CODE)
    task = Task("toy/add", "It subtracts.", "python", "dir:x", b"--- a/add.py\n+++ b/add.py\n@@ -2 +2 @@\n-a\n+b\n")
    async with ScriptedEndpoint([Answer(WHERE[1]), Answer(WHERE[2]), Answer(RIGHT)]) as server:
        await agent.run(task, box, server.endpoint())
    assert "notes.txt" not in json.dumps(server.requests)
    assert b"+    return a + b" in await box.diff()


async def test_every_question_is_recorded_token_for_token(tmp_path: Path, miniature: Path) -> None:
    replies = [*WHERE, WRONG, RIGHT, RIGHT]
    codec = tokens.load_codec(miniature)
    end = codec.tokenizer.added["<|im_end|>"]
    said = iter(replies)
    engine = ScriptedEngine(lambda ids, sampling, seed: [*codec.encode(next(said)), end], context=8192)
    (tmp_path / "repo").mkdir()
    box = FolderSandbox(tmp_path / "repo", CODE)
    task = Task("toy/add", "add() in add.py subtracts", "python", "dir:x", b"")
    agent = agents.make_agent("agentless", samples=len(replies) - 3)
    async with open_session(codec, engine, Limits(tokens=8000)) as session:
        report = await agent.run(task, box, session.endpoint)
    turns = session.turns
    assert report.exit == "submitted"
    assert [turn.base for turn in turns] == [None] * len(replies), "questions are conversations of their own"
    assert len({asked.seed for asked in engine.requests}) == len(replies), "the same question is sampled anew"
    assert all(len(turn.output) == turn.sampled for turn in turns)
    assert find_side_turns(turns, agent.side_calls, task.prompt) == (), "all of it is trained"
    assert [call.turn for call in report.tool_calls or ()] == list(range(len(replies)))
    assert [codec.decode(turn.output.ids).removesuffix("<|im_end|>") for turn in turns] == replies
    assert b"+    return a + b" in await box.diff()


def test_elements_in_other_languages() -> None:
    java = b"""\
public class Sum {
    private int total;

    public static int add(int a,
                          int b) {
        if (a > 0) {
            return a - b;
        }
        return a - b;
    }
}
"""
    go = b"package sum\n\nfunc (s *Sum) Add(a int) int {\n\treturn a\n}\n\ntype Sum struct {\n\ttotal int\n}\n"
    found = {path: Source.parse(path, data).elements for path, data in {"Sum.java": java, "sum.go": go}.items()}
    assert [(each.name, each.first, each.last) for each in found["Sum.java"]] == [("Sum", 1, 11), ("add", 4, 10)]
    assert [(each.name, each.first, each.last) for each in found["sum.go"]] == [("Add", 3, 5), ("Sum", 7, 9)]


def test_no_answer_and_no_file_keeps_the_controller_busy() -> None:
    drawn = random.Random(0)
    began = time.process_time()
    lines = "".join(
        drawn.choice(["class a a a a a a ", "(", "12-", "a.py", " ", "\n", "a::", "<"]) for _ in range(200_000)
    )
    source = Source.parse("a.py", lines.encode())
    find_elements(lines, [source])
    find_lines(lines, [source], 3)
    assert time.process_time() - began < 20.0
