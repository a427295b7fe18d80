"""Checks that prompts leave room for a reply, before a model starts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from coderepairrl.config import Config
from coderepairrl.errors import ConfigError, TaskError
from coderepairrl.plan.model import LocalModel
from coderepairrl.plan.terms import group_by_kind
from coderepairrl.rollout.curriculum import WeightedTasks
from coderepairrl.rollout.episodes import AttemptSettings
from coderepairrl.tokens import TooLong
from coderepairrl.types import Task

_COUNTED = 4 << 20
"""Bytes of prompts tokenized per kind: a few seconds' worth."""
_MODEL = "the model's context"
_TOKENS = ("tokens", "turn_tokens")


class LongestPrompt(NamedTuple):
    """Prompt closest to its limit: `most` tokens, by the setting `limit`."""

    task: str
    tokens: int
    most: int
    limit: str


def check_prompts(
    config: Config, model: LocalModel, kinds: Mapping[str, AttemptSettings], tasks: Iterable[Task]
) -> LongestPrompt | None:
    """The longest first request of an agent, or None without tasks.

    Raises `ConfigError` if one leaves no room for a reply, `TaskError` if it cannot be written.
    """
    longest = [
        _FirstRequests(config, model, kind, kinds).check(some) for kind, some in group_by_kind(kinds, tasks).items()
    ]
    return max(longest, key=lambda each: each.tokens / each.most, default=None)


def check_overlong_buffer(config: Config, model: LocalModel, kinds: Mapping[str, AttemptSettings]) -> None:
    """Raise `ConfigError` if the context ends attempts before `train.overlong_buffer` can act."""
    limits = {"rollout": config.rollout} | {f"kinds.{kind}": settings for kind, settings in config.kinds.items()}
    for prompts in (_FirstRequests(config, model, kind, kinds) for kind in kinds if config.train.overlong_buffer):
        tokens, most = prompts.terms.limits.tokens, prompts.most
        if most < tokens:
            keys = ((f"{section}.{name}", getattr(limits[section], name)) for section in limits for name in _TOKENS)
            raise ConfigError(
                f"train.overlong_buffer={config.train.overlong_buffer} ends at {tokens:,} tokens, and attempts at"
                f" {most:,} ({prompts.limit})",
                fix=" ".join(f"{key}={most}" for key, value in keys if (value or 0) > most),
            )


def drop_too_long(
    config: Config, model: LocalModel, kinds: Mapping[str, AttemptSettings], sources: Sequence[WeightedTasks]
) -> tuple[WeightedTasks, ...]:
    """`sources` without tasks whose first request leaves no room for a reply.

    Raises `ConfigError` if a source loses all its tasks, and as `check_prompts`.
    """
    left = []
    for share in sources:
        groups = group_by_kind(kinds, share.tasks).items()
        long = {task.id for kind, some in groups for task in _FirstRequests(config, model, kind, kinds).too_long(some)}
        tasks = tuple(task for task in share.tasks if task.id not in long)
        if not tasks:
            check_prompts(config, model, kinds, share.tasks)
        left.append(replace(share, tasks=tasks))
    return tuple(left)


class _FirstRequests:
    """First requests about tasks of one kind, and the limit of an episode: `most` tokens, by the setting `limit`."""

    def __init__(self, config: Config, model: LocalModel, kind: str, kinds: Mapping[str, AttemptSettings]) -> None:
        self.terms, self.codec = kinds[kind], model.codec
        chosen = model.capabilities.context
        context, self.most = chosen or model.codec.context, self.terms.limits.tokens
        self.limit = f"kinds.{kind}.tokens" if kind and config.kinds[kind].tokens is not None else "rollout.tokens"
        if context < self.most:
            self.most, self.limit = context, "engine.options.context" if chosen else _MODEL

    def check(self, tasks: Sequence[Task]) -> LongestPrompt:
        """The longest prompt. Raises `ConfigError` if it leaves no room for a reply."""
        too_long = self.too_long(tasks, _COUNTED)
        first = (too_long or _longest_first(tasks))[0]
        longest = LongestPrompt(first.id, self.count(first), self.most, self.limit)
        if too_long:
            raise self.refusal(longest, len(too_long), self.count(replace(first, prompt="")))
        return longest

    def too_long(self, tasks: Sequence[Task], at_most: float = math.inf) -> list[Task]:
        """Tasks without room for a reply, longest first; about `at_most` bytes of prompts are tokenized."""
        ordered = _longest_first(tasks)
        empty = replace(ordered[0], prompt="")
        around = self.count(empty) - self.size(empty)
        too_long: list[Task] = []
        counted = 0
        for task in ordered:
            size = self.size(task)
            # a byte is at most one token: most prompts fit by their bytes, and are not tokenized
            if around + size < self.most or counted > at_most:
                break
            counted += size
            try:
                self.count(task, self.most - 1)
            except TooLong:
                too_long.append(task)
        return too_long

    def count(self, task: Task, most: int | None = None) -> int:
        """Tokens of a request. Raises `TooLong` above `most`, and `TaskError`."""
        request = self.terms.agent.first_request(task)
        try:
            return len(self.codec.render(request.messages, request.tools, most=most))
        except TooLong:
            raise
        except ValueError as error:
            raise TaskError(f"the prompt of task {task.id} cannot be written: {error}") from error

    def size(self, task: Task) -> int:
        """Bytes of a request's messages."""
        messages = self.terms.agent.first_request(task).messages
        return sum(len(_encode_prompt(str(message.get("content") or ""))) for message in messages)

    def refusal(self, longest: LongestPrompt, count: int, before: int) -> ConfigError:
        """Error for the `longest` of `count` prompts; `before` tokens precede the issue."""
        agent, context = self.terms.agent.name, self.codec.context
        episode = f"an episode may have {self.most:,} ({self.limit})"
        if before >= self.most:
            return ConfigError(
                f"what agent {agent} says before an issue, its examples included, has {before:,} tokens, and {episode}",
                fix="fewer or shorter ones (agent.options.examples), a shorter agent.options.system, a longer context",
            )
        further = f" (and those of {count - 1:,} more tasks are too long)" if count > 1 else ""
        needed = longest.tokens + self.terms.limits.turn_tokens
        fix = "leave such tasks out (of training: tasks.too_long=drop)"
        if needed <= context and self.limit != _MODEL:
            fix = f"{self.limit}={needed} leaves room for a reply; or {fix}"
        else:
            fix += f", or take a model with a longer context than {context:,} tokens"
        return ConfigError(
            f"the first request of agent {agent} about task {longest.task} has {longest.tokens:,} tokens, and"
            f" {episode}{further}",
            fix=fix,
        )


def _longest_first(tasks: Sequence[Task]) -> list[Task]:
    return sorted(tasks, key=lambda task: len(_encode_prompt(task.prompt)), reverse=True)


def _encode_prompt(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
