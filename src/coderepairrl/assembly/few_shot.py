"""The worked examples of a configuration's agents: read or drawn once, kept from what is evaluated, and written into
the configuration, so that a run records what its model is shown and no one draws others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter, ValidationError

from coderepairrl.agents import blocks, examples
from coderepairrl.agents.examples import Example
from coderepairrl.agents.fences import FORMATS, Format, write
from coderepairrl.config import Config
from coderepairrl.config.sections.episodes import Agent
from coderepairrl.errors import ConfigError
from coderepairrl.rollout import derive_seed
from coderepairrl.sandbox.contents import files_at_hand
from coderepairrl.tasks.overlap import quoted
from coderepairrl.tasks.patches import patched, paths
from coderepairrl.types import Task

_TAKE_EXAMPLES = frozenset({"direct", "agentless", "nano", "nano4"})


def has_examples(config: Config, *, drawn: bool = False) -> bool:
    """Whether an agent of `config` is shown examples; those that are `drawn` from the training tasks alone."""
    found = [each.options.get("examples") for each in _agents(config)]
    return any(each and (isinstance(each, int) or not drawn) for each in found)


def with_examples(config: Config, trained: Sequence[Task], evaluated: Sequence[Task]) -> Config:
    """`config`, whose agents' option ``examples`` names them all: those of a file, or drawn from the tasks `trained` by
    their ids, the same for every seed, each of one file and of another than the others.

    Raises `ConfigError` where there are not enough, and for one that is among the tasks `evaluated`: by its id, by its
    issue, or by its file before or after the repair.
    """
    seen = {file for task in evaluated for file in _files(task)}
    ids = {task.id for task in evaluated}

    def evaluates(each: Example) -> bool:
        known = each.id in ids or {each.before.strip(), each.after.strip()} & seen
        return bool(known) or bool(quoted({"": each.prompt}, evaluated))

    def change(agent: Agent) -> Agent:
        option = agent.options.get("examples")
        if agent.name not in _TAKE_EXAMPLES or not option:
            return agent
        found: Sequence[Example]
        if isinstance(option, int):
            if option < 0:
                raise ConfigError("agent.options.examples is negative")
            form = agent.options.get("format", "blocks")
            found = _drawn(option, trained, form if form in FORMATS else "blocks", evaluates)
        else:
            given = option if isinstance(option, str) else _as_examples(option)
            found = examples.of(given)
            for each in found:
                if evaluates(each):
                    raise ConfigError(
                        f"agent.options.examples: {each.id or each.path} is a task that is evaluated, or has its issue"
                        " or its file",
                        fix="take examples of other tasks",
                    )
        return agent.model_copy(update={"options": {**agent.options, "examples": [asdict(each) for each in found]}})

    kinds = {
        name: kind.model_copy(update={"agent": kind.agent and change(kind.agent)})
        for name, kind in config.kinds.items()
    }
    each = config.eval.each
    also: dict[str, dict[str, Any]] = {
        name: {**other, "agent": change(own).model_dump()} if (own := each[name].agent) and "agent" in other else other
        for name, other in config.eval.also.items()
    }
    measured = config.eval.model_copy(update={"agent": config.eval.agent and change(config.eval.agent), "also": also})
    return config.model_copy(update={"agent": change(config.agent), "kinds": kinds, "eval": measured})


def _as_examples(option: object) -> tuple[Example, ...]:
    try:
        return TypeAdapter(tuple[Example, ...]).validate_python(option)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"agent.options.examples: {where}: {first['msg']}",
            fix='give a number, a file, or [{prompt="...", path="a.py", before="...", after="..."}]',
        ) from None


def _agents(config: Config) -> Iterable[Agent]:
    kinds, evaluations = config.kinds.values(), config.eval.each.values()
    found = [config.agent, *(kind.agent for kind in kinds), *(each.agent for each in evaluations)]
    return [agent for agent in found if agent is not None and agent.name in _TAKE_EXAMPLES]


def _drawn(most: int, trained: Sequence[Task], form: Format, evaluates: Callable[[Example], bool]) -> list[Example]:
    found: list[Example] = []
    for task in sorted(trained, key=lambda task: (derive_seed("examples", task.id), task.id)):
        if len(found) == most:
            break
        made = _example(task)
        if made is None or made.after in {each.after for each in found}:
            continue
        try:
            write(form, made.path, made.before.encode(), made.after.encode())
        except blocks.Inexpressible:
            continue
        if evaluates(made):
            continue
        found.append(made)
    if len(found) < most:
        raise ConfigError(
            f"agent.options.examples={most}, and {len(found)} of {len(trained)} training tasks can be examples: of one"
            " file on this machine, each of another, none of them evaluated",
            fix='ask for fewer, name tasks.source, or a file: agent.options.examples="examples.jsonl"',
        )
    return found


def _example(task: Task) -> Example | None:
    """The example that `task` is, if it repairs one file that is at hand."""
    changed = paths(task.reference)
    before = files_at_hand(task.workspace, changed).get(changed[0]) if len(changed) == 1 else None
    after = patched(before, task.reference) if before is not None else None
    try:
        return Example(task.prompt, changed[0], before.decode(), after.decode(), task.id) if before and after else None
    except UnicodeDecodeError:
        return None


def _files(task: Task) -> Iterable[str]:
    made = _example(task)
    return (made.before.strip(), made.after.strip()) if made else ()
