"""Agents: programs that repair code by calling a model."""

from __future__ import annotations

from typing import Any

from coderepairrl import registry
from coderepairrl.agents import recipe
from coderepairrl.protocols import Agent

__all__ = ["SHIPPED", "make_agent"]

SHIPPED = {
    "nano": "coderepairrl.agents.nano:Nano",
    "nano4": "coderepairrl.agents.nano4:Nano4",
    "direct": "coderepairrl.agents.direct:Direct",
    "agentless": "coderepairrl.agents.agentless:Agentless",
    "command": "coderepairrl.agents.command:Command",
    "scripted": "coderepairrl.agents.scripted:ScriptedAgent",
}
"""The agents that ship as code, by name; others ship as recipes of `command`."""


def make_agent(name: str, /, **options: Any) -> Agent:
    """Build an agent from its name, a recipe file, or an import path ``module:Class``.

    Raises `ConfigError` for an unknown agent or option, `PrerequisiteError` for a program that is not installed.

    >>> make_agent("nano", nudge=False).name
    'nano'
    """
    if name not in SHIPPED and recipe.is_recipe(name):
        from coderepairrl.agents.command import Program

        return Program(recipe.agent_label(name), recipe.load_recipe(name, options), name)
    classes = SHIPPED | dict.fromkeys(recipe.list_recipes(), SHIPPED["command"])
    agent: Agent = registry.make_part("agent", name, classes, Agent, options)
    return agent
