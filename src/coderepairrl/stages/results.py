"""What an evaluation leaves in its run folder: episodes, a summary with intervals, and predictions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from coderepairrl.rewards import MalformedPatch
from coderepairrl.rewards.verified import identity
from coderepairrl.runs import RunFolder
from coderepairrl.stages import predictions
from coderepairrl.stats import Summary, outcomes, summarise
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
) -> dict[str, Any]:
    """Write what became of the `episodes` of evaluation `name` into `folder`: ``episodes/NAME-STEP.jsonl``, and
    ``summary.json`` and the predictions into ``eval/NAME-STEP/``. Returns the record for the log.

    `model` is what predictions call the policy: where it is empty, the run and the step.
    """
    place = f"{name}-{step:05d}"
    found = outcomes(episodes, exact_of(episodes, {task.id: task for task in tasks}))
    summary = as_json(summarise(episodes)) | {"outcomes": {each: share._asdict() for each, share in found.items()}}
    folder.write_episodes(place, episodes)
    folder.write_evaluation(place, {"step": step, **summary})
    predictions.write(folder.path / "eval" / place, model or f"{folder.path.name}-{step:05d}", episodes)
    return {"name": name, "step": step, "version": version, "summary": summary}


def exact_of(episodes: Iterable[Episode], tasks: Mapping[str, Task]) -> set[str]:
    """The ids of the episodes whose patch makes of the files exactly what the reference of their task does."""
    wanted = {name: made for name, task in tasks.items() if (made := _makes(task.reference)) is not None}
    return {each.id for each in episodes if each.task_id in wanted and _makes(each.patch) == wanted[each.task_id]}


def _makes(patch: bytes) -> object:
    """What `patch` makes of the files; None of one that is empty or no diff."""
    try:
        return identity(patch) or None
    except MalformedPatch:
        return None


def as_json(summary: Summary) -> dict[str, Any]:
    """A summary as plain data."""
    return {
        "episodes": summary.episodes,
        "tasks": summary.tasks,
        "void": summary.void,
        "values": {name: interval._asdict() for name, interval in summary.values.items()},
    }
