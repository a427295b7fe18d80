"""Results of labelled tasks by kind: accuracy, F1, confusion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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
            classes.get(label, label) or None,  # as the tasks spell it
            clusters[each.task_id],
        )
        answers_by_kind.setdefault(each.kind or PLAIN, []).append(answer)
    return answers_by_kind


def summarise_answers(episodes: Sequence[Episode], tasks: Mapping[str, Task]) -> dict[str, Any]:
    """Summarise answers by kind: `Classification` as plain data."""
    by_kind = collect_answers(episodes, tasks)
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
            intervals = (row[score] for score in ("precision", "recall", "f1"))
            scores = ("undefined" if interval is None else str(Interval(**interval)) for interval in intervals)
            mistakes = Counter({other: count for other, count in each["confusion"][name].items() if other != name})
            confused = ", ".join(f"{other} {count:,}" for other, count in mistakes.most_common())
            rows.append((name, f"{row['support']:,}", *scores, confused))
        lines += align_columns(rows, "    ")
    return lines


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
