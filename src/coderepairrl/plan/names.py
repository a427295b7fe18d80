"""Checks that the parts a configuration names exist, before any is made."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from coderepairrl import agents, engines, rewards, sandbox, tasks
from coderepairrl.agents import recipe
from coderepairrl.config import Config
from coderepairrl.errors import ConfigError, combine_errors
from coderepairrl.plan.model import RELAY
from coderepairrl.plan.terms import agent_settings, evaluation_setting
from coderepairrl.registry import nearest


def check_names(config: Config) -> None:
    """Raise `ConfigError` (`Several` for more) for unknown parts, with the nearest known name.

    Checks neither user classes (``module:Class``) nor options.
    """
    if wrong := list(_wrong(config)):
        raise combine_errors(wrong)


def _wrong(config: Config) -> Iterator[ConfigError]:
    for key, agent in agent_settings(config).items():
        if not recipe.is_recipe(agent.name):
            yield from _unknown(f"{key}.name", "agent", [agent.name], {*agents.SHIPPED, *recipe.recipe_names()})
    yield from _unknown("engine.name", "engine", [config.engine.name], {*engines.SHIPPED, RELAY})
    yield from _unknown("sandbox.name", "sandbox", [config.sandbox.name], {*sandbox.SHIPPED, "auto"})
    sources = {"tasks.source": config.tasks.source}
    sources |= {f"tasks.sources.{at}.source": each.source for at, each in enumerate(config.tasks.sources)}
    sources |= {f"{evaluation_setting(name)}.source": each.source for name, each in config.eval.each.items()}
    for key, source in sources.items():
        yield from _unknown(key, "task source", filter(None, [source]), tasks.SHIPPED)
    paid = {"reward": config.reward, "eval.reward": config.eval.reward}
    paid |= {f"kinds.{name}.reward": kind.reward for name, kind in config.kinds.items()}
    for key, named in paid.items():
        yield from _unknown(key, "reward", named, {*rewards.SHIPPED, *rewards.PRESETS})


def _unknown(key: str, kind: str, names: Iterable[str], known: Collection[str]) -> Iterator[ConfigError]:
    for name in names:
        if name not in known and ":" not in name:
            yield ConfigError(
                f"{key}: unknown {kind} {name!r}",
                fix=f"{nearest(name, known)} A class of your own is named module:Class.",
            )
