"""Conditions of attempts (agent, limits, sandbox, environments, sampling), and how evaluations differ from training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any, NamedTuple

from coderepairrl.agents.command import Program
from coderepairrl.agents.recipe import installed_program
from coderepairrl.config import Config
from coderepairrl.environments.verify import list_fingerprints
from coderepairrl.plan import Plan
from coderepairrl.plan.terms import AgentPlan, group_by_kind
from coderepairrl.protocols import Agent
from coderepairrl.rollout.episodes import AttemptSettings
from coderepairrl.types import Task
from coderepairrl.version import __version__

TRAINING = "train"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


class Difference(NamedTuple):
    """A condition that differs between an evaluation and training.

    >>> print(Difference("eval", "temperature", "1", "0.2", intended=True))
    evaluation eval has temperature 0.2, and training 1
    """

    evaluation: str
    condition: str
    training: str
    measured: str
    """Value in the evaluation."""
    intended: bool
    """Whether the configuration asks for the difference."""

    def __str__(self) -> str:
        return f"evaluation {self.evaluation} has {self.condition} {self.measured}, and training {self.training}"


def describe_conditions(plan: AgentPlan) -> dict[str, Any]:
    """Describe the conditions of training (``train``) and of each evaluation that has tasks, as plain data."""
    evaluations = {
        name: _phase_conditions(
            name, tasks, plan.kinds, {key: getattr(plan.config.eval.each[name], key) for key in _SAMPLING}
        )
        for name, tasks in plan.eval_tasks.items()
        if tasks
    }
    if not isinstance(plan, Plan):
        return evaluations
    evaluations = evaluations if plan.config.eval.is_due else {}
    sampling = {"temperature": plan.config.rollout.temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return {TRAINING: _phase_conditions(TRAINING, plan.train_tasks, plan.kinds, sampling), **evaluations}


def list_time_limit_warnings(plan: AgentPlan) -> list[str]:
    """Warnings for kinds of tasks that allow more time than the run does, with the setting to change."""
    tasks = chain(plan.train_tasks if isinstance(plan, Plan) else (), *plan.eval_tasks.values())
    messages = []
    for kind, group in group_by_kind(plan.kinds, tasks).items():
        limit, longest = plan.kinds[kind].limits.seconds, max(task.limits.get("seconds", 0.0) for task in group)
        if longest > limit:
            setting = f"kinds.{kind}.seconds" if kind else "rollout.seconds"
            messages.append(
                f"tasks allow up to {longest:g} s, and attempts end after {limit:g} s: {setting}={longest:g}"
            )
    return messages


def _phase_conditions(
    phase: str, tasks: Sequence[Task], kinds: Mapping[str, AttemptSettings], sampling: Mapping[str, float]
) -> dict[str, Any]:
    terms = [kinds[name].for_phase(phase) for name in sorted(group_by_kind(kinds, tasks))]
    agents = [
        {"name": _agent_name(each.agent), "version": _agent_version(each.agent), **asdict(each.limits)}
        for each in terms
    ]
    sandboxes = {each.sandbox.name: dict(each.sandbox.info().limits) for each in terms}
    return {
        "environments": list_fingerprints(tasks),
        "agents": agents,
        "sandboxes": [{"name": name, **limits} for name, limits in sandboxes.items()],
        "sampling": dict(sampling),
    }


def _agent_name(agent: Agent) -> str:
    return f"{agent.name}, shown files of the reference" if agent.reads_reference else agent.name


def _agent_version(agent: Agent) -> str:
    return (isinstance(agent, Program) and installed_program(agent.recipe)) or f"coderepairrl=={__version__}"


def list_differences(
    evaluations: Mapping[str, Any], training: Mapping[str, Any], config: Config | None = None
) -> list[Difference]:
    """List conditions of evaluations that training does not have.

    A difference is intended if `config` sets the condition for the evaluation; without a `config`, if it is about the
    agent, limits or sampling.
    """
    training_facts, differences = _collect_facts(training), []
    for name, evaluation in evaluations.items():
        evaluation_facts = _collect_facts(evaluation)
        if name == TRAINING:
            continue
        for fact in sorted(training_facts.keys() & evaluation_facts.keys()):
            if not evaluation_facts[fact] <= training_facts[fact]:
                trained, measured = (", ".join(sorted(side)) for side in (training_facts[fact], evaluation_facts[fact]))
                differences.append(Difference(name, fact, trained, measured, _is_configured(name, fact, config)))
    return differences


def compare_conditions(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """List differences between the conditions of two parts of an evaluation; ignores those that only one recorded.

    >>> one, two = ({"eval": {"environments": [], "agents": [], "sandboxes": [], "sampling": {"top_p": p}}}
    ...             for p in (1.0, 0.9))
    >>> compare_conditions(one, two), compare_conditions(one, one), compare_conditions(one, {})
    (['eval: top_p 1 against 0.9'], [], [])
    """
    messages = []
    for name in sorted(first.keys() & other.keys()):
        first_facts, other_facts = _collect_facts(first[name]), _collect_facts(other[name])
        for fact in sorted(first_facts.keys() & other_facts.keys()):
            if first_facts[fact] != other_facts[fact]:
                sides = (", ".join(sorted(side)) or "none" for side in (first_facts[fact], other_facts[fact]))
                messages.append(f"{name}: {fact} {' against '.join(sides)}")
    return messages


def _collect_facts(conditions: Mapping[str, Any]) -> dict[str, set[str]]:
    """Values of each condition, as text."""
    parts = (*conditions["agents"], *conditions["sandboxes"])
    limits = {key for part in parts for key in part} - {"name", "version"}
    return {
        # only the kinds: each project's tasks have a different environment
        "environments of kind": {each["kind"] for each in conditions["environments"]},
        "agent": {f"{each['name']} ({each['version']})" for each in conditions["agents"]},
        "sandbox": {each["name"] for each in conditions["sandboxes"]},
        **{key: {f"{part[key]:g}" for part in parts if key in part} for key in limits},
        **{key: {f"{value:g}"} for key, value in conditions["sampling"].items()},
        **{f"environment {each['name']}": {each["digest"]} for each in conditions["environments"] if each["digest"]},
    }


def _is_configured(name: str, fact: str, config: Config | None) -> bool:
    if fact.startswith("environment") or fact == "sandbox":
        return False
    if config is None:
        return True
    if fact == "agent" and config.eval.each[name].agent is not None:
        return True
    if fact in _SAMPLING:
        return fact in config.eval.model_fields_set or fact in config.eval.also.get(name, {})
    return bool(config.kinds)  # agents and limits are those of training, unless a kind sets them
