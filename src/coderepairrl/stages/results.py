"""Results of an evaluation: episodes, metrics, summary, predictions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from coderepairrl.report import answers, localisation, metrics
from coderepairrl.runs import RunFolder
from coderepairrl.sandbox.contents import files_at_hand
from coderepairrl.stages import predictions
from coderepairrl.stats import Interval, Summary, outcomes, summarise
from coderepairrl.types import Episode, Task


def conclude(
    folder: RunFolder,
    name: str,
    step: int,
    version: int,
    episodes: Sequence[Episode],
    tasks: Iterable[Task],
    *,
    model: str = "",
    agents: Mapping[str, str] | None = None,
    known: Mapping[str, metrics.Row] | None = None,
) -> dict[str, Any]:
    """Write the results of evaluation `name` into `folder`; return the record for the log.

    Files: ``episodes/NAME-STEP.jsonl``, and in ``eval/NAME-STEP/`` ``metrics.jsonl``, ``summary.json`` and predictions.
    `model` names the policy there (default: run and step), `agents` are by kind, `known` are metrics by episode id.
    """
    place = f"{name}-{step:05d}"
    by_id = {task.id: task for task in tasks}
    rows = {**metrics.rows(_attempts(episodes, by_id, known or {})), **(known or {})}
    counts = outcomes(episodes, {name for name, row in rows.items() if row.get("exact")})
    summary = as_json(summarise(episodes)) | {"outcomes": _plain(counts)}
    further = metrics.summary(episodes, rows)
    summary["metrics"] = _plain({each: further[each] for each in further if each not in {*counts, *summary["values"]}})
    summary["slices"] = {
        part: {"tasks": len(ids)} | _plain(_headline([each for each in episodes if each.task_id in ids], rows))
        for part, ids in metrics.parts(episodes, by_id, agents or {}).items()
    }
    if labelled := answers.summary(episodes, by_id.values()):
        summary["answers"] = labelled
    folder.write_episodes(place, episodes)
    folder.write_attempts(
        place,
        (
            {"id": each.id, "task": each.task_id, "attempt": each.attempt, **rows[each.id]}
            for each in episodes
            if each.id in rows
        ),
    )
    folder.write_evaluation(place, {"step": step, **summary})
    predictions.write(folder.path / "eval" / place, model or f"{folder.path.name}-{step:05d}", episodes)
    return {"name": name, "step": step, "version": version, "summary": summary}


def _attempts(
    episodes: Sequence[Episode], tasks: Mapping[str, Task], known: Mapping[str, object]
) -> Iterator[metrics.Attempt]:
    # By task: a patch may change all files of a project, and only one task's files are held.
    by_task: dict[str, list[Episode]] = {}
    for each in episodes:
        if each.id not in known:
            by_task.setdefault(each.task_id, []).append(each)
    for name, task_episodes in by_task.items():
        task, sources = tasks.get(name), None
        if task is not None and task.reference.strip():
            paths = localisation.python_files(task.reference, *(each.patch for each in task_episodes))
            sources = files_at_hand(task.workspace, sorted(paths))
        yield from (metrics.Attempt(each, task, sources) for each in task_episodes)


def _headline(episodes: Sequence[Episode], rows: Mapping[str, metrics.Row]) -> dict[str, Interval]:
    headline = {
        each.id: {name: v for name, v in rows.get(each.id, {}).items() if name in metrics.HEADLINE} for each in episodes
    }
    return metrics.summary(episodes, headline)


def as_json(summary: Summary) -> dict[str, Any]:
    """Convert a summary to plain data."""
    return {
        "episodes": summary.episodes,
        "tasks": summary.tasks,
        "void": summary.void,
        "values": _plain(summary.values),
    }


def _plain(found: Mapping[str, Interval]) -> dict[str, Any]:
    return {name: interval._asdict() for name, interval in found.items()}
