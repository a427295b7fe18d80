"""What is said of labels, by every command that reads an evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from aiohttp import web
from typer.testing import CliRunner

from coderepairrl import report
from coderepairrl.cli import app
from coderepairrl.stages.arguments import plan_evaluations
from coderepairrl.stages.evaluation import evaluate_all
from coderepairrl.stages.results import format_results

from .test_eval_command import LABELS, completion, listening

CLASSES = ("CWE-20", "CWE-125", "CWE-416")


async def test_labels_in_the_table_the_report_and_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolating: None
) -> None:
    """A policy that knows two classes of three, in two attempts of which the second says nothing in one task, against
    one that knows all: the numbers of eval, report and compare are the same, and those that can be counted."""
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
            return web.json_response(completion("I do not\nknow"))
        said = label if label in knows else "CWE-20" if asked[label] % 2 else "CWE-999"
        return web.json_response(completion(f"<answer>\n{said.lower()}\n</answer>\n<confidence>0.75</confidence>"))

    async with listening(handler) as url:
        for run, known in (("one", CLASSES[:2]), ("two", CLASSES)):
            knows.clear()
            knows.update(known)
            asked.clear()
            given = [*LABELS[2:], "engine.options.model_name=m", f"run.name={run}", "eval.attempts=2"]
            [found] = await evaluate_all(plan_evaluations("jsonl", given, [url]))
            table = format_results([found])
            if run == "one":
                first, text = found, table

    numbers = first["evaluations"]["eval"]["answers"]["detect"]
    assert (numbers["tasks"], numbers["answers"], numbers["missing"], numbers["invalid"]) == (18, 36, 1, 6)
    assert numbers["accuracy"]["value"] == pytest.approx(23 / 36)
    expected = (2 * 11 / (11 + 6 + 12) + 1 + 0) / 3
    assert numbers["macro_f1"]["value"] == pytest.approx(expected)
    assert numbers["macro_f1"]["low"] < expected < numbers["macro_f1"]["high"]
    assert numbers["confusion"]["CWE-416"] == {"CWE-20": 6, "(other)": 6}
    assert numbers["confusion"]["CWE-20"] == {"CWE-20": 11, "(none)": 1}
    assert numbers["stated"]["count"] == 35 and numbers["agreement"]["count"] == 18
    assert numbers["stated"]["error"]["value"] == pytest.approx(0.75 - 23 / 35)
    assert "kind detect: 18 tasks, 36 answers, 1 without a label, 6 with another" in text
    assert "macro-F1" in text and f"{expected:.3f}" in text
    assert "CWE-416" in text and "undefined" in text

    folders = [Path("runs/one"), Path("runs/two")]
    site = report.Site(folders)
    page = site.page(site.first())
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
