"""What tasks need, fetched and built before a run, so that it needs no network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from coderepairrl.environments import Environment, ReadyImage, prepare_environments, prepare_images
from coderepairrl.errors import CodeRepairError, several
from coderepairrl.grading import harness
from coderepairrl.sandbox.workspace import commit_folder
from coderepairrl.types import Task

Say = Callable[[str], None]


class Prerequisites(NamedTuple):
    """What is on this machine now: commits (as in `Task.workspace`), images and environments."""

    commits: list[str]
    images: list[ReadyImage]
    environments: list[Environment]


async def prepare(
    tasks: Iterable[Task], *, images: Path | None = None, jobs: int = 2, say: Say = lambda _: None
) -> Prerequisites:
    """Fetch the commits and images of `tasks` and build their environments, `jobs` at a time; what is there is kept.
    The packages that judge them are installed, too.

    `images` is a folder in OCI layout, or an archive of ``docker save``, that is asked before a registry. All is tried;
    raises what cannot be had together, as a `CodeRepairError`.
    """
    wanted = list(tasks)
    problems: list[CodeRepairError] = []
    commits = await asyncio.to_thread(_fetch, wanted, problems, say)
    unpacked: list[ReadyImage] = []
    environments: list[Environment] = []
    try:
        if names := image_names(wanted):
            unpacked = await asyncio.to_thread(prepare_images, names, offered=images, jobs=jobs, say=say)
    except CodeRepairError as error:
        problems.append(error)
    try:
        environments = await prepare_environments(wanted, jobs=jobs, say=say)
    except CodeRepairError as error:
        problems.append(error)
    try:
        await asyncio.to_thread(harness.install, [task.checks for task in wanted])
    except CodeRepairError as error:
        problems.append(error)
    if problems:
        raise several(problems)
    return Prerequisites(commits, unpacked, environments)


def _fetch(tasks: Iterable[Task], problems: list[CodeRepairError], say: Say) -> list[str]:
    """Fetch each commit once; returns those that could be had, and adds to `problems` why the others could not."""
    wanted = dict.fromkeys(task.workspace for task in tasks if task.workspace.startswith("git:"))
    there = []
    for number, workspace in enumerate(wanted, 1):
        url, _, commit = workspace.removeprefix("git:").rpartition("@")
        try:
            with commit_folder(url, commit):
                there.append(workspace)
        except CodeRepairError as error:
            problems.append(error)
            say(f"commit {number} of {len(wanted)}: {error}")
    return there


def image_names(tasks: Iterable[Task]) -> list[str]:
    """The images that tasks run in, by name."""
    places = (place for task in tasks for place in (task.workspace, task.checks.workspace))
    kinds = (place.partition(":") for place in places)
    return list(dict.fromkeys(name for kind, _, name in kinds if kind == "image"))
