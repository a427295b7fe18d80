"""Panels of a report's curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from coderepairrl.report.analysis import ROLLOUT, Report, readable_name
from coderepairrl.report.plots.panels import Baseline, Panel, Series, choose_alpha, ema, format_number

EMA_ALPHA, TOOLS_EMA_ALPHA = 0.01, 0.05
"""Default smoothing (`choose_alpha`) of most curves, and of those by tool."""

MAX_RAW_CURVES = 4
"""Most curves of a panel that are also drawn unsmoothed."""
_FACTOR_TITLE = "factor on advantages by kind"

Section = tuple[str, list[Panel]]


def make_sections(reports: Sequence[Report]) -> list[Section]:
    """Panels by heading; each run has a colour or a panel."""
    titled_panels = [
        ("What is learned", make_outcome_panels(reports)),
        ("Kinds of tasks", _make_kind_panels(reports)),
        ("What the agent does", _make_behaviour_panels(reports)),
        ("Speed and time", _make_speed_panels(reports)),
        ("The learner's health", _make_learner_panels(reports)),
    ]
    return [
        (title, panels) for title, panels in titled_panels if any(series.points for p in panels for series in p.series)
    ]


def make_outcome_panels(reports: Sequence[Report]) -> list[Panel]:
    """Reward with its spread, a chart per score, empty patches."""
    scores = list(dict.fromkeys(score for report in reports for score in report.scores))
    if "tests" not in scores:
        scores.insert(0, "tests")  # shown even if missing
    whole = [score for score in scores if all(is_whole_reward(report, score) for report in reports)]
    panels = [make_curve_panel(reports, "reward", per_patch=whole), make_curve_panel(reports, "reward_std")]
    panels += [make_curve_panel(reports, name, per_patch=[name]) for name in scores if name not in whole]
    return [*panels, make_curve_panel(reports, "empty_patches")]


def make_curve_panel(
    reports: Sequence[Report], measure: str, baselines: Sequence[Baseline] = (), per_patch: Sequence[str] = ()
) -> Panel:
    """Draw a measure over steps, dashed `per_patch` curves of scores, and evaluations as points with intervals."""
    several = len(reports) > 1  # then the legend names runs, and the note explains dots and dashes
    alpha = _choose_run_alpha(reports, EMA_ALPHA)
    held_out = [
        {e.step: e.values[measure] for e in report.evaluations if measure in e.values and e.name == "eval"}
        for report in reports
    ]
    training_label = "training" if any(held_out) or per_patch else ""
    series = [
        _make_series(report, measure, report.name if several else training_label, at, alpha)
        for at, report in enumerate(reports)
    ]
    for at, (report, intervals) in enumerate(zip(reports, held_out, strict=True)):
        if intervals:
            name = f"{report.name}, held out" if several else "held out"
            values, lows, highs = zip(*intervals.values(), strict=True)
            colour = at if several else 1
            series.append(Series(name, [*intervals], values, colour, low=lows, high=highs, listed=not several))
    for at, report in enumerate(reports):
        for score in per_patch:
            name = f"{report.name} per non-empty patch" if several else "per non-empty patch"
            colour = at if several else 2
            dashed = _make_series(report, f"{score}_per_patch", name, colour, alpha, dashed=True)
            series.append(replace(dashed, listed=not several))
    notes = [describe_smoothing(alpha)]
    notes += ["dots: held-out tasks, 95 % intervals"] if any(held_out) else []
    notes += ["dashed: per non-empty patch"] if several and per_patch else []
    return Panel(readable_name(measure), series, note="; ".join(filter(None, notes)), baselines=baselines)


def _make_kind_panels(reports: Sequence[Report]) -> list[Panel]:
    panels = []
    for each in reports:
        for prefix, title in (
            ("reward/", "reward by kind"),
            ("trained/", "trained tokens by kind"),
            ("kind_scale/", _FACTOR_TITLE),
        ):
            names = dict.fromkeys(name for step in each.steps for name in step if name.startswith(prefix))
            if names:
                panels.append(_make_metrics_panel([each], list(names), title + _format_run_label(reports, each)))
    # a factor that is always 1 changes nothing
    return [panel for panel in panels if not panel.title.startswith(_FACTOR_TITLE) or _collect_values(panel) != {1.0}]


def _collect_values(panel: Panel) -> set[float]:
    return {y for series in panel.series for _, y in series.points}


def _make_behaviour_panels(reports: Sequence[Report]) -> list[Panel]:
    panels = [_make_metrics_panel(reports, ["tool_success"], default_alpha=TOOLS_EMA_ALPHA)]
    for title, field, names in (
        ("success by tool", "tools", "tools"),
        ("calls per episode, by tool", "calls_by_tool", "tools"),
        ("commands per tool call", "commands", "commands"),
    ):
        panels += [
            _make_tool_panel(each, title + _format_run_label(reports, each), getattr(each, names), field)
            for each in reports
        ]
    panels += [_make_metrics_panel(reports, [name]) for name in ("turns", "calls", "sampled_tokens")]
    panels.append(_make_metrics_panel(reports, ["episode_tokens"], "tokens per episode, context included"))
    diversity = ("distinct_patches", "distinct_actions")
    return [
        *panels,
        _make_metrics_panel(reports, diversity, "share of a group's attempts whose patch, or calls, differ"),
    ]


def _make_speed_panels(reports: Sequence[Report]) -> list[Panel]:
    panels = [
        _make_metrics_panel(reports, ["tokens_per_second"], "sampled tokens per second of rollout"),
        _make_metrics_panel(reports, ["engine_busy"], "share of a step in which the engine has work"),
    ]
    for report in reports:
        xs = [step["step"] for step in report.steps]
        series = [
            Series(name, xs, [step["ledger"][name] for step in report.steps], colour)
            for colour, name in enumerate((*ROLLOUT, "learning"))
        ]
        panels.append(
            Panel(f"seconds per step{_format_run_label(reports, report)}", series, kind="stack", missing="no steps yet")
        )
    return panels


def _make_learner_panels(reports: Sequence[Report]) -> list[Panel]:
    charts = [
        (("learn/entropy",), "entropy, estimated from the sampled tokens"),
        (("learn/grad_norm",), "gradient norm before clipping"),
        (("learn/loss",), "loss"),
        (("learn/accuracy",), "share of example tokens that are the likeliest"),
        (("learn/kl",), "KL to the initial policy"),
        (("learn/teacher_kl",), "divergence from the teacher"),
        (("learn/mismatch_mean", "learn/mismatch_max"), "engine against learner: |Δ logprob|"),
        (("learn/ratio_mean", "learn/ratio_max"), "importance ratio"),
        (("learn/clip_low", "learn/clip_high"), "share of ratios that the clip cuts off"),
        (("learn/staleness_max",), "versions behind, oldest token"),
        (("learn/lr",), "learning rate"),
        (("held_out/loss",), "loss of held-out examples"),
        (("held_out/accuracy",), "share of held-out example tokens that are the likeliest"),
        (("informative",), "share of groups that are trained on"),
    ]
    panels = [_make_metrics_panel(reports, names, title) for names, title in charts]
    # a constant learning rate or staleness needs no curve: the configuration states it
    fewest_values = {"learning rate": 2, "versions behind, oldest token": 2}
    return [panel for panel in panels if len(_collect_values(panel)) >= fewest_values.get(panel.title, 1)]


def _make_metrics_panel(
    reports: Sequence[Report], names: Sequence[str], title: str = "", default_alpha: float = EMA_ALPHA
) -> Panel:
    several = len(reports) > 1
    alpha = _choose_run_alpha(reports, default_alpha)
    series = []
    for at, report in enumerate(reports):
        for number, name in enumerate(names):
            short = name.rpartition("/")[2].replace("_", " ") if len(names) > 1 else ""
            label = " ".join(filter(None, [report.name if several else "", short]))
            colour = at if several else number
            series.append(_make_series(report, name, label, colour, alpha, dashed=several and number > 0))
    include = (1.0,) if "ratio_mean" in names[0] else (0.0,)  # an importance ratio is 1 without any change
    return Panel(title or readable_name(names[0]), series, note=describe_smoothing(alpha), include=include)


def _make_series(report: Report, name: str, label: str, colour: int, alpha: float, dashed: bool = False) -> Series:
    values = [step.get(name) for step in report.steps]
    return Series(label, [step["step"] for step in report.steps], values, colour, alpha, dashed=dashed)


def _make_tool_panel(report: Report, title: str, names: Sequence[str], field: str) -> Panel:
    alpha = _choose_run_alpha([report], TOOLS_EMA_ALPHA)
    absent = None if field == "tools" else 0.0  # a tool that a step never used has no success rate, but 0 calls
    xs = [step["step"] for step in report.steps]
    series = []
    for colour, name in enumerate(names):
        values = [step[field].get(name, absent) for step in report.steps]
        if len(names) > MAX_RAW_CURVES:  # raw curves would hide the smooth ones
            series.append(Series(name, xs, ema(values, alpha), colour))
        else:
            series.append(Series(name, xs, values, colour, alpha))
    return Panel(title, series, note=describe_smoothing(alpha), missing="none was used")


def is_whole_reward(report: Report, score: str) -> bool:
    """Whether the reward is `score` alone, so one chart shows both."""
    weights = [value for key, value in report.config.items() if key.startswith("reward.") and value]
    return weights == [1.0] and list(report.scores[:1]) == [score]


def _choose_run_alpha(reports: Sequence[Report], default: float) -> float:
    return choose_alpha(max((len(report.steps) for report in reports), default=0), default)


def describe_smoothing(alpha: float) -> str:
    """Note of a panel whose curves are smoothed."""
    return f"EMA \N{GREEK SMALL LETTER ALPHA} = {format_number(alpha, 2)}" if alpha < 1 else ""


def _format_run_label(reports: Sequence[Report], report: Report) -> str:
    return f" · {report.name}" if len(reports) > 1 else ""
