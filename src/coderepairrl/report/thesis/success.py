"""Runs side by side: curves, success of evaluations, ablations, algorithms, and tables of RQ2, compute and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

from coderepairrl.printable import format_count, join_first
from coderepairrl.report.analysis import list_differences, readable_name
from coderepairrl.report.comparison import Comparison, compare_episodes, measure_outcome
from coderepairrl.report.plots.panels import Baseline, Panel, Series
from coderepairrl.report.thesis.attempts import ThesisRun, select_trained
from coderepairrl.report.thesis.marks import Figure, draw_panels
from coderepairrl.stats.intervals import cluster_episodes
from coderepairrl.stats.measures import collect_columns, measure_interval
from coderepairrl.types import Episode

_WINDOW = 20
"""Most steps of a rolling mean, as in the thesis."""
_MAX_BARS = 12  # in a panel
_CURVES = ("reward", "reward_std", "tool_success")
_STABILITY = ("reward", "learn/grad_norm", "learn/clip_low", "learn/clip_high", "learn/kl")
_SLIDES = "slides of the thesis' defence"
_PUBLISHED_COMPUTE = (
    ("DeepSWE, 32B", "72 H100", f"{_SLIDES}, related work"),
    ("CodeRepairRL, 14B", "3 A100", f"{_SLIDES}, RQ0; RQ2: the evaluated step", 48.0, 144.0, None, 460, 14_720),
    ("CodeRepairRL, 32B", "6 A100", f"{_SLIDES}, contributions"),
)


class Estimate(NamedTuple):
    """Mean of a measure over the `n` attempts that have it."""

    run: str
    evaluation: str
    step: int
    measure: str
    sum: float
    n: int
    value: float
    low: float | None
    high: float | None


def make_success_figures(runs: Sequence[ThesisRun]) -> Iterator[Figure]:
    """Make curves, success, ablation and algorithms, and the tables of RQ2, of compute and of memory."""
    figure = Figure("curves", "Reward, its standard deviation within groups, and tool success over steps")
    yield _draw_curves(figure, runs, [run.name for run in runs], _CURVES)
    yield _make_success_bars(runs)
    yield _make_ablation(runs)
    yield _make_algorithms(runs)
    yield _make_success_table(runs)
    yield _make_compute_table(runs)
    yield _make_memory_table(runs)


# -- curves


def _draw_curves(figure: Figure, runs: Sequence[ThesisRun], labels: Sequence[str], measures: Sequence[str]) -> Figure:
    longest = max(len(run.report.steps) for run in runs)
    if longest < 2:
        return replace(figure, missing="fewer than two steps")
    window = max(1, min(_WINDOW, longest // 5))  # a window of 20 steps would flatten a short run
    rows, panels = list[tuple[Any, ...]](), []
    for measure in measures:
        curves = [list(_smooth_steps(run, measure, window)) for run in runs]
        rows += [(run.name, measure, *point) for run, curve in zip(runs, curves, strict=True) for point in curve]
        series = [
            Series(label, [step for step, *_ in curve], [mean for _, mean, _ in curve], colour)
            for colour, (label, curve) in enumerate(zip(labels, curves, strict=True))
        ]
        panels.append(Panel(readable_name(measure).removeprefix("learn/").replace("_", " "), series))
    if not rows:
        return replace(figure, missing="no step has any of these measures")
    lengths = ", ".join(f"n = {len(run.report.steps)} steps ({run.name})" for run in runs)
    caption = f"Means over a centred window of {window} steps, fewer at both ends; {lengths}; without intervals."
    heads = ("run", "measure", "step", "mean", "steps in the window")
    return replace(figure, caption=caption, heads=heads, rows=rows, drawing=draw_panels(*panels))


def _smooth_steps(run: ThesisRun, measure: str, window: int) -> Iterator[tuple[int, float, int]]:
    """Step, mean over the steps around it, and their number."""
    steps = run.report.steps
    for at, step in enumerate(steps):
        begin = at - window // 2
        window_values = (other.get(measure) for other in steps[max(0, begin) : begin + window])
        values = [value for value in window_values if value is not None]
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


def list_estimates(run: ThesisRun, measures: Sequence[str]) -> Iterator[Estimate]:
    """Estimate the measures that have values, in each evaluation; intervals are over clusters of tasks."""
    for name, by_step in run.report.evaluated.items():
        for step, episodes in by_step.items():
            columns = collect_columns(episodes, cluster_episodes(episodes), map(measure_outcome, episodes))
            for measure in filter(columns.__contains__, measures):
                values, clusters = columns[measure]
                interval = measure_interval(measure, values, clusters)
                yield Estimate(run.name, name, step, measure, sum(values), len(values), *interval)


def choose_evaluation(runs: Sequence[ThesisRun]) -> tuple[str, str]:
    """Choose the first evaluation that ran tests and ``resolved``, else the first one and ``reward``."""
    tested = (estimate.evaluation for run in runs for estimate in list_estimates(run, ["resolved"]))
    if name := next(tested, ""):
        return name, "resolved"
    return next((name for run in runs for name in run.report.evaluated), ""), "reward"


def compare_ends(by_step: Mapping[int, Sequence[Episode]], measure: str) -> list[Comparison]:
    """Compare the last step of an evaluation with its first; none if there are fewer than two."""
    steps = sorted(by_step)
    return compare_episodes({f"step {step}": by_step[step] for step in steps[:1] + steps[-1:]}, measure)


def _make_success_bars(runs: Sequence[ThesisRun]) -> Figure:
    _, measure = choose_evaluation(runs)
    figure = Figure("success", f"Success of evaluations: {measure}")
    estimates = [estimate for run in runs for estimate in list_estimates(run, [measure])]
    if not estimates:
        is_evaluated = any(run.report.evaluated for run in runs)
        return replace(
            figure, missing="all evaluated attempts are void" if is_evaluated else "no evaluation is finished"
        )
    top, panels = max(each.high or each.value for each in estimates), []  # one scale for all panels
    for colour, run in enumerate(runs):
        run_estimates = [each for each in estimates if each.run == run.name]
        bars = [
            (f"{each.evaluation} after step {each.step}", each.value, each.low, each.high) for each in run_estimates
        ]
        parts = (bars[start : start + _MAX_BARS] for start in range(0, len(bars), _MAX_BARS))
        panels += [_draw_bars(run.name, part, colour=colour, top=top) for part in parts]
    counts = join_first(sorted({str(each.n) for each in estimates}), 9)
    caption = f"Means of {measure} with 95 % intervals clustered by task; n = {counts} attempts."
    return replace(figure, caption=caption, heads=Estimate._fields, rows=estimates, drawing=draw_panels(*panels))


def _draw_bars(
    title: str, bars: Sequence[tuple[Any, ...]], floor: Sequence[float] = (), colour: int = 0, top: float = 0.0
) -> Panel:
    """Panel of horizontal `bars` (label, value, low, high) that begin at `floor`, on an axis to at least `top`."""
    labels, values, lows, highs = zip(*bars, strict=True)
    series = Series("", range(len(bars)), values, colour, low=lows, high=highs, floor=floor)
    return Panel(title, [series], kind="rows", labels=labels, include=(0.0, top), x_label="")


def _make_ablation(runs: Sequence[ThesisRun]) -> Figure:
    (name, measure), first = choose_evaluation(runs), runs[0]
    figure = Figure("ablation", f"Ablation, from {first.name} to the other runs: {measure}")
    if len(runs) < 2:
        return replace(figure, missing="a single run has nothing to compare with")
    last = {run.name: by_step[max(by_step)] for run in runs if (by_step := run.report.evaluated.get(name))}
    comparisons = compare_episodes(last, measure) if first.name in last else []
    if not comparisons:
        return replace(figure, missing=f"no task has {measure} in the last evaluation of each run")
    tasks, mean = comparisons[0].tasks, comparisons[0].early
    rows: list[tuple[Any, ...]] = [(first.name, 0.0, *mean, None)]  # as `heads` below
    for comparison in comparisons:
        ends = (None if end is None else mean.value + end for end in comparison.change[1:])
        rows.append((comparison.after, mean.value, comparison.late.value, *ends, comparison.adjusted))
    panel = _draw_bars(measure, [(row[0], *row[2:5]) for row in rows], [row[1] for row in rows])
    panel = replace(panel, baselines=[Baseline(first.name, mean.value)])
    caption = (
        f"Last evaluation {name} of each run, on the n = {tasks} tasks that all share. First bar: mean with 95 % "
        "interval. Other bars reach from it to the mean of their run, with the 95 % interval of the paired "
        "difference; p: sign flips, corrected for the runs (Holm)."
    )
    if without := [run.name for run in runs if run.name not in last]:
        caption += f" Left out, without this evaluation: {join_first(without, 6)}."
    heads = ("run", "from", "to", "low", "high", "p")
    return replace(figure, caption=caption, heads=heads, rows=rows, drawing=draw_panels(panel))


# -- tables


def _make_success_table(runs: Sequence[ThesisRun]) -> Figure:
    rows = list[Sequence[Any]]()
    for run in runs:
        similarity = [score for score in run.report.scores if score != "tests"][:1]
        measures = ("completed", "empty", "resolved", "resolved per completed", "errors", *similarity)
        rows += [(*row, None) for row in list_estimates(run, measures)]
        for name, by_step in run.report.evaluated.items():
            for pair in (pair for measure in measures for pair in compare_ends(by_step, measure)):
                step = f"{pair.before} to {pair.after}"
                rows.append((run.name, name, step, pair.metric, None, pair.tasks, *pair.change, pair.p))
    caption = (
        "Completed: with a patch. Errors: void attempts, which no other row counts. n: attempts; of changes, tasks. "
        "low, high: 95 % intervals; of changes, paired by task. p: sign flips."
    )
    missing = "" if rows else "no evaluation is finished"
    return Figure("table-success", "RQ2: evaluations", caption, (*Estimate._fields, "p"), rows, missing=missing)


def _make_compute_table(runs: Sequence[ThesisRun]) -> Figure:
    rows = list[Sequence[Any]]()
    for run in runs:
        report, wall, sampled = run.report, run.report.wall_seconds, run.report.account["sampled"]
        seconds = (wall, *((report.used or {}).get(f"{name}_seconds") for name in ("gpu", "cpu")))
        hours = [None if number is None else number / 3600 for number in seconds]
        counts = (len(report.steps), report.episodes["train"], sampled, sampled / wall if wall else None)
        rows.append((run.name, report.about["ran_on"], "run here", *hours, *counts))
    heads = ["run", "hardware", "source", *(f"{name} hours" for name in ("wall", "GPU", "CPU"))]
    heads += ["steps", "training episodes", "sampled tokens", "sampled tokens per wall second"]
    caption = (
        f"n = {format_count(len(rows), 'run')}, counted, so without intervals; hours and tokens include "
        f"evaluations. The last {len(_PUBLISHED_COMPUTE)} rows are as published, not run here. A dash: neither "
        "measured nor published."
    )
    published = [(*row, *(None,) * (len(heads) - len(row))) for row in _PUBLISHED_COMPUTE]
    return Figure("table-compute", "Compute beside published runs", caption, heads, [*rows, *published])


def _make_memory_table(runs: Sequence[ThesisRun]) -> Figure:
    """Table of what each setting saves or costs, by the plan in run.json."""
    figure = Figure("table-memory", "Memory of the learner: what each setting saves")
    rows, reasons = list[Sequence[Any]](), list[str]()
    for run in select_trained(runs):
        needs, model = run.report.about.get("needs", {}), run.report.config.get("model.path")
        for setting, gb in needs.get("learner_gb_with", {}).items():
            rows.append((run.name, model, setting, needs["learner_gb"], gb, round(gb - needs["learner_gb"], 2)))
        if "learner_gb_with" not in needs:
            reasons.append(f"{run.name}: {needs.get('memory', 'run.json has no plan')}")
    if not rows:
        return replace(figure, missing=join_first(reasons, 3))
    caption = (
        "GB (10^9 bytes) that the plan gives a learner process, as the run began and with only one setting changed: "
        "computed, not measured, so without n and intervals. A positive difference is what the run's setting saves, a "
        "negative one what the change would save."
    )
    if reasons:
        caption += f" Without a plan, so left out: {join_first(reasons, 3)}."
    heads = ("run", "model", "only change", "GB", "GB with it", "difference")
    return replace(figure, caption=caption, heads=heads, rows=rows)
