"""`nano4`: Nano's loop with four tools. What differs from Nano is the tools, so that is what is tested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nano_play import DONE, FILES, Outcome, play

from coderepairrl import agents
from coderepairrl.agents.scripted import Answer
from coderepairrl.agents.texts import Wording, build_tool_schemas, fill_template
from coderepairrl.errors import ConfigError
from coderepairrl.types import Limits


def use(*calls: tuple[str, dict[str, Any]]) -> Answer:
    return Answer(None, calls)


async def four(folder: Path, *answers: Answer, **options: Any) -> Outcome:
    return await play(folder, *answers, agent="nano4", **options)


async def test_it_repairs_with_its_four_tools(tmp_path: Path) -> None:
    run = await four(
        tmp_path,
        use(("bash", {"command": "grep -n return add.py"})),
        use(("view_file", {"path": "add.py", "start": 2, "end": 2})),
        use(("str_replace", {"path": "add.py", "old_str": "a - b", "new_str": "a + b"})),
        use(("write_file", {"path": "new/why.txt", "content": "it subtracted\n"})),
        DONE,
    )
    assert run.report.exit == "submitted"
    assert run.results == ["2:    return a - b", "    return a - b", "changed add.py", "created new/why.txt"]
    assert [(call.name, call.ok, call.command) for call in run.calls] == [
        ("bash", True, "grep"),
        ("view_file", True, ""),
        ("str_replace", True, ""),
        ("write_file", True, ""),
    ]
    diff = await run.sandbox.diff()
    assert b"+    return a + b" in diff
    assert b"+it subtracted" in diff
    names = [tool["function"]["name"] for tool in run.requests[0]["tools"]]
    assert names == ["bash", "view_file", "str_replace", "write_file"]


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("view_file", {"path": "notes.txt"}, "one\ntwo"),
        ("view_file", {"path": "notes.txt", "start": 2}, "two"),
        ("view_file", {"path": "notes.txt", "start": 9}, "command succeeded"),
        ("view_file", {"path": "none.txt"}, "write_file would create it"),
        ("view_file", {"path": "."}, "error: ."),
        ("view_file", {"path": "../../etc/passwd"}, "outside the repository"),
        ("view_file", {"path": "notes.txt", "start": "2"}, "start: not a line number"),
        ("view_file", {"path": "notes.txt", "end": True}, "end: not a line number"),
        ("view_file", {}, "view_file needs path"),
        ("write_file", {"path": "notes.txt", "content": "three\n"}, "changed notes.txt"),
        ("write_file", {"path": "../x", "content": ""}, "outside the repository"),
        ("write_file", {"path": ".", "content": ""}, "error: ."),
        ("write_file", {"path": "x"}, "write_file needs content"),
        ("str_replace", {"path": "add.py", "old_str": "", "new_str": "x"}, "old_str is empty"),
        ("str_replace", {"path": "add.py", "old_str": "nothing"}, "str_replace needs new_str"),
        ("str_replace", {"path": "add.py", "old_str": "nothing", "new_str": "x"}, "old_str does not occur"),
        ("str_replace", {"path": "add.py", "old_str": "a", "new_str": "x"}, "old_str occurs"),
        ("bash", {"cmd": "ls"}, "bash needs command"),
        ("shell", {"cmd": "ls"}, "the tools are bash, view_file, str_replace and write_file"),
    ],
)
async def test_each_tool_says_what_is_wrong(tmp_path: Path, name: str, arguments: dict[str, Any], says: str) -> None:
    run = await four(tmp_path, use((name, arguments)), limits=Limits(calls=1))
    assert says in run.results[0]
    assert run.ok == [not any(word in run.results[0] for word in ("error", "needs"))]


def test_its_texts_never_name_nanos_tools() -> None:
    agent = agents.make_agent("nano4")
    wording: Wording = agent.wording  # type: ignore[attr-defined]
    words = f"{wording.system} {wording.compact_system} {wording.full} {wording.compact} {wording.descriptions}"
    for word in ("apply_patch", "old_content", "{bash_", "shell "):
        assert word not in words
    assert "{shell_seconds}" in wording.system
    assert fill_template(wording.system, shell_seconds=4, output_chars=9).count("{") == 0
    compact = build_tool_schemas("compact", {}, wording)
    assert compact[1]["function"]["parameters"]["properties"] == {"path": {"type": "string"}}
    with pytest.raises(ConfigError, match="apply_patch"):
        agents.make_agent("nano4", descriptions={"apply_patch": "x"})


async def test_a_file_written_back_is_no_change(tmp_path: Path) -> None:
    same = {"path": "add.py", "content": FILES["add.py"].decode()}
    run = await four(tmp_path, use(("write_file", same)), DONE, limits=Limits(calls=3))
    assert run.report.exit == "calls"
