"""`thesis`: the thesis's mixed curriculum, 1,000 issues of SWE-Gym and SWE-bench Multilingual.

Follows ``ASSERT-KTH/CodeRepairRL`` (``src/train_grpo.py``). Not run against the hub.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Literal

from coderepairrl.errors import CodeRepairError, PrerequisiteError, TaskError, several
from coderepairrl.tasks.base import LoadedSource
from coderepairrl.tasks.benchmark import Repositories, Workspace
from coderepairrl.tasks.select import HELD_OUT, TRAIN
from coderepairrl.tasks.sources.swe_bench import SweBench
from coderepairrl.tasks.sources.swe_gym import SweGym
from coderepairrl.types import Task

DROPPED = "fastlane/fastlane"
"""Repository whose large files made clones fail, which became rewards of zero."""


class Thesis(LoadedSource):
    """`from_swe_gym` and `from_multilingual` issues, shuffled; the latter's rest is split ``test``.

    Excluded are `DROPPED` and prompts of more than `max_prompt` characters. `rows` ``drawn`` samples after exclusions
    (1,000, and 43 held out); ``first`` excludes from the first rows, as the thesis did (993, and 50). Options:
    docs/guides/reproduce-the-thesis.md.
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
        self._sources: dict[str, Repositories] = {
            "swe_gym": SweGym(path=swe_gym, revision=swe_gym_revision, workspace=workspace, clone=clone),
            "multilingual": SweBench(
                "multilingual", path=multilingual, revision=multilingual_revision, workspace=workspace, clone=clone
            ),
        }
        self._asked = {"swe_gym": from_swe_gym, "multilingual": from_multilingual}
        self._drawn, self._seed, self._max_prompt, self._only = rows == "drawn", seed, max_prompt, only

    def load(self) -> Iterator[Task]:
        """Read both tables, and select.

        Raises `TaskError` and `PrerequisiteError` that name replacements of the hub, and `TaskError` for too few rows.
        """
        by_source, problems = dict[str, list[Task]](), list[CodeRepairError]()
        for name, source in self._sources.items():
            try:
                by_source[name] = list(source)
            except CodeRepairError as error:
                problems.append(error if source.path else _without_hub(error, name))
        if problems:
            raise several(problems)
        if self._drawn:
            by_source = {name: self._usable(tasks) for name, tasks in by_source.items()}
            for tasks in by_source.values():
                Random(self._seed).shuffle(tasks)
        for name, tasks in by_source.items():
            if len(tasks) < self._asked[name]:
                raise TaskError(
                    f"thesis: {name} has {len(tasks)} issues to draw from, and {self._asked[name]} are asked for",
                    fix=f"name all of its rows, or ask for less: from_{name}={len(tasks)}",
                )
        chosen = {name: tasks for name, tasks in by_source.items() if self._only in ("", name)}
        train = [task for name, tasks in chosen.items() for task in tasks[: self._asked[name]]]
        Random(self._seed).shuffle(train)
        held_out = chosen.get("multilingual", [])[self._asked["multilingual"] :]
        for split, tasks in ((TRAIN, train), (HELD_OUT, held_out)):
            yield from (replace(task, split=split) for task in self._usable(tasks))

    def _usable(self, tasks: list[Task]) -> list[Task]:
        return [task for task in tasks if task.repository != DROPPED and len(task.prompt) <= self._max_prompt]


def _without_hub(error: CodeRepairError, name: str) -> CodeRepairError:
    where = f"name a file of its rows: {name}=FILE (in a run tasks.options.{name}=FILE)"
    install = isinstance(error, PrerequisiteError)
    return type(error)(str(error), fix=f"{error.fix if install else 'connect this machine once'}; or {where}")
