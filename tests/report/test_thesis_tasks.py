"""Figures about languages, tokens and tasks: each number recomputed by pandas from the exported tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from coderepairrl.report.site import Site
from coderepairrl.report.thesis import make_figures, write_thesis
from coderepairrl.report.thesis.attempts import ThesisRun
from coderepairrl.report.thesis.marks import Figure
from coderepairrl.stats.intervals import mean_interval, median_interval, paired_difference, wilson_interval
from tests.report.thesis_runs import read_thesis_run, write_thesis_run

STEPS, END, MIDDLE = 21, 4, 11


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("thesis")
    write_thesis(Site([write_thesis_run(base / "run", STEPS)]), base / "out")
    return base / "out"


@pytest.fixture(scope="module")
def figures(folder: Path) -> dict[str, Figure]:
    return {figure.name: figure for figure in make_figures([read_thesis_run(folder.parent / "run")])}


@pytest.fixture(scope="module")
def attempts(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "attempts.csv")


def pick_ends(attempts: pd.DataFrame) -> dict[str, pd.DataFrame]:
    return {"early": attempts[attempts.step <= END], "late": attempts[attempts.step > STEPS - END]}


def read_marks(folder: Path, name: str) -> dict[str, pd.DataFrame]:
    """Rows of a CSV by panel."""
    table = pd.read_csv(folder / f"{name}.csv")
    return {panel: rows.drop(columns="panel") for panel, rows in table.groupby("panel", sort=False)}


def interval(values: pd.Series, tasks: pd.Series | pd.Index) -> list[float]:
    return list(mean_interval(list(values), list(tasks), share=True))


def check(rows: pd.DataFrame, expected: dict[tuple[str, str], list[float]], *more: str) -> None:
    """Compare n, value and interval, or n, value and `more`, by series and place; no row is missing or left over."""
    names = ["n", "value", *(more or ("low", "high"))]
    found = {(row.series, str(row.at)): [getattr(row, name) for name in names] for row in rows.itertuples()}
    assert found.keys() == expected.keys()
    for key, numbers in expected.items():
        assert found[key] == pytest.approx(numbers, abs=1e-9), key


def average(attempts: pd.DataFrame, language: str = "all") -> pd.Series:
    return attempts[attempts.language.eq(language) | (language == "all")].groupby("task").reward.mean()


def pick_repeated(attempts: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    second = attempts[attempts.visit == 2]
    return attempts[(attempts.visit == 1) & attempts.task.isin(second.task)], second


def test_rewards_of_both_visits_are_means_over_the_same_tasks(folder: Path, attempts: pd.DataFrame) -> None:
    first, second = pick_repeated(attempts)
    rewards, changes = {}, {}
    for language in ("all", "python", "java", "rust"):
        before, after = average(first, language), average(second, language)
        assert len(before) > 2 and set(before.index) == set(after.index)
        after = after[before.index]
        rewards["first visit", language] = [len(before), *interval(before, before.index)]
        rewards["second visit", language] = [len(after), *interval(after, after.index)]
        change = paired_difference(list(before), list(after), list(before.index), share=True)
        changes["second minus first", language] = [len(before), *change]
    panels = read_marks(folder, "language-visits")
    check(panels["same tasks"], rewards)
    check(panels["change, task by task"], changes)


def test_halves_of_visits_have_different_tasks(
    folder: Path, figures: dict[str, Figure], attempts: pd.DataFrame
) -> None:
    first, second = pick_repeated(attempts)
    early, late = first[: len(first) // 2], second[len(second) - len(second) // 2 :]
    expected = {}
    for series, side in (("first half of first visits", early), ("last half of second visits", late)):
        for language in ("all", "python", "java", "rust"):
            means = average(side, language)
            expected[series, language] = [len(means), *interval(means, means.index)]
    check(read_marks(folder, "language-visits")["different tasks"], expected)
    both = len(set(early.task) & set(late.task))
    assert f"the tasks differ ({both} are in both)" in figures["language-visits"].caption


def test_languages_have_shares_of_attempts_and_a_reward_by_step(folder: Path, attempts: pd.DataFrame) -> None:
    panels, shares, curves = read_marks(folder, "languages"), {}, {}
    for language in ("python", "java", "rust"):
        for end, side in pick_ends(attempts).items():
            shares[end, language] = [len(side), *interval(side.language.eq(language).astype(float), side.task)]
        steps = attempts[attempts.language == language].groupby("step").reward.agg(["size", "mean"])
        smooth = steps["mean"].ewm(alpha=20 / STEPS, adjust=False).mean()
        for step, row in steps.iterrows():
            curves[language, str(step)] = [row["size"], row["mean"], smooth[step]]
    check(panels["share of the attempts"], shares)
    check(panels["mean reward of a step's attempts"], curves, "smoothed")


def check_histogram(rows: pd.DataFrame, sides: dict[str, tuple[pd.Series, list[str]]]) -> None:
    labels = list(dict.fromkeys(rows["at"]))
    edges = [float(label.split(" to ")[0]) for label in labels] + [float(labels[-1].split(" to ")[1])]
    assert 5 < len(labels) < 16 and edges == sorted(edges)
    edges[-1] += 1e-9  # the last bin has its upper edge
    expected = {}
    for end, (values, tasks) in sides.items():
        bins = pd.cut(values.round(9), edges, right=False, labels=labels)
        assert bins.notna().all()
        for label in labels:
            expected[end, label] = [len(values), *interval((bins == label).astype(float), pd.Index(tasks))]
    check(rows, expected)


def test_tokens_have_a_distribution_medians_and_a_curve(
    folder: Path, figures: dict[str, Figure], attempts: pd.DataFrame
) -> None:
    panels, ends = read_marks(folder, "tokens"), pick_ends(attempts)
    check_histogram(
        panels["share of attempts by sampled tokens"],
        {end: (side.sampled, list(side.task)) for end, side in ends.items()},
    )
    steps = attempts.groupby("step").sampled.agg(["size", "mean"])
    smooth = steps["mean"].ewm(alpha=20 / STEPS, adjust=False).mean()
    expected = {("mean of a step's attempts", str(step)): [*row, smooth[step]] for step, row in steps.iterrows()}
    check(panels["sampled tokens of an attempt"], expected, "smoothed")
    for end, side in ends.items():
        median = median_interval(list(side.sampled), list(side.task))
        assert median.value == side.sampled.median()
        assert f"{end} {median.text(',.0f')}" in figures["tokens"].caption


def test_task_rewards_have_a_distribution_and_a_gini_coefficient(
    folder: Path, figures: dict[str, Figure], attempts: pd.DataFrame
) -> None:
    sides = {end: average(side) for end, side in pick_ends(attempts).items()}
    check_histogram(
        read_marks(folder, "task-rewards")["share of tasks by mean reward"],
        {end: (means, list(means.index)) for end, means in sides.items()},
    )
    means = average(attempts)
    differences = sum((means - mean).abs().sum() for mean in means)  # the definition, over all pairs
    gini = differences / (2 * len(means) ** 2 * means.mean())
    assert f"{gini:.3f} (n = {len(means)} tasks)" in figures["task-rewards"].caption


def test_progress_counts_trajectories_and_pairs_halves(
    folder: Path, figures: dict[str, Figure], attempts: pd.DataFrame
) -> None:
    panels, caption = read_marks(folder, "task-progress"), figures["task-progress"].caption
    visits = attempts.groupby(["task", "visit"]).reward.mean().unstack().dropna(subset=[2])
    first, last = visits[1], visits.ffill(axis=1).iloc[:, -1]
    level = ((first + last) / 2).ge(0.5).map({True: "steady high", False: "steady low"})
    kinds = level.mask(last - first >= 0.1, "improved").mask(first - last >= 0.1, "declined")
    expected = {}
    for kind in ("improved", "declined", "steady high", "steady low"):
        expected["tasks", kind] = [len(kinds), *interval(kinds.eq(kind).astype(float), kinds.index)]
        assert f"{kind} {(kinds == kind).sum()}" in caption
    check(panels["share of the tasks visited again"], expected)

    before, after = average(attempts[attempts.step < MIDDLE]), average(attempts[attempts.step >= MIDDLE])
    tasks, sizes = before.index.intersection(after.index), attempts.task.value_counts()
    points = panels["mean reward, second half of the steps"].set_index("series").astype({"at": float})
    assert len(points) == len(tasks) > 10
    for task in tasks:
        assert list(points.loc[task, ["at", "n", "value"]]) == pytest.approx([before[task], sizes[task], after[task]])
    change = paired_difference(list(before[tasks]), list(after[tasks]), list(tasks), share=True)
    assert f"{sizes[tasks].sum()} attempts at {len(tasks)} tasks" in caption and change.text("+.3f") in caption
    assert figures["task-progress"].drawing is not None
    assert ">0.4</text>" in figures["task-progress"].drawing(True)  # the axis of rewards has marks between 0 and 1


def test_extremes_are_the_tenths_with_the_lowest_and_highest_mean_and_what_was_never_solved(
    folder: Path, figures: dict[str, Figure], attempts: pd.DataFrame
) -> None:
    table, means, tasks = pd.read_csv(folder / "task-extremes.csv"), average(attempts), attempts.groupby("task")
    solved = tasks.resolved.any()
    unsolved, count = set(solved.index[~solved]), round(len(means) / 10)
    named = {kind: list(rows.task) for kind, rows in table.groupby("kind")}
    assert unsolved and set(named["never solved"]) == unsolved
    assert named["hardest"] == list(means.nsmallest(count).index)
    assert named["easiest"] == list(means.nlargest(count).index)
    for row in table.itertuples():
        own = tasks.get_group(row.task)
        numbers = [len(own), own.reward.mean(), own.resolved.mean()]
        assert [row.attempts, row.mean_reward, row.resolved_share] == pytest.approx(numbers)
        assert row.language == own.language.iloc[0]
    share = wilson_interval(len(unsolved), len(means))
    assert f"{len(unsolved)} of {len(means)} tested tasks, {share}" in figures["task-extremes"].caption


def test_many_languages_and_negative_rewards_are_drawn_as_far_as_they_can_be(folder: Path) -> None:
    run = read_thesis_run(folder.parent / "run")
    names = ["", "<b>", *(f"language {at}" for at in range(10))]
    number = {task: at % 12 for at, task in enumerate(dict.fromkeys(each.task for each in run.attempts))}
    changed = [replace(each, language=names[number[each.task]], reward=each.reward - 2) for each in run.attempts]
    figures = {figure.name: figure for figure in make_figures([ThesisRun(run.report, changed)])}
    languages = figures["languages"]
    assert len({row.at for row in languages.rows if row.panel == "share of the attempts"}) == 9
    assert "other languages" in languages.caption
    assert "Gini coefficient of all tasks' mean rewards, over all steps: not defined" in figures["task-rewards"].caption
    for name in ("language-visits", "languages"):
        drawing = figures[name].drawing
        assert drawing is not None and "<b>" not in drawing(True) and "nan" not in drawing(True)
    assert {"unknown", "<b>"} <= {row.at for row in languages.rows}
