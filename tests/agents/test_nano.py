"""Nano's loop: endings, limits, warnings, history. Each defect of the original has its test."""

from __future__ import annotations

from pathlib import Path

import pytest
from nano_play import DONE, ISSUE, patch, play, shell

from coderepairrl import agents
from coderepairrl.agents.scripted import Action, Answer, ScriptedAgent, ScriptedEndpoint
from coderepairrl.checks.agent import examine_agent
from coderepairrl.errors import ConfigError
from coderepairrl.registry import Finding
from coderepairrl.types import Limits, Task
from needs import need

REPAIR = patch("add.py", "a - b", "a + b")
COUNT = "echo x >> count.txt"


def counted(folder: Path) -> int:
    path = folder / "repo" / "count.txt"
    return path.read_text().count("x") if path.exists() else 0


RENAMED = {"shell": "run", "apply_patch": "change"}


@pytest.mark.parametrize("style", ["full", "compact"])
async def test_tools_under_other_names_do_the_same_and_are_called_so_everywhere(tmp_path: Path, style: str) -> None:
    wrong = {"file_path": "add.py", "old_content": "nowhere", "new_content": "x"}
    run = await play(
        tmp_path,
        Answer(None, (("run", {"cmd": "grep -n return add.py"}), ("run", {}))),
        Answer(None, (("shell", {"cmd": "ls"}), ("change", wrong))),
        Answer(None, (("change", {"file_path": "add.py", "old_content": "a - b", "new_content": "a + b"}),)),
        DONE,
        names=RENAMED,
        system=style,
        tools=style,
        descriptions={"shell": "Runs it."},
    )
    assert run.ok == [True, False, False, False, True]
    assert b"+    return a + b" in await run.sandbox.diff()
    tools = [each["function"] for each in run.requests[0]["tools"]]
    assert [each["name"] for each in tools] == ["run", "change"] and tools[0]["description"] == "Runs it."
    told = [run.requests[0]["messages"][0]["content"], *run.results]
    assert "run" in told[0] and "change" in told[0]
    assert not any(own in text for own in RENAMED for text in told if "no tool shell" not in text), told
    assert [call.name for call in run.calls] == ["run", "run", "shell", "change", "change"]
    assert run.calls[0].command == "grep"


async def test_several_calls_in_a_reply_do_not_overshoot(tmp_path: Path) -> None:
    run = await play(tmp_path, shell(COUNT), shell(*[COUNT] * 7), limits=Limits(calls=4))
    assert (run.report.exit, counted(tmp_path), len(run.calls)) == ("calls", 4, 4)
    assert run.results[4:] == ["not executed: the limit of calls is reached"] * 4
    asked = [call["id"] for message in run.conversation for call in message.get("tool_calls", ())]
    answered = [message["tool_call_id"] for message in run.conversation if message["role"] == "tool"]
    assert asked == answered


async def test_warnings_state_the_number_that_is_left(tmp_path: Path) -> None:
    """The original's number was one too high."""
    run = await play(tmp_path, shell("true"), limits=Limits(calls=7), warnings=True)
    left = [6, 5, 4, 3, 2, 1, 0]
    for result, calls in zip(run.results, left, strict=True):
        assert result.startswith("[warning]") == (1 <= calls <= 4)
        assert f" {calls} call" in result or not 1 <= calls <= 4


async def test_warnings_of_tokens_come_before_those_of_calls(tmp_path: Path) -> None:
    answers = [shell("true", tokens=tokens) for tokens in (1000, 7_300, 8_800, 10_240)]
    run = await play(tmp_path, *answers, limits=Limits(calls=5, tokens=10_240), warnings=True)
    assert "4 calls are left" in run.results[0]
    assert run.results[1].startswith("[warning] Few tokens")
    assert run.results[2].startswith("[warning] Almost no tokens")
    assert run.report.exit == "tokens"
    assert len(run.requests) == 4


async def test_tokens_are_those_of_the_endpoint(tmp_path: Path) -> None:
    """The original recounted them with a generic tokenizer, and too low."""
    run = await play(tmp_path, shell("true", tokens=700), shell("true", tokens=1000), limits=Limits(tokens=1000))
    assert (run.report.exit, len(run.requests)) == ("tokens", 2)
    assert [request["max_tokens"] for request in run.requests] == [450, 256]


async def test_inaction_is_an_action_and_is_nudged(tmp_path: Path) -> None:
    run = await play(tmp_path, Answer("I give up."), limits=Limits(calls=3), warnings=True)
    assert (run.report.exit, len(run.requests)) == ("calls", 3)
    nudges = [message["content"] for message in run.conversation[2:] if message["role"] == "user"]
    assert ["2 calls are left" in nudges[0], "1 call is left" in nudges[1]] == [True, True]
    assert all("unchanged" in nudge for nudge in nudges)
    assert run.report.tool_calls == ()


@pytest.mark.parametrize(
    "change",
    [
        "sed -i 's/a - b/a + b/' add.py",
        "echo new > new.py",
        "git add -A && sed -i 's/a - b/a + b/' add.py && git add add.py",
        "sed -i 's/a - b/a + b/' add.py && git -c user.name=x -c user.email=x@x commit -qam fix",
        "rm -rf .git",
    ],
)
async def test_every_kind_of_change_counts_as_one(tmp_path: Path, change: str) -> None:
    """New, staged and committed files were lost on the original."""
    run = await play(tmp_path, shell(change), DONE, limits=Limits(calls=3))
    assert run.report.exit == "submitted"
    assert len(run.requests) == 2


async def test_a_change_taken_back_is_no_change(tmp_path: Path) -> None:
    undo = patch("add.py", "a + b", "a - b")
    run = await play(tmp_path, REPAIR, undo, DONE, limits=Limits(calls=4))
    assert run.report.exit == "calls"
    run = await play(tmp_path / "b", REPAIR, shell("git checkout -q ."), DONE, limits=Limits(calls=4))
    assert run.report.exit == "calls"


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("shell", '{"cmd": "ls', "not a JSON object"),
        ("shell", '["ls"]', "not a JSON object: a list"),
        ("shell", "[" * 200_000, "not a JSON object"),
        ("shell", "{}", "shell needs cmd"),
        ("shell", {"cmd": 7}, "cannot take this cmd: not a string"),
        ("shell", {"cmd": "ls\0"}, "NUL"),
        ("shell", '{"cmd": "\\ud800"}', "surrogate"),
        ("shell", {"cmd": "true " + "x" * 200_000}, "longer than"),
        ("bash", {"cmd": "ls"}, "there is no tool bash"),
    ],
)
async def test_malformed_calls_are_answered_and_counted(
    tmp_path: Path, name: str, arguments: object, expected: str
) -> None:
    run = await play(tmp_path, Answer(None, ((name, arguments),), tokens=9), limits=Limits(calls=2))
    assert (run.report.exit, len(run.requests), run.ok) == ("calls", 2, [False, False])
    assert expected in run.results[0]


async def test_calls_that_the_gateway_could_not_read_are_answered(tmp_path: Path) -> None:
    """They arrive as text, and are no submission."""
    raw = '<tool_call>\n{"name": "shell", "arguments": {"cmd": ls}}'
    unread = Answer(raw, crrl={"malformed": [raw], "context_tokens": 50, "remaining_tokens": 900, "turn": 4})
    run = await play(tmp_path, unread, REPAIR, DONE, nudge=False)
    call = run.calls[0]
    assert (call.turn, call.name, call.ok, call.arguments) == (4, "shell", False, raw)
    assert "not a JSON object" in run.conversation[3]["content"]
    assert b"+    return a + b" in await run.sandbox.diff()
    run = await play(tmp_path / "b", unread, limits=Limits(calls=2))
    assert (run.report.exit, run.ok, len(run.requests)) == ("calls", [False, False], 2)


async def test_the_context_of_the_model_is_a_limit_too(tmp_path: Path) -> None:
    full = Answer(None, (("shell", {"cmd": COUNT}),), crrl={"context_tokens": 100, "remaining_tokens": 0})
    run = await play(tmp_path, full)
    assert (run.report.exit, len(run.requests), counted(tmp_path)) == ("tokens", 1, 1)


async def test_prompt_tools_and_texts_are_configuration(tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Cut at {output_chars}. {this stays}")
    run = await play(
        tmp_path,
        shell("seq 1000"),
        DONE,
        system_file=str(prompt),
        user_template="Issue: {prompt}!",
        tools="compact",
        descriptions={"shell": "bash"},
        messages={"truncated": "[cut]"},
        output_chars=10,
        nudge=False,
        request={"temperature": 0.5},
    )
    request = run.requests[0]
    assert [message["content"] for message in request["messages"]] == [
        "Cut at 10. {this stays}",
        f"Issue: {ISSUE}!",
    ]
    assert [tool["function"].get("description") for tool in request["tools"]] == ["bash", None]
    assert "context" not in request["tools"][1]["function"]["parameters"]["properties"]
    assert request["temperature"] == 0.5
    assert run.results == ["1\n2\n3\n4\n5\n\n[cut]"]


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"tools": "tiny"}, "agent.options.tools"),
        ({"messages": {"nuge": "x"}}, "nudge"),
        ({"descriptions": {"bash": "x"}}, "shell"),
        ({"names": {"bash": "run"}}, "shell"),
        ({"names": {"shell": "apply_patch"}}, "two tools"),
        ({"names": {"shell": "run it"}}, "not a valid tool name"),
        ({"user_template": "no place"}, "{prompt}"),
        ({"system_file": "/nonexistent/prompt"}, "cannot be read"),
        ({"request": {"stream": True}}, "stream"),
        ({"output_chars": 0}, "positive"),
    ],
)
def test_wrong_options_are_refused_at_the_door(options: dict[str, object], hint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        agents.make_agent("nano", **options)
    assert hint in f"{raised.value} {raised.value.fix}"


async def test_nano_passes_the_exam_in_a_real_sandbox(tmp_path: Path) -> None:
    """Also: a pipe that is cut, a search without a match and a timeout look the same there as on the host."""
    from coderepairrl import sandbox

    need({entry.name: entry.ok for entry in sandbox.check_backends()}["bwrap"], "bubblewrap does not work here")
    backend = sandbox.make_backend("bwrap")
    checks = await examine_agent(agents.make_agent("nano"), backend)
    assert [check for check in checks if not check.ok] == []
    (tmp_path / "add.py").write_text("x = 1\n")
    task = Task("toy/add", "x", "python", f"dir:{tmp_path}", b"")
    outputs = ["yes | head -2", "grep nothing add.py", "sleep 9"]
    async with ScriptedEndpoint([*map(shell, outputs), DONE]) as server, backend.open(task) as box:
        report = await agents.make_agent("nano", shell_seconds=0.5, nudge=False).run(task, box, server.endpoint())
    assert [call.ok for call in report.tool_calls or ()] == [True, True, False]
    assert all(text in report.log for text in ("y\\ny", "no match", "timed out after 0.5 s"))


async def test_the_exam_can_be_failed() -> None:
    checks = await examine_agent(ScriptedAgent())
    assert {check.name for check in checks if not check.ok} >= {
        "history is appended only",
        "edits arrive in the diff",
        "a limit of 3 calls allows 3",
        "a broken endpoint is a fault",
    }


async def test_an_agent_that_raises_fails_the_exam_by_name() -> None:
    def script(task: Task) -> list[Action]:
        raise KeyError(task.id)

    [submits, *_] = await examine_agent(ScriptedAgent(script))
    assert submits == Finding("submits", False, "agent scripted raised KeyError: KeyError: 'exam/add'")
