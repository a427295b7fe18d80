"""Builds a run's parts from its configuration and takes them down again, whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from coderepairrl import agents, engines, models, rewards, sandbox, tasks, tokens
from coderepairrl.assembly import devices
from coderepairrl.assembly.route import check_route
from coderepairrl.assembly.sample import sample
from coderepairrl.config import Config
from coderepairrl.errors import ConfigError, TaskError
from coderepairrl.gateway import Gateway
from coderepairrl.learn import Learner, init_random
from coderepairrl.protocols import Agent, Engine, EngineSpec, SandboxBackend
from coderepairrl.rollout import Rollout, Share, SupervisedEngine, Terms
from coderepairrl.runs import Log, RunFolder
from coderepairrl.sandbox.workspace import check_workspace, environment_of
from coderepairrl.stages.policy import LivePolicy, settings, start_learner
from coderepairrl.stages.progress import Progress
from coderepairrl.stages.references import check_references
from coderepairrl.sync.shared import shared_folder
from coderepairrl.sync.streamed import Streamed
from coderepairrl.types import Limits, Sampling, Task, Turn


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything the loop needs, running."""

    config: Config
    folder: RunFolder
    log: Log
    train_tasks: tuple[Task, ...]
    eval_tasks: Mapping[str, tuple[Task, ...]]
    """By the name of the evaluation."""
    rollout: Rollout
    policy: LivePolicy
    engine: SupervisedEngine
    progress: Progress

    @property
    def sources(self) -> tuple[Share, ...]:
        """Training tasks, with the part of the batches that each source has."""
        return (Share(self.train_tasks),)


@asynccontextmanager
async def assemble(config: Config, folder: RunFolder, progress: Progress) -> AsyncIterator[Parts]:
    """The parts of a run. Raises what is wrong with the config, the machine or the tasks before anything runs."""
    train_tasks, eval_tasks = load_tasks(config)
    if config.eval.before or config.eval.every or config.eval.after:
        for name, held_out in eval_tasks.items():
            if not held_out:
                split = config.eval.each[name].split
                progress.say(f"no evaluation {name}: there is no held-out task in split {split!r}")
    agent, backend, choice = placed_agent(config)
    progress.say(str(choice))
    judge = rewards.make(config.eval.reward or config.reward)
    judges = {"train": rewards.make(config.reward), **dict.fromkeys(eval_tasks, judge)}
    async with AsyncExitStack() as parts:  # whatever happens to one, the others are taken down
        log = folder.writer()
        parts.callback(log.close)
        folder.upgrade()
        folder.add_tasks(chain(train_tasks, *eval_tasks.values()))
        shared = outbox = parts.enter_context(shared_folder(folder))
        if config.engine.weights_dir:
            outbox = parts.enter_context(shared_folder(folder, Path(config.engine.weights_dir)))
        model = await prepare_model(config, folder)
        codec = tokens.load(model, renderer=config.model.renderer, thinking=config.model.thinking)
        for fork in codec.verify():
            progress.say(f"token ids cannot be extended exactly, so conversations will fork: {fork}")

        spec = engine_spec(config)

        async def start_engine() -> Engine:
            made = await spec.start(model, log_dir=folder.logs)
            if config.engine.weights == "file":
                return made
            return Streamed(made, lambda *offer: policy.send(*offer))  # of the learner that there is then

        # while vLLM measures what it needs of a GPU, it counts as its own what a learner takes of it meanwhile
        started, learner = await _both(
            start_engine(), lambda: start_learner(config, folder, model, outbox), in_turn=bool(devices.shared(config))
        )
        engine = SupervisedEngine(started, start_engine, restarts=config.run.retries)
        parts.push_async_callback(engine.close)
        policy = LivePolicy(config, folder, model, engine, learner, outbox, adapters=spec.adapters)
        parts.push_async_callback(policy.close)

        def record(episode: str, turn: Turn) -> None:
            log.append("turn", episode=episode, turn=turn)

        gateway = Gateway(
            codec,
            engine,
            sampling=Sampling(),
            on_turn=record,
            accept=config.gateway.accept,
            history_policy=config.rollout.history_policy,
        )
        parts.push_async_callback(gateway.stop)
        await gateway.start(socket=shared / "gateway.sock")
        rollout = Rollout(
            gateway=gateway,
            kinds={"": Terms(agent, backend, limits(config), judges, config.rollout.side_calls)},
            log=log,
            concurrency=config.rollout.concurrency,
            on_episode=progress.episode,
        )
        yield Parts(config, folder, log, train_tasks, eval_tasks, rollout, policy, engine, progress)


async def _both(
    engine: Coroutine[Any, Any, Engine], learner: Callable[[], Coroutine[Any, Any, Learner]], *, in_turn: bool
) -> tuple[Engine, Learner]:
    """Start the two, at once or `in_turn`; when one fails, or both are called off, neither is left behind."""
    serving = asyncio.create_task(engine)

    async def second() -> Learner:
        if in_turn:
            await serving
        return await learner()

    starting = serving, asyncio.create_task(second())
    try:
        await asyncio.gather(*starting)
        return starting[0].result(), starting[1].result()
    except BaseException:
        for each in starting:
            each.cancel()
        for made in await asyncio.gather(*starting, return_exceptions=True):
            if not isinstance(made, BaseException):
                await made.close()
        raise


def check(config: Config) -> tuple[tuple[Task, ...], dict[str, tuple[Task, ...]]]:
    """Refuse whatever can be refused before anything is started or written; returns the tasks, as `load_tasks` does.

    Raises `ConfigError`, `UsageError`, `TaskError` and `PrerequisiteError`.
    """
    settings(config)
    model = models.folder(config.model.path, weights=config.model.init == "weights")
    tokens.load(model, renderer=config.model.renderer, thinking=config.model.thinking).verify()
    for reward in (config.reward, config.eval.reward or config.reward):
        rewards.make(reward)
    placed_agent(config)
    engine_spec(config).check_model(model)
    check_route(config)
    train, held_out = load_tasks(config)
    check_references(config, train)
    for task in {task.workspace: task for task in (*chain(*held_out.values()), *train)}.values():
        environment_of(task)
        try:
            check_workspace(task.workspace)
        except TaskError as error:
            raise TaskError(f"task {task.id}: {error}", fix=error.fix) from error
    return train, held_out


def limits(config: Config) -> Limits:
    """What an episode may spend."""
    rollout = config.rollout
    return Limits(rollout.calls, rollout.tokens, rollout.seconds, rollout.turn_tokens)


def placed_agent(config: Config) -> tuple[Agent, SandboxBackend, sandbox.Choice]:
    """The agent, a sandbox that works here and shows it what it needs, and why it is that one.

    Raises `ConfigError` and `PrerequisiteError`, also where the agent does not work in that sandbox.
    """
    agent = agents.make(config.agent.name, **config.agent.options)
    choice = sandbox.choose(config.sandbox.name)
    sandbox.check_agent(choice, agent.name, getattr(agent, "not_in", {}))
    try:
        backend = sandbox.make(choice.name, getattr(agent, "binds", ()), **config.sandbox.options)
    except ConfigError as error:
        if not choice.fix:
            raise
        raise ConfigError(f"{error} ({choice})", fix=error.fix) from error  # the option was meant for the stronger one
    sandbox.require(backend)
    return agent, backend, choice


def engine_spec(config: Config) -> EngineSpec:
    """The engine as this run needs it: with room for its adapters, on its GPUs.

    Raises `ConfigError` for an unknown engine or option, for adapters larger than the engine takes, and what
    `devices.split` raises.
    """
    spec, lora = engines.make(config.engine.name, **config.engine.options), config.train.lora
    if lora is not None:
        spec = spec.with_adapters(lora.rank)
    visible = devices.split(config).engine.get(devices.VISIBLE)
    return spec if visible is None else spec.on_gpus(visible)


def load_tasks(config: Config) -> tuple[tuple[Task, ...], dict[str, tuple[Task, ...]]]:
    """Training tasks, and held-out ones by evaluation: all, or a sample by `run.seed`.

    Raises `TaskError` when there is nothing to train on.
    """
    here = config.tasks
    train, splits = _tasks_of(here.source, here.options, here.split)
    if not train:
        raise TaskError(f"{here.source} has no task in split {here.split!r}", fix=f"splits it has: {splits or 'none'}")
    held_out = {}
    for name, there in config.eval.each.items():
        options = there.options or ({} if there.source else here.options)
        found, _ = _tasks_of(there.source or here.source, options, there.split)
        held_out[name] = sample(found, there.tasks, config.run.seed)
    return train, held_out


def _tasks_of(source: str, options: Mapping[str, Any], split: str) -> tuple[tuple[Task, ...], str]:
    made = tasks.make(source, **options)
    made.prepare()
    everything = list(made)
    return tuple(task for task in everything if task.split == split), ", ".join(sorted({t.split for t in everything}))


async def prepare_model(config: Config, folder: RunFolder) -> Path:
    """The initial policy: the named folder, or random weights drawn once per run into ``RUN/model``."""
    source = models.folder(config.model.path)
    if config.model.init == "weights":
        return source
    target = folder.path / "model"
    if not target.exists() or not folder.log.stat().st_size:  # of a start that failed, perhaps with another seed
        await init_random(source, target, config.run.seed, log_dir=folder.logs)
    return target
