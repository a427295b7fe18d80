"""Quality of labels: accuracy, precision, recall, F1, confusion.

Intervals are clustered bootstraps (`paired.bootstrap`): F1 is not a mean of tasks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from coderepairrl.stats.intervals import Interval, mean_interval, paired_difference
from coderepairrl.stats.paired import Array, bootstrap, divide


class LabelAnswer(NamedTuple):
    """Expected and predicted label of an attempt."""

    task: str
    expected: str
    predicted: str | None
    cluster: Hashable


@dataclass(frozen=True, slots=True)
class PerClass:
    """Scores of a class; None for 0 / 0."""

    support: int
    precision: Interval | None
    recall: Interval | None
    f1: Interval | None


@dataclass(frozen=True, slots=True)
class Classification:
    """Results of answers; classes are the tasks' labels, sorted.

    `macro_f1`: mean over classes of 2 TP / (2 TP + FP + FN).
    """

    answers: int
    tasks: int
    missing: int
    """Answers without a label: counted as wrong."""
    invalid: int
    """Answers with a label that is not a class: counted as wrong."""
    accuracy: Interval
    macro_f1: Interval
    classes: Mapping[str, PerClass]
    confusion: Mapping[str, Mapping[str, int]]
    """Counts by class, then by predicted label: a class, `OTHER` or `NONE`."""


OTHER, NONE = "(other)", "(none)"
"""Labels in a confusion matrix: not a class, and no label."""


def classify(answers: Sequence[LabelAnswer]) -> Classification:
    """Measure `answers`. Raises ValueError without any."""
    if not answers:
        raise ValueError("no answers to classify")
    names = sorted({each.expected for each in answers})
    clusters = [each.cluster for each in answers]
    labels = [
        NONE if each.predicted is None else each.predicted if each.predicted in names else OTHER for each in answers
    ]
    confusion = {name: Counter[str]() for name in names}
    for each, label in zip(answers, labels, strict=True):
        confusion[each.expected][label] += 1
    columns = _make_share_columns([[each] for each in answers], names)
    macro = bootstrap(columns, clusters, macro_f1)
    assert macro is not None  # each class is the label of some task
    return Classification(
        answers=len(answers),
        tasks=len({each.task for each in answers}),
        missing=labels.count(NONE),
        invalid=labels.count(OTHER),
        accuracy=mean_interval([float(each.predicted == each.expected) for each in answers], clusters, share=True),
        macro_f1=macro,
        # every len(names)-th column belongs to one class
        classes={
            name: _measure_class(columns[at :: len(names)], clusters, confusion[name]) for at, name in enumerate(names)
        },
        confusion={name: {label: row[label] for label in (*names, OTHER, NONE) if row[label]}
                   for name, row in confusion.items()},
    )  # fmt: skip


def macro_f1(means: Array) -> Array:
    """Compute macro-F1 from means of correct, predicted and expected labels per class, ``(3 * classes, draws)``."""
    correct, predicted, expected = np.split(means, 3)
    total = predicted + expected
    f1 = np.divide(2 * correct, total, out=np.zeros_like(correct), where=total > 0)
    return np.asarray(f1.sum(axis=0) / (total > 0).sum(axis=0))


def _measure_class(
    columns: Sequence[Sequence[float]], clusters: Sequence[Hashable], confusion: Mapping[str, int]
) -> PerClass:
    return PerClass(
        support=sum(confusion.values()),
        precision=bootstrap(columns, clusters, lambda means: divide(means[0], means[1])),
        recall=bootstrap(columns, clusters, lambda means: divide(means[0], means[2])),
        f1=bootstrap(columns, clusters, lambda means: divide(2 * means[0], means[1] + means[2])),
    )


class Difference(NamedTuple):
    """Differences between two policies: later minus earlier."""

    accuracy: Interval
    macro_f1: Interval


def compare_answers(before: Sequence[LabelAnswer], after: Sequence[LabelAnswer]) -> Difference:
    """Compare two policies on common tasks, weighted equally. Raises ValueError without any."""
    sides = [_group_by_task(answers) for answers in (before, after)]
    tasks = [task for task in sides[0] if task in sides[1]]
    if not tasks:
        raise ValueError("the policies share no task")
    names = sorted({sides[0][task][0].expected for task in tasks})
    clusters = [sides[0][task][0].cluster for task in tasks]
    accuracies = [[_compute_label_share(side[task], side[task][0].expected) for task in tasks] for side in sides]
    columns = [column for side in sides for column in _make_share_columns([side[task] for task in tasks], names)]
    half = 3 * len(names)
    change = bootstrap(columns, clusters, lambda means: macro_f1(means[half:]) - macro_f1(means[:half]))
    assert change is not None  # each class is the label of some task
    return Difference(paired_difference(accuracies[0], accuracies[1], clusters, share=True), change)


def _group_by_task(answers: Sequence[LabelAnswer]) -> dict[str, list[LabelAnswer]]:
    by_task: dict[str, list[LabelAnswer]] = {}
    for each in answers:
        by_task.setdefault(each.task, []).append(each)
    return by_task


def _compute_label_share(attempts: Sequence[LabelAnswer], label: str) -> float:
    return sum(each.predicted == label for each in attempts) / len(attempts)


def _make_share_columns(tasks: Sequence[Sequence[LabelAnswer]], names: Sequence[str]) -> list[list[float]]:
    """Shares of correct, predicted and expected labels by class, a value per task."""
    predicted = [[_compute_label_share(attempts, name) for attempts in tasks] for name in names]
    expected = [[float(attempts[0].expected == name) for attempts in tasks] for name in names]
    correct = [
        [share * is_class for share, is_class in zip(*rows, strict=True)]
        for rows in zip(predicted, expected, strict=True)
    ]
    return correct + predicted + expected
