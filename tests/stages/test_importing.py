"""Trajectories of other programs become the same examples, without those that overlap with evaluation sets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from coderepairrl.errors import UsageError
from coderepairrl.report.trajectories import ExportSource, write_atif
from coderepairrl.report.trajectories.others import FORMATS, DamagedItem, LogFilter, Trajectory, read_trajectories
from coderepairrl.runs.examples import Example, read_examples
from coderepairrl.stages.collect import select_attempts
from coderepairrl.stages.importing import format_import, import_trajectories
from coderepairrl.types import Ending, Episode, Finish, Origin, Score, TokenSpan, Turn

ISSUE = "Adding two numbers gives their difference when the second of them is negative, since add subtracts it."
PATCH = "diff --git a/m.py b/m.py\n--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-return a - b\n+return a + b\n"
SCHEMA = {
    "type": "function",
    "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
}
PROMPT = f"Here is an issue:\n<issue>{ISSUE}</issue>\nPlease repair it, whatever it takes, and submit it in the end."


def call(**more: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}, **more}


def chat(**answer: Any) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": "You repair."},
        {"role": "user", "content": PROMPT},
        {"role": "assistant", "content": "I look.", "tool_calls": [call()]},
        {"role": "tool", "content": "m.py", **(answer or {"tool_call_id": "c1"})},
        {"role": "assistant", "content": "done"},
    ]


EXPECTED = chat()


def published() -> dict[str, Any]:
    """A row of nebius/SWE-rebench-openhands-trajectories, as a table of one type per column gives it back."""
    wide = {"content": None, "name": None, "tool_call_id": None, "tool_calls": None}
    said = [wide | message for message in chat()]
    said[3]["name"] = "bash"
    about = {"trajectory_id": "chatcmpl-1", "instance_id": "o__r-1", "repo": "o/r", "exit_status": "submit"}
    return about | {"trajectory": said, "tools": [SCHEMA], "model_patch": PATCH, "resolved": 1}


def sampled() -> dict[str, Any]:
    """A row of SWE-Gym's trajectories: content in parts, tools as JSON."""
    said = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in chat()]
    return {"instance_id": "o__r-2", "run_id": "r", "resolved": False, "messages": said, "tools": json.dumps([SCHEMA])}


def evaluated() -> dict[str, Any]:
    """A line of the output.jsonl of OpenHands' evaluations."""
    reply = {"id": "x", "choices": [{"message": {"content": "I look.", "role": "assistant", "tool_calls": [call()]}}]}
    meta = {"tool_call_id": "c1", "function_name": "bash", "model_response": reply}
    last = {"id": "y", "choices": [{"message": {"content": "done", "role": "assistant"}}]}
    history = [
        {"source": "agent", "action": "system", "args": {"content": "You repair.", "tools": [SCHEMA]}},
        {"source": "user", "action": "message", "args": {"content": PROMPT}},
        {"source": "agent", "action": "run", "args": {"command": "ls"}, "tool_call_metadata": meta},
        {"source": "agent", "observation": "run", "content": "m.py", "tool_call_metadata": meta},
        {"source": "environment", "observation": "agent_state_changed", "content": ""},
        {"source": "agent", "action": "finish", "args": {}, "tool_call_metadata": {"model_response": last}},
    ]
    instance = {"repo": "o/r", "base_commit": "abc", "problem_statement": ISSUE}
    metadata = {"llm_config": {"model": "big-coder"}}
    result = {"git_patch": PATCH, "report": {"resolved": True}}
    about = {"instance_id": "o__r-3", "instance": instance, "metadata": metadata}
    return about | {"history": history, "test_result": result}


def swe_agent() -> dict[str, Any]:
    history = [{**each, "agent": "main", "message_type": "x"} for each in chat(tool_call_ids=["c1"])]
    demo = {"role": "user", "content": "Here is a demonstration", "is_demo": True}
    return {"history": [history[0], demo, *history[1:]], "trajectory": [], "info": {"submission": PATCH}}


def mini() -> dict[str, Any]:
    said = [{**each, "extra": {"cost": 0.1}, "function_call": None} for each in chat()]
    info = {"submission": PATCH, "exit_status": "Submitted", "config": {"model": {"model_name": "big-coder"}}}
    ended = {"role": "exit", "content": PATCH, "extra": {"exit_status": "Submitted"}}
    return {"info": info, "messages": [*said, ended], "trajectory_format": "mini-swe-agent-1.1"}


def nano(folder: Path, when: str, *, model: str = "big-coder", finished: bool = True) -> Path:
    made = folder / f"{when}-1a2b3c4d"
    made.mkdir(parents=True)
    said = chat() if finished else chat()[:3]
    (made / "messages.jsonl").write_text("".join(json.dumps(each, sort_keys=True) + "\n" for each in said))
    (made / "tools.json").write_text(json.dumps([SCHEMA]))
    (made / "metadata.json").write_text(json.dumps({"model": model, "temperature": 0.7}))
    (made / "diff.txt").write_text(PATCH if finished else "")
    return made


def import_examples(tmp_path: Path, form: str, *paths: Path) -> list[Example]:
    target = tmp_path / f"{form}.parquet"
    target.unlink(missing_ok=True)
    found = import_trajectories(form, paths, target, unchecked=True)
    examples = read_examples(target)
    assert found["rows"] == len(examples)
    return examples


def write_all_formats(tmp_path: Path) -> Mapping[str, list[Path]]:
    """Write the same conversation in each format."""
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist([published()]), tmp_path / "published.parquet")
    for name, row in (("sampled", sampled()), ("output", evaluated())):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "o__r-4.traj").write_text(json.dumps(swe_agent()))
    (tmp_path / "o__r-5.traj.json").write_text(json.dumps(mini()))
    nano(tmp_path / "nano", "2026-05-01T12:00:00")
    rows = [tmp_path / name for name in ("published.parquet", "sampled.jsonl", "output.jsonl")]
    own = {"swe-agent": [tmp_path / "o__r-4.traj"], "mini-swe-agent": [tmp_path / "o__r-5.traj.json"]}
    return {"openhands": rows, **own, "nano": [tmp_path / "nano"]}


def test_each_format_says_the_same_conversation(tmp_path: Path) -> None:
    found = {form: import_examples(tmp_path, form, *paths) for form, paths in write_all_formats(tmp_path).items()}
    everything = [example for examples in found.values() for example in examples]
    assert len(everything) == 6 and set(found) | {"atif"} == set(FORMATS)
    for example in everything:
        assert list(example.messages) == EXPECTED and not example.exact
    assert [example.task_id for example in everything[:5]] == [f"o__r-{number}" for number in range(1, 6)]
    assert {example.repository for example in everything[:5]} == {"o/r"}
    assert [example.passed for example in everything] == [True, False, True, None, None, None]
    assert [example.reward for example in everything] == [1.0, 0.0, 1.0, None, None, None]
    assert [bool(example.tools) for example in everything] == [True, True, True, False, True, True]
    assert [example.policy for example in everything] == ["", "", "big-coder", "", "big-coder", "big-coder"]


def test_what_we_export_is_read_back(tmp_path: Path) -> None:
    def turn(index: int, base: int | None, *messages: dict[str, Any]) -> Turn:
        span = TokenSpan((index + 1,), Origin.POLICY, (-0.1,))
        return Turn(index, base, TokenSpan((9,), Origin.GIVEN), span, messages=messages, finish=Finish.STOP)

    turns = (turn(0, None, *EXPECTED[:3]), turn(1, 0, *EXPECTED[3:]))
    score = Score("tests", 1.0, passed=True)
    episode = Episode("e", "o__r-6", "eval", 0, "g", 0, Ending.DONE, turns=turns, patch=PATCH.encode(), scores=(score,))
    write_atif(ExportSource("run", {"": "nano"}, "1", "tiny"), [episode], tmp_path / "atif")
    [example] = import_examples(tmp_path, "atif", tmp_path / "atif")
    assert list(example.messages) == EXPECTED
    assert (example.task_id, example.policy, example.agent) == ("o__r-6", "tiny", "nano")
    assert (example.passed, example.reward) == (True, 1.0)


def write_evaluation_set(tmp_path: Path, **more: str) -> str:
    """An evaluation set of one task."""
    row = {"id": "other__task-1", "prompt": "unlike", "language": "python", "answer": "yes", **more}
    (tmp_path / "measured.jsonl").write_text(json.dumps(row) + "\n")
    return f"jsonl path={tmp_path / 'measured.jsonl'}"


@pytest.mark.parametrize(
    ("task", "why"),
    [({"id": "o__r-1"}, "the same id"), ({"prompt": f"Title of it\n{ISSUE}"}, "the same issue"), ({}, "")],
)
def test_what_overlaps_with_an_evaluation_set_is_refused_or_dropped_by_name(
    task: dict[str, str], why: str, tmp_path: Path
) -> None:
    [path, *_] = write_all_formats(tmp_path)["openhands"]
    source, target = write_evaluation_set(tmp_path, **task), tmp_path / "x.parquet"
    with pytest.raises(UsageError, match="no evaluation set is named"):
        import_trajectories("openhands", [path], target)
    if not why:
        assert import_trajectories("openhands", [path], target, against=[source])["rows"] == 1
        return
    with pytest.raises(UsageError, match=rf"1 of 1 trajectories overlap with jsonl .*\({why}\)") as caught:
        import_trajectories("openhands", [path], target, against=[source])
    assert "--drop 'jsonl path=" in caught.value.fix and not target.exists()
    with pytest.raises(UsageError, match="all 1 trajectories overlap"):
        import_trajectories("openhands", [path], target, drop=[source])
    other = {**published(), "instance_id": "a__b-9", "trajectory": [*chat()]}
    other["trajectory"][1] = {"role": "user", "content": "Something else entirely is broken here, and not that."}
    (tmp_path / "rows.jsonl").write_text(json.dumps(published()) + "\n" + json.dumps(other) + "\n")
    found = import_trajectories("openhands", [tmp_path / "rows.jsonl"], target, drop=[source])
    assert [each.task_id for each in read_examples(target)] == ["a__b-9"]
    assert why in found["dropped"][0] and "left out, since they overlap: 1" in format_import(found)


def test_finished_episodes_are_recovered_from_an_agents_own_logs(tmp_path: Path) -> None:
    row = {"id": "toy/add", "prompt": ISSUE, "language": "python", "workspace": f"dir:{tmp_path}", "reference": PATCH}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    logs = tmp_path / "logs"
    nano(logs, "2026-05-01T11:59:59")
    wanted = nano(logs, "2026-05-01T12:00:00")
    nano(logs, "2026-05-01T12:00:01", model="small")
    nano(logs, "2026-05-01T12:30:00", finished=False)
    nano(logs, "2026-05-01T13:00:00")
    (logs / "notes").mkdir()
    (logs / "notes" / "messages.jsonl").write_text("{")
    log_filter = LogFilter(datetime(2026, 5, 1, 12), datetime(2026, 5, 1, 13), "big")
    asked: Any = {"unchecked": True, "log_filter": log_filter, "tasks": f"jsonl path={tmp_path / 'tasks.jsonl'}"}
    found = import_trajectories("nano", [logs], tmp_path / "x.parquet", **asked)
    [example] = read_examples(tmp_path / "x.parquet")
    assert (example.source, example.task_id, example.language, example.reward) == (
        wanted.name,
        "toy/add",
        "python",
        1.0,
    )
    assert sorted(each["why"] for each in found["damaged"])[-1] == "it was not finished"
    with pytest.raises(UsageError, match="selects logs of nano only"):
        import_trajectories("atif", [logs], tmp_path / "y.parquet", **asked)


def test_reports_say_which_passed_and_filters_take_these(tmp_path: Path) -> None:
    paths = [write_all_formats(tmp_path)["mini-swe-agent"][0], tmp_path / "o__r-7.traj.json"]
    paths[1].write_text(json.dumps(mini()))
    report = {"resolved_ids": ["o__r-5"], "unresolved_ids": ["o__r-7"], "submitted_ids": ["o__r-5", "o__r-7"]}
    (tmp_path / "report.json").write_text(json.dumps(report))
    outcomes = str(tmp_path / "report.json")
    import_trajectories("mini-swe-agent", paths, tmp_path / "x.parquet", unchecked=True, outcomes=outcomes)
    kept = select_attempts([str(tmp_path / "x.parquet"), "keep.passed=true"], tmp_path / "kept.parquet")
    assert kept["by_task"] == {"o__r-5": 1}


DAMAGE: list[tuple[str, Any]] = [
    ("openhands", {"messages": chat()}),
    ("openhands", {"instance_id": "a", "trajectory": [{"role": "wizard", "content": ""}]}),
    ("openhands", {"instance_id": "a", "trajectory": chat()[:2]}),
    ("openhands", {"instance_id": "a", "trajectory": [*chat()[:2], chat()[3]]}),
    ("openhands", {"instance_id": "a", "trajectory": chat(), "tools": "[1]"}),
    ("openhands", {"instance_id": "a", "trajectory": chat(), "tools": "{"}),
    ("openhands", {"instance_id": "a", "history": [{"kind": "MessageEvent"}]}),
    ("openhands", {"instance_id": "a", "history": {}}),
    ("openhands", [[]]),
    ("swe-agent", {"info": {}}),
    ("swe-agent", {"instance_id": "a", "trajectory": ["x"]}),
    ("mini-swe-agent", {"info": None}),
    ("mini-swe-agent", {"messages": [{"role": "assistant", "content": 7}]}),
    ("mini-swe-agent", {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}]}),
    ("atif", {"steps": [{"source": "moon"}], "agent": {}}),
    ("atif", {"steps": [], "agent": {}}),
    ("atif", {"steps": [{"source": "agent", "tool_calls": [7]}], "agent": {}}),
    ("atif", {"steps": [{"source": "agent", "message": "a"}], "agent": {}, "extra": {"reward": float("nan")}}),
    ("atif", {"steps": [{"source": "agent", "message": "a"}], "agent": {}, "extra": {"reward": 10**400}}),
    ("openhands", {"instance_id": "a", "messages": EXPECTED, "model": "\ud800"}),
]


@pytest.mark.parametrize(("form", "row"), DAMAGE)
def test_damage_is_named_and_the_rest_is_read(form: str, row: Any, tmp_path: Path) -> None:
    folder = tmp_path / "some"
    folder.mkdir()
    ending = {"openhands": "jsonl", "swe-agent": "traj", "mini-swe-agent": "traj.json", "atif": "json"}[form]
    (folder / f"a.{ending}").write_text(json.dumps(row))
    (folder / f"b.{ending}").write_text('{"cut')
    (folder / f"c.{ending}").write_bytes(b"\xff\xfe")
    found = list(read_trajectories(form, folder))
    assert len(found) == 3 and all(isinstance(each, DamagedItem) and each.why for each in found)
    with pytest.raises(UsageError, match=rf"no trajectory that can be read; the first: some/a\.{ending}"):
        import_trajectories(form, [folder], tmp_path / "x.parquet", unchecked=True)
    whole = {"openhands": published, "swe-agent": swe_agent, "mini-swe-agent": mini}.get(form)
    if whole is not None:
        (folder / f"d.{ending}").write_text(json.dumps(whole()))
        assert [isinstance(each, Trajectory) for each in read_trajectories(form, folder)] == [False, False, False, True]
        assert "they cannot be read: 3" in format_import(
            import_trajectories(form, [folder], tmp_path / "x.parquet", unchecked=True)
        )
