"""Default rewards and measures, derived from what the tasks have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from coderepairrl.config import Config, validate
from coderepairrl.errors import ConfigError
from coderepairrl.plan.tasks import is_attempted_twice
from coderepairrl.printable import counted
from coderepairrl.types import Task

VERIFIED_REFERENCES = 4
"""Verified repairs of each task that become references if `hybrid` is the default."""


def settle_rewards(
    config: Config, training_tasks: Iterable[Task], evaluated_tasks: Iterable[Task]
) -> tuple[Config, dict[str, str]]:
    """Fill in rewards and ``tasks.verified_references``, and describe them. The tasks matter if no reward is named.

    Raises `ConfigError` if the tasks have no common measure, or a setting contradicts the rewards.
    """
    most, reasons = config.tasks.verified_references or 0, {"train": "", "evaluations": ""}
    if not config.reward:
        trained = _judged_alike(config, training_tasks)
        data = config.model_dump(exclude_none=True)
        data["reward"] = reward_for(trained, pays=True)
        reasons["train"] = f" (no reward is named, and of {_what_they_have(trained)})"
        if config.tasks.verified_references is None and "hybrid" in data["reward"]:
            most = VERIFIED_REFERENCES if is_attempted_twice(config, len(trained)) else 0
        if not config.eval.reward:
            held_out = _judged_alike(config, evaluated_tasks)
            data["eval"]["reward"] = reward_for(held_out)
            reasons["evaluations"] = f" (eval.reward names none, and of {_what_they_have(held_out)})"
        validate(data, "the reward that follows from the tasks")
        # not the validated copy, in which every setting counts as given by the user
        evaluation = config.eval.model_copy(update={"reward": data["eval"]["reward"]})
        config = config.model_copy(update={"reward": data["reward"], "eval": evaluation})
    config = config.model_copy(update={"tasks": config.tasks.model_copy(update={"verified_references": most})})
    paid, measured = (_describe_reward(each) for each in (config.reward, config.eval.reward or config.reward))
    verified = f", with up to {most} verified references of each task" if most else ""
    return config, {"train": paid + verified + reasons["train"], "evaluations": measured + reasons["evaluations"]}


def settle_measure(config: Config, tasks: Iterable[Task]) -> Config:
    """Fill in what evaluations on `tasks` measure, if nothing names it. Raises as `reward_for`."""
    measured = reward_for(_judged_alike(config, tasks))
    return config.model_copy(update={"eval": config.eval.model_copy(update={"reward": measured})})


def reward_for(tasks: Sequence[Task], *, pays: bool = False) -> dict[str, float]:
    """Weighted rewards that recognise repairs of `tasks`, by checks, else references, else answers.

    With `pays`, references join the checks: a group that never passes would teach nothing. Raises `ConfigError` without
    a common measure.
    """
    references = all(task.reference.strip() for task in tasks)
    if tasks and all(task.checks for task in tasks):
        if pays and references:
            return {"hybrid": 1.0}
        return {"tests": 1.0} | ({"patch_edits": 0.0} if references else {})
    if references:
        return {"patch_edits": 1.0}
    if all(task.answer for task in tasks):
        return {"label": 1.0}
    raise ConfigError(
        "some tasks lack checks, some references: there is no one measure of all",
        fix=f"name it: {'reward' if pays else 'eval.reward'}=NAME",
    )


def _judged_alike(config: Config, tasks: Iterable[Task]) -> list[Task]:
    """Tasks whose kind names no reward."""
    return [task for task in tasks if not (task.kind in config.kinds and config.kinds[task.kind].reward)]


def _what_they_have(tasks: Sequence[Task]) -> str:
    checks = sum(bool(task.checks) for task in tasks)
    references = sum(bool(task.reference.strip()) for task in tasks)
    return f"{counted(len(tasks), 'task')} {checks} have checks and {references} have a reference"


def _describe_reward(reward: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {weight:g}" for name, weight in reward.items())
