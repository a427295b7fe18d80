"""Runs side by side and answers to the research questions, recomputed by pandas from exports and logs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from coderepairrl.config import load_config
from coderepairrl.report.analysis import compare_runs
from coderepairrl.report.site import Site
from coderepairrl.report.thesis import make_figures, write_thesis
from coderepairrl.report.thesis.questions import answer_rq2, compare_sides, estimate_slope
from coderepairrl.runs import RunFolder, write_json
from coderepairrl.stages.command import compute_needs
from coderepairrl.types import Ending, Episode, Score
from tests.report.runs import RunMaker
from tests.report.thesis_runs import read_thesis_run, write_direct_run, write_thesis_run

STEPS = 30
NEEDS = compute_needs(load_config("thesis", ["gpu.memory_gb=80"]))
Read = Callable[[str], pd.DataFrame]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Runs `a` and `b`, which differ in seed and algorithm; `a` has a plan."""
    folder = tmp_path_factory.mktemp("runs")
    run = RunFolder(write_thesis_run(folder / "a", STEPS))
    write_json(run.path / "run.json", {**run.about(), "needs": NEEDS})
    config = write_thesis_run(folder / "b", STEPS, seed=1) / "config.toml"
    config.write_text(config.read_text().replace('"gspo"', '"ppo"'))
    return Site([folder])


@pytest.fixture(scope="module")
def folder(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_thesis(site, tmp_path_factory.mktemp("figures")).parent


@pytest.fixture(scope="module")
def read(folder: Path) -> Read:
    return lambda name: pd.read_csv(folder / f"{name}.csv")


@pytest.fixture(scope="module")
def logged(site: Site) -> pd.DataFrame:
    """Attempts of evaluations, as in the logs."""
    rows = []
    for name, run in site.runs.items():
        for record in run.folder.records():
            if record["type"] == "verdict" and (verdict := record["verdict"])["phase"] == "eval":
                scores = {score["name"]: score["value"] for score in verdict["scores"]}
                each = {"run": name, "step": verdict["step"], "task": verdict["task_id"], "resolved": scores["tests"]}
                each |= {"completed": bool(verdict["patch"]), "ended by itself": verdict["ending"] == "done"}
                rows.append({**each, "empty": not verdict["patch"], "patch_lines": scores["patch_lines"]})
    frame = pd.DataFrame(rows)
    names = ["completed", "ended by itself", "empty"]
    return frame.astype(dict.fromkeys(names, float)).assign(errors=0.0)


def test_curves_are_centred_rolling_means(site: Site, read: Read) -> None:
    attempts, calls = read("attempts"), read("calls")
    deviations = attempts.groupby(["run", "step", "group"]).reward.std(ddof=0).groupby(["run", "step"]).mean()
    logged = pd.DataFrame(
        {"run": name, "step": record["step"], **record["metrics"]}
        for name, run in site.runs.items()
        for record in run.folder.records()
        if record["type"] == "step"
    ).set_index(["run", "step"])
    values = {
        "reward": attempts.groupby(["run", "step"]).reward.mean(),
        "reward_std": deviations,
        "tool_success": calls.groupby(["run", "step", "id"]).ok.mean().groupby(["run", "step"]).mean(),
        **{name: logged[name] for name in ("learn/grad_norm", "learn/clip_low", "learn/clip_high")},
    }
    drawn = pd.concat([read("curves"), read("algorithms")])
    assert set(drawn.measure) == set(values) and set(drawn.run) == {"a", "b"}
    for (run, measure), curve in drawn.groupby(["run", "measure"]):
        window = values[measure].loc[run].rolling(6, center=True, min_periods=1)
        curve = curve.drop_duplicates("step").set_index("step")  # the reward is in both figures
        np.testing.assert_allclose(curve["mean"], window.mean(), err_msg=measure)
        assert (curve["steps in the window"] == window.count()).all()


def test_success_is_that_of_the_logged_verdicts_and_of_the_report(site: Site, read: Read, logged: pd.DataFrame) -> None:
    table, reports = read("table-success"), {each.name: each for each in site.reports()}
    assert len(table) == 2 * 3 * 6
    means, changes = table[table["sum"].notna()], table[table["sum"].isna()]
    for row in means.to_dict("records"):
        attempts = logged[(logged.run == row["run"]) & (logged.step == int(row["step"]))]
        per_patch = row["measure"] == "resolved per completed"
        values = attempts.resolved[attempts.completed == 1] if per_patch else attempts[row["measure"]]
        assert row["n"] == len(values) and (row["sum"], row["value"]) == pytest.approx((values.sum(), values.mean()))
    names = {"empty": "empty_patches", "resolved": "tests", "resolved per completed": "tests_per_patch"}
    for row in changes.to_dict("records"):
        attempts = logged[logged.run == row["run"]].set_index(["step", "task"])
        both = attempts.unstack("step")
        if row["measure"] == "resolved per completed":
            both = both[(both["completed"] == 1).all(axis=1)]
        values = both[row["measure"].removesuffix(" per completed")]
        assert row["n"] == len(both) and row["value"] == pytest.approx((values[STEPS] - values[0]).mean())
        assert row["low"] <= row["value"] <= row["high"]
        if row["measure"] in names:
            change = reports[row["run"]].comparisons[0].changes[names[row["measure"]]]
            assert (row["value"], row["low"], row["high"], row["p"]) == pytest.approx((*change.change, change.p))
    drawn = read("success").merge(means[means.measure == "resolved"].astype({"step": int}))
    assert len(drawn) == len(read("success")) == 4  # what the figure has is in the table


def test_an_ablation_floats_from_the_first_run(site: Site, read: Read, logged: pd.DataFrame) -> None:
    first, other = read("ablation").to_dict("records")
    means = logged[logged.step == STEPS].groupby("run").resolved.mean()
    [compared] = [each for each in compare_runs(*site.reports()) if each.before == "a"]
    change = compared.changes["tests"]
    assert (first["run"], first["from"], first["to"]) == ("a", 0, pytest.approx(means["a"]))
    assert (other["run"], other["from"], other["to"]) == ("b", first["to"], pytest.approx(means["b"]))
    ends = [first["to"] + end for end in change.change[1:] if end is not None]
    assert [other["low"], other["high"], other["p"]] == pytest.approx([*ends, change.p])


def test_compute_is_counted_from_the_log(site: Site, read: Read) -> None:
    table = read("table-compute")
    assert list(table.run[:2]) == ["a", "b"] and table["source"].notna().all()
    assert table["GPU hours"].dropna().tolist() == [144.0] and table["hardware"].tolist()[2] == "72 H100"
    for (name, run), (_, row) in zip(site.runs.items(), table.iterrows(), strict=False):
        records = list(run.folder.records())
        verdicts = [each for each in records if each["type"] == "verdict" and each["verdict"]["phase"] == "train"]
        sampled = sum(len(each["turn"]["output"]["ids"]) for each in records if each["type"] == "turn")
        counts = (row["run"], row["steps"], row["training episodes"], row["sampled tokens"])
        assert counts == (name, STEPS, len(verdicts), sampled)


def test_memory_is_that_of_the_plan_at_the_start_of_the_run(read: Read, folder: Path) -> None:
    table = read("table-memory").set_index("only change")
    assert table["GB with it"].to_dict() == NEEDS["learner_gb_with"] and set(table.run) == {"a"}
    np.testing.assert_allclose(table["GB"] + table["difference"], table["GB with it"])
    assert (table["GB"] == NEEDS["gpu 1, 2 (learner)"]["needs_gb"]).all()
    assert table.difference["train.lora=false"] > 300 > 0 > table.difference["train.strategy=fsdp2"]
    assert "Without a plan, so left out: b: run.json has no plan." in (folder / "index.html").read_text()


def test_numbers_behind_the_answers(read: Read, logged: pd.DataFrame) -> None:
    table, answers = read("question-numbers"), read("questions")
    attempts, calls = (read(name).query("run == 'a'") for name in ("attempts", "calls"))
    expected: dict[str, tuple[float, int]] = {}
    steps = {"reward": attempts.groupby("step").reward.mean()}
    steps["reward_std"] = attempts.groupby(["step", "group"]).reward.std(ddof=0).groupby("step").mean()
    for name, values in steps.items():
        expected[f"slope of {name} per 100 steps"] = 100 * np.polyfit(values.index, values, 1)[0], STEPS
        expected |= make_ends(name, values[:6], values[-6:])
    early, late = attempts.step <= 6, attempts.step > STEPS - 6
    expected |= make_ends("calls per attempt", attempts.tool_calls[early], attempts.tool_calls[late])
    limited = calls.id.isin(attempts.id[attempts.reason == "calls"])
    first, last = calls.step <= 6, calls.step > STEPS - 6
    within = "success of calls within the limit"
    expected |= make_ends(within, calls.ok[first & ~limited], calls.ok[last & ~limited])
    shares = (
        calls.command[last]
        .value_counts(normalize=True)
        .sub(calls.command[first].value_counts(normalize=True), fill_value=0)
    )
    for name in [*shares.nlargest(3).index, *shares.nsmallest(3).index]:
        expected[f"share of {name}, late - early"] = shares[name], int((first | last).sum())
    evaluated = logged[logged.run == "a"].groupby("step").mean(numeric_only=True)
    for measure in ("completed", "ended by itself", "resolved"):
        for step in (0, STEPS):
            expected[f"{measure}, step {step}"] = evaluated[measure][step], 24
        expected[f"{measure}, step {STEPS} - step 0"] = evaluated[measure].diff().iloc[-1], 24
    visits = attempts.groupby(["language", "task", "visit"]).reward.mean().unstack("visit")
    for language, rewards in visits[visits[2].notna()].groupby("language"):
        change = rewards.ffill(axis=1).iloc[:, -1] - rewards[1]
        expected[f"reward in {language}, last time - first time"] = change.mean(), len(change)

    found = table[table.run == "a"].set_index("quantity")
    for quantity, (value, n) in expected.items():
        assert (found.value[quantity], found.n[quantity]) == (pytest.approx(value), n), quantity
    others = set(found.index) - set(expected)
    assert all(" in " in each and ("tests" in each or "eval" in each) for each in others)  # RQ3, by the report
    assert (found.low.isna() | ((found.low <= found.value) & (found.value <= found.high))).all()
    text = dict(zip(answers.question.str[:3], answers.answer[answers.run == "a"], strict=False))
    assert "over steps: rose" in text["RQ0"] and f"{within}: rose" in text["RQ1"] and "never fell" in text["RQ0"]


def make_ends(name: str, early: pd.Series, late: pd.Series) -> dict[str, tuple[float, int]]:
    change = late.mean() - early.mean()
    ends = {"early": (early.mean(), len(early)), "late": (late.mean(), len(late))}
    return {
        f"{name}, {end}": value for end, value in {**ends, "late - early": (change, len(early) + len(late))}.items()
    }


def test_too_few_clusters_have_no_interval_and_noise_has_no_trend() -> None:
    """A straight line has its slope in every draw; few clusters on a side have no interval; noise has no trend."""
    line = estimate_slope([(step, 0.01 * step) for step in range(40)], [step // 2 for step in range(40)])
    assert line.value == pytest.approx(1.0) and line.low is None
    noise = np.random.default_rng(0).normal(size=40)
    flat = estimate_slope([*enumerate(noise)], range(40))
    assert flat.low is not None and flat.high is not None and flat.low < 0 < flat.high
    assert estimate_slope([*enumerate(noise[:4])], range(4)).low is None
    few = [(at % 4, float(value)) for at, value in enumerate(noise)]
    many = [*enumerate(map(float, noise))]
    assert compare_sides("x", "steps", (few, many))[-1].interval.low is None
    change = compare_sides("x", "steps", (many, [(-at, value + 3) for at, value in many]))[-1].interval
    assert change.value == pytest.approx(3) and change.is_all_above(2)
    assert compare_sides("x", "steps", ([], many)) == []


def test_the_published_numbers_show_no_difference_in_repairs(tmp_path: Path) -> None:
    """S2: completed 186 to 388 and resolved 36 to 31 of 500."""
    run = read_thesis_run(write_direct_run(tmp_path / "run"))

    def evaluate(step: int, completed: int, resolved: range) -> list[Episode]:
        made = [Episode(f"{step}-{at}", f"t{at}", "eval", step, f"{at}", 0, Ending.DONE) for at in range(500)]
        return [
            replace(each, patch=b"x" * (at < completed), scores=(Score("tests", float(at in resolved)),))
            for at, each in enumerate(made)
        ]

    by_step = {0: evaluate(0, 186, range(36)), 460: evaluate(460, 388, range(20, 51))}
    text, findings = answer_rq2(replace(run, report=replace(run.report, evaluated={"eval": by_step})))
    operates, repairs = text.split("Tier 2, repairs: ")
    assert operates.startswith("Tier 1, operates: step 460 is above step 0 on completed: +40.4 points")
    assert repairs.startswith("No difference can be claimed: step 460 - step 0 = -1.0 points")
    assert "the smallest difference that 500 tasks could have shown is" in repairs
    base = next(each.interval for each in findings if each.quantity == "resolved, step 0")
    assert base == pytest.approx((0.072, 0.053, 0.098), abs=1e-3)  # Wilson's, as on the slide


def test_a_missing_figure_says_what_the_run_lacks(tmp_path: Path) -> None:
    direct = write_direct_run(tmp_path / "direct")
    page = write_thesis(Site([direct]), tmp_path / "out").read_text()
    for words in (
        "direct: run.json has no plan",
        "no evaluation is finished",
        "a single run has nothing to compare with",
        "all runs use GSPO",
    ):
        assert f"Not shown: {words}." in page
    answers = pd.read_csv(tmp_path / "out/questions.csv").set_index("question").answer
    assert answers.str.contains("Not known: ").sum() == 3 and "fewer than two" in answers.iloc[0]
    assert {"success.svg", "ablation.csv"}.isdisjoint(each.name for each in (tmp_path / "out").iterdir())
    assert not any("nan" in each.read_text() for each in (tmp_path / "out").glob("*.csv"))
    run = read_thesis_run(direct)
    figures: dict[str, Any] = {each.name: each for each in make_figures([run])}
    for missing, names in (
        ("no attempt called a tool", ("command-flow", "episode", "exploits-fetching", "habits")),
        ("no attempt at a task with a reference has a patch", ("exploits-large-patches",)),
        ("fewer than two tasks were visited twice", ("language-visits",)),
        ("all attempts are in one language, python", ("languages",)),
        ("no task was visited twice", ("task-progress",)),
        ("", ("ties", "tokens", "task-rewards")),
    ):
        assert {figures[name].missing for name in names} == {missing}
    first = [replace(each, resolved=None) for each in run.attempts if each.step == 1]
    figures = {each.name: each for each in make_figures([replace(run, attempts=first)])}
    names = ("ties", "tokens", "task-rewards", "exploits-large-patches", "habits")
    assert {figures[name].missing for name in names} == {"fewer than two steps with attempts"}
    assert figures["task-extremes"].caption.endswith("which tasks were never solved is unknown.")
    bare = RunFolder(tmp_path / "bare")
    bare.create((direct / "config.toml").read_text(), {"name": "bare"})
    figures = {each.name: each for each in make_figures([read_thesis_run(bare.path)])}
    assert figures["curves"].missing == "fewer than two steps"
    assert all("Not known" in row[2] for row in figures["questions"].rows)
    drawn = {name for name, figure in figures.items() if not figure.missing}
    assert drawn <= {"questions", "question-numbers", "table-compute"}


def test_tests_of_any_evaluation_count_and_only_runs_that_train_have_figures_of_training(tmp_path: Path) -> None:
    class Maker(RunMaker):
        def evaluate(self, step: int, phase: str = "eval") -> None:
            super().evaluate(step, phase)
            self.tests = True
            super().evaluate(step, "verified")
            self.tests = False

    trained = Maker(tmp_path / "trained", tests=False, run={"steps": 4}).run(4, evaluations=(0, 4)).folder.path
    base = Maker(tmp_path / "base", tests=False).run(0, evaluations=(0,)).folder
    about = json.loads((base.path / "run.json").read_text())
    (base.path / "run.json").write_text(json.dumps({**about, "policy": "base"}))
    figures = {each.name: each for each in make_figures([read_thesis_run(base.path), read_thesis_run(trained)])}
    assert {row[0] for row in figures["questions"].rows} == {"trained"} and "ties" in figures
    answers = [row[2] for row in figures["questions"].rows]
    assert (
        "evaluations resolved" in answers[0] and "Tier 2, repairs: " in answers[2] and "no test ran" not in answers[2]
    )
    assert not figures["ablation"].missing and "Last evaluation verified" in figures["ablation"].caption


def test_runs_of_one_name_have_their_own_figures_and_damage_is_told(tmp_path: Path) -> None:
    paths = [write_direct_run(tmp_path / f"{place}/p/same") for place in "ab"]
    log = paths[0] / "log.jsonl"
    log.write_bytes(log.read_bytes()[:-5])
    page = write_thesis(Site(paths), tmp_path / "out").read_text()
    reports = Site(paths).reports()
    assert len({each.name for each in reports}) == 2 == len(list((tmp_path / "out").glob("ties*.svg")))
    assert "a/p/same: The log&#39;s last line is incomplete" in page
    (tmp_path / "out" / "ties-mine.svg").write_text("mine")
    write_thesis(Site(paths[:1]), tmp_path / "out")
    assert sorted(each.name for each in (tmp_path / "out").glob("ties*.svg")) == ["ties-mine.svg", "ties.svg"]
    figures = make_figures([replace(read_thesis_run(paths[1]), report=report) for report in reports])
    assert len({figure.name for figure in figures}) == len(figures)


def test_metrics_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    class Diverged(RunMaker):
        def record(self, type: str, **fields: Any) -> None:
            if type == "step":
                fields["metrics"] |= dict.fromkeys(("reward", "reward_std", "tool_success"), float("nan"))
            super().record(type, **fields)

    run = Diverged(tmp_path / "run", run={"steps": 3}).run(3).folder.path
    figures = {each.name: each for each in make_figures([read_thesis_run(run)])}
    assert figures["curves"].missing == "no step has any of these measures"
    assert figures["question-numbers"].rows and "nan" not in str([each.rows for each in figures.values()])
