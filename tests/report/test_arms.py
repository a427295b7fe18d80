"""What the runs of arms say: the numbers of its questions, what is missing, what may not be compared, every format."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from coderepairrl.config import Config, to_toml
from coderepairrl.report.arms import Question, Runs, answer_question, result
from coderepairrl.report.verdict import FORMATS, Table, render
from coderepairrl.runs import RunFolder
from coderepairrl.stats.replicates import replicated_difference
from coderepairrl.types import Ending, Episode, Score, ToolCall

TASKS = [f"mutants/f{at // 2}/swap-{at}-q" for at in range(24)]
QUESTION = Question("RQ2", "Are more bugs repaired?", ("base", "rl", "other"), "resolved", "eval")
ARMS = Table("arms", ("arm",), [("base",), ("rl",), ("other",)])
Solves = Callable[[int, int], bool]


def evaluated(path: Path, solves: Solves, seed: int, *, calls: int = 5, version: int = 1, tasks: int = 24) -> Path:
    """A finished evaluation in which `solves` says of seed and task whether the tests passed."""
    config = Config.model_validate({"run": {"name": path.name, "seed": seed}, "rollout": {"calls": calls}})
    folder = RunFolder(path)
    folder.create(to_toml(config), {"name": path.name, "rewards": {"tests": version}})
    made = Episode("", "", "eval", 0, "", 0, Ending.DONE, patch=b"diff", tool_calls=(ToolCall(0, "shell", "{}", True),))
    folder.write_episodes(
        "eval-00000",
        [
            replace(made, id=f"e{at}", task_id=task, group=f"g{at}", scores=(Score("tests", float(solves(seed, at))),))
            for at, task in enumerate(TASKS[:tasks])
        ],
    )
    return path


def grid(tmp_path: Path, seeds: int = 3) -> dict[str, dict[int, Path]]:
    """A baseline that repairs a quarter of the tasks, an arm that repairs nearly all, and one that is no better."""
    random = Random(0)
    arms: dict[str, Solves] = {
        "base": lambda seed, at: at % 4 == 0,
        "rl": lambda seed, at: at % 8 != 1,
        "other": lambda seed, at: random.random() < 0.25,
    }
    return {
        arm: {seed: evaluated(tmp_path / f"{arm}-{seed}", solves, seed) for seed in range(seeds)}
        for arm, solves in arms.items()
    }


def said(runs: Runs, seeds: int = 3, question: Question = QUESTION) -> str:
    return "\n".join(result([question], runs, range(seeds), ARMS).verdicts)


def test_what_differs_is_claimed_and_what_does_not_says_what_could_have_been_seen(tmp_path: Path) -> None:
    runs = grid(tmp_path)
    found = answer_question(QUESTION, runs)
    assert {arm: mean.interval.value for arm, mean in found.means.items()} == {
        "base": 0.25,
        "rl": 0.875,
        "other": pytest.approx(0.25, abs=0.15),
    }
    rows = [[float(at % 4 == 0) for at in range(24)]] * 3, [[float(at % 8 != 1) for at in range(24)]] * 3
    order = sorted(range(24), key=lambda at: TASKS[at])
    sides = [[[row[at] for at in order] for row in side] for side in rows]
    clusters = [TASKS[at].rpartition("/")[0] for at in order]
    expected = replicated_difference(sides[0], sides[1], clusters, share=True)
    rl, other = found.contrasts
    assert rl.change == expected and rl.claimed and not other.claimed
    assert rl.adjusted == pytest.approx(2 * expected.p), "Holm, of two"
    text = said(runs)
    assert text.startswith("RQ2: Are more bugs repaired? rl is above base: rl - base = +62.5 points [")
    assert "3 seeds x 24 tasks. Too small to tell: other - base" in text
    assert "the smallest difference that 3 seeds x 24 tasks could have shown is" in text


def test_what_is_missing_is_said_and_makes_nothing_more_certain(tmp_path: Path) -> None:
    runs = grid(tmp_path)
    runs["rl"][2] = evaluated(tmp_path / "short", lambda seed, at: True, 2, tasks=20)
    found = answer_question(QUESTION, runs)
    assert (found.means["base"].tasks, found.notes) == (20, ["RQ2: 4 tasks left out, which some run has no value of."])
    assert "Not known yet" in said({"rl": runs["rl"]}), "nothing without the baseline"
    del runs["rl"][1], runs["other"]
    text = said(runs)
    assert "2 seeds x 20 tasks (of 3 seeds)" in text
    assert text.endswith("Not known yet: no seed of base and other is finished.")
    [rl] = answer_question(QUESTION, runs).contrasts
    assert rl.adjusted == pytest.approx(2 * (rl.change.p or 0)), "an arm that failed makes no other one more certain"


def test_what_may_not_be_compared_is_an_answer_of_its_own(tmp_path: Path) -> None:
    runs = grid(tmp_path)
    runs["rl"][0] = evaluated(tmp_path / "judged", lambda seed, at: True, 0, version=2)
    assert "cannot be answered: base, seed 0 and rl, seed 0 were judged by other versions of a reward" in said(runs)
    assert "does not measure 'speed'" in said(runs, question=replace(QUESTION, metric="speed"))
    assert "no one evaluation 'greedy'" in said(runs, question=replace(QUESTION, evaluation="greedy"))


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_has_every_number_with_its_interval(tmp_path: Path, form: str) -> None:
    text = render(result([QUESTION], grid(tmp_path), range(3), ARMS, ["a note"]), form)
    assert "a note" in text and "rl is above base" in text
    if form == "json":
        data = json.loads(text, parse_constant=pytest.fail)
        [question] = data["questions"]
        assert question["contrasts"][0]["claimed"] is True
        assert set(question["by_seed"]["rl"]) == {"0", "1", "2"}
    else:
        assert "25.0 " in text and "too few" not in text
