"""Worked examples for agents, kept out of evaluations and recorded in the configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from pydantic import TypeAdapter, ValidationError

from coderepairrl.agents import examples, patching
from coderepairrl.agents.examples import Example
from coderepairrl.agents.fences import FORMATS, Format, format_reply
from coderepairrl.config import Config
from coderepairrl.config.schema import Agent
from coderepairrl.errors import ConfigError
from coderepairrl.plan.terms import agent_settings
from coderepairrl.rollout.episodes import derive_seed
from coderepairrl.sandbox.contents import read_local_files
from coderepairrl.tasks.overlap import find_quoting_texts
from coderepairrl.tasks.patches import apply_to_text, list_changed_paths
from coderepairrl.types import Task

_TAKE_EXAMPLES = frozenset({"direct", "agentless", "nano", "nano4"})


def has_examples(config: Config, *, drawn: bool = False) -> bool:
    """Whether an agent of `config` is shown examples (`drawn`: from training tasks)."""
    agents = (each for each in agent_settings(config).values() if each.name in _TAKE_EXAMPLES)
    options = [each.options.get("examples") for each in agents]
    return any(each and (isinstance(each, int) or not drawn) for each in options)


def fill_in_examples(config: Config, trained: Sequence[Task], evaluated: Sequence[Task]) -> Config:
    """`config` with each agent's option ``examples`` filled in, from its file or drawn from `trained`.

    Draws are the same for every seed, with distinct repaired files. Raises `ConfigError` for too few, and for one that
    shares its id, issue or file with a task in `evaluated`.
    """
    evaluated_examples = filter(None, map(_make_example, evaluated))
    evaluated_files = {text.strip() for each in evaluated_examples for text in (each.before, each.after)}
    evaluated_ids = {task.id for task in evaluated}

    def is_in_evaluation(each: Example) -> bool:
        if each.id in evaluated_ids or not evaluated_files.isdisjoint((each.before.strip(), each.after.strip())):
            return True
        return bool(find_quoting_texts({"": each.prompt}, evaluated))

    def fill_in_agent(agent: Agent) -> Agent:
        option = agent.options.get("examples")
        if agent.name not in _TAKE_EXAMPLES or not option:
            return agent
        selected: Sequence[Example]
        if isinstance(option, int):
            if option < 0:
                raise ConfigError(f"agent.options.examples={option} is negative", fix="0 or more; 0 sends none")
            form = agent.options.get("format", "blocks")
            selected = _draw_examples(option, trained, form if form in FORMATS else "blocks", is_in_evaluation)
        else:
            source = option if isinstance(option, str) else _parse_examples(option)
            selected = examples.resolve_examples(source)
            if wrong := [each.id or each.path for each in selected if is_in_evaluation(each)]:
                raise ConfigError(
                    f"agent.options.examples: {wrong[0]} is a task that is evaluated, or has its issue or its file",
                    fix="take examples of other tasks",
                )
        return agent.model_copy(update={"options": {**agent.options, "examples": [asdict(each) for each in selected]}})

    kinds = {
        name: kind.model_copy(update={"agent": kind.agent and fill_in_agent(kind.agent)})
        for name, kind in config.kinds.items()
    }
    also = {name: dict(other) for name, other in config.eval.also.items()}
    for name, other in also.items():
        if "agent" in other and (agent := config.eval.each[name].agent):
            other["agent"] = fill_in_agent(agent).model_dump()
    evaluation = config.eval.model_copy(
        update={"agent": config.eval.agent and fill_in_agent(config.eval.agent), "also": also}
    )
    return config.model_copy(update={"agent": fill_in_agent(config.agent), "kinds": kinds, "eval": evaluation})


def _parse_examples(option: object) -> tuple[Example, ...]:
    try:
        return TypeAdapter(tuple[Example, ...]).validate_python(option)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"agent.options.examples: {where}: {first['msg']}",
            fix='give a number, a file, or [{prompt="...", path="a.py", before="...", after="..."}]',
        ) from None


def _draw_examples(
    count: int, trained: Sequence[Task], form: Format, is_in_evaluation: Callable[[Example], bool]
) -> list[Example]:
    chosen: list[Example] = []
    for task in sorted(trained, key=lambda task: (derive_seed("examples", task.id), task.id)):
        if len(chosen) == count:
            break
        example = _make_example(task)
        if example is None or example.after in {each.after for each in chosen}:
            continue
        try:
            format_reply(form, example.path, example.before.encode(), example.after.encode())
        except patching.Inexpressible:
            continue
        if not is_in_evaluation(example):
            chosen.append(example)
    if len(chosen) < count:
        raise ConfigError(
            f"agent.options.examples={count}, and only {len(chosen)} of {len(trained)} training tasks can be examples:"
            " each must change one file, which this machine has and no other example changes, and not be evaluated",
            fix='ask for fewer, name tasks.source, or a file: agent.options.examples="examples.jsonl"',
        )
    return chosen


def _make_example(task: Task) -> Example | None:
    changed = list_changed_paths(task.reference)
    before = read_local_files(task.workspace, changed).get(changed[0]) if len(changed) == 1 else None
    after = apply_to_text(before, task.reference) if before is not None else None
    try:
        return Example(task.prompt, changed[0], before.decode(), after.decode(), task.id) if before and after else None
    except UnicodeDecodeError:
        return None
