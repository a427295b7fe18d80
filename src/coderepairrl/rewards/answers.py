"""Rewards for single-turn tasks, which judge the last reply."""

from __future__ import annotations

from abc import ABC, abstractmethod

from coderepairrl.protocols import Reward, SandboxBackend
from coderepairrl.types import Episode, Score, Task


class AnswerReward(Reward, ABC):
    """Reward for the last reply."""

    name: str

    @abstractmethod
    def judge(self, answer: str, task: Task) -> float:
        """Value of `answer`. Raises `TaskError` without a label or reference."""

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """Score the episode."""
        answer = last_reply(episode)
        return Score(self.name, self.judge(answer, task)) if answer else Score(self.name, 0.0, note="no reply")


def last_reply(episode: Episode) -> str:
    """Text of the last reply, with parsed thoughts back in ``<think>`` tags."""
    messages = episode.turns[-1].messages if episode.turns else ()
    if not messages or messages[-1].get("role") != "assistant":
        return ""
    text, thought = messages[-1].get("content") or "", messages[-1].get("reasoning_content")
    return f"<think>\n{thought.strip()}\n</think>\n{text.lstrip()}" if thought else str(text)
