"""Checks that prompts leave room for a reply, before a model starts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from coderepairrl.config import Config
from coderepairrl.errors import ConfigError, TaskError
from coderepairrl.plan.model import LocalModel
from coderepairrl.rollout import Share, Terms
from coderepairrl.tokens import Codec, TooLong
from coderepairrl.types import FirstRequest, Task

_COUNTED = 4 << 20
"""Bytes of prompts tokenized per kind: a few seconds' worth."""


class LongestPrompt(NamedTuple):
    """Prompt closest to its limit: `most` tokens, by the setting `limit`."""

    task: str
    tokens: int
    most: int
    limit: str


def check_prompts(
    config: Config, model: LocalModel, kinds: Mapping[str, Terms], tasks: Iterable[Task]
) -> LongestPrompt | None:
    """The longest first request of an agent, or None without tasks.

    Raises `ConfigError` if one leaves no room for a reply, `TaskError` if it cannot be written.
    """
    longest = [_check(config, model, kind, kinds[kind], some) for kind, some in _by_kind(kinds, tasks).items()]
    return max(longest, key=lambda each: each.tokens / each.most, default=None)


def check_overlong(config: Config, model: LocalModel, kinds: Mapping[str, Terms]) -> None:
    """Raise `ConfigError` if the context ends attempts before `train.overlong_buffer` can act."""
    if not config.train.overlong_buffer:
        return
    for kind, terms in kinds.items():
        most, limit = _limit(config, model, kind, terms)
        if most < terms.limits.tokens:
            raise ConfigError(
                f"train.overlong_buffer={config.train.overlong_buffer} ends at {terms.limits.tokens:,} tokens, and"
                f" attempts at {most:,} ({limit})",
                fix=" ".join(f"{name}={most}" for name in _above(config, most)),
            )


def _above(config: Config, most: int) -> list[str]:
    token_limits = {f"rollout.{name}": getattr(config.rollout, name) for name in ("tokens", "turn_tokens")}
    for kind, terms in config.kinds.items():
        token_limits |= {f"kinds.{kind}.{name}": getattr(terms, name) or 0 for name in ("tokens", "turn_tokens")}
    return [name for name, tokens in token_limits.items() if tokens > most]


def without_too_long(
    config: Config, model: LocalModel, kinds: Mapping[str, Terms], sources: Sequence[Share]
) -> tuple[Share, ...]:
    """`sources` without tasks whose first request leaves no room for a reply.

    Raises `ConfigError` if a source loses all its tasks, and as `check_prompts`.
    """
    left = []
    for share in sources:
        groups = _by_kind(kinds, share.tasks).items()
        long = {
            task.id for kind, some in groups for task in _too_long(config, model, kind, kinds[kind], some, math.inf)
        }
        tasks = tuple(task for task in share.tasks if task.id not in long)
        if not tasks:
            for kind, some in groups:
                _check(config, model, kind, kinds[kind], some)
        left.append(replace(share, tasks=tasks))
    return tuple(left)


def _by_kind(kinds: Mapping[str, Terms], tasks: Iterable[Task]) -> dict[str, list[Task]]:
    groups: dict[str, list[Task]] = defaultdict(list)
    for task in tasks:
        groups[task.kind if task.kind in kinds else ""].append(task)
    return groups


def _check(config: Config, model: LocalModel, kind: str, terms: Terms, tasks: Sequence[Task]) -> LongestPrompt:
    most, limit = _limit(config, model, kind, terms)
    too_long = _too_long(config, model, kind, terms, tasks, _COUNTED)
    first = (too_long or _longest_first(tasks))[0]
    longest = LongestPrompt(first.id, _count(model.codec, terms.agent.first_request(first), first), most, limit)
    if too_long:
        before = _count(model.codec, terms.agent.first_request(replace(first, prompt="")), first)
        raise _refusal(longest, len(too_long), model, terms, before)
    return longest


def _too_long(
    config: Config, model: LocalModel, kind: str, terms: Terms, tasks: Sequence[Task], at_most: float
) -> list[Task]:
    """Tasks without room for a reply, longest first."""
    most, _ = _limit(config, model, kind, terms)
    ordered = _longest_first(tasks)
    empty = terms.agent.first_request(replace(ordered[0], prompt=""))
    around = _count(model.codec, empty, ordered[0]) - _size(empty)
    too_long: list[Task] = []
    counted = 0
    for task in ordered:
        request = terms.agent.first_request(task)
        size = _size(request)
        # a byte is at most one token: most prompts fit by their bytes, and are not tokenized
        if around + size < most or counted > at_most:
            break
        counted += size
        try:
            _count(model.codec, request, task, most - 1)
        except TooLong:
            too_long.append(task)
    return too_long


def _longest_first(tasks: Sequence[Task]) -> list[Task]:
    return sorted(tasks, key=lambda task: len(_bytes(task.prompt)), reverse=True)


def _limit(config: Config, model: LocalModel, kind: str, terms: Terms) -> tuple[int, str]:
    """Token limit of an episode, and the setting that determines it."""
    chosen = model.capabilities.context
    context = chosen or model.codec.context
    if context < terms.limits.tokens:
        return context, "engine.options.context" if chosen else "the model's context"
    is_kind_limit = kind in config.kinds and config.kinds[kind].tokens is not None
    return terms.limits.tokens, f"kinds.{kind}.tokens" if is_kind_limit else "rollout.tokens"


def _refusal(longest: LongestPrompt, count: int, model: LocalModel, terms: Terms, before: int) -> ConfigError:
    if before >= longest.most:
        return ConfigError(
            f"what agent {terms.agent.name} says before an issue, its examples included, has {before:,} tokens, and an"
            f" episode may have {longest.most:,} ({longest.limit})",
            fix="fewer or shorter ones (agent.options.examples), a shorter agent.options.system, or a longer context",
        )
    further = f" (and those of {count - 1:,} more tasks are too long)" if count > 1 else ""
    needed = longest.tokens + terms.limits.turn_tokens
    fix = "leave such tasks out (of training: tasks.too_long=drop)"
    if needed <= model.codec.context and longest.limit != "the model's context":
        fix = f"{longest.limit}={needed} leaves room for a reply; or {fix}"
    else:
        fix += f", or take a model with a longer context than {model.codec.context:,} tokens"
    return ConfigError(
        f"the first request of agent {terms.agent.name} about task {longest.task} has {longest.tokens:,} tokens, and an"
        f" episode may have {longest.most:,} ({longest.limit}){further}",
        fix=fix,
    )


def _count(codec: Codec, asked: FirstRequest, task: Task, most: int | None = None) -> int:
    """Tokens of a request. Raises `TooLong` above `most`, and `TaskError`."""
    try:
        return len(codec.render(asked.messages, asked.tools, most=most))
    except TooLong:
        raise
    except ValueError as error:
        raise TaskError(f"the prompt of task {task.id} cannot be written: {error}") from error


def _size(asked: FirstRequest) -> int:
    """Bytes of the messages."""
    return sum(len(_bytes(str(message.get("content") or ""))) for message in asked.messages)


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
