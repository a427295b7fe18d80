"""``crrl eval`` and ``grade`` as users call them, and measures of labels."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from typer.testing import CliRunner

from coderepairrl import report, tasks
from coderepairrl.cli import app
from coderepairrl.errors import ConfigError, HealthGateError, RunError, UsageError
from coderepairrl.runs import RunFolder
from coderepairrl.stages.arguments import plan_evaluations
from coderepairrl.stages.evaluation import Evaluation, evaluate_all
from coderepairrl.stages.results import format_results, read_results
from coderepairrl.stages.shards import merge_shards
from gateway.test_remote import listening

from .conftest import Project, make_completion, wait_until

MANY = ("select.n=2", "rollout.seconds=600")
GOLD = ("eval", "handmade", "eval.split=train", "agent=e2e_rewards:Gold", "--policy", "builtin:tiny")


def read_all_results(folder: Path) -> Mapping[str, Any]:
    """Read what must not depend on how an evaluation was run."""
    return {
        path.name: [drop_times(json.loads(line)) for line in (path.read_text().splitlines())]
        for path in sorted(folder.glob("eval/eval-00000/*.jsonl"))
    } | {
        "summary": drop_times(json.loads((folder / "eval/eval-00000/summary.json").read_text())),
        "tasks": (folder / "tasks.jsonl").read_text(),
    }


def drop_times(data: Any) -> Any:
    """Drop what depends on the clock, and on how often an attempt was tried."""
    if not isinstance(data, dict):
        return data
    return {key: drop_times(value) for key, value in data.items() if key not in {"seconds", "seconds_to_resolve", "id"}}


@pytest.mark.timeout(900)  # six evaluations, on a machine that may be busy
async def test_killed_and_resumed_or_sharded_evaluations_equal_an_undisturbed_one(
    project: Project, isolating: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.path)

    async def measure(output: str, shard: str | None = None) -> Mapping[str, Any]:
        settings, folder = [*MANY, "eval.attempts=2"], Path(output)
        [found] = await evaluate_all(
            plan_evaluations("mutants", settings, ["builtin:tiny"], output=folder, shard=shard)
        )
        return found

    whole = await measure("whole")
    assert whole["evaluations"]["eval"]["episodes"] == 4 and whole["cost"]["sampled_tokens"] > 0
    log = RunFolder(project.path / "killed").log
    tiny = ("eval", "mutants", *MANY, "--policy", "builtin:tiny", "--attempts", "2", "-o", "killed")
    with project.started(*tiny) as process:
        await wait_until(process, lambda: log.is_file() and log.read_bytes().count(b'{"type":"verdict"') >= 2)
    await evaluate_all(plan_evaluations("killed", resume=True))
    assert read_all_results(Path("killed")) == read_all_results(Path("whole")) != {}

    parts = [Path("part1"), Path("part2")]
    for number, part in enumerate(parts, 1):
        await measure(str(part), f"{number}/2")
    merged = project.crrl("eval", "--merge", "part2", "part1", "-o", "merged", "--json")
    assert read_all_results(Path("merged")) == read_all_results(Path("whole"))
    found = json.loads(merged.stdout)
    assert found == read_results(RunFolder(Path("merged")))
    assert drop_times(found["evaluations"]) == drop_times(whole["evaluations"])
    assert {**found["cost"], "attempt_seconds": 0} == {**whole["cost"], "attempt_seconds": 0}
    for shards, message in (
        (parts[:1], "shards are missing: 2/2"),
        ([*parts, parts[0]], "part1 and part1 are both shard 1/2"),
        ([parts[0], Path("whole")], "not shards of one evaluation"),
        ([parts[0], Path("nowhere")], "there is no run nowhere"),
    ):
        with pytest.raises(UsageError, match=message):
            merge_shards(shards, Path("x"))
    with pytest.raises(UsageError, match="merged already exists"):
        merge_shards(parts, Path("merged"))
    refuse_unlike_shards(parts)
    assert not Path("x").exists()
    with pytest.raises(UsageError, match="already holds a run"):
        await measure("whole")
    other = plan_evaluations("whole", ["eval.temperature=0"], resume=True)
    with pytest.raises(ConfigError, match=r"whole has eval.temperature=1.0, which cannot become 0.0") as caught:
        await evaluate_all(other)
    assert "crrl eval whole --resume" in caught.value.fix
    done = project.crrl("eval", "part1", "--merge", "--limit", "3", "-o", "x", check=False)
    assert done.returncode == 2 and "--merge makes no attempts" in done.stderr


def refuse_unlike_shards(parts: list[Path]) -> None:
    """Check that unfinished shards, and shards of several versions, are refused."""
    log, about = (parts[1] / "log.jsonl").read_bytes(), json.loads((parts[1] / "run.json").read_text())
    (parts[1] / "log.jsonl").write_bytes(log[: log.rindex(b'{"type":"eval"')])
    with pytest.raises(UsageError, match="part2 is not finished") as caught:
        merge_shards(parts, Path("x"))
    assert caught.value.fix == "crrl eval part2 --resume"
    (parts[1] / "log.jsonl").write_bytes(log)
    for key, value in {"coderepairrl": "0.0.1", "rewards": {"tests": 9}, "policy": "builtin:other"}.items():
        (parts[1] / "run.json").write_text(json.dumps({**about, key: value}))
        with pytest.raises(UsageError, match=f"they differ in {key}"):
            merge_shards(parts, Path("x"))
    [agent] = (found := about["conditions"]["eval"])["agents"]
    other = {"eval": {**found, "agents": [{**agent, "calls": 7}]}}
    (parts[1] / "run.json").write_text(json.dumps({**about, "conditions": other}))
    with pytest.raises(UsageError, match=f"they differ in eval: calls {agent['calls']} against 7"):
        merge_shards(parts, Path("x"))
    (parts[1] / "run.json").write_text(json.dumps(about))


def test_what_an_agent_repairs_is_found_and_its_predictions_are_graded_alike(project: Project, isolating: None) -> None:
    done = project.crrl(*GOLD, "-o", "gold", "--json")
    assert "\neval: reward " in done.stderr and "after step" not in done.stderr, "nothing was trained"
    found = json.loads(done.stdout)
    names = [task.id.rpartition("/")[2] for task in tasks.make_source("handmade") if task.split == "train"]
    repaired = sum("r" in name for name in names)
    filled = sum("r" in name or "s" in name for name in names)
    assert 0 < repaired < filled <= len(names)
    shares = {key: share["value"] for key, share in found["evaluations"]["eval"]["outcomes"].items()}
    expected = {
        "resolved": repaired / len(names),
        "completed": filled / len(names),
        "empty": 1 - filled / len(names),
        "exact": repaired / len(names),
        "resolved_per_patch": repaired / filled,
    }
    assert {name: shares[name] for name in expected} == pytest.approx(expected)
    [predictions] = found["predictions"]
    done = project.crrl("grade", predictions, "handmade", "-o", "graded.jsonl", "--json")
    [graded] = json.loads(done.stdout)["models"]
    assert graded["model"] == "builtin:tiny" and graded["resolved"] == repaired
    assert len(graded["missing"]) == graded["tasks"] - len(names) > 0, "those of the other split"
    rows = [json.loads(line) for line in (project.path / "graded.jsonl").read_text().splitlines()]
    assert sum(row["resolved"] for row in rows) == repaired
    assert sum(row["empty"] for row in rows) == len(names) - filled


LABELS = ("path=labels.jsonl", "eval.split=train", "agent=direct", 'agent.options={system=""}')


def plan_labels(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *more: str, count: int = 3, **options: Any
) -> list[Evaluation]:
    monkeypatch.chdir(tmp_path)
    rows = [{"id": f"q/{at}", "prompt": f"{at}?", "language": "c", "answer": "yes"} for at in range(count)]
    (tmp_path / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [*LABELS, *more, "engine.options.backoff=0", "engine.options.model_name=m"]
    return plan_evaluations("jsonl", given, [url], **options)


async def test_a_url_that_dies_stops_the_evaluation_and_is_no_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolating: None
) -> None:
    dead = True

    async def handler(request: web.Request) -> web.Response:
        if dead:
            return web.json_response({"error": "gone"}, status=500)
        return web.json_response(make_completion("<answer>yes</answer>"))

    async with listening(handler) as url:
        first = plan_labels(url, tmp_path, monkeypatch, "rollout.concurrency=2", count=40)
        with pytest.raises(HealthGateError, match="the last 4 attempts are void"):
            await evaluate_all(first)
        folder = first[0].folder
        records = list(folder.records())
        assert sum(record["type"] == "episode" for record in records) < 12 and records[-1]["type"] == "stop"
        dead = False
        [found] = await evaluate_all(plan_evaluations(str(folder.path), resume=True))
    summary = found["evaluations"]["eval"]
    assert (summary["void"], summary["tasks"]) == (0, 40)
    share = summary["values"]["label"]
    assert share["value"] == pytest.approx(share["high"]) == 1 and 0.9 < share["low"] < 1, "never of zero width"


async def test_a_url_that_becomes_another_model_is_two_policies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolating: None
) -> None:
    seen = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal seen
        seen += 1
        return web.json_response(make_completion("yes", model="m-1" if seen < 3 else "m-2"))

    async with listening(handler) as url:
        first = plan_labels(url, tmp_path, monkeypatch, "rollout.concurrency=1")
        with pytest.raises(RunError, match="replied as m-1 before, and as m-2 now"):
            await evaluate_all(first)
        with pytest.raises(RunError, match="replied as m-1 before"):
            await evaluate_all(plan_evaluations(str(first[0].folder.path), resume=True))


CLASSES = ("CWE-20", "CWE-125", "CWE-416")


async def test_labels_in_the_table_the_report_and_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolating: None
) -> None:
    """A policy that knows two of three classes against one that knows all: eval, report and compare agree with
    numbers counted by hand."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {"id": f"q/{at}", "prompt": f"Which is {CLASSES[at % 3]}?", "language": "c", "answer": CLASSES[at % 3],
         "repository": f"a/{at // 3}", "kind": "detect"}
        for at in range(18)
    ]  # fmt: skip
    Path("labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    knows, asked = set[str](CLASSES[:2]), dict[str, int]()

    async def handler(request: web.Request) -> web.Response:
        text = str((await request.json())["messages"][-1]["content"])
        label = text.removeprefix("Which is ").removesuffix("?")
        asked[label] = asked.get(label, 0) + 1
        if label == "CWE-20" and asked[label] == 1 and len(knows) == 2:
            return web.json_response(make_completion("I do not\nknow"))
        said = label if label in knows else "CWE-20" if asked[label] % 2 else "CWE-999"
        return web.json_response(make_completion(f"<answer>\n{said.lower()}\n</answer>"))

    async with listening(handler) as url:
        for run, known in (("one", CLASSES[:2]), ("two", CLASSES)):
            knows.clear()
            knows.update(known)
            asked.clear()
            given = [*LABELS, "engine.options.model_name=m", f"run.name={run}", "eval.attempts=2"]
            [found] = await evaluate_all(plan_evaluations("jsonl", given, [url]))
            if run == "one":
                first = found

    numbers = first["evaluations"]["eval"]["answers"]["detect"]
    assert (numbers["tasks"], numbers["answers"], numbers["missing"], numbers["invalid"]) == (18, 36, 1, 6)
    assert numbers["accuracy"]["value"] == pytest.approx(23 / 36)
    expected = (2 * 11 / (11 + 6 + 12) + 1 + 0) / 3
    assert numbers["macro_f1"]["value"] == pytest.approx(expected)
    assert numbers["macro_f1"]["low"] < expected < numbers["macro_f1"]["high"]
    assert numbers["confusion"]["CWE-416"] == {"CWE-20": 6, "(other)": 6}
    assert numbers["confusion"]["CWE-20"] == {"CWE-20": 11, "(none)": 1}
    table = format_results([first])
    assert "kind detect: 18 tasks, 36 answers, 1 without a label, 6 with another" in table
    assert f"{expected:.3f}" in table and "undefined" in table

    folders = [Path("runs/one"), Path("runs/two")]
    site = report.Site(folders)
    page = site.page(site.choose_first_path())
    assert "Labels of one, kind detect" in page and f"{expected:.3f}" in page and "(other)" in page
    shown = json.loads(CliRunner().invoke(app, ["report", "runs/one", "--json"]).stdout)
    assert shown["runs"][0]["evaluations"][0]["answers"] == {"detect": numbers}

    compared = CliRunner().invoke(app, ["compare", "runs/one", "runs/two", "--metric", "label", "--json"])
    [labels] = json.loads(compared.stdout)["comparisons"][0]["labels"]
    assert (labels["kind"], labels["tasks"]) == ("detect", 18)
    assert labels["early"] == numbers["macro_f1"] and labels["late"]["value"] == 1
    assert labels["change"]["value"] == pytest.approx(1 - expected) and labels["change"]["low"] > 0
    assert labels["accuracy"]["value"] == pytest.approx(13 / 36)
    words = CliRunner().invoke(app, ["compare", "runs/one", "runs/two", "--metric", "label"]).stdout
    assert "difference of macro-F1" in words
