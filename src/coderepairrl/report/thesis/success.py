"""Runs side by side: curves, success of evaluations, ablations, algorithms, and the tables of RQ2 and of compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from coderepairrl.errors import UsageError
from coderepairrl.printable import join_first
from coderepairrl.report.analysis import list_differences, readable_name
from coderepairrl.report.comparison import Comparison, ComparisonOptions, compare_outcomes
from coderepairrl.report.outcomes import Outcomes
from coderepairrl.report.plots import Panel, Series
from coderepairrl.report.thesis.attempts import ThesisRun
from coderepairrl.report.thesis.figure import Figure, draw_panels
from coderepairrl.stats import Interval, is_resolved, measure_episode
from coderepairrl.stats.intervals import cluster_episodes
from coderepairrl.stats.measures import measure_interval
from coderepairrl.types import Ending, Episode

WINDOW = 20
"""Steps of a rolling mean, as in the thesis."""
_ROWS = 12
"""Bars in a panel."""
_CURVES = ("reward", "reward_std", "tool_success")
_STABILITY = ("reward", "learn/kl", "learn/grad_norm", "learn/clip_low", "learn/clip_high")
_EVALUATION_HEADS = ("run", "evaluation", "step", "measure", "sum", "n", "value", "low", "high")
_COMPUTE_HEADS = (
    *("run", "hardware", "wall hours", "GPU hours", "CPU hours", "steps", "training episodes", "sampled tokens"),
    *("sampled tokens per wall second", "source"),
)
_SLIDES = "slides of the thesis' defence, on"
_PUBLISHED_COMPUTE = (
    ("DeepSWE, 32B", "72 H100", *(None,) * 7, f"{_SLIDES} related work"),
    ("CodeRepairRL, 14B", "3 A100", 48.0, 144.0, None, 460, 14_720, None, None, f"{_SLIDES} RQ0 and RQ2"),
    ("CodeRepairRL, 32B", "6 A100", *(None,) * 7, f"{_SLIDES} contributions"),
)


def make_success_figures(runs: Sequence[ThesisRun]) -> Iterator[Figure]:
    """Make curves, success, ablation and algorithms (V8, V14), and the tables of RQ2 and of compute (V15)."""
    figure = Figure("curves", "Reward, its deviation and tool success over steps")
    yield _draw_curves(figure, runs, [run.name for run in runs], _CURVES)
    yield _make_success_bars(runs)
    yield _make_ablation(runs)
    yield _make_algorithms(runs)
    yield _make_success_table(runs)
    yield _make_compute_table(runs)


# -- curves


def _draw_curves(figure: Figure, runs: Sequence[ThesisRun], labels: Sequence[str], measures: Sequence[str]) -> Figure:
    longest = max(len(run.report.steps) for run in runs)
    if longest < 2:
        return replace(figure, missing="fewer than two steps")
    window = max(1, min(WINDOW, longest // 5))  # 20 steps of a short run would hide everything
    rows, panels, absent = list[Sequence[Any]](), [], []
    for measure in measures:
        series = []
        for colour, (run, label) in enumerate(zip(runs, labels, strict=True)):
            points = list(_smooth_steps(run, measure, window))
            rows += [(run.name, measure, *point) for point in points]
            series.append(Series(label, [point[0] for point in points], [point[1] for point in points], colour))
        if any(each.points for each in series):
            panels.append(Panel(readable_name(measure), series))
        else:
            absent.append(measure)
    lengths = ", ".join(f"n = {len(run.report.steps)} steps ({run.name})" for run in runs)
    caption = f"Means over a centred window of {window} steps, fewer at both ends; {lengths}; without intervals."
    caption += f" Not measured: {', '.join(absent)}." if absent else ""
    heads = ("run", "measure", "step", "mean", "steps in the window")
    return replace(figure, caption=caption, heads=heads, rows=rows, drawing=draw_panels(*panels))


def _smooth_steps(run: ThesisRun, measure: str, window: int) -> Iterator[tuple[int, float, int]]:
    """Step, mean over the steps around it, and their number."""
    steps = run.report.steps
    for at, step in enumerate(steps):
        begin = at - window // 2
        values = [each[measure] for each in steps[max(0, begin) : begin + window] if each.get(measure) is not None]
        if values:
            yield step["step"], fmean(values), len(values)


def _make_algorithms(runs: Sequence[ThesisRun]) -> Figure:
    names = [str(run.report.config.get("train.algorithm", "unknown")).upper() for run in runs]
    figure = Figure("algorithms", f"Stability of {' beside '.join(dict.fromkeys(names))}")
    if len(set(names)) < 2:
        return replace(figure, missing=f"all runs use {names[0]}")
    labels = [f"{name}: {run.name}" for name, run in zip(names, runs, strict=True)]
    figure = _draw_curves(figure, runs, labels, _STABILITY)
    others = [key for key in list_differences([run.report for run in runs]) if key != "train.algorithm"]
    return replace(figure, caption=f"{figure.caption} Other differences: {join_first(others, 6) or 'none'}.")


# -- evaluations


def list_evaluations(run: ThesisRun) -> dict[str, dict[int, Sequence[Episode]]]:
    """Attempts of evaluations by name, ``eval`` first, and step."""
    evaluations: dict[str, dict[int, Sequence[Episode]]] = {}
    for (name, step), episodes in sorted(
        run.report.evaluated.items(), key=lambda each: (each[0][0] != "eval", each[0])
    ):
        evaluations.setdefault(name, {})[step] = episodes
    return evaluations


def measure_attempt(episode: Episode, measure: str) -> float | None:
    """Measure an attempt of an evaluation; None if void or unknown."""
    is_void, is_completed, verdict = episode.ending is Ending.VOID, bool(episode.patch.strip()), is_resolved(episode)
    if is_void or measure == "errors":
        return float(is_void) if measure == "errors" else None
    values = {"completed": float(is_completed), "ended by itself": float(episode.ending is Ending.DONE)}
    if verdict is not None:
        values |= {"resolved": float(verdict)} | ({"resolved per completed": float(verdict)} if is_completed else {})
    return {**measure_episode(episode), **values}.get(measure)


def list_estimates(run: ThesisRun, measures: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Rows of `_EVALUATION_HEADS`, with intervals from clusters of tasks, for what evaluations measured."""
    for name, by_step in list_evaluations(run).items():
        for step, episodes in by_step.items():
            cluster_of = cluster_episodes(episodes)
            for measure in measures:
                pairs = [(value, each) for each in episodes if (value := measure_attempt(each, measure)) is not None]
                if pairs:
                    values, clusters = [value for value, _ in pairs], [cluster_of[each.task_id] for _, each in pairs]
                    interval = measure_interval(measure, values, clusters)
                    yield run.name, name, step, measure, sum(values), len(values), *interval


def choose_measure(runs: Sequence[ThesisRun]) -> str:
    """Choose ``resolved``, or ``reward`` if no evaluation ran tests."""
    return "resolved" if any(row for run in runs for row in list_estimates(run, ["resolved"])) else "reward"


def compare_episodes(sides: Mapping[str, Sequence[Episode]], measure: str) -> list[Comparison]:
    """Compare each side with the first on common tasks, as `crrl compare`; none without a common measured task."""
    policies = []
    for name, episodes in sides.items():
        values: dict[str, tuple[float, ...]] = {}
        for each in episodes:
            if (value := measure_attempt(each, measure)) is not None:
                values[each.task_id] = (*values.get(each.task_id, ()), value)
        policies.append(Outcomes(name, measure, values, {each.task_id: each.repository for each in episodes}))
    try:
        return compare_outcomes(policies, ComparisonOptions(measure, common=True)) if policies else []
    except UsageError:
        return []


def compare_ends(by_step: Mapping[int, Sequence[Episode]], measure: str) -> list[Comparison]:
    """Compare the last step of an evaluation with its first; none if there is only one."""
    steps = sorted(by_step)
    return compare_episodes({f"step {step}": by_step[step] for step in (steps[0], steps[-1])}, measure)


def make_rows_panel(
    title: str,
    labels: Sequence[str],
    sides: Mapping[str, Sequence[Interval]],
    *,
    colour: int = 0,
    top: float = 0.0,
    floor: Sequence[float] = (),
) -> Panel:
    """Lying bars with whiskers: at each label one of each side, on an axis from 0 to at least `top`."""
    series = []
    for number, (name, intervals) in enumerate(sides.items()):
        values, lows, highs = zip(*intervals, strict=True)
        series.append(Series(name, range(len(labels)), values, colour + number, low=lows, high=highs, floor=floor))
    return Panel(title, series, kind="rows", labels=labels, include=(0.0, top), x_label="")


def _make_success_bars(runs: Sequence[ThesisRun]) -> Figure:
    measure = choose_measure(runs)
    figure = Figure("success", f"Success of evaluations: {measure}")
    rows = [row for run in runs for row in list_estimates(run, [measure])]
    if not rows:
        return replace(figure, missing="no evaluation is finished")
    top, panels = max(row[-1] or row[-3] for row in rows), []  # one scale for all panels
    for colour, run in enumerate(runs):
        bars = [(f"{row[1]} after step {row[2]}", Interval(*row[-3:])) for row in rows if row[0] == run.name]
        for start in range(0, len(bars), _ROWS):
            labels, intervals = zip(*bars[start : start + _ROWS], strict=True)
            panels.append(make_rows_panel(run.name, labels, {"": intervals}, colour=colour, top=top))
    counts = sorted({row[5] for row in rows})
    caption = (
        f"Means of {measure} with 95 % intervals clustered by task; n = {join_first([*map(str, counts)], 9)} attempts."
    )
    return replace(figure, caption=caption, heads=_EVALUATION_HEADS, rows=rows, drawing=draw_panels(*panels))


def _make_ablation(runs: Sequence[ThesisRun]) -> Figure:
    measure, evaluations = choose_measure(runs), {run.name: list_evaluations(run) for run in runs}
    figure = Figure("ablation", f"From {runs[0].name} to the other runs: {measure}")
    if len(runs) < 2:
        return replace(figure, missing="a single run has nothing to compare with")
    name = next(iter(evaluations[runs[0].name]), "")
    last = {run: [*each[name].values()][-1] for run, each in evaluations.items() if name in each}
    comparisons = compare_episodes(last, measure) if runs[0].name in last else []
    if not comparisons:
        return replace(figure, missing="the runs have no evaluation of the same tasks")
    bars = [(runs[0].name, 0.0, comparisons[0].early, None)]
    for each in comparisons:
        start, low, high = each.early.value, each.change.low, each.change.high
        ends = (None, None) if low is None or high is None else (start + low, start + high)
        bars.append((each.after, start, Interval(each.late.value, *ends), each.adjusted))
    labels, floors, intervals, _ = zip(*bars, strict=True)
    caption = (
        f"Last {name} of each run, n = {comparisons[0].tasks} tasks that all have. First bar: mean with 95 % interval. "
        "Other bars float from there to each run's mean, with the 95 % interval of the paired difference; p: sign "
        "flips, corrected for the runs (Holm)."
    )
    rows = [(run, name, measure, comparisons[0].tasks, floor, *interval, p) for run, floor, interval, p in bars]
    heads = ("run", "evaluation", "measure", "tasks", "from", "to", "low", "high", "p")
    drawing = draw_panels(make_rows_panel(measure, labels, {"": intervals}, floor=floors))
    return replace(figure, caption=caption, heads=heads, rows=rows, drawing=drawing)


# -- tables


def _make_success_table(runs: Sequence[ThesisRun]) -> Figure:
    rows = list[Sequence[Any]]()
    for run in runs:
        similarity = [score for score in run.report.scores if score != "tests"][:1]
        measures = ("completed", "empty_patches", "resolved", "resolved per completed", "errors", *similarity)
        rows += [(*row, None) for row in list_estimates(run, measures)]
        for name, by_step in list_evaluations(run).items():
            for each in (each for measure in measures for each in compare_ends(by_step, measure)):
                step = f"{each.before} to {each.after}"
                rows.append((run.name, name, step, each.metric, None, each.tasks, *each.change, each.p))
    caption = (
        "Completed: with a patch. Errors: void attempts, in no other row. n: attempts, or tasks of a change. Low and "
        "high: 95 % intervals, of changes paired by task; p: sign flips."
    )
    missing = "" if rows else "no evaluation is finished"
    return Figure("table-success", "RQ2: evaluations", caption, (*_EVALUATION_HEADS, "p"), rows, missing=missing)


def _make_compute_table(runs: Sequence[ThesisRun]) -> Figure:
    rows = list[Sequence[Any]]()
    for run in runs:
        report, wall, sampled = run.report, run.report.wall_seconds, run.report.account["sampled"]
        seconds = (wall, *((report.used or {}).get(f"{name}_seconds") for name in ("gpu", "cpu")))
        hours = [None if each is None else each / 3600 for each in seconds]
        counts = (len(report.steps), report.episodes["train"], sampled, sampled / wall if wall else None)
        rows.append((run.name, report.about["ran_on"], *hours, *counts, "run here"))
    caption = (
        f"n = {len(rows)} here, counted, so without intervals; evaluations are in hours and tokens. The last "
        f"{len(_PUBLISHED_COMPUTE)} rows are as printed, not run here. A dash: neither measured nor printed."
    )
    title = "Compute beside published runs"
    return Figure("table-compute", title, caption, _COMPUTE_HEADS, [*rows, *_PUBLISHED_COMPUTE])
