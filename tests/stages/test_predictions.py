"""Predictions of anybody: read, written, and graded without a fault becoming a zero."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from coderepairrl import sandbox, tasks
from coderepairrl.errors import TaskError, UsageError
from coderepairrl.runs.log import JsonLines
from coderepairrl.stages import predictions
from coderepairrl.stages.grade import (
    GradedPrediction,
    choose_predictions,
    compute_totals,
    format_grades_table,
    grade_predictions,
)
from coderepairrl.stages.predictions import Prediction
from coderepairrl.types import Checks, Command, Ending, Episode, Task

PATCH = "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b"


def row(instance: str, patch: str | None = PATCH, model: str = "m") -> dict[str, Any]:
    return {"instance_id": instance, "model_name_or_path": model, "model_patch": patch}


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def test_all_forms_that_the_harness_reads_say_the_same(tmp_path: Path) -> None:
    rows = [row("a"), row("b", None), row("a", model="n")]
    lines = written(tmp_path / "p.jsonl", *rows, rows[0])
    listed, zipped = tmp_path / "p.json", tmp_path / "p.jsonl.gz"
    listed.write_text(json.dumps(rows, indent=1))
    zipped.write_bytes(gzip.compress(lines.read_bytes()))
    expected = [
        Prediction("a", "m", (PATCH + "\n").encode()),
        Prediction("b", "m", b""),
        Prediction("a", "n", (PATCH + "\n").encode()),
    ]
    assert (
        predictions.read_predictions(lines)
        == predictions.read_predictions(listed)
        == predictions.read_predictions(zipped)
        == expected
    )
    by_instance = tmp_path / "other.json"
    by_instance.write_text(json.dumps({"a": {"model_patch": PATCH}, "b": {"model_patch": None}}))
    assert [each.model for each in predictions.read_predictions(by_instance)] == ["other", "other"]


@pytest.mark.parametrize(
    ("fields", "model"),
    [
        ({"instance_id": "o__r-1", "patch": PATCH, "prefix": "sample1"}, "sample1"),
        ({"instance_id": "o__r-1", "model": "m", "prediction": PATCH}, "m"),
        ({"instance_id": "o__r-1", "test_result": {"git_patch": PATCH}, "metadata": {}}, "p"),
        ({"org": "o", "repo": "r", "number": 1, "fix_patch": PATCH}, "p"),
    ],
)
def test_patches_are_read_as_benchmarks_spell_them(tmp_path: Path, fields: dict[str, Any], model: str) -> None:
    expected = Prediction("o__r-1", model, (PATCH + "\n").encode())
    assert predictions.read_predictions(written(tmp_path / "p.jsonl", fields)) == [expected]


def test_what_is_written_is_read_again_byte_for_byte(tmp_path: Path) -> None:
    def made(task: str, number: int, patch: bytes, ending: Ending = Ending.DONE) -> Episode:
        return Episode(f"{task}{number}", task, "eval", 0, task, number, ending, patch=patch)

    episodes = [made("a", 0, b"\xff\n"), made("a", 1, b""), made("b", 0, b"x\r\n"), made("c", 0, b"", Ending.VOID)]
    predictions.write_predictions(tmp_path, "m", episodes)
    second, first = sorted(tmp_path.iterdir())
    assert [each.name for each in (first, second)] == ["predictions.jsonl", "predictions-1.jsonl"]
    assert predictions.read_predictions(first) == [Prediction("a", "m", b"\xff\n"), Prediction("b", "m", b"x\r\n")]
    assert predictions.read_predictions(second) == [Prediction("a", "m", b"")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no predictions"),
        ("{", "line 1: not read as JSON"),
        ("[]", "line 1: not an object"),
        ('{"model_patch": ""}', "line 1: no instance_id"),
        (
            '{"instance_id": "a", "model": "m", "diff": "x"}',
            "no patch of a: none of .* is among its keys, .*model, diff",
        ),
        ('{"instance_id": "a", "test_result": {}}', "no patch of a"),
        ('{"instance_id": "a", "model_patch": 3}', "model_patch of a is not text"),
        (json.dumps(row("a")) + "\n" + json.dumps(row("a", "other")), "line 2: a second, different patch of m for a"),
        (json.dumps(row("a"))[:-1] + ', "model_patch": ""}', "line 1: not read as JSON: 'model_patch' twice"),
        (json.dumps(row("a", "\ud800")), "line 1: model_patch of a is not text"),
    ],
)
def test_what_is_no_prediction_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(UsageError, match=message):
        predictions.read_predictions(tmp_path / "p.jsonl")


def test_unknown_instances_are_refused_or_listed_and_tasks_need_checks() -> None:
    there = [Task("a", "p", "c", "", b"", checks=Checks((Command(("true",)),))), Task("b", "p", "c", "", b"")]
    asked = [Prediction("a", "m", b"x"), Prediction("z", "m", b"x")]
    with pytest.raises(UsageError, match="1 instance of the predictions not found among the 2 tasks of the source: z"):
        choose_predictions(asked, there)
    assert choose_predictions(asked, there, skip_unknown=True)[1:] == ([asked[0]], ["z"])
    with pytest.raises(TaskError, match="task b has no checks"):
        choose_predictions([Prediction("b", "m", b"x")], there)
    with pytest.raises(UsageError, match="no prediction is for a task"):
        choose_predictions(asked[1:], there, skip_unknown=True)


def test_shares_count_what_is_missing_and_leave_out_faults() -> None:
    there = {name: Task(name, "p", "c", "", b"") for name in "abcd"}
    graded = [
        GradedPrediction("a", "m", True, False),
        GradedPrediction("b", "m", False, True),
        GradedPrediction("c", "m", False, False, fault="SandboxFault: it died"),
    ]
    [found] = compute_totals(graded, there)
    assert (found.resolved, found.missing, found.empty, list(found.faults)) == (1, ("d",), 1, ["c"])
    assert found.wilson is not None and found.wilson.value == pytest.approx(1 / 3)
    assert found.per_patch is not None and found.per_patch.value == 1
    shown = format_grades_table([found])
    assert "c: SandboxFault: it died" in shown and "of all 4 tasks" in shown and "--of listed" in shown
    [listed] = compute_totals(graded, there, listed=True)
    assert listed.wilson is not None and listed.wilson.value == 1 / 2 and not listed.missing
    assert "of the 3 tasks listed" in format_grades_table([listed])
    [nothing] = compute_totals([graded[2]], {"c": there["c"]})
    assert (nothing.wilson, nothing.clustered, nothing.per_patch) == (
        None,
        None,
        None,
    ) and "none" in format_grades_table([nothing])


async def test_a_grader_that_cannot_run_gives_no_verdict_and_is_asked_again(tmp_path: Path, isolating: None) -> None:
    [good] = (task for task in tasks.make_source("handmade") if task.id == "handmade/till")
    broken = Task(
        "broken", "p", "python", good.workspace, good.reference, checks=Checks((Command(("no-such-program",)),))
    )
    there, output = {good.id: good, broken.id: broken}, tmp_path / "out.jsonl"
    asked = [Prediction(name, "m", good.reference) for name in there] + [Prediction(good.id, "n", b" ")]
    backend, printed = sandbox.make_backend(sandbox.choose_backend().name), list[str]()
    found = await grade_predictions(asked, there, backend, output, say=printed.append)
    assert [(each.resolved, bool(each.fault), each.empty) for each in found] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]
    assert [each["instance_id"] for each in JsonLines.read(output)] == [good.id, good.id], "a fault is no verdict"
    with pytest.raises(UsageError, match="already exists"):
        await grade_predictions(asked, there, backend, output)
    with output.open("a") as file:
        file.write('{"instance_id": "br')  # a crash
    there["broken"] = Task("broken", "p", "python", good.workspace, good.reference, checks=good.checks)
    printed.clear()
    again = await grade_predictions(asked, there, backend, output, resume=True, say=printed.append)
    assert [each.resolved for each in again] == [True, True, False]
    assert len(printed) == 1 and printed[0].startswith("[3/3] broken"), "only what had no verdict is run"
    for other, message in (
        ([Prediction(good.id, "m", b"other\n"), *asked[1:]], "a verdict on another patch for handmade/till"),
        (asked[1:], "a verdict on another task for handmade/till"),
    ):
        with pytest.raises(UsageError, match=message):
            await grade_predictions(other, there, backend, output, resume=True)
    row, *others = JsonLines.read(output)
    for key, value in {"resolved": "no", "seconds": True, "instance_id": 1, "empty": None}.items():
        output.write_text("".join(json.dumps(each) + "\n" for each in ({**row, key: value}, *others)))
        with pytest.raises(UsageError, match=f"line 1: not a verdict .{key} is {json.dumps(value)}"):
            await grade_predictions(asked, there, backend, output, resume=True)
