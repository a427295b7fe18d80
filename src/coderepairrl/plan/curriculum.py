"""The order of tasks, and results of earlier attempts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from coderepairrl.config import Config
from coderepairrl.errors import ConfigError, UsageError
from coderepairrl.rollout import Band, Curriculum, EasyFirst, WeightedTasks
from coderepairrl.runs import RunFolder, codec, open_run
from coderepairrl.stats import is_resolved
from coderepairrl.types import Ending, Episode

_FIX = "write JSON lines of task, attempts, solved and reward (docs/guides/curriculum.md)"


class ProbedTask(BaseModel):
    """Attempts at one task in a probe file; a mean `reward` replaces a missing `solved`."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)

    task: str
    attempts: Annotated[int, Field(ge=1)]
    solved: Annotated[int, Field(ge=0)] | None = None
    reward: float | None = None

    @model_validator(mode="after")
    def _check_results(self) -> ProbedTask:
        if self.solved is None and self.reward is None:
            raise ValueError("neither solved nor reward")
        if (self.solved or 0) > self.attempts:
            raise ValueError(f"{self.solved} of {self.attempts} attempts cannot have solved it")
        return self

    @property
    def rate(self) -> float:
        """Share of attempts that solved the task, else their mean reward clipped to 0..1.

        >>> ProbedTask(task="a", attempts=8, solved=2, reward=0.5).rate
        0.25
        """
        if self.solved is not None:
            return self.solved / self.attempts
        return min(1.0, max(0.0, self.reward or 0.0))


def read_probe(path: Path) -> dict[str, ProbedTask]:
    """Read attempts by task from a run folder of `crrl eval` or a JSON Lines file. Raises `UsageError`."""
    if (path / "run.json").is_file():
        return _read_evaluation(open_run(path))
    try:
        written = codec.read_foreign_text(path)
    except ValueError as error:
        raise UsageError(f"{path} is not read: {error}", fix="name a run of crrl eval, or leave it out") from None
    by_task: dict[str, ProbedTask] = {}
    for number, row in codec.parse_foreign_lines(path, written, _FIX):
        try:
            probed = ProbedTask.model_validate(row)
        except ValidationError as error:
            first = error.errors()[0]
            message = ": ".join([*map(str, first["loc"]), first["msg"]])
            raise UsageError(f"{path}, line {number}: {message}", fix=_FIX) from None
        if probed.task in by_task:
            raise UsageError(f"{path}, line {number}: task {probed.task} has a line already", fix="leave one out")
        by_task[probed.task] = probed
    return by_task


def _read_evaluation(run: RunFolder) -> dict[str, ProbedTask]:
    by_task: dict[str, list[Episode]] = {}
    for episode in run.episodes("eval-00000"):
        if episode.ending is not Ending.VOID:
            by_task.setdefault(episode.task_id, []).append(episode)
    if not by_task:
        raise UsageError(f"{run.path} has no evaluation with an attempt", fix="name a run folder of crrl eval")
    return {task: _summarize_attempts(task, episodes) for task, episodes in by_task.items()}


def _summarize_attempts(task: str, episodes: Sequence[Episode]) -> ProbedTask:
    verdicts = [verdict for each in episodes if (verdict := is_resolved(each)) is not None]
    reward = sum(each.reward for each in episodes) / len(episodes)
    return ProbedTask(task=task, attempts=len(episodes), solved=sum(verdicts) if verdicts else None, reward=reward)


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
        before = {name: (each.attempts, each.rate) for name, each in probed.items() if name in ids}
        order = Band(band.low, band.high, before)
    return Curriculum(sources=sources, per_step=config.rollout.tasks_per_step, seed=config.run.seed, order=order)


def _set_difficulties(sources: tuple[WeightedTasks, ...], probe: str) -> tuple[WeightedTasks, ...]:
    """`sources` with task difficulties, from the file `probe` if given."""
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
        f"{probe} has none of the {len(ids)} training tasks ({min(ids)}, ...)", fix="crrl eval FILE makes one"
    )
