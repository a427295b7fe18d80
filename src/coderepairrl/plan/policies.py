"""Settings of a run folder used as a policy, which must not run programs."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from coderepairrl import agents, engines, rewards, tasks
from coderepairrl import config as configs
from coderepairrl.agents import recipe
from coderepairrl.config import Config
from coderepairrl.errors import ConfigError
from coderepairrl.plan.parts import raise_errors

_SHIPPED = {
    "agent": {*agents.SHIPPED, *recipe.list_recipes()},
    "engine": {*engines.SHIPPED},
    "source": {*tasks.SHIPPED, ""},
    "reward": {*rewards.SHIPPED, *rewards.PRESETS},
}
_CHOSEN_BY_USER = ("sandbox.name", "sandbox.options", "log", "rollout.executor", "rollout.ray", "engine.weights_dir")
"""Settings that choose the isolation, or where data is sent, whatever their values."""


def load_policy(run: Path, overrides: Sequence[str], used: Sequence[str]) -> Config:
    """Settings of the folder `run` with `overrides`, for a command that uses the sections `used`.

    Raises `ConfigError` for settings that run a program, read a local file or weaken isolation, unless overridden or
    shipped.
    """
    overridden = [configs.parse_override(each)[0] for each in overrides]
    if "eval.source" in overridden:  # then the source of training tasks is not opened
        overridden.append("tasks")
    settings = configs.load_run(run).model_dump(mode="json")
    defaults = Config.model_validate({"run": {"name": "policy"}}).model_dump(mode="json")
    user_choices = {
        key: _value_at(settings, key) for key in _CHOSEN_BY_USER if _value_at(settings, key) != _value_at(defaults, key)
    }
    problems = [
        ConfigError(
            f"{run} sets {key} to {configs.to_inline(value)}, but a policy may not run programs or choose isolation",
            fix=f"choose {key} yourself; if you trust that: {shlex.quote(f'{key}={configs.to_inline(value)}')}",
        )
        for key, value in (user_choices | dict(_find_programs("", settings))).items()
        if is_key_below(key, used) and not is_key_below(key, overridden) and not _is_shipped(key, value)
    ]
    raise_errors(problems)
    return configs.load_run(run, overrides)


def _find_programs(prefix: str, section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Settings in `section` that import a class, start a program or read a local file."""
    for key, value in section.items():
        place = f"{prefix}{key}"
        if key in ("agent", "engine") and value:
            part: Mapping[str, Any] = {"name": value} if isinstance(value, str) else value
            if "name" in part and part["name"] not in _SHIPPED[key]:
                yield f"{place}.name", part["name"]
            for option, option_value in part.get("options", {}).items():
                if key == "agent":
                    is_unsafe = option == "system_file" or (option == "examples" and isinstance(option_value, str))
                else:
                    is_unsafe = not _is_data(option, option_value)
                if is_unsafe:
                    yield f"{place}.options.{option}", option_value
        elif key in ("source", "reward"):
            if not _SHIPPED[key].issuperset([value] if isinstance(value, str) else value):
                yield place, value
        elif key == "options" and isinstance(value, Mapping):
            yield from ((f"{place}.{option}", each) for option, each in value.items() if option.startswith("sandbox"))
        elif isinstance(value, list) and any(list(_find_programs("", {"each": each})) for each in value):
            yield place, value
        if isinstance(value, Mapping):  # under any key: users name kinds and evaluations
            yield from _find_programs(f"{place}.", value)


def _is_data(option: str, value: object) -> bool:
    """Whether an engine option is data, not a program, its arguments, or an address."""
    return isinstance(value, (int, float)) or option in ("dtype", "head")


def _is_shipped(key: str, value: object) -> bool:
    return any(_value_at(data, key) == value for data in _load_shipped())


@cache
def _load_shipped() -> list[dict[str, Any]]:
    return [configs.load_config(path).model_dump(mode="json") for path in configs.shipped_configs().values()]


def is_key_below(key: str, names: Iterable[str]) -> bool:
    """Whether `key` is one of `names` or below one, dotted."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _value_at(data: Any, key: str) -> Any:
    """Value at the dotted `key`, or None."""
    for part in key.split("."):
        data = data.get(part) if isinstance(data, Mapping) else None
    return data
