"""Settings for each kind of task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from coderepairrl import rewards
from coderepairrl.config import Config
from coderepairrl.config.sections.episodes import TaskKind
from coderepairrl.errors import ConfigError
from coderepairrl.plan.place import Place, choose_place, limits
from coderepairrl.plan.problems import Made, Problems
from coderepairrl.registry import nearest
from coderepairrl.rewards import Weighted
from coderepairrl.rollout import Terms
from coderepairrl.types import Task


def of_kind(config: Config, kind: TaskKind) -> Config:
    """`config` for the tasks of `kind`."""
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


def make_kinds(
    config: Config,
    plain: tuple[Made[list[Weighted]], Made[list[Weighted]], Made[Place]],
    evaluations: Made[Mapping[str, tuple[Task, ...]]],
    problems: Problems,
) -> Made[Mapping[str, Terms]]:
    """Terms of each kind of task; `plain` has the default rewards and place."""
    parts = {"": (config, *plain)}
    for name, kind in config.kinds.items():
        own = of_kind(config, kind)
        paid, measured, place = plain
        if kind.reward:
            paid = measured = problems.attempt(lambda own=own: rewards.make(own.reward))  # type: ignore[misc]
        parts[name] = own, paid, measured, choose_place(own, problems) if kind.agent else place
    evaluation_places = {
        name: choose_place(config.model_copy(update={"agent": each.agent}), problems)
        for name, each in config.eval.each.items()
        if each.agent is not None
    }

    def terms() -> Mapping[str, Terms]:
        return {
            name: Terms(
                place.value.agent,
                place.value.sandbox,
                limits(own),
                {"train": paid.value, **dict.fromkeys(evaluations.value, measured.value)},
                own.rollout.side_calls,
                {
                    phase: (evaluation_place.value.agent, evaluation_place.value.sandbox)
                    for phase, evaluation_place in evaluation_places.items()
                }
                if own.agent == config.agent
                else {},
            )
            for name, (own, paid, measured, place) in parts.items()
        }

    return problems.attempt(terms)


def check_kinds(kinds: Mapping[str, Terms], tasks: Iterable[Task]) -> None:
    """Raise `ConfigError` for a kind without tasks, and a task without the workspace its agent needs."""
    first_of_kind: dict[str, Task] = {}
    for task in tasks:
        first_of_kind.setdefault(task.kind, task)
        terms = kinds.get(task.kind) or kinds[""]
        if not task.workspace and terms.agent.placement == "sandbox":
            raise ConfigError(
                f"task {task.id} has no workspace, and agent {terms.agent.name} works in one",
                fix=f'give its kind an agent on the host: [kinds.{task.kind or "NAME"}] agent = "direct"',
            )
    if absent := sorted(kinds.keys() - first_of_kind.keys() - {""}):
        raise ConfigError(f"kinds.{absent[0]}: no task is of this kind", fix=nearest(absent[0], sorted(first_of_kind)))
