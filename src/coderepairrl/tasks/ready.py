"""Find the needs of tasks that this machine lacks."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from coderepairrl.environments import KIND
from coderepairrl.errors import TaskError
from coderepairrl.processes.caches import ENVIRONMENT_RECORD, environment_folder
from coderepairrl.sandbox.commits import commits_at_hand
from coderepairrl.sandbox.privileges import SANDBOX_USER
from coderepairrl.sandbox.rootfs import find
from coderepairrl.types import Task


def lacking(tasks: Iterable[Task]) -> dict[str, tuple[str, ...]]:
    """Missing needs by task id: ``commit``, ``image``, ``folder``, ``environment``."""
    task_list = list(tasks)
    by_url = defaultdict[str, list[str]](list)
    for task in task_list:
        if task.workspace.startswith("git:"):
            url, _, commit = task.workspace.removeprefix("git:").rpartition("@")
            by_url[url].append(commit)
    at_hand = {f"git:{url}@{commit}" for url, some in by_url.items() for commit in commits_at_hand(url, some)}
    return {
        task.id: tuple(
            need for need in (_workspace(task, at_hand), "" if _has_environment(task) else "environment") if need
        )
        for task in task_list
    }


def _workspace(task: Task, commits: set[str]) -> str:
    kind, _, where = task.workspace.partition(":")
    if kind == "git":
        return "" if task.workspace in commits else "commit"
    if kind == "dir":
        return "" if Path(where).is_dir() else "folder"
    try:
        if kind == "image":
            find(where, SANDBOX_USER if os.geteuid() == 0 else None)
    except TaskError:
        return "image"
    return ""


def _has_environment(task: Task) -> bool:
    kind, _, where = task.environment.partition(":")
    if kind == KIND:
        return (environment_folder(task.environment) / ENVIRONMENT_RECORD).is_file()
    return kind != "venv" or (Path(where) / "pyvenv.cfg").is_file()
