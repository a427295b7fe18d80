"""Where an attempt happens: the agent, and a sandbox that works here and shows it what it needs."""

from __future__ import annotations

from dataclasses import dataclass

from coderepairrl import agents, sandbox
from coderepairrl.assembly.problems import Made, Problems
from coderepairrl.config import Config
from coderepairrl.errors import ConfigError
from coderepairrl.protocols import Agent, SandboxBackend
from coderepairrl.sandbox import Choice
from coderepairrl.types import Limits


@dataclass(frozen=True, slots=True)
class Place:
    """Agent and sandbox, neither of them started."""

    agent: Agent
    sandbox: SandboxBackend
    choice: Choice
    """Why it is that sandbox."""


def limits(config: Config) -> Limits:
    """What an episode may spend."""
    rollout = config.rollout
    return Limits(rollout.calls, rollout.tokens, rollout.seconds, rollout.turn_tokens)


def choose_place(config: Config, problems: Problems) -> Made[Place]:
    """The agent, and the sandbox that is named or the strongest that works here.

    `problems` gets an agent that is unknown, not installed or does not work in that sandbox, and a sandbox that is
    unknown or does not work here.
    """
    agent = problems.attempt(lambda: agents.make(config.agent.name, **config.agent.options))
    choice = problems.attempt(lambda: sandbox.choose(config.sandbox.name))

    def check_agent() -> None:
        sandbox.check_agent(choice.value, agent.value.name, agent.value.not_in)

    def make() -> SandboxBackend:
        shown = agent.value.binds if agent else ()
        try:
            backend = sandbox.make(choice.value.name, shown, **config.sandbox.options)
        except ConfigError as error:
            if not choice.value.fix:
                raise  # else the option was meant for the stronger one
            raise ConfigError(f"{error} ({choice.value})", fix=error.fix) from error
        backend.require()
        return backend

    works = problems.attempt(check_agent)
    backend = problems.attempt(make)

    def place() -> Place:
        works.value  # noqa: B018 (no place where it failed)
        return Place(agent.value, backend.value, choice.value)

    return problems.attempt(place)


def place(config: Config) -> Place:
    """As `choose_place`. Raises `ConfigError` and `PrerequisiteError`, or `Several`."""
    problems = Problems()
    chosen = choose_place(config, problems)
    problems.report()
    return chosen.value
