"""The order of tasks, and results of earlier attempts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from coderepairrl.config import Config
from coderepairrl.errors import ConfigError, UsageError
from coderepairrl.rollout.curriculum import Band, Curriculum, EasyFirst, WeightedTasks
from coderepairrl.runs import open_run
from coderepairrl.stats.outcomes import is_resolved
from coderepairrl.types import Ending, Episode


class ProbedTask(NamedTuple):
    """Earlier attempts at a task."""

    attempts: int
    rate: float
    """Share of attempts that solved it; without verdicts their mean reward, clipped to 0..1."""


def read_probe(path: Path) -> dict[str, ProbedTask]:
    """Read attempts by task from a run folder of `crrl eval`. Raises `UsageError`."""
    run, by_task = open_run(path), dict[str, list[Episode]]()
    for episode in run.episodes("eval-00000"):
        if episode.ending is not Ending.VOID:
            by_task.setdefault(episode.task_id, []).append(episode)
    if not by_task:
        raise UsageError(f"{run.path} has no evaluation with an attempt", fix="name a run folder of crrl eval")
    return {task: _summarize_attempts(episodes) for task, episodes in by_task.items()}


def _summarize_attempts(episodes: Sequence[Episode]) -> ProbedTask:
    verdicts = [verdict for each in episodes if (verdict := is_resolved(each)) is not None]
    successes = sum(verdicts) if verdicts else sum(each.reward for each in episodes)
    return ProbedTask(len(episodes), min(1.0, max(0.0, successes / len(episodes))))


def make_curriculum(config: Config, sources: Sequence[WeightedTasks]) -> Curriculum:
    """Curriculum of `config`. Raises `UsageError` for an unreadable probe, `ConfigError` for one that lacks the
    tasks."""
    options, sources = config.curriculum, tuple(sources)
    order: EasyFirst | Band | None = None
    if options.easy_first is not None:
        order = EasyFirst(options.easy_first.steps)
        sources = _set_difficulties(sources, options.probe)
    elif (band := options.band) is not None:
        probed = read_probe(Path(options.probe)) if options.probe else {}
        ids = {task.id for share in sources for task in share.tasks}
        if options.probe and not ids & probed.keys():
            raise _no_common_task_error(options.probe, ids)
        order = Band(band.low, band.high, {name: each for name, each in probed.items() if name in ids})
    return Curriculum(sources=sources, per_step=config.rollout.tasks_per_step, seed=config.run.seed, order=order)


def _set_difficulties(sources: tuple[WeightedTasks, ...], probe: str) -> tuple[WeightedTasks, ...]:
    """Set task difficulties in `sources`, from the run `probe` if given."""
    if probe:
        probed = read_probe(Path(probe))
        difficulties = {name: 1 - each.rate for name, each in probed.items()}
        sources = tuple(
            replace(share, tasks=tuple(replace(task, difficulty=difficulties.get(task.id)) for task in share.tasks))
            for share in sources
        )
    tasks = list(chain.from_iterable(share.tasks for share in sources))
    unrated = [task.id for task in tasks if task.difficulty is None]
    if probe and len(unrated) == len(tasks):
        raise _no_common_task_error(probe, unrated)
    if unrated:
        raise ConfigError(
            f"curriculum.easy_first: {len(unrated)} of {len(tasks)} training tasks have no difficulty"
            f"{f' in {probe}' if probe else ''} ({min(unrated)}, ...)",
            fix="attempt all of them with crrl eval (eval.split=train; curriculum.probe=RUN), or take"
            " curriculum.band, which needs none",
        )
    return sources


def _no_common_task_error(probe: str, ids: Collection[str]) -> ConfigError:
    return ConfigError(
        f"{probe} has none of the {len(ids)} training tasks ({min(ids)}, ...)",
        fix="attempt them with crrl eval FILE eval.split=train, and set curriculum.probe to its run folder",
    )
