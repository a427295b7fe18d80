"""Checks that prompts leave room for a reply, before a model starts."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from coderepairrl.agents.nano import Nano
from coderepairrl.config import Config
from coderepairrl.errors import ConfigError, TaskError
from coderepairrl.plan.model import LocalModel
from coderepairrl.plan.terms import group_by_kind
from coderepairrl.protocols import Agent
from coderepairrl.rollout.curriculum import WeightedTasks
from coderepairrl.rollout.episodes import AttemptSettings
from coderepairrl.tokens import TooLong
from coderepairrl.types import Task

_MOST_TOKENIZED_BYTES = 4 << 20
"""Bytes of prompts tokenized per kind: a few seconds' worth."""
_MODEL_CONTEXT = "the model's context"
_TOKEN_LIMITS = ("tokens", "turn_tokens")


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
        _FirstRequests(config, model, kind, kinds).check(group) for kind, group in group_by_kind(kinds, tasks).items()
    ]
    return max(longest, key=lambda each: each.tokens / each.most, default=None)


def check_overlong_buffer(config: Config, model: LocalModel, kinds: Mapping[str, AttemptSettings]) -> None:
    """Raise `ConfigError` if the context ends attempts before `train.overlong_buffer` can act."""
    limits = {"rollout": config.rollout} | {f"kinds.{kind}": settings for kind, settings in config.kinds.items()}
    for prompts in (_FirstRequests(config, model, kind, kinds) for kind in kinds if config.train.overlong_buffer):
        tokens, most = prompts.terms.limits.tokens, prompts.most
        if most < tokens:
            keys = (
                (f"{section}.{name}", getattr(limits[section], name)) for section in limits for name in _TOKEN_LIMITS
            )
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
    kept = []
    for source in sources:
        groups = group_by_kind(kinds, source.tasks).items()
        too_long = {
            task.id for kind, group in groups for task in _FirstRequests(config, model, kind, kinds).too_long(group)
        }
        tasks = tuple(task for task in source.tasks if task.id not in too_long)
        if not tasks:
            check_prompts(config, model, kinds, source.tasks)  # raises
        kept.append(replace(source, tasks=tasks))
    return tuple(kept)


class _FirstRequests:
    """First requests about tasks of one kind, and the limit of an episode: `most` tokens, by the setting `limit`."""

    def __init__(self, config: Config, model: LocalModel, kind: str, kinds: Mapping[str, AttemptSettings]) -> None:
        self.terms, self.codec = kinds[kind], model.codec
        settings = config.kinds[kind] if kind else None
        self.agent_key = f"kinds.{kind}.agent" if settings and settings.agent is not None else "agent"
        limits = {f"kinds.{kind}.tokens": settings.tokens} if settings and settings.tokens is not None else {}
        engine_context = model.capabilities.context
        limits |= {
            "rollout.tokens": config.rollout.tokens,
            "engine.options.context" if engine_context else _MODEL_CONTEXT: engine_context or self.codec.context,
        }
        self.limits = limits
        self.limit = min(limits, key=lambda name: limits[name])
        self.most = limits[self.limit]

    def check(self, tasks: Sequence[Task]) -> LongestPrompt:
        """The longest prompt. Raises `ConfigError` if it leaves no room for a reply."""
        too_long = self.too_long(tasks, _MOST_TOKENIZED_BYTES)
        first = (too_long or _longest_first(tasks))[0]
        longest = LongestPrompt(first.id, self.count(first), self.most, self.limit)
        if too_long:
            raise self.make_error(first, longest, len(too_long))
        return longest

    def too_long(self, tasks: Sequence[Task], at_most: float = math.inf) -> list[Task]:
        """Tasks without room for a reply, longest first; about `at_most` bytes of prompts are tokenized."""
        ordered = _longest_first(tasks)
        empty = replace(ordered[0], prompt="")
        empty_tokens, empty_bytes = self.count(empty), self.size(empty)
        too_long: list[Task] = []
        tokenized_bytes = 0
        for task in ordered:
            size = self.size(task)
            # a byte is at most one token: most prompts fit by this bound, and are not tokenized
            if empty_tokens + size - empty_bytes < self.most or tokenized_bytes > at_most:
                break
            tokenized_bytes += size
            try:
                self.count(task, self.most - 1)
            except TooLong:
                too_long.append(task)
        return too_long

    def count(self, task: Task, most: int | None = None, agent: Agent | None = None) -> int:
        """Tokens of a request, by another `agent` if given. Raises `TooLong` above `most`, and `TaskError`."""
        request = (agent or self.terms.agent).first_request(task)
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

    def make_error(self, task: Task, longest: LongestPrompt, count: int) -> ConfigError:
        """Error for `task`, the `longest` of `count` too long prompts."""
        agent, tokens_before = self.terms.agent.name, self.count(replace(task, prompt=""))
        episode = f"an episode may have {self.most:,} ({self.limit})"
        shorter = self.shorten_agent(task)
        if tokens_before >= self.most:
            return ConfigError(
                f"the prompt of agent {agent} before an issue, its examples included, has {tokens_before:,} tokens, and"
                f" {episode}",
                fix=f"{shorter}fewer or shorter examples ({self.agent_key}.options.examples), a shorter"
                f" {self.agent_key}.options.system, a longer context",
            )
        further = f" (and those of {count - 1:,} more tasks are too long)" if count > 1 else ""
        needed, context = longest.tokens + self.terms.limits.turn_tokens, self.codec.context
        fix = "leave such tasks out (of training: tasks.too_long=drop)"
        if needed <= context:
            raised = (f"{name}={needed}" for name, most in self.limits.items() if most < needed)
            fix = f"{' '.join(raised)} leaves room for a reply; or {fix}"
        else:
            fix += f", or take a model with a longer context than {context:,} tokens"
        return ConfigError(
            f"the first request of agent {agent} about task {longest.task} has {longest.tokens:,} tokens, and"
            f" {episode}{further}",
            fix=shorter + fix,
        )

    def shorten_agent(self, task: Task) -> str:
        """Suggest compact agent settings that leave room for a reply to `task`; else empty."""
        if not isinstance(self.terms.agent, Nano):
            return ""
        agent = copy.copy(self.terms.agent)
        agent.options = replace(agent.options, system="compact", system_file="", tools="compact")
        if agent.options == self.terms.agent.options or self.count(task, agent=agent) >= self.most:
            return ""
        return f"{self.agent_key}.options.system=compact {self.agent_key}.options.tools=compact; or "


def _longest_first(tasks: Sequence[Task]) -> list[Task]:
    return sorted(tasks, key=lambda task: len(_encode_prompt(task.prompt)), reverse=True)


def _encode_prompt(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
