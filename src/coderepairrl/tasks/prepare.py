"""Fetch and build what tasks need, so that runs need no network."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from coderepairrl.environments import Environment, NoRoom, ReadyImage, prepare_environments, prepare_images
from coderepairrl.errors import CodeRepairError, SandboxFault, TaskError, several
from coderepairrl.grading import harness
from coderepairrl.printable import counted, without_login
from coderepairrl.sandbox.commits import commits_at_hand, fetch_commits
from coderepairrl.tasks.references import with_diffed_references
from coderepairrl.types import Task

Say = Callable[[str], None]
_AT_ONCE = 32
"""Commits per fetch, the most that a kill or failure can lose."""
_WAITS = (1.0, 5.0)
"""Seconds before retries of a fetch with a transient failure."""


class Prerequisites(NamedTuple):
    """Commits (as in `Task.workspace`), images and environments on this machine."""

    commits: list[str]
    images: list[ReadyImage]
    environments: list[Environment]


async def prepare(
    tasks: Iterable[Task], *, images: Path | None = None, jobs: int = 2, say: Say = lambda _: None
) -> Prerequisites:
    """Fetch commits and images and build environments of `tasks`, `jobs` at a time; existing ones are kept.

    `images` is a folder in OCI layout or an archive of ``docker save``, tried before a registry. Raises
    `PrerequisiteError` before fetching if the disk lacks room for the images, else one `CodeRepairError`.
    """
    task_list = list(tasks)
    problems: list[CodeRepairError] = []
    kinds = {"commit": {task.workspace for task in task_list if task.workspace.startswith("git:")}}
    kinds["environment"] = {task.environment for task in task_list if task.environment.startswith("python:")}
    if needed := " and ".join(counted(len(some), kind) for kind, some in kinds.items() if some):
        say(f"{needed}, whose size nobody states before they are here")
    unpacked: list[ReadyImage] = []
    environments: list[Environment] = []
    try:
        if names := image_names(task_list):
            unpacked = await asyncio.to_thread(prepare_images, names, offered=images, jobs=jobs, say=say)
    except NoRoom:
        raise
    except CodeRepairError as error:
        problems.append(error)
    commits = await asyncio.to_thread(_Commits(task_list, problems, say).fetch, jobs)
    try:
        environments = await prepare_environments(task_list, jobs=jobs, say=say)
    except CodeRepairError as error:
        problems.append(error)
    try:
        await asyncio.to_thread(harness.install, [task.checks for task in task_list])
    except CodeRepairError as error:
        problems.append(error)
    await asyncio.to_thread(with_diffed_references, task_list)
    if problems:
        raise several(problems)
    return Prerequisites(commits, unpacked, environments)


class _Commits:
    def __init__(self, tasks: Iterable[Task], problems: list[CodeRepairError], say: Say) -> None:
        self._wanted = list(dict.fromkeys(task.workspace for task in tasks if task.workspace.startswith("git:")))
        self._problems, self._say, self._done = problems, say, 0

    def fetch(self, jobs: int) -> list[str]:
        """Fetch from `jobs` repositories at a time; return the commits present, and record problems."""
        by_url = defaultdict[str, list[str]](list)
        for workspace in self._wanted:
            url, _, commit = workspace.removeprefix("git:").rpartition("@")
            by_url[url].append(commit)
        with ThreadPoolExecutor(jobs) as pool:
            present = pool.map(self._of, by_url, by_url.values())
            at_hand = {f"git:{url}@{commit}" for url, some in zip(by_url, present, strict=True) for commit in some}
        return [workspace for workspace in self._wanted if workspace in at_hand]

    def _of(self, url: str, commits: list[str]) -> list[str]:
        at_hand = commits_at_hand(url, commits)
        self._done += len(at_hand)
        lacking = [commit for commit in commits if commit not in at_hand]
        while lacking:
            some, lacking = lacking[:_AT_ONCE], lacking[_AT_ONCE:]
            try:
                self._some(url, some)
            except CodeRepairError as error:  # it would be the same with the others
                self._problems.append(error)
                self._say(f"{counted(len(some) + len(lacking), 'commit')} of {without_login(url)} not fetched")
                break
        return commits_at_hand(url, commits)

    def _some(self, url: str, commits: list[str]) -> None:
        try:
            _patiently(url, commits, self._say)
        except TaskError as error:
            if len(commits) == 1:
                self._problems.append(error)
                self._say(f"1 commit of {without_login(url)} not fetched")
                return
            half = len(commits) // 2
            self._some(url, commits[:half])
            self._some(url, commits[half:])
            return
        self._done += len(commits)
        self._say(f"commits: {self._done} of {len(self._wanted)} are here ({without_login(url)}: {len(commits)} more)")


def _patiently(url: str, commits: list[str], say: Say) -> None:
    for wait in _WAITS:
        try:
            return fetch_commits(url, commits)
        except SandboxFault as error:
            say(f"{error}; trying again in {wait:.0f} s")
            time.sleep(wait)
    return fetch_commits(url, commits)


def image_names(tasks: Iterable[Task]) -> list[str]:
    """Names of the images that tasks run in."""
    places = (place for task in tasks for place in (task.workspace, task.checks.workspace))
    kinds = (place.partition(":") for place in places)
    return list(dict.fromkeys(name for kind, _, name in kinds if kind == "image"))
