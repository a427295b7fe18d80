"""Agents: things that repair code by calling a model. `make` builds one from its name in a configuration."""

from __future__ import annotations

from typing import Any

from coderepairrl import registry
from coderepairrl.protocols import Agent

__all__ = ["SHIPPED", "make"]

SHIPPED = {
    "nano": "coderepairrl.agents.nano:Nano",
    "scripted": "coderepairrl.agents.scripted:ScriptedAgent",
}
"""The agents that ship, by name."""


def make(name: str, **options: Any) -> Agent:
    """The agent called `name` in a configuration, or the class at an import path ``module:Class``.

    Raises `ConfigError`, which names the nearest known name, for an unknown agent or option.

    >>> make("nano", nudge=False).name
    'nano'
    """
    agent: Agent = registry.make("agent", name, SHIPPED, Agent, options)
    return agent
