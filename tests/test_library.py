"""The five functions for other programs: any patch has a score, mistakes raise errors, and they print no text."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

import coderepairrl
from coderepairrl import attempt, compare, evaluate, grade, score
from coderepairrl.agents.fences import format_reply
from coderepairrl.agents.scripted import Answer, ScriptedEndpoint
from coderepairrl.errors import ConfigError, RunError, UsageError
from coderepairrl.sandbox.contents import read_local_files
from coderepairrl.tasks import make_source
from coderepairrl.tasks.patches import apply_to_text, list_changed_paths
from coderepairrl.types import Task

DIFF = "diff --git a/f.py b/f.py\n--- a/f.py\n+++ b/f.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n"


def test_what_a_policy_writes_is_a_score() -> None:
    assert score(DIFF, DIFF) == score(DIFF.encode(), DIFF.encode()) == 1
    assert score(f"Here it is:\n```diff\n{DIFF}```\nDone.", DIFF) == score(DIFF.rstrip("\n"), DIFF) == 1
    junk = ("", " \n", "I do not know.", DIFF.replace("@@ -1", "@@ -1,7"), "--- a/f.py\n+++ b/f.py", "\ud800\udcff")
    assert [score(patch, DIFF) for patch in junk] == [0.0] * len(junk)
    assert 0 < score(DIFF.replace("2", "3"), DIFF) < 1
    assert 0 < score(DIFF.replace("2", "'\ud800'"), DIFF) < 1


def test_mistakes_of_the_caller_are_errors() -> None:
    for reference, patch in (("", DIFF), ("no diff", DIFF), ("no diff", "")):
        with pytest.raises(UsageError, match="the reference"):
            score(patch, reference)
    with pytest.raises(UsageError, match="needs more than two diffs"):
        score(DIFF, DIFF, "tests")
    with pytest.raises(ConfigError, match="patch_edit") as unknown:
        score(DIFF, DIFF, "patch_edit")
    assert "patch_edits" in unknown.value.fix
    with pytest.raises(AttributeError, match="has no attribute 'scores'"):
        _ = coderepairrl.scores  # type: ignore[attr-defined]


def test_thousands_of_pairs_take_seconds() -> None:
    tasks = make_source("mutants", split="train", n=50)
    references = [task.reference.decode() for task in tasks]
    began = time.process_time()
    values = [score(patch, reference) for reference in references for patch in references[:20]]
    assert len(values) == 1000 and values.count(1.0) >= 20
    assert time.process_time() - began < 2  # a third of it on a quiet core


def test_results_are_compared(tmp_path: Path) -> None:
    for name, solved in {"a": 4, "b": 12}.items():
        rows = [f'{{"instance_id": "t{at}", "resolved": {str(at < solved).lower()}}}\n' for at in range(16)]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    found = compare(tmp_path / "a.jsonl", str(tmp_path / "b.jsonl"), cluster="task", pass_at=[1])
    [comparison] = found["comparisons"]
    assert (comparison["early"]["value"], comparison["late"]["value"]) == (0.25, 0.75)
    assert 0 < comparison["change"]["low"] < comparison["change"]["value"] == 0.5 < comparison["change"]["high"]
    assert comparison["p"] < 0.05
    with pytest.raises(UsageError, match="two policies"):
        compare(tmp_path / "a.jsonl")


def test_several_patches_of_a_task_are_graded(isolating: None, capfd: pytest.CaptureFixture[str]) -> None:
    [first, second] = make_source("mutants", split="unseen", n=2, quoted=0)
    tasks = [first, second]
    pairs = [(second.id, second.reference.decode()), *((first.id, each) for each in (first.reference, "No idea.", ""))]
    found = grade(pairs, tasks, jobs=2)
    assert [each.task for each in found] == [second.id, first.id, first.id, first.id]
    assert [each.resolved for each in found] == [True, True, False, False]
    assert "does not apply" in found[2].problem and found[3].problem == "empty patch" and found[0].seconds > 0
    assert grade([], tasks) == [] and capfd.readouterr() == ("", "")
    with pytest.raises(UsageError, match="not found among the 2 tasks"):
        grade([("mutants/none", DIFF)], "mutants", options={"split": "unseen", "n": 2, "quoted": 0})


def repair_of(task: Task) -> str:
    """The task's reference as a function in a fence."""
    [path] = list_changed_paths(task.reference)
    before = read_local_files(task.workspace, [path])[path]
    after = apply_to_text(before or b"", task.reference)
    assert before is not None and after is not None
    return format_reply("function", path, before, after)


async def test_attempts_are_made_and_measured(
    tmp_path: Path, isolating: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = make_source("mutants", split="unseen", n=2, quoted=0)
    options = {"n": 2, "quoted": 0, "agent": "direct", "agent.options.format": "function"}
    settings = {**options, "engine.options.model_name": "x", "run.retries": 0}
    async with ScriptedEndpoint([Answer(repair_of(second)), Answer("I do not know."), Answer(status=401)]) as server:
        url = server.endpoint().base_url
        episode = await asyncio.to_thread(attempt, "mutants", second.id, policy=url, settings=settings)
        assert episode.reward == 1 and episode.patch.startswith(b"diff --git") and not any(tmp_path.iterdir())
        episode = await asyncio.to_thread(attempt, "mutants", first.id, policy=url, settings=settings)
        assert episode.reward == 0 and episode.patch == b""
        with pytest.raises(RunError, match="401"):
            await asyncio.to_thread(attempt, "mutants", first.id, policy=url, settings=settings)
    with pytest.raises(UsageError, match="event loop") as blocking:
        attempt("mutants", second.id, policy=url, settings=settings)
    assert "asyncio.to_thread" in blocking.value.fix

    settings |= {"eval.split": "unseen", "rollout.concurrency": 1}
    async with ScriptedEndpoint([Answer(repair_of(first)), Answer("I do not know.")]) as server:
        url, place = server.endpoint().base_url, tmp_path / "runs" / "one"
        result = await asyncio.to_thread(evaluate, "mutants", policy=url, settings=settings, output=place)
        asked = len(server.requests)
        summary = result["evaluations"]["eval"]
        assert asked == summary["tasks"] == 2 and summary["outcomes"]["resolved"]["value"] == 0.5
        assert await asyncio.to_thread(evaluate, place, resume=True) == result and len(server.requests) == asked
    assert capfd.readouterr() == ("", "")
    with pytest.raises(UsageError, match="no policy is named"):
        evaluate("mutants")
