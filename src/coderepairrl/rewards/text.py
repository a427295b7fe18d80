"""What the rewards that compare two patches have in common. They run nothing and need no sandbox."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from coderepairrl.errors import TaskError
from coderepairrl.protocols import SandboxBackend
from coderepairrl.rewards.parse import MalformedPatch, parse
from coderepairrl.types import Episode, Score, Task

LARGEST_PATCH = 16 << 20
"""Bytes; a longer one is no repair, and would keep a processor busy for minutes."""


class TextReward(ABC):
    """Compares the episode's patch with the oracle's text."""

    name: str

    @abstractmethod
    def compare(self, oracle: bytes, patch: bytes, language: str = "") -> float:
        """Similarity of two patches in [0, 1]; `language` is the task's. Raises `MalformedPatch`."""

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """Score the episode's patch; one that is no diff, or beyond `LARGEST_PATCH`, scores 0 with a note.

        Raises `TaskError` where the task's own reference is malformed.
        """
        if not task.reference.strip():
            return Score(self.name, 0.0, note="the task has no reference patch")
        if not episode.patch.strip():
            return Score(self.name, 0.0, note="empty patch")
        if len(episode.patch) > LARGEST_PATCH:
            return Score(self.name, 0.0, note=f"a patch of {len(episode.patch) >> 20} MiB")
        try:
            return Score(self.name, await asyncio.to_thread(self.compare, task.reference, episode.patch, task.language))
        except MalformedPatch as problem:
            self._check_reference(task)
            return Score(self.name, 0.0, note=str(problem))

    @staticmethod
    def _check_reference(task: Task) -> None:
        try:
            parse(task.reference)
        except MalformedPatch as problem:
            raise TaskError(f"task {task.id}: reference: {problem}", fix=problem.fix) from problem
