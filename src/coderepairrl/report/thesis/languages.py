"""Languages of attempts: their shares, and rewards at the first and second visit of tasks and over the steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from coderepairrl.report.plots.panels import COLOURS
from coderepairrl.report.thesis.attempts import Attempt, ThesisRun, split_ends
from coderepairrl.report.thesis.marks import (
    Figure,
    Mark,
    average_steps,
    average_tasks,
    describe_ends,
    describe_size,
    draw_panels,
    make_bar_panel,
    make_curve_panel,
    make_per_run,
    measure_shares,
)
from coderepairrl.stats.measures import compare_tasks, measure_interval

_ALL, _UNKNOWN = "all", "unknown"
_FEWEST_TASKS = 2  # for an interval


def make_language_figures(runs: Sequence[ThesisRun]) -> Iterator[Figure]:
    """Make the figures about languages."""
    yield from make_per_run(runs, _compare_visits, _describe_languages)


def _compare_visits(run: ThesisRun) -> Figure:
    name, title = "language-visits", "Reward by language, first and second visit"
    second = [attempt for attempt in run.attempts if attempt.visit == 2]
    repeated = {attempt.task for attempt in second}
    if len(repeated) < _FEWEST_TASKS:
        return Figure(name, title, missing="fewer than two tasks were visited twice")
    first = [attempt for attempt in run.attempts if attempt.visit == 1 and attempt.task in repeated]
    early, late = first[: len(first) // 2], second[len(second) - len(second) // 2 :]
    same = _average_languages("same tasks", {"first visit": first, "second visit": second})
    changes = [_measure_change(first, second, str(mark.at)) for mark in same if mark.series == "first visit"]
    halves = {"first half of first visits": early, "last half of second visits": late}
    different = _average_languages("different tasks", halves)
    both = len({attempt.task for attempt in early} & {attempt.task for attempt in late})
    caption = (
        "Tasks that were visited twice; means of each task's mean reward, 95 % intervals by task. Same tasks: "
        f"{describe_size(first)} at the first visit and {describe_size(second)} at the second; changes are paired. "
        f"Different tasks: the first half of the attempts at first visits ({describe_size(early)}) and the last half "
        f"of those at second visits ({describe_size(late)}); the tasks differ ({both:,} are in both), and perhaps "
        f"their difficulty. Bars 'all' include the languages with fewer than {_FEWEST_TASKS} tasks and those after "
        f"the {COLOURS} most frequent. Tasks: " + ", ".join(f"{mark.at} {mark.n:,}" for mark in changes)
    )
    panels = [make_bar_panel(marks, "rows", "reward") for marks in (same, changes, different)]
    return Figure(name, title, f"{caption}.", Mark._fields, [*same, *changes, *different], draw_panels(*panels))


def _average_languages(panel: str, sides: Mapping[str, Sequence[Attempt]]) -> list[Mark]:
    """Mean reward of all tasks, and of each language with enough tasks on each side."""
    counts = [
        Counter(name for _, name in {(attempt.task, _name_language(attempt)) for attempt in side})
        for side in sides.values()
    ]
    languages = [name for name in sorted(counts[0]) if min(count[name] for count in counts) >= _FEWEST_TASKS]
    languages.sort(key=lambda name: -sum(count[name] for count in counts))
    marks = []
    for language in (_ALL, *languages[:COLOURS]):
        for series, side in sides.items():
            means = average_tasks(_select_language(side, language))
            interval = measure_interval("reward", [*means.values()], [*means])
            marks.append(Mark(panel, series, language, len(means), *interval))
    return marks


def _measure_change(first: Sequence[Attempt], second: Sequence[Attempt], language: str) -> Mark:
    before, after = (average_tasks(_select_language(side, language)) for side in (first, second))
    pairs = compare_tasks("reward", before, after, {task: task for task in before})
    return Mark("change, task by task", "second minus first", language, pairs.tasks, *pairs.change)


def _describe_languages(run: ThesisRun) -> Figure:
    name, title = "languages", "Languages of the attempts, and their reward over the steps"
    counts, ends = Counter(map(_name_language, run.attempts)), split_ends(run)
    if ends.missing or len(counts) < 2:
        return Figure(name, title, missing=ends.missing or f"all attempts are in one language, {next(iter(counts))}")
    languages = [language for language, _ in counts.most_common(COLOURS)]
    pairs = {end: [(attempt.task, _name_language(attempt)) for attempt in side] for end, side in ends.sides.items()}
    shares = measure_shares("share of the attempts", pairs, languages)
    curves = {
        language: [(attempt.step, attempt.reward) for attempt in _select_language(run.attempts, language)]
        for language in languages
    }
    rewards = average_steps("mean reward of a step's attempts", curves)
    others = counts.total() - sum(counts[language] for language in languages)
    caption = (
        f"Shares of attempts, {describe_ends(ends)}; 95 % intervals by task. Rewards are means of few attempts each "
        "(n in the CSV), so they have no intervals. Attempts of all steps: "
        + ", ".join(f"{language} {counts[language]:,}" for language in languages)
        + (f", other languages {others:,}." if others else ".")
    )
    panels = make_bar_panel(shares, "rows"), make_curve_panel(rewards)
    return Figure(name, title, caption, Mark._fields, [*shares, *rewards], draw_panels(*panels))


def _select_language(attempts: Sequence[Attempt], language: str) -> list[Attempt]:
    return [attempt for attempt in attempts if language in (_ALL, _name_language(attempt))]


def _name_language(attempt: Attempt) -> str:
    return attempt.language or _UNKNOWN
