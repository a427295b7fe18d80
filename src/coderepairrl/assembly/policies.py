"""The settings of a run that is named as a policy: data is taken, what runs programs is asked for by name."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from coderepairrl import agents, engines, rewards, tasks
from coderepairrl import config as configs
from coderepairrl.agents import recipe
from coderepairrl.config import Config
from coderepairrl.errors import ConfigError, several

_SHIPPED = {
    "agent": {*agents.SHIPPED, *recipe.names()},
    "engine": {*engines.SHIPPED},
    "source": {*tasks.SHIPPED, ""},
    "reward": {*rewards.SHIPPED, *rewards.PRESETS},
}
_OF_THE_USER = ("sandbox.name", "sandbox.options", "log", "rollout.executor", "rollout.ray", "engine.weights_dir")
"""Settings that choose the isolation, or where data is sent, whatever their values."""


def load_policy(run: Path, overrides: Sequence[str], used: Sequence[str]) -> Config:
    """The settings of the folder `run` with `overrides`, for a command that uses the sections `used`.

    Raises `ConfigError` for each setting of the run that runs a program, reads a file of this machine or weakens
    isolation, unless an override names it.
    """
    named = [configs.parse_override(each)[0] for each in overrides]
    if "eval.source" in named:  # then that of training is not made
        named.append("tasks")
    here = configs.load_run(run).model_dump(mode="json")
    usual = Config.model_validate({"run": {"name": "policy"}}).model_dump(mode="json")
    chosen = {key: _at(here, key) for key in _OF_THE_USER if _at(here, key) != _at(usual, key)}
    problems = [
        ConfigError(
            f"{run} sets {key} to {configs.inline(value)}, and a policy runs no programs and chooses no isolation",
            fix=f"choose {key} yourself; if you trust that: {shlex.quote(f'{key}={configs.inline(value)}')}",
        )
        for key, value in (chosen | dict(_programs("", here))).items()
        if _is_below(key, used) and not _is_below(key, named)
    ]
    if problems:
        raise several(problems)
    return configs.load_run(run, overrides)


def _programs(prefix: str, section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings in `section` that import a class, start a program, or read a file of this machine."""
    for key, value in section.items():
        place = f"{prefix}{key}"
        if key in ("agent", "engine") and value:
            part = {"name": value} if isinstance(value, str) else value
            if part.get("name", "tiny" if key == "engine" else "nano") not in _SHIPPED[key]:
                yield f"{place}.name", part["name"]
            for option, it in part.get("options", {}).items():
                # an engine's numbers and flags are data; its texts and tables are programs, addresses, environments
                if option == "system_file" or (key == "engine" and not isinstance(it, (int, float))):
                    yield f"{place}.options.{option}", it
        elif key in ("source", "reward"):
            if not _SHIPPED[key].issuperset([value] if isinstance(value, str) else value):
                yield place, value
        elif key == "options":
            yield from ((f"{place}.{option}", it) for option, it in value.items() if option.startswith("sandbox"))
        elif isinstance(value, Mapping):
            yield from _programs(f"{place}.", value)
        elif isinstance(value, list) and any(_programs_of(each) for each in value):
            yield place, value


def _programs_of(item: object) -> list[tuple[str, Any]]:
    return list(_programs("", item)) if isinstance(item, Mapping) else []


def _is_below(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _at(data: Mapping[str, Any], key: str) -> Any:
    return reduce(getitem, key.split("."), data)
