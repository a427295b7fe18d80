"""Parts of a run, opened as planned and always closed."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from coderepairrl import models, tokens
from coderepairrl.config import Config
from coderepairrl.gateway import Gateway, PolicySource, ReplySource
from coderepairrl.learn import (
    Learner,
    LearnSettings,
    format_torchrun,
    init_random,
    merge_adapter,
    round_model,
)
from coderepairrl.plan import Plan
from coderepairrl.plan.conditions import list_time_limit_warnings
from coderepairrl.plan.imitation import ImitationPlan
from coderepairrl.plan.learner import warn_of_default_rate
from coderepairrl.plan.terms import AgentPlan, make_worker_setup
from coderepairrl.protocols import Engine
from coderepairrl.rollout.curriculum import Curriculum
from coderepairrl.rollout.episodes import AttemptSettings, Executor, PlannedAttempt, Rollout
from coderepairrl.rollout.local import LocalExecutor
from coderepairrl.rollout.ray_executor import ray_executor
from coderepairrl.rollout.supervise import SupervisedEngine, warm_up
from coderepairrl.runs import Log, RunFolder
from coderepairrl.runs.storage import replace_folder, write_checksums
from coderepairrl.stages.policy import LivePolicy
from coderepairrl.stages.progress import Progress
from coderepairrl.stages.shards import WHOLE, Shard
from coderepairrl.sync.weights import StreamedEngine, create_shared_folder
from coderepairrl.types import Episode, Sampling, Task, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationContext:
    """Running parts of an evaluation."""

    config: Config
    folder: RunFolder
    log: Log
    eval_tasks: Mapping[str, tuple[Task, ...]]
    """Tasks by evaluation."""
    rollout: Rollout
    progress: Progress
    shard: Shard = WHOLE
    """Part of each evaluation's tasks."""
    model_name: str = ""
    """Policy's name in predictions; empty: run and step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingContext(EvaluationContext):
    """Running parts of the training loop."""

    curriculum: Curriculum
    policy: LivePolicy

    @property
    def train_tasks(self) -> tuple[Task, ...]:
        """Training tasks of all sources."""
        return tuple(chain.from_iterable(source.tasks for source in self.curriculum.sources))


@asynccontextmanager
async def open_training(plan: Plan, folder: RunFolder, progress: Progress) -> AsyncIterator[TrainingContext]:
    """Open the parts of `plan`. Raises `Fault`."""
    log_warnings(plan, progress)
    async with AsyncExitStack() as stack:  # closes all parts, even if one fails
        log = folder.writer()
        stack.callback(log.close)
        folder.add_tasks(chain(plan.train_tasks, *plan.eval_tasks.values()))
        shared = outbox = stack.enter_context(create_shared_folder(folder))
        if plan.config.engine.weights_dir:
            outbox = stack.enter_context(create_shared_folder(folder, Path(plan.config.engine.weights_dir)))
        model = await prepare_initial_model(plan, folder)
        policy = await open_policy(stack, plan, folder, model, outbox, progress)
        for notice in policy.learner.notices:
            progress.say(notice)
        codec = plan.model.codec
        if model != plan.model.folder:  # the run's copy of the tokenizer, which does not change
            codec = tokens.load_codec(model, thinking=plan.config.model.thinking)
        rollout = await stack.enter_async_context(
            open_rollout(
                plan, PolicySource(codec, policy.engine), log, shared / "gateway.sock", progress.episode, progress.say
            )
        )
        yield TrainingContext(
            config=plan.config,
            folder=folder,
            log=log,
            eval_tasks=plan.eval_tasks,
            rollout=rollout,
            progress=progress,
            curriculum=plan.curriculum,
            policy=policy,
        )


def log_warnings(plan: Plan, progress: Progress) -> None:
    """Report evaluations without tasks, the sandbox, agents that see references, an unset learning rate, and forks."""
    evaluation = plan.config.eval
    if evaluation.is_due:
        for name, held_out in plan.eval_tasks.items():
            if not held_out:
                split = evaluation.each[name].split
                progress.say(f"no evaluation {name}: there is no held-out task in split {split!r}")
    progress.say(str(plan.choice))
    for agent in dict.fromkeys(terms.agent for terms in plan.kinds.values() if terms.agent.reads_reference):
        progress.alarm(f"agent {agent.name} is shown files of the reference, and the policy is trained with that")
    if warning := warn_of_default_rate(plan.config):
        progress.say(f"WARNING: {warning}")
    for fork in plan.model.forks:
        progress.say(f"token ids cannot be extended exactly, so conversations will fork: {fork}")


async def prepare_initial_model(plan: Plan | ImitationPlan, folder: RunFolder) -> Path:
    """Folder of the initial policy: the named one, or ``RUN/model`` with random, merged or rounded weights.

    ``RUN/model`` is made once, atomically.
    """
    config, adapter = plan.config, plan.model.adapter
    form = config.model.quantise
    needs_rounding = form != "none" and (models.read_quantised_form(plan.model.folder) != form or adapter is not None)
    if config.model.init == "weights" and adapter is None and not needs_rounding:
        return plan.model.folder
    target = folder.path / "model"
    if target.exists() and folder.log.stat().st_size:  # else a failed start made it, perhaps with another seed
        return target
    with ExitStack() as stack:
        scratch = stack.enter_context(replace_folder(target))
        source, unrounded = plan.model.folder, scratch
        if form != "none":
            unrounded = folder.path / ".exact"
            shutil.rmtree(unrounded, ignore_errors=True)  # left by a killed start
            stack.callback(shutil.rmtree, unrounded, ignore_errors=True)
        if config.model.init == "random":
            await init_random(source, unrounded, config.run.seed, log_dir=folder.logs)
            source = unrounded
        elif adapter is not None:
            await merge_adapter(source, adapter, unrounded, config.train.precision, log_dir=folder.logs)
            await asyncio.to_thread(write_checksums, unrounded)
            source = unrounded
        if form != "none":
            await round_model(source, scratch, form, config.train.precision, log_dir=folder.logs)
    return target


async def open_policy(
    stack: AsyncExitStack, plan: Plan, folder: RunFolder, model: Path, outbox: Path, progress: Progress
) -> LivePolicy:
    """Start engine and learner with the weights of `model`; new ones pass through `outbox`."""
    config = plan.config

    async def start_engine() -> Engine:
        engine = await plan.model.engine.start(model, log_dir=folder.logs, needs=plan.model.needs)
        if config.engine.weights == "file":
            return engine
        # looked up at each call: the policy is made after the engine, and replaces a dead learner
        return StreamedEngine(engine, lambda *offer: policy.learner.send(*offer))

    async def learn(settings: LearnSettings) -> Learner:
        return await start_learner(plan, settings, folder, model, outbox, progress)

    async def start_first() -> Engine:
        engine = await start_engine()
        if config.engine.share_devices == "turns":  # the learner has the device until `policy.restore`
            try:
                await engine.sleep()
            except BaseException:
                await engine.close()
                raise
        return engine

    # in turn on a shared GPU: vLLM measures its memory use as it starts, and would count what the learner allocates
    started, learner = await _start_both(start_first(), lambda: learn(plan.learner), in_turn=plan.has_shared_gpus)
    engine = SupervisedEngine(started, start_engine, restarts=config.run.retries, on_death=progress.alarm)
    stack.push_async_callback(engine.close)
    adapters = plan.model.needs.adapter_rank > 0
    policy = LivePolicy(config, folder, learn, engine, learner, adapters=adapters, on_death=progress.alarm)
    stack.push_async_callback(policy.close)
    return policy


async def start_learner(
    plan: Plan | ImitationPlan,
    settings: LearnSettings,
    folder: RunFolder,
    model: Path,
    outbox: Path,
    progress: Progress,
) -> Learner:
    """Start a learner. Raises like `Learner.start`."""
    train = plan.config.train
    if train.listen:
        progress.say(f"waiting for the learner; start it: {format_torchrun(train.listen)}")
    return await Learner.start(
        model,
        settings,
        log_dir=folder.logs,
        publish_dir=outbox,
        env=plan.devices.learner,
        gpu=bool(train.devices),
        patience=train.patience,
        listen=train.listen,
    )


async def _start_both(
    engine: Coroutine[Any, Any, Engine], learner: Callable[[], Coroutine[Any, Any, Learner]], *, in_turn: bool
) -> tuple[Engine, Learner]:
    """Start both, at once or `in_turn`; close both on failure or cancellation."""
    engine_start = asyncio.create_task(engine)

    async def start_learner_in_turn() -> Learner:
        if in_turn:
            await engine_start
        return await learner()

    learner_start = asyncio.create_task(start_learner_in_turn())
    try:
        await asyncio.gather(engine_start, learner_start)
        return engine_start.result(), learner_start.result()
    except BaseException:
        engine_start.cancel()
        learner_start.cancel()
        for part in await asyncio.gather(engine_start, learner_start, return_exceptions=True):
            if not isinstance(part, BaseException):
                await part.close()
        raise


@asynccontextmanager
async def open_rollout(
    plan: AgentPlan,
    source: ReplySource,
    log: Log,
    socket: Path,
    on_episode: Callable[[Episode], None],
    say: Callable[[str], None],
    on_turn: Callable[[str, Turn], None] | None = None,
) -> AsyncIterator[Rollout]:
    """Open the rollout of `plan`; `on_episode` gets each episode once its verdict is in `log`.

    `on_turn` (default: into `log`) gets each turn; a local gateway listens on `socket`; `say` prints warnings and lost
    machines. Raises `PrerequisiteError` and `RunError` for a failing Ray cluster.
    """
    config, concurrency, cluster = plan.config, plan.config.rollout.concurrency, plan.config.rollout.ray
    on_turn = on_turn or log.turn
    for warning in list_time_limit_warnings(plan):
        say(f"WARNING: {warning}")

    async def warm(planned: PlannedAttempt) -> None:
        terms = AttemptSettings.for_attempt(plan.kinds, planned)
        await warm_up(source, terms.agent.first_request(planned.task))

    async with AsyncExitStack() as stack:
        executor: Executor
        if config.rollout.executor == "local":
            gateway = Gateway(source, sampling=Sampling(), on_turn=on_turn)
            await stack.enter_async_context(gateway.listening(socket=socket))
            executor = LocalExecutor(gateway, plan.kinds)
        else:
            assert isinstance(source, PolicySource)  # the plan allows no other model
            sandbox, learns = plan.agent_setup.sandbox, isinstance(plan, Plan)
            workers = ray_executor(
                make_worker_setup(config, source.codec, sandbox=sandbox.name, learns=learns),
                source.engine,
                on_turn,
                address=cluster.address,
                concurrency=concurrency,
                capacity=min(cluster.episodes, concurrency),
                memory=sandbox.info().limits.get("memory", 0),
                say=say,
            )
            executor = await stack.enter_async_context(workers)
        yield Rollout(executor=executor, log=log, concurrency=concurrency, on_episode=on_episode, warm_up=warm)
