"""One patch out of several attempts, and numbers of others beside our own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from coderepairrl.report.choosing import choose, judged_by_oracle
from typer.testing import CliRunner

from coderepairrl.cli import app
from coderepairrl.errors import UsageError
from coderepairrl.report import published
from coderepairrl.runs import RunFolder
from coderepairrl.types import Ending, Episode, Score


def patch(text: str, context: str = "x") -> bytes:
    return f"--- a/f.py\n+++ b/f.py\n@@ -1,2 +1,2 @@\n {context}\n-a\n+{text}\n".encode() if text else b""


def attempt(task: str, number: int, text: str, passed: bool, short: float, context: str = "x") -> Episode:
    tests = Score("tests", float(bool(passed)), 1.0, passed=passed)
    scores = (tests, Score("patch_edits", float(text == "good"), 0.0), Score("short", short, 0.0))
    made = patch(text, context)
    return Episode(f"{task}-{number}", task, "eval", 0, task, number, Ending.DONE, patch=made, scores=scores)


def run(folder: Path, *episodes: Episode) -> str:
    made = RunFolder(folder)
    made.create('[run]\nname = "r"\n', {"name": "r"})
    made.write_episodes("eval-00000", episodes)
    return str(folder)


def three(folder: Path) -> str:
    """Majority is right on the first, wrong on the second and empty but for one attempt on the third task."""
    return run(
        folder,
        *(attempt("a", n, text, text == "good", 0.0, f"c{n}") for n, text in enumerate(["bad", "good ", "good"])),
        *(attempt("b", n, text, text == "good", -n) for n, text in enumerate(["good", "bad", "bad"])),
        *(attempt("c", n, text, text == "good", n) for n, text in enumerate(["", "", "good"])),
    )


def test_each_rule_chooses(tmp_path: Path) -> None:
    source = three(tmp_path / "run")
    found = {each.rule: (dict(each.outcomes), each.oracle) for each in choose(source)}
    assert found["first"] == ({"a": 0, "b": 1, "c": 0}, False)
    assert found["majority"][0] == {"a": 0, "b": 0, "c": 1}, "of `good ` and `good`, one patch, the first counts"
    assert found["mean"][0]["b"] == pytest.approx(1 / 3)
    assert found["tests"] == ({"a": 1, "b": 1, "c": 1}, True) and found["patch_edits"][1] and found["any"][1]
    assert found["short"][0] == {"a": 0, "b": 1, "c": 1}
    assert {each.rule: each.outcomes for each in choose(source, 1)}["any"] == {"a": 0, "b": 1, "c": 0}
    with pytest.raises(UsageError, match="3 valid attempts, and 4"):
        choose(source, 4)
    with pytest.raises(UsageError, match="nothing to choose from"):
        choose(run(tmp_path / "once", attempt("a", 0, "good", True, 0.0)))
    with pytest.raises(UsageError, match="its checks were not run"):
        choose(run(tmp_path / "unjudged", replace(attempt("a", 0, "good", True, 0.0), scores=())))


def test_oracles_are_known_by_what_they_look_at() -> None:
    assert not judged_by_oracle("length")
    assert all(map(judged_by_oracle, ("tests", "patch_similarity", "patch_lines", "nobody:Knows")))


def test_the_command_writes_what_compare_reads(tmp_path: Path) -> None:
    source, chosen = three(tmp_path / "run"), tmp_path / "chosen.jsonl"

    def crrl(*words: Any) -> Any:
        return CliRunner().invoke(app, [*map(str, words)])

    done = crrl("choose", source, "-o", chosen)
    assert done.exit_code == 0 and "oracle: looks at what no policy is given" in done.stdout
    assert "any" in done.stdout and "1.000 [0." in done.stdout, "no number without its interval"
    assert isinstance(crrl("choose", source, "-o", chosen).exception, UsageError)
    assert json.loads(crrl("choose", source, "--json").stdout)[0]["rule"] == "first"
    compared = crrl("compare", f"{chosen}@first", f"{chosen}@tests", "--json")
    assert compared.exit_code == 0 and json.loads(compared.stdout)["comparisons"]


def test_numbers_of_others_are_cited_and_marked() -> None:
    table = published.table()
    assert len(table) > 30
    for each in table.values():
        assert (each.percent is None) != (each.similarity is None), each.name
        assert each.source and each.scaffold and each.how and each.tasks > 0
        if each.percent is not None:
            assert each.solved is not None and abs(100 * each.solved / each.tasks - each.percent) < 0.06, each.name
    listed = CliRunner().invoke(app, ["compare", "--published"])
    assert listed.exit_code == 0 and published.MARK in listed.stdout
    assert all(name in listed.stdout for name in table)
    done = CliRunner().invoke(app, ["compare", "36/500", "published:swe-rl"])
    assert done.exit_code == 0 and f"swe-rl on SWE-bench Verified ({published.MARK})" in done.stdout
    assert "compare neither with each other nor with ours" in done.stdout
    numbers = json.loads(CliRunner().invoke(app, ["compare", "--published", "--json"]).stdout)
    assert numbers["published"][0]["tasks"] == 500
    for wrong in ("swe-rle", "nano-qwen3-14b", "agentless-lite"):  # nobody, another measure, another benchmark
        refused = CliRunner().invoke(app, ["compare", "36/500", f"published:{wrong}"])
        assert isinstance(refused.exception, UsageError)


def test_episodes_of_another_shape_are_damage_that_is_named(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.create("", {"name": "run"})
    run.write_evaluation("eval-00000", {"step": 0})
    (run.path / "episodes/eval-00000.jsonl").write_text("[]\n")
    with pytest.raises(UsageError, match="eval-00000.jsonl is damaged"):
        choose(str(run.path))
