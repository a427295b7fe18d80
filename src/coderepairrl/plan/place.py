"""Agent of an attempt, and a sandbox that works here."""

from __future__ import annotations

from dataclasses import dataclass

from coderepairrl import agents, sandbox
from coderepairrl.config import Config
from coderepairrl.errors import ConfigError
from coderepairrl.plan.problems import Made, Problems
from coderepairrl.protocols import Agent, SandboxBackend
from coderepairrl.sandbox import Choice
from coderepairrl.types import Limits


@dataclass(frozen=True, slots=True)
class Place:
    """Agent and sandbox, not started."""

    agent: Agent
    sandbox: SandboxBackend
    choice: Choice
    """Reason for that sandbox."""


def limits(config: Config) -> Limits:
    """Limits of an episode."""
    rollout = config.rollout
    return Limits(rollout.calls, rollout.tokens, rollout.seconds, rollout.turn_tokens)


def choose_place(config: Config, problems: Problems) -> Made[Place]:
    """Agent, and the named sandbox or the strongest that works here; errors go to `problems`."""
    agent = problems.attempt(lambda: agents.make(config.agent.name, **config.agent.options))
    choice = problems.attempt(lambda: sandbox.choose(config.sandbox.name))

    def check_agent() -> None:
        sandbox.check_agent(choice.value, agent.value.name, agent.value.not_in)

    def make() -> SandboxBackend:
        binds = agent.value.binds if agent else ()
        try:
            backend = sandbox.make(choice.value.name, binds, **config.sandbox.options)
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
    """Like `choose_place`, but raises as `Problems.report`."""
    problems = Problems()
    chosen = choose_place(config, problems)
    problems.report()
    return chosen.value
