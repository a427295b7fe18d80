"""Terms of attempts: agent, sandbox, limits and rewards, for each kind of task, and whether the named parts exist."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from coderepairrl import agents, engines, rewards, sandbox, tasks
from coderepairrl.agents import recipe
from coderepairrl.config import Config
from coderepairrl.config.schema import Agent as AgentSettings
from coderepairrl.config.schema import TaskKind
from coderepairrl.errors import CombinedError, ConfigError, combine_errors
from coderepairrl.plan.model import RELAY, ServingPlan
from coderepairrl.plan.parts import Check, make_each, part, raise_errors
from coderepairrl.protocols import Agent, SandboxBackend
from coderepairrl.registry import suggest_nearest
from coderepairrl.rewards import Weighted
from coderepairrl.rollout import ray_cluster
from coderepairrl.rollout.episodes import AttemptSettings
from coderepairrl.rollout.worker import WorkerSetup
from coderepairrl.sandbox import BackendChoice
from coderepairrl.tokens import Codec
from coderepairrl.types import Task


class AgentSetup(NamedTuple):
    """Agent and sandbox, not started."""

    agent: Agent
    sandbox: SandboxBackend


class AgentPlan(ServingPlan):
    """An agent that works on tasks with the model (``crrl fix``, evaluation)."""

    kinds: part[dict[str, AttemptSettings]]
    """Terms of attempts by kind of task; ``""`` is for all others."""
    eval_tasks: part[dict[str, tuple[Task, ...]]]
    """Held-out tasks by name of the evaluation: all, or a sample."""

    @property
    def reward_versions(self) -> dict[str, int]:
        """Formula version of each reward, by name."""
        weighted = (each for terms in self.kinds.values() for phase in terms.rewards.values() for each in phase)
        return rewards.collect_versions(reward for reward, _ in weighted)

    @part
    def agent_config(self) -> Config:
        """Settings, with the examples that agents are shown."""
        return self.raw_config

    @part
    def agents(self) -> dict[str, Agent]:
        """Agents by the setting that names them."""
        settings = agent_settings(self.agent_config)
        each_agent = make_each(lambda each: agents.make_agent(each.name, **each.options), settings.values())
        return dict(zip(settings, each_agent, strict=True))

    @part
    def choice(self) -> BackendChoice:
        """The named sandbox, or the strongest that works here."""
        return sandbox.choose_backend(self.raw_config.sandbox.name)

    @part
    def agent_setups(self) -> dict[str, AgentSetup]:
        """Each agent with its sandbox, by the setting that names the agent."""
        return {key: AgentSetup(agent, self.make_sandbox(agent.binds)) for key, agent in self.agents.items()}

    @part
    def agent_setup(self) -> AgentSetup:
        """Agent of the run, and its sandbox."""
        return self.agent_setups["agent"]

    def make_sandbox(self, binds: Sequence[str]) -> SandboxBackend:
        """Make the sandbox; `binds` are host folders that its commands see."""
        try:
            backend = sandbox.make_backend(self.choice.name, binds, **self.raw_config.sandbox.options)
        except (ConfigError, CombinedError) as error:
            if not self.choice.fix:
                raise
            # the options may be meant for the stronger sandbox, which does not work here
            raise combine_errors(
                [ConfigError(f"{each} ({self.choice})", fix=each.fix) for each in error.problems]
            ) from error
        backend.require()
        return backend

    def _checks(self) -> list[Check]:
        return [
            lambda: self.can_make("agents") or self.make_sandbox(()),  # else wrong agents would hide its errors
            lambda: make_each(
                lambda agent: sandbox.check_agent(self.choice, agent.name, agent.not_in), self.agents.values()
            ),
        ]


class JudgedPlan(AgentPlan):
    """Attempts that rewards judge, by kind of task."""

    learns: bool
    """Whether the model learns from attempts; else all are evaluations."""

    @part
    def evaluation_rewards(self) -> list[Weighted]:
        """Rewards of evaluations."""
        return rewards.make_rewards(self.config.eval.reward or self.config.reward)

    @part
    def training_rewards(self) -> list[Weighted]:
        """Rewards of training."""
        if self.learns and self.config.eval.reward:
            return rewards.make_rewards(self.config.reward)
        return self.evaluation_rewards

    @part
    def rewards_by_kind(self) -> dict[str, list[Weighted]]:
        """Rewards by kind of task, for kinds with their own."""
        settings = {name: kind.reward for name, kind in self.raw_config.kinds.items() if kind.reward}
        return dict(zip(settings, make_each(rewards.make_rewards, settings.values()), strict=True))

    @part
    def kinds(self) -> dict[str, AttemptSettings]:
        """Terms of attempts by kind of task; ``""`` is for all others."""
        return {name: self.make_kind_terms(name, kind) for name, kind in {"": TaskKind(), **self.config.kinds}.items()}

    def make_kind_terms(self, name: str, kind: TaskKind) -> AttemptSettings:
        """Terms of the tasks of `kind`."""
        evaluations = self.config.eval.each
        setup = self.agent_setups["agent" if kind.agent is None else f"kinds.{name}.agent"]
        evaluation_setups = {
            phase: self.agent_setups[f"{evaluation_setting(phase)}.agent"]
            for phase, each in evaluations.items()
            if each.agent
        }
        if kind.agent not in (None, self.config.agent):
            evaluation_setups = {}  # kinds of tasks keep their agent
        kind_rewards = self.rewards_by_kind.get(name)
        rewards_by_phase = {"train": kind_rewards or self.training_rewards}
        rewards_by_phase |= dict.fromkeys(evaluations, kind_rewards or self.evaluation_rewards)
        limits = kind.model_dump(include={"calls", "tokens", "seconds", "turn_tokens"}, exclude_none=True)
        if "tokens" in limits:  # a reply is no longer than its episode
            limits.setdefault("turn_tokens", min(self.limits.turn_tokens, limits["tokens"]))
        return AttemptSettings(
            setup.agent,
            setup.sandbox,
            replace(self.limits, **limits),
            rewards_by_phase,
            self.config.rollout.side_calls,
            evaluation_setups,
        )


def make_worker_setup(config: Config, codec: Codec, *, sandbox: str, learns: bool) -> WorkerSetup:
    """Setup for attempts under `config` in the chosen `sandbox`; without `learns`, for evaluations only."""
    assert codec.loaded_from is not None  # as in every plan
    if config.sandbox.name == "auto":  # the same on all machines; one that lacks it raises an error
        config = config.model_copy(update={"sandbox": config.sandbox.model_copy(update={"name": sandbox})})
    return WorkerSetup(codec.loaded_from, partial(make_terms, config, learns))


def make_terms(config: Config, learns: bool) -> Mapping[str, AttemptSettings]:
    """Terms of each kind of task, with the parts of `config` made on this machine. Raises as `raise_errors`."""
    plan = JudgedPlan()
    plan.raw_config, plan.learns = config, learns
    raise_errors(plan.errors())
    return plan.kinds


def agent_settings(config: Config) -> dict[str, AgentSettings]:
    """Agents of the run, of kinds of tasks and of evaluations, by the setting that names them."""
    kinds = {f"kinds.{name}.agent": kind.agent for name, kind in config.kinds.items()}
    evaluations = {f"{evaluation_setting(name)}.agent": each.agent for name, each in config.eval.each.items()}
    return {key: each for key, each in {"agent": config.agent, **kinds, **evaluations}.items() if each is not None}


def evaluation_setting(name: str) -> str:
    """Setting of the evaluation `name`."""
    return name if name == "eval" else f"eval.also.{name}"


def group_by_kind(kinds: Mapping[str, AttemptSettings], tasks: Iterable[Task]) -> dict[str, list[Task]]:
    """Tasks by the key of their terms in `kinds`."""
    groups: dict[str, list[Task]] = {}
    for task in tasks:
        groups.setdefault(task.kind if task.kind in kinds else "", []).append(task)
    return groups


def check_kinds(kinds: Mapping[str, AttemptSettings], tasks: Iterable[Task]) -> None:
    """Raise `ConfigError` for kinds without tasks, and a task without the workspace its agent needs."""
    first_of_kind: dict[str, Task] = {}
    for task in tasks:
        first_of_kind.setdefault(task.kind, task)
        terms = kinds.get(task.kind) or kinds[""]
        if not task.workspace and terms.agent.placement == "sandbox":
            raise ConfigError(
                f"task {task.id} has no workspace, and agent {terms.agent.name} works in one",
                fix=f'give its kind an agent on the host: [kinds.{task.kind or "NAME"}] agent = "direct"',
            )
    absent = sorted(kinds.keys() - first_of_kind.keys() - {""})
    present = sorted(first_of_kind.keys() - {""})
    raise_errors(
        [ConfigError(f"kinds.{name}: no task is of this kind", fix=suggest_nearest(name, present)) for name in absent]
    )


def check_rewards(kinds: Mapping[str, AttemptSettings], tasks_by_phase: Mapping[str, Iterable[Task]]) -> None:
    """Raise `ConfigError` for a reward that runs checks if a task it is weighted on lacks them, or all tasks do."""
    can_measure: dict[str, bool] = {}
    for phase, phase_tasks in tasks_by_phase.items():
        for task in phase_tasks:
            for reward, weight in (kinds.get(task.kind) or kinds[""]).rewards[phase]:
                if reward.runs_checks and weight and not task.checks:
                    raise ConfigError(
                        f"task {task.id} has no checks, which the reward {reward.name} runs",
                        fix=f"weight 0 measures {reward.name} where tasks have checks; a reward that compares patches,"
                        " such as patch_edits, judges all",
                    )
                if reward.runs_checks:
                    can_measure[reward.name] = bool(task.checks) or can_measure.get(reward.name, False)
    for name, has_checks in can_measure.items():
        if not has_checks:
            raise ConfigError(f"no task has checks, which {name} runs", fix="leave it out, or name tasks with checks")


def check_executor(config: Config, *, remote: bool = False) -> None:
    """Raise `ConfigError` for settings that attempts on a cluster do not support. `remote`: an API serves the model."""
    if config.rollout.executor == "local":
        return
    if remote:
        raise ConfigError(
            "attempts with a remote model run on one machine, which they hardly load",
            fix="leave rollout.executor out",
        )
    address = config.rollout.ray.address
    if (address not in ("auto", "local") and not address.rpartition(":")[2].isdecimal()) or "://" in address:
        raise ConfigError(
            f"rollout.ray.address={address} is not the address of a cluster's head; a Ray client's will not do",
            fix="auto, local, or HOST:PORT of the cluster's head (ray start prints it)",
        )


def require_ray(config: Config) -> None:
    """Raise `PrerequisiteError` if Ray is needed and not installed, or its cluster is unreachable."""
    if config.rollout.executor == "ray" and config.rollout.ray.address:  # which `check_executor` requires
        ray_cluster.find_head(config.rollout.ray.address)


def check_names(config: Config) -> None:
    """Raise `ConfigError` (`CombinedError` for more) for unknown parts, with the nearest known name.

    Checks neither user classes (``module:Class``) nor options.
    """
    raise_errors(list(_find_unknown_parts(config)))


def _find_unknown_parts(config: Config) -> Iterator[ConfigError]:
    for key, agent in agent_settings(config).items():
        if not recipe.is_recipe(agent.name):
            yield from _find_unknown_names(
                f"{key}.name", "agent", [agent.name], {*agents.SHIPPED, *recipe.list_recipes()}
            )
    yield from _find_unknown_names("engine.name", "engine", [config.engine.name], {*engines.SHIPPED, RELAY})
    yield from _find_unknown_names("sandbox.name", "sandbox", [config.sandbox.name], {*sandbox.SHIPPED, "auto"})
    sources = {"tasks.source": config.tasks.source}
    sources |= {f"tasks.sources.{at}.source": each.source for at, each in enumerate(config.tasks.sources)}
    sources |= {f"{evaluation_setting(name)}.source": each.source for name, each in config.eval.each.items()}
    for key, source in sources.items():
        yield from _find_unknown_names(key, "task source", filter(None, [source]), tasks.SHIPPED)
    weights = {"reward": config.reward, "eval.reward": config.eval.reward}
    weights |= {f"kinds.{name}.reward": kind.reward for name, kind in config.kinds.items()}
    for key, weight_by_name in weights.items():
        yield from _find_unknown_names(key, "reward", weight_by_name, {*rewards.SHIPPED, *rewards.PRESETS})


def _find_unknown_names(key: str, kind: str, names: Iterable[str], known: Collection[str]) -> Iterator[ConfigError]:
    for name in names:
        if name not in known and ":" not in name:
            yield ConfigError(
                f"{key}: unknown {kind} {name!r}",
                fix=f"{suggest_nearest(name, known)} A class of your own is named module:Class.",
            )
