"""`repair`: the code is in the prompt, and search/replace blocks of it are the repair."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coderepairrl import sandbox, tasks
from coderepairrl.agents.patching import apply_blocks, blocks_between, parse_blocks, write_blocks
from coderepairrl.checks.task_source import examine_task_source
from coderepairrl.errors import ConfigError, TaskError
from coderepairrl.rewards import make_rewards
from coderepairrl.rewards.thesis import SearchReplaceSimilarity
from coderepairrl.tasks.patches import apply_to_text, format_diff
from coderepairrl.tasks.sources.repair import Repair

BEFORE = "".join(f"line {n}\n" for n in range(12))
AFTER = BEFORE.replace("line 5\n", "line five\n")


def repairs(tmp_path: Path, *rows: Mapping[str, Any], **options: Any) -> Repair:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return Repair(str(path), cache=str(tmp_path / "cache"), **options)


def row(**values: Any) -> dict[str, Any]:
    return {"id": "a", "before": BEFORE, "after": AFTER, "prompt": "Say it in words.", "path": "a/b.txt", **values}


def test_rows_of_code_before_and_after(tmp_path: Path) -> None:
    [task] = repairs(tmp_path, row())
    assert (task.id, task.kind, task.language) == ("repair/a", "repair", "text")
    assert task.prompt == f"Say it in words.\n\na/b.txt\n```\n{BEFORE}```\n"
    assert (Path(task.workspace.removeprefix("dir:")) / "a/b.txt").read_text() == BEFORE
    assert apply_to_text(BEFORE.encode(), task.reference) == AFTER.encode()
    patch = format_diff("a/b.txt", BEFORE, AFTER).decode()
    [same] = repairs(tmp_path, {"id": "a", "before": BEFORE, "patch": patch, "path": "a/b.txt"})
    assert (same.reference, same.workspace) == (task.reference, task.workspace)
    assert same.prompt.startswith("There is a defect in a/b.txt.\n")


def test_lines_around_the_change_can_be_searched(tmp_path: Path) -> None:
    [task] = repairs(tmp_path, row(), context_lines=1)
    assert task.prompt == "Say it in words.\n\na/b.txt\n```\nline 4\nline 5\nline 6\n```\n"
    again = BEFORE.replace("line 4", "line 5").replace("line 6", "line 5")
    [task] = repairs(
        tmp_path, row(before=again, after=again.replace("line 5\nline 7", "line 6\nline 7")), context_lines=0
    )
    assert "```\nline 5\nline 5\nline 7\n```\n" in task.prompt, "what is shown occurs once"
    [task] = repairs(tmp_path, row(before="x = '''\n```\n'''\n", after="x = 1\n"))
    assert task.prompt.endswith("````\nx = '''\n```\n'''\n````\n")


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    source = repairs(
        tmp_path,
        row(),
        row(id="b", after=BEFORE),
        row(id="c", after=None, patch=format_diff("a/b.txt", "other\n", "text\n").decode()),
        row(id="d", before="x\r\ny\r\n", after="x\ny\n"),
        row(id="e", before="\udcff\n", after="x\n"),
    )
    assert [task.id for task in source] == ["repair/a"]
    assert dict(source.left_out) == {
        "change nothing": 1,
        "have a patch that does not apply": 1,
        "cannot be written as search/replace blocks": 1,
        "change a file that is not UTF-8": 1,
    }


async def test_tasks_of_another_source(isolating: None) -> None:
    source = Repair(source="handmade", options={"split": "train"})
    found = list(source)
    others = {task.id: task for task in tasks.make_source("handmade", split="train")}
    assert found and sum(source.left_out.values()) == len(others) - len(found)
    for task in found:
        other = others[task.id]
        assert task.prompt.startswith(other.prompt.rstrip()) and len(task.prompt) > len(other.prompt)
        assert (task.workspace, task.reference, task.checks) == (other.workspace, other.reference, other.checks)
        assert task.kind == "repair"
    findings = await examine_task_source(source, sandbox.make_backend(sandbox.choose().name), limit=1)
    assert [finding for finding in findings if not finding.ok] == []


@pytest.mark.parametrize("options", [{}, {"path": "x", "source": "handmade"}, {"path": "x", "context_lines": -1}])
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Repair(**options)


def test_half_a_character_in_a_row_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="column 'after' has half a character at 1"):
        repairs(tmp_path, row(after="x\ud800")).prepare()


def test_sources_to_be_measured_on_stay_so(tmp_path: Path) -> None:
    benchmark = {"source": "swe_bench", "options": {"name": "lite", "path": "x"}}
    assert (
        Repair(**benchmark).evaluation_set == tasks.make_source("swe_bench", name="lite", path="x").evaluation_set != ""
    )


_TEXT = st.lists(st.sampled_from(("", "a", "b", "\x0c", "-", "+ x", "\\ No newline at end of file"))).map("\n".join)


@settings(deadline=None)
@given(_TEXT, _TEXT)
def test_patches_apply_where_they_say(old: str, new: str) -> None:
    patch = format_diff("x", old, new)
    assert apply_to_text(old.encode(), patch) == new.encode()
    if old != new and old:
        assert apply_to_text(b"other\n" + old.encode(), patch) in (None, b"other\n" + new.encode())


def test_the_reference_said_in_blocks_earns_everything(tmp_path: Path) -> None:
    """Each hunk of the reference is a block with the same context."""
    [task] = repairs(tmp_path, row())
    blocks = blocks_between("a/b.txt", BEFORE.encode(), AFTER.encode(), context_lines=3)
    answer = f"<think>\nIt is five.\n</think>\n<answer>\n{write_blocks(blocks)}</answer>"
    assert SearchReplaceSimilarity().judge(answer, task) == 1.0
    weights = {reward.name: reward.judge(answer, task) * weight for reward, weight in make_rewards("thesis_repair")}  # type: ignore[attr-defined]
    assert sum(weights.values()) == pytest.approx(0.8), "the strict format is for answers of one line"
    assert apply_blocks(BEFORE.encode(), parse_blocks(answer)) == AFTER.encode()
