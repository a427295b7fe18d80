"""Results of labelled tasks by kind: accuracy, F1, confusion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from coderepairrl.report.reading import to_plain_data
from coderepairrl.rewards.text import normalize_label, read_label, read_last_reply
from coderepairrl.stats.classification import NONE, OTHER, LabelAnswer, classify
from coderepairrl.stats.intervals import Interval, cluster_episodes
from coderepairrl.types import Ending, Episode, Task

PLAIN = "plain"  # printed for tasks without a kind


def collect_answers(episodes: Sequence[Episode], tasks: Mapping[str, Task]) -> dict[str, list[LabelAnswer]]:
    """Collect the answers to labelled tasks by kind, without void episodes."""
    labelled = [each for each in episodes if each.task_id in tasks and tasks[each.task_id].answer]
    clusters = cluster_episodes(labelled)
    classes = {normalize_label(tasks[each.task_id].answer): tasks[each.task_id].answer for each in labelled}
    answers_by_kind: dict[str, list[LabelAnswer]] = {}
    for each in sorted(labelled, key=lambda each: (each.task_id, each.attempt)):
        if each.ending is Ending.VOID:
            continue
        label = read_label(read_last_reply(each))
        answer = LabelAnswer(
            each.task_id,
            classes[normalize_label(tasks[each.task_id].answer)],
            classes.get(label, label) or None,
            clusters[each.task_id],
        )
        answers_by_kind.setdefault(each.kind or PLAIN, []).append(answer)
    return answers_by_kind


def summarise_answers(episodes: Sequence[Episode], tasks: Iterable[Task]) -> dict[str, Any]:
    """Summarise answers by kind (`classify`)."""
    by_kind = collect_answers(episodes, {task.id: task for task in tasks})
    return {kind: to_plain_data(classify(answers)) for kind, answers in by_kind.items()}


def format_summary(summary: Mapping[str, Any]) -> list[str]:
    """Format the result of `summarise_answers` as lines: figures, rows by class."""
    lines: list[str] = []
    for kind, each in summary.items():
        lines += [
            f"labels, kind {kind}: {each['tasks']:,} tasks, {each['answers']:,} answers, {each['missing']:,} without a "
            f"label, {each['invalid']:,} with another",
            f"  {'accuracy':<28} {Interval(**each['accuracy'])}",
            f"  {'macro-F1':<28} {Interval(**each['macro_f1'])}",
        ]
        rows: list[tuple[str, ...]] = [("class", "answers", "precision", "recall", "F1", "given instead")]
        for name, row in each["classes"].items():
            scores = (format_interval(row[score]) for score in ("precision", "recall", "f1"))
            mistakes = ", ".join(f"{other} {count:,}" for other, count in list_mistakes(each["confusion"], name))
            rows.append((name, f"{row['support']:,}", *scores, mistakes))
        lines += align_columns(rows, "    ")
    return lines


def format_interval(value: Mapping[str, Any] | None) -> str:
    """Format an interval from plain data.

    >>> format_interval({"value": 0.5, "low": 0.25, "high": 0.75}), format_interval(None)
    ('0.500 [0.250, 0.750]', 'undefined')
    """
    return "undefined" if value is None else str(Interval(**value))


def list_mistakes(confusion: Mapping[str, Mapping[str, int]], name: str) -> list[tuple[str, int]]:
    """Wrong labels for class `name`, most frequent first."""
    wrong = [(other, count) for other, count in confusion[name].items() if other != name]
    return sorted(wrong, key=lambda each: -each[1])


def list_confusion_columns(confusion: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Columns of a confusion matrix: classes, then labels outside them."""
    unlisted = [name for name in (OTHER, NONE) if any(name in row for row in confusion.values())]
    return [*confusion, *unlisted]


def align_columns(rows: Sequence[Sequence[str]], indent: str) -> list[str]:
    """Format `rows` as lines of aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
