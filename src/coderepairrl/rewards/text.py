"""Rewards without a sandbox: patches by references, last replies by labels."""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from coderepairrl.errors import RewardFault, SandboxFault, TaskError
from coderepairrl.protocols import Reward, Sandbox, SandboxBackend
from coderepairrl.rewards.parse import FilePatch, MalformedPatch, parse_patch
from coderepairrl.types import Episode, Score, Task

LARGEST_PATCH = 16 << 20
"""Most bytes of a patch: longer ones take minutes to compare."""


class TextReward(Reward, ABC):
    """Compares the episode's patch with a reference patch."""

    @abstractmethod
    def compare(self, oracle: bytes, patch: bytes, language: str = "") -> float:
        """Similarity in [0, 1]. Raises `MalformedPatch`."""

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """Score against the nearest reference; a malformed or oversized patch scores 0.

        Raises `TaskError` for a malformed reference.
        """
        references = [(task.reference, "")] if task.reference.strip() else []
        if self.takes_verified:
            references += [(verified.patch, verified.episode) for verified in task.verified]
        if not references:
            return Score(self.name, 0.0, note="the task has no reference patch")
        if problem := explain_unread_patch(episode.patch):
            return Score(self.name, 0.0, note=problem)
        try:
            value, nearest = await asyncio.to_thread(self._find_nearest, references, episode.patch, task.language)
        except MalformedPatch as malformed:
            parse_reference(task)  # raises `TaskError` if the malformed one is the reference
            return Score(self.name, 0.0, note=str(malformed))
        return Score(self.name, value, nearest=nearest)

    def _find_nearest(self, references: Sequence[tuple[bytes, str]], patch: bytes, language: str) -> tuple[float, str]:
        best, nearest = -1.0, ""
        for reference, episode in references:
            value = self.compare(reference, patch, language)
            if value > best:
                best, nearest = value, episode
            if best >= 1.0:
                break
        return best, nearest


def explain_unread_patch(patch: bytes) -> str:
    """Reason to score a patch 0 unread, or empty."""
    if not patch.strip():
        return "empty patch"
    return f"a patch of {len(patch) >> 20} MiB" if len(patch) > LARGEST_PATCH else ""


def parse_reference(task: Task) -> tuple[FilePatch, ...]:
    """Parse the task's reference. Raises `TaskError` for a malformed one."""
    try:
        return parse_patch(task.reference)
    except MalformedPatch as problem:
        raise TaskError(f"task {task.id}: reference: {problem}", fix=problem.fix) from problem


async def read_sandbox_file(sandbox: Sandbox, path: str) -> bytes:
    """Content of a file; empty if it does not exist or cannot be read."""
    try:
        return await sandbox.read(path)
    except OSError:
        return b""


@contextmanager
def reward_faults(what: str, task: Task) -> Iterator[None]:
    """Raise a `SandboxFault` in `what` of `task` as `RewardFault`."""
    try:
        yield
    except SandboxFault as fault:
        raise RewardFault(f"{what} of task {task.id}: {fault}", fix=fault.fix) from fault


class AnswerReward(Reward, ABC):
    """Reward for the last reply."""

    name: str

    @abstractmethod
    def judge(self, answer: str, task: Task) -> float:
        """Value of `answer`. Raises `TaskError` without a label or reference."""

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """Score the last reply."""
        answer = read_last_reply(episode)
        return Score(self.name, self.judge(answer, task)) if answer else Score(self.name, 0.0, note="no reply")


def read_last_reply(episode: Episode) -> str:
    """Text of the last reply, with parsed thoughts back in ``<think>`` tags."""
    messages = episode.turns[-1].messages if episode.turns else ()
    if not messages or messages[-1].get("role") != "assistant":
        return ""
    text, thought = messages[-1].get("content") or "", messages[-1].get("reasoning_content")
    return f"<think>\n{thought.strip()}\n</think>\n{text.lstrip()}" if thought else str(text)


# A stated confidence, which some models add unasked. Possessive quantifiers keep replies from causing backtracking.
_CONFIDENCE = re.compile(r"<confidence>\s*+\d++(?:\.\d++)?+\s*+%?+\s*+</confidence>")
_SURROUNDING = " \t\n\r*`'\"."


def read_label(reply: str) -> str:
    r"""Label on one line, between ``<answer>`` tags or alone after the thought; else empty.

    >>> read_label("<think>hm</think>\n<answer>\nCWE-079\n</answer>"), read_label("cwe-79."), read_label("a\nb")
    ('cwe-79', 'cwe-79', '')
    """
    text = reply.rpartition("</think>")[2]
    _, tag, rest = text.partition("<answer>")
    answer = rest.partition("</answer>")[0] if tag else _CONFIDENCE.sub("", text)
    return normalize_label(answer) if "\n" not in answer.strip() else ""


def normalize_label(label: str) -> str:
    """Lower-case `label` without surrounding punctuation or leading zeros."""
    return re.sub(r"^cwe-0*(?=\d)", "cwe-", label.strip(_SURROUNDING).lower())


def read_task_label(task: Task) -> str:
    """The task's label. Raises `TaskError` without one."""
    if not task.answer:
        raise TaskError(f"task {task.id} has no label", fix="put the label into the task's field answer")
    return task.answer


class Label(AnswerReward):
    """1 if the reply gives the task's label (`Task.answer`, such as ``CWE-79``), else 0.

    Ignores case, leading zeros of weakness ids, and surrounding quotes, asterisks and full stops.

    Source: this project. Known weakness: with few classes, guessing the commonest pays.
    """

    name = "label"

    def judge(self, answer: str, task: Task) -> float:
        """Compare labels. Raises `TaskError` without a label."""
        return float(read_label(answer) == normalize_label(read_task_label(task)))
