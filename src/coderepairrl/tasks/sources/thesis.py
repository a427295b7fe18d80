"""`thesis`: the thesis's training tasks, 1,000 issues of SWE-Gym and SWE-bench Multilingual.

Follows ``ASSERT-KTH/CodeRepairRL`` (``src/train_grpo.py``). Never tested with the hub's data sets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Literal

from coderepairrl.errors import CodeRepairError, PrerequisiteError, TaskError, combine_errors
from coderepairrl.tasks.base import LoadedSource
from coderepairrl.tasks.benchmark import RepositoryBenchmark, Workspace
from coderepairrl.tasks.select import HELD_OUT, TRAIN
from coderepairrl.tasks.sources.swe_bench import SweBench
from coderepairrl.tasks.sources.swe_gym import SweGym
from coderepairrl.types import Task

DROPPED = "fastlane/fastlane"
"""Repository left out: in the thesis its large files made clones fail, and failed clones got reward 0."""


class Thesis(LoadedSource):
    """`from_swe_gym` and `from_multilingual` issues for training, shuffled; other Multilingual issues are held out.

    Leaves out `DROPPED` and prompts of more than `max_prompt` characters. With `rows` ``drawn``, draws at random from
    what remains (1,000 issues, and 43 held out); with ``first``, takes the first rows and filters them afterwards, like
    the thesis (993, and 50). Options: docs/guides/reproduce-the-thesis.md.
    """

    name = "thesis"

    def __init__(
        self,
        *,
        swe_gym: str = "",
        multilingual: str = "",
        swe_gym_revision: str = "",
        multilingual_revision: str = "",
        rows: Literal["drawn", "first"] = "drawn",
        from_swe_gym: int = 750,
        from_multilingual: int = 250,
        only: Literal["", "swe_gym", "multilingual"] = "",
        max_prompt: int = 20_000,
        seed: int = 42,
        workspace: Workspace = "git",
        clone: str = "",
    ) -> None:
        self._sources: dict[str, RepositoryBenchmark] = {
            "swe_gym": SweGym(path=swe_gym, revision=swe_gym_revision, workspace=workspace, clone=clone),
            "multilingual": SweBench(
                "multilingual", path=multilingual, revision=multilingual_revision, workspace=workspace, clone=clone
            ),
        }
        self._counts = {"swe_gym": from_swe_gym, "multilingual": from_multilingual}
        self._is_drawn, self._seed, self._max_prompt, self._only = rows == "drawn", seed, max_prompt, only

    def load(self) -> Iterator[Task]:
        """Select tasks of both data sets. Raises `TaskError`, also for too few issues, and `PrerequisiteError`."""
        by_source, problems = dict[str, list[Task]](), list[CodeRepairError]()
        for name, source in self._sources.items():
            try:
                by_source[name] = list(source)
            except CodeRepairError as error:
                problems.append(error if source.path else _suggest_file(error, name))
        if problems:
            raise combine_errors(problems)
        if self._is_drawn:
            by_source = {name: self._leave_out(tasks) for name, tasks in by_source.items()}
            for tasks in by_source.values():
                Random(self._seed).shuffle(tasks)
        for name, tasks in by_source.items():
            if len(tasks) < self._counts[name]:
                raise TaskError(
                    f"thesis: {name} has {len(tasks)} usable issues, fewer than from_{name}={self._counts[name]}",
                    fix=f"name a file with all of its rows, or set from_{name}={len(tasks)}",
                )
        chosen = {name: tasks for name, tasks in by_source.items() if self._only in ("", name)}
        train = [task for name, tasks in chosen.items() for task in tasks[: self._counts[name]]]
        Random(self._seed).shuffle(train)
        held_out = chosen.get("multilingual", [])[self._counts["multilingual"] :]
        for split, tasks in ((TRAIN, train), (HELD_OUT, held_out)):
            yield from (replace(task, split=split) for task in self._leave_out(tasks))

    def _leave_out(self, tasks: list[Task]) -> list[Task]:
        return [task for task in tasks if task.repository != DROPPED and len(task.prompt) <= self._max_prompt]


def _suggest_file(error: CodeRepairError, name: str) -> CodeRepairError:
    suggestion = f"name a file of its rows: {name}=FILE (in a run tasks.options.{name}=FILE)"
    fix = error.fix if isinstance(error, PrerequisiteError) else "connect this machine to the internet once"
    return type(error)(str(error), fix=f"{fix}; or {suggestion}")
