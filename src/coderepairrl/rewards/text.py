"""Rewards that compare two patches, without a sandbox."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from coderepairrl.errors import RewardFault, SandboxFault, TaskError
from coderepairrl.protocols import Reward, Sandbox, SandboxBackend
from coderepairrl.rewards.parse import FilePatch, MalformedPatch, parse_patch
from coderepairrl.types import Episode, Score, Task

LARGEST_PATCH = 16 << 20
"""Bytes; longer patches would take minutes to compare."""


class TextReward(Reward, ABC):
    """Compares the episode's patch with a reference patch."""

    @abstractmethod
    def compare(self, oracle: bytes, patch: bytes, language: str = "") -> float:
        """Similarity of two patches in [0, 1]. Raises `MalformedPatch`."""

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """Score against the nearest reference; a malformed or oversized patch scores 0.

        Raises `TaskError` for a malformed reference.
        """
        references = [(task.reference, "")] if task.reference.strip() else []
        if self.takes_verified:
            references += [(verified.patch, verified.episode) for verified in task.verified]
        if not references:
            return Score(self.name, 0.0, note="the task has no reference patch")
        if not episode.patch.strip():
            return Score(self.name, 0.0, note="empty patch")
        if len(episode.patch) > LARGEST_PATCH:
            return Score(self.name, 0.0, note=f"a patch of {len(episode.patch) >> 20} MiB")
        try:
            value, nearest = await asyncio.to_thread(self._nearest, references, episode.patch, task.language)
        except MalformedPatch as problem:
            parse_reference(task)
            return Score(self.name, 0.0, note=str(problem))
        return Score(self.name, value, nearest=nearest)

    def _nearest(self, references: Sequence[tuple[bytes, str]], patch: bytes, language: str) -> tuple[float, str]:
        best, whose = -1.0, ""
        for reference, owner in references:
            value = self.compare(reference, patch, language)
            if value > best:
                best, whose = value, owner
            if best >= 1.0:
                break
        return best, whose


def parse_reference(task: Task) -> tuple[FilePatch, ...]:
    """Parse the task's reference. Raises `TaskError` for a malformed one."""
    try:
        return parse_patch(task.reference)
    except MalformedPatch as problem:
        raise TaskError(f"task {task.id}: reference: {problem}", fix=problem.fix) from problem


async def read_sandbox_file(sandbox: Sandbox, path: str) -> bytes:
    """Content of a file; empty if one side creates or deletes it, or no file can have that name."""
    try:
        return await sandbox.read(path)
    except OSError:
        return b""


@contextmanager
def reward_faults(what: str, task: Task) -> Iterator[None]:
    """Raise `RewardFault` for a `SandboxFault`."""
    try:
        yield
    except SandboxFault as fault:
        raise RewardFault(f"{what} of task {task.id}: {fault}", fix=fault.fix) from fault
