"""What a configuration means for the tasks of one kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from coderepairrl.config import Config
from coderepairrl.config.schema import TaskKind
from coderepairrl.errors import ConfigError
from coderepairrl.registry import nearest
from coderepairrl.rollout import Terms
from coderepairrl.types import Task


def of_kind(config: Config, kind: TaskKind) -> Config:
    """`config` as it is for the tasks of `kind`."""
    limits = kind.model_dump(include={"calls", "tokens", "seconds", "turn_tokens"}, exclude_none=True)
    if "tokens" in limits:  # a reply is no longer than the whole
        limits.setdefault("turn_tokens", min(config.rollout.turn_tokens, limits["tokens"]))
    return config.model_copy(
        update={
            "agent": kind.agent or config.agent,
            "reward": kind.reward or config.reward,
            "rollout": config.rollout.model_copy(update=limits),
        }
    )


def check_kinds(kinds: Mapping[str, Terms], tasks: Iterable[Task]) -> None:
    """Raise `ConfigError` for a kind that no task has, and for a task without a workspace whose agent works in one."""
    found: dict[str, Task] = {}
    for task in tasks:
        found.setdefault(task.kind, task)
        terms = kinds.get(task.kind) or kinds[""]
        if not task.workspace and terms.agent.placement == "sandbox":
            raise ConfigError(
                f"task {task.id} has no workspace, and agent {terms.agent.name} works in one",
                fix=f'give its kind an agent on the host: [kinds.{task.kind or "NAME"}] agent = "direct"',
            )
    if absent := sorted(kinds.keys() - found.keys() - {""}):
        raise ConfigError(f"kinds.{absent[0]}: no task is of this kind", fix=nearest(absent[0], sorted(found)))
