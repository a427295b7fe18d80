"""Compare arms with a baseline, over seeds and tasks.

An arm is a way to train or measure; each seed is one run of it. Reads finished evaluations only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from coderepairrl.errors import UsageError
from coderepairrl.printable import format_count
from coderepairrl.report.analysis import LESS_IS_BETTER
from coderepairrl.report.comparison import (
    ComparisonOptions,
    find_differing_settings,
    list_void_attempts,
    restrict_to_common,
)
from coderepairrl.report.metrics import COUNTS
from coderepairrl.report.outcomes import Outcomes, PublishedCount, read_outcomes
from coderepairrl.report.reading import to_plain_data
from coderepairrl.report.verdict import (
    Result,
    Table,
    describe_gain,
    describe_smallest,
    format_change,
    format_p,
    format_p_equation,
    format_rate,
    format_smallest_difference,
    make_settings_table,
    orient_gain,
)
from coderepairrl.stats.intervals import TOO_FEW, cluster_tasks
from coderepairrl.stats.measures import is_share_measure
from coderepairrl.stats.paired import adjust_holm
from coderepairrl.stats.power import ALPHA, POWER
from coderepairrl.stats.replicates import Replicated, mean_of_replicates, replicated_difference

Runs = Mapping[str, Mapping[int, Path]]  # run folders by arm and seed


@dataclass(frozen=True, slots=True)
class ArmQuestion:
    """Question about arms; the first is the baseline."""

    name: str
    asks: str  # question in words, printed before the answer
    arms: Sequence[str]
    metric: str
    evaluation: str
    at_least: float | None = None
    """Gain over the baseline that must be shown: points for a share, else the metric's unit."""


@dataclass(frozen=True, slots=True)
class Contrast:
    """Difference of an arm from the baseline, on common seeds and tasks."""

    arm: str
    change: Replicated
    adjusted: float | None
    """P-value corrected for all arms (Holm)."""

    @property
    def claimed(self) -> bool:
        """Whether a difference may be claimed."""
        return self.adjusted is not None and self.adjusted <= ALPHA


@dataclass(frozen=True, slots=True)
class ArmAnswer:
    """Answer to a question."""

    question: ArmQuestion
    share: bool  # whether the metric is a share
    unit: str  # what intervals resample: ``tasks`` or ``clusters`` of tasks
    means: Mapping[str, Replicated]
    """Means by arm, on all of its seeds; arms without a run are absent."""
    by_seed: Mapping[str, Mapping[int, Replicated]]
    contrasts: Sequence[Contrast]
    settings: Mapping[str, Sequence[object]]  # settings in which evaluations differ: a value per arm with a run
    notes: Sequence[str]


def answer_question(question: ArmQuestion, runs: Runs) -> ArmAnswer:
    """Answer `question`. Raises `UsageError` for missing or incomparable runs."""
    arms = [arm for arm in question.arms if runs.get(arm)]
    runs_read = {
        (arm, seed): _read_arm_outcomes(arm, seed, path, question)
        for arm in arms
        for seed, path in sorted(runs[arm].items())
    }
    if not runs_read:
        return ArmAnswer(question, share=False, unit="tasks", means={}, by_seed={}, contrasts=[], settings={}, notes=[])
    options = ComparisonOptions(common=True, other_conditions=True)
    outcomes = dict(zip(runs_read, restrict_to_common(list(runs_read.values()), options), strict=True))
    first = next(iter(outcomes.values()))
    tasks = sorted(first.values)
    cluster_of = cluster_tasks({task: first.repositories.get(task, "") for task in tasks})
    clusters = [cluster_of[task] for task in tasks]
    values = {key: [fmean(each.values[task]) for task in tasks] for key, each in outcomes.items()}
    share = is_share_measure(question.metric, [value for row in values.values() for value in row], COUNTS)
    seeds = {arm: [seed for other, seed in outcomes if other == arm] for arm in arms}
    contrasts, baseline = [], question.arms[0]
    for arm in arms[1:] if baseline in arms else []:
        if common_seeds := [seed for seed in seeds[baseline] if seed in seeds[arm]]:
            before, after = ([values[side, seed] for seed in common_seeds] for side in (baseline, arm))
            change = replicated_difference(before, after, clusters, share=share)
            contrasts.append(Contrast(arm, change, change.p))
    p_values = [each.adjusted for each in contrasts if each.adjusted is not None]
    # missing arms count as p = 1: without them, the other differences would look more certain
    missing = len(question.arms) - 1 - len(p_values)
    adjusted = iter(adjust_holm([*p_values, *[1.0] * missing]))
    return ArmAnswer(
        question,
        share=share,
        unit="tasks" if clusters == tasks else "clusters",
        means={
            arm: mean_of_replicates([values[arm, seed] for seed in seeds[arm]], clusters, share=share) for arm in arms
        },
        by_seed={
            arm: {seed: mean_of_replicates([values[arm, seed]], clusters, share=share) for seed in seeds[arm]}
            for arm in arms
        },
        contrasts=[each if each.adjusted is None else replace(each, adjusted=next(adjusted)) for each in contrasts],
        settings=find_differing_settings([outcomes[arm, seeds[arm][0]] for arm in arms]),
        notes=_list_omissions(question, runs_read, tasks),
    )


def _read_arm_outcomes(arm: str, seed: int, path: Path, question: ArmQuestion) -> Outcomes:
    outcomes = read_outcomes(f"{path}@{question.evaluation}", question.metric)
    assert not isinstance(outcomes, PublishedCount)  # a path never names one
    # policies differ by design: they are no condition of the measurement
    settings = {key: value for key, value in outcomes.settings.items() if key not in ("policy", "model.path")}
    return replace(outcomes, name=f"{arm}, seed {seed}", settings=settings)


def _list_omissions(question: ArmQuestion, runs_read: Mapping[Any, Outcomes], tasks: Sequence[str]) -> list[str]:
    every_task = {task for each in runs_read.values() for task in [*each.values, *each.missing]}
    notes = [f"{question.name}: {note}" for note in list_void_attempts(runs_read.values())]
    if left_out := len(every_task) - len(tasks):
        notes.append(f"{question.name}: {format_count(left_out, 'task')} left out: some run has no value for them.")
    return notes


def answer_questions(
    questions: Sequence[ArmQuestion],
    runs: Runs,
    seeds: Sequence[int],
    arms: Table,
    notes: Sequence[str] = (),
    criteria: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Result:
    """Answer `questions`.

    `seeds` are planned for each arm; each of `criteria` names the questions whose gains must all be shown.
    """
    gains = dict[str, bool | None]()
    verdicts, tables, remarks, numbers = list[str](), list[Table](), list(notes), list[dict[str, Any]]()
    for question in questions:
        try:
            answer = answer_question(question, runs)
        except UsageError as error:
            verdicts.append(f"{_format_question(question)} cannot be answered: {error}")
            numbers.append({"question": question.name, "error": str(error)})
            continue
        verdicts.append(_describe_answer(answer, len(seeds)))
        tables += _make_answer_tables(answer, seeds)
        gains[question.name] = _is_gain_shown(answer, len(seeds))
        remarks += answer.notes
        numbers.append(_answer_as_json(answer, len(seeds)))
    for criterion, names in criteria.items():
        verdicts.append(_describe_criterion(criterion, {name: gains.get(name) for name in names}))
    tables += [arms] if arms.rows else []
    remarks += _describe_methods(len(seeds))
    data = {"verdicts": verdicts, "questions": numbers, "seeds": list(seeds), "notes": remarks}
    return Result(verdicts, tables, remarks, data)


def _get_least_gain(answer: ArmAnswer) -> float | None:
    # questions state shares in points
    least = answer.question.at_least
    return least if least is None or not answer.share else least / 100


def _is_gain_shown(answer: ArmAnswer, planned_seeds: int) -> bool | None:
    """Whether each arm shows the gain that its question asks for; None until all seeds of all arms are done."""
    least = _get_least_gain(answer)
    done = [each for each in answer.contrasts if each.change.seeds >= planned_seeds]
    if least is None or len(done) < len(answer.question.arms) - 1:
        return None
    gains = (orient_gain(answer.question.metric, each.change.interval) for each in answer.contrasts)
    return all(gain.is_all_above(least) for gain in gains)


# -- sentences


def _describe_criterion(criterion: str, gains: Mapping[str, bool | None]) -> str:
    """Describe a criterion: all its gains must be shown, so none needs a correction (Berger 1982)."""
    state = "met" if all(gains.values()) else "not met" if False in gains.values() else "not known yet"
    words = {True: "shown", False: "not shown", None: "not known yet"}
    parts = ", ".join(f"{name} {words[is_shown]}" for name, is_shown in gains.items())
    return f"{criterion}: the criterion is {state}: {parts}."


def _format_question(question: ArmQuestion) -> str:
    return f"{question.name}: {question.asks}" if question.asks else f"{question.name}:"


def _describe_answer(answer: ArmAnswer, planned_seeds: int) -> str:
    question = answer.question
    sentences, least = list[str](), _get_least_gain(answer)
    for contrast in answer.contrasts:
        sentences.append(_describe_contrast(answer, contrast, planned_seeds))
        if least is not None:
            sentences.append(describe_gain(question.metric, contrast.change.interval, least, answer.share))
    measured_arms = {contrast.arm for contrast in answer.contrasts}
    if missing := [arm for arm in question.arms[1:] if arm not in measured_arms]:
        both = f"{question.arms[0]} and {' or '.join(missing) if sentences else 'another arm'}"
        sentences.append(f"Not known yet: no seed of {both} is finished.")
    return " ".join([_format_question(question), *sentences])


def _describe_contrast(answer: ArmAnswer, contrast: Contrast, planned_seeds: int) -> str:
    question, change, arm = answer.question, contrast.change, contrast.arm
    gain = format_change(change.interval, answer.share)
    difference = f"{arm} - {question.arms[0]} = {gain} on {question.metric}"
    sample = f"{format_count(change.seeds, 'seed')} x {format_count(change.tasks, 'task')}"
    sample += f" (of {planned_seeds} seeds)" if change.seeds < planned_seeds else ""
    if contrast.adjusted is None:
        return f"Nothing can be claimed: {difference}; {sample} are too few for an interval."
    if contrast.claimed:
        side = "above" if change.interval.value > 0 else "below"
        arms = len(question.arms) - 1
        corrected = f", corrected for {arms} arms" if arms > 1 else ""
        better = ", where less is better" if question.metric.removesuffix("_per_patch") in LESS_IS_BETTER else ""
        p = f"{format_p_equation(contrast.adjusted)}{corrected}"
        claim = f"{arm} is {side} {question.arms[0]} on {question.metric}: {gain}{better}, {p}, {sample}."
    else:
        smallest = format_smallest_difference(change.smallest, answer.share) if change.smallest else ""
        detectable = describe_smallest(smallest, sample)
        claim = f"Too small to tell: {difference}, {format_p_equation(contrast.adjusted)}; {detectable}."
    return claim if change.seeds > 1 else f"{claim} One seed says nothing about other training runs."


# -- tables


def _make_answer_tables(answer: ArmAnswer, seeds: Sequence[int]) -> list[Table]:
    question = answer.question
    where = "" if question.evaluation == "eval" else f", evaluation {question.evaluation}"
    contrasts = {each.arm: each for each in answer.contrasts}
    rows = []
    for arm in question.arms:
        if arm not in answer.means:
            rows.append((arm, f"0 of {len(seeds)}", *("-",) * 5))
            continue
        mean, cells = answer.means[arm], ("-", "-", "-")
        if contrast := contrasts.get(arm):
            p = TOO_FEW if contrast.adjusted is None else format_p(contrast.adjusted)
            change = contrast.change
            smallest = "none" if change.smallest is None else format_smallest_difference(change.smallest, answer.share)
            cells = format_change(change.interval, answer.share), p, smallest
        tasks = f"{mean.tasks} in {mean.clusters}" if answer.unit == "clusters" else str(mean.tasks)
        rows.append((arm, f"{mean.seeds} of {len(seeds)}", tasks, format_rate(mean.interval, answer.share), *cells))
    tasks_head = "tasks in clusters" if answer.unit == "clusters" else "tasks"
    statistics = (question.metric, f"against {question.arms[0]}", "p, Holm", "smallest detectable")
    heads = ("arm", "seeds", tasks_head, *statistics)
    tables = [Table(f"{question.name}: {question.metric}{where}", heads, rows)]
    if len(seeds) > 1 and answer.by_seed:
        by_seed = [
            (arm, *(format_rate(means[seed].interval, answer.share) if seed in means else "-" for seed in seeds))
            for arm, means in answer.by_seed.items()
        ]
        tables.append(Table(f"{question.name}: by seed", ("arm", *(f"seed {seed}" for seed in seeds)), by_seed))
    if answer.settings:
        title = f"{question.name}: how evaluations differ"
        tables.append(make_settings_table(title, answer.means, answer.settings))
    return tables


def _describe_methods(seeds: int) -> list[str]:
    sources = "seeds and of clusters of tasks (crossed; Hillis 2007)" if seeds > 1 else "clusters of tasks"
    return [
        f"Brackets are 95 % intervals from the variance of {sources}, with Student's quantile: Wilson's score interval "
        "for a share, Tango's for a difference of shares, paired by seed and task, Student's for any other. p is of "
        "the same statistic, two-sided, corrected for the arms of the question (Holm 1979). The smallest difference to "
        f"be shown has a power of {POWER:.0%}; its interval follows from that of the variance.",
        "By seed: intervals of each run alone, over clusters of tasks."
        if seeds > 1
        else "One seed: the variation between training runs is unknown, and no interval here includes it.",
        "A cluster is a repository where there are several, else a function or a single task.",
    ]


def _answer_as_json(answer: ArmAnswer, planned_seeds: int) -> dict[str, Any]:
    return {
        "question": answer.question.name,
        "asks": answer.question.asks,
        "metric": answer.question.metric,
        "evaluation": answer.question.evaluation,
        "baseline": answer.question.arms[0],
        "at_least": answer.question.at_least,
        "gain_shown": _is_gain_shown(answer, planned_seeds),
        "share": answer.share,
        "arms": to_plain_data(answer.means),
        "by_seed": {
            arm: {str(seed): to_plain_data(mean.interval) for seed, mean in means.items()}
            for arm, means in answer.by_seed.items()
        },
        "contrasts": [
            {"arm": each.arm, "claimed": each.claimed, "p_holm": each.adjusted, **to_plain_data(each.change)}
            for each in answer.contrasts
        ],
        "settings": to_plain_data(answer.settings),
    }
