"""Open the model of a plan, the same way for every command."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from coderepairrl import engines, models
from coderepairrl.errors import ConfigError, EngineFault
from coderepairrl.gateway import PolicySource, Remote, ReplySource
from coderepairrl.learn import merge_adapter, round_model
from coderepairrl.plan import devices
from coderepairrl.plan.model import LocalModel, RemoteModel, ServingPlan, derive_adapter_needs
from coderepairrl.processes.scratch import scratch
from coderepairrl.protocols import Engine, EngineSpec
from coderepairrl.rollout.supervise import SupervisedEngine
from coderepairrl.sync import weights
from coderepairrl.types import EngineNeeds

OpenModel = Callable[[ServingPlan, Path], AbstractAsyncContextManager[ReplySource]]
"""Signature of `open_model`."""


@asynccontextmanager
async def open_model(plan: ServingPlan, log_dir: Path) -> AsyncIterator[ReplySource]:
    """A running reply source for the model of `plan`: a supervised engine, or the remote endpoint.

    Adapters are loaded as version 1, or merged into a temporary copy if the engine takes none. Raises `UsageError` for
    an unknown remote model, `EngineFault` and `RemoteFault`.
    """
    model, config = plan.model, plan.config
    if isinstance(model, RemoteModel):
        options = model.options.model_dump(exclude={"model_name", "key_env"})
        async with Remote(model.url, model=model.options.model_name, key=model.key, **options) as remote:
            yield remote
        return
    async with AsyncExitStack() as stack:
        folder, adapter = model.folder, model.adapter
        if _needs_rounding(plan):
            rounded = stack.enter_context(scratch("rounded"))
            await round_model(folder, rounded, config.model.quantise, config.train.precision, log_dir=log_dir)
            folder = rounded
        if adapter is not None and not model.needs.adapter_rank:
            merged = stack.enter_context(scratch("merged"))
            await merge_adapter(folder, adapter, merged, config.train.precision, log_dir=log_dir)
            folder, adapter = merged, None

        async def start() -> Engine:
            return await model.engine.start(folder, log_dir=log_dir, needs=model.needs)

        engine = SupervisedEngine(await start(), start, restarts=config.run.retries)
        stack.push_async_callback(engine.close)
        if adapter is not None:
            await engine.load(adapter, 1, await asyncio.to_thread(weights.compute_checksum, adapter))
        yield PolicySource(model.codec, engine)


class ModelGroup(NamedTuple):
    """Plans whose models are open together, at most `at_once` of them."""

    indices: tuple[int, ...]
    """Indices of the plans."""
    at_once: int
    shared: bool = False
    """Whether one engine serves all."""


def split_by_engine(plans: Sequence[ServingPlan], at_once: int) -> list[ModelGroup]:
    """Split `plans` into groups that run one after another.

    Models on the same weights share an engine that takes adapters. Concurrent engines and remote models are one group;
    others run one by one. Raises `ConfigError` for several at once on Ray.
    """
    if at_once > 1 and any(plan.config.rollout.executor != "local" for plan in plans):
        raise ConfigError(
            "--jobs measures several policies at once, and rollout.executor=ray one at a time",
            fix="leave --jobs out, and raise rollout.concurrency for more attempts at a time",
        )
    shared_groups, alone, rest = list[ModelGroup](), list[int](), list(range(len(plans)))
    while rest:
        group = [each for each in rest if each == rest[0] or _has_same_weights(plans[rest[0]], plans[each])]
        if _can_share([plans[each] for each in group]):
            shared_groups.append(ModelGroup(tuple(group), at_once, shared=True))
        else:
            group = group[:1]
            alone += group
        rest = [each for each in rest if each not in group]
    concurrent = [each for each in alone if at_once > 1 and not plans[each].model.capabilities.is_exclusive]
    one_by_one = [each for each in alone if each not in concurrent]
    return [
        *shared_groups,
        *([ModelGroup(tuple(concurrent), at_once)] if concurrent else []),
        *([ModelGroup(tuple(one_by_one), 1)] if one_by_one else []),
    ]


@asynccontextmanager
async def open_model_group(plans: Sequence[ServingPlan], group: ModelGroup, log_dir: Path) -> AsyncIterator[OpenModel]:
    """Yield a function like `open_model` for `group` of `plans`. A shared engine logs to `log_dir`."""
    if not group.shared:
        yield open_model
        return
    shared = _SharedEngine([plans[each] for each in group.indices], log_dir)
    try:
        await shared.serve()
        yield shared.open_model
    finally:
        await shared.close()


class _SharedEngine:
    """One engine for several plans; the adapter of each is a version."""

    def __init__(self, plans: Sequence[ServingPlan], log_dir: Path) -> None:
        self._plans, self._log_dir = plans, log_dir
        self._adapters = [plan.model.adapter if isinstance(plan.model, LocalModel) else None for plan in plans]
        self._spec, self._needs = _plan_shared_engine(plans)
        self._engine: Engine | None = None
        self._starting = asyncio.Lock()

    @asynccontextmanager
    async def open_model(self, plan: ServingPlan, log_dir: Path) -> AsyncIterator[ReplySource]:
        """Like the function `open_model`."""
        assert isinstance(plan.model, LocalModel)
        version = next(self._version(index) for index, each in enumerate(self._plans) if each is plan)

        async def start() -> Engine:
            return (await self.serve()).at(version)

        engine = SupervisedEngine(await start(), start, restarts=plan.config.run.retries)
        yield PolicySource(plan.model.codec, engine)

    def _version(self, index: int) -> int:
        return 0 if self._adapters[index] is None else index + 1

    async def serve(self) -> Engine:
        """Engine with all adapters, restarted if it has died."""
        model = self._plans[0].model
        assert isinstance(model, LocalModel)
        async with self._starting:
            if self._engine is not None:
                try:
                    await self._engine.health()
                    return self._engine
                except EngineFault:
                    await self.close()
            engine = await self._spec.start(model.folder, log_dir=self._log_dir, needs=self._needs)
            try:
                for index, adapter in enumerate(self._adapters):
                    if adapter is not None:
                        checksum = await asyncio.to_thread(weights.compute_checksum, adapter)
                        await engine.load(adapter, self._version(index), checksum)
            except BaseException:
                await engine.close()
                raise
            self._engine = engine
            return engine

    async def close(self) -> None:
        """Close the engine, if it runs."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()


def _can_share(plans: Sequence[ServingPlan]) -> bool:
    """Whether one engine serves these adapters on the same weights."""
    if len(plans) == 1 or any(_needs_rounding(plan) for plan in plans):
        return False
    return _plan_shared_engine(plans)[1].adapter_rank > 0


def _plan_shared_engine(plans: Sequence[ServingPlan]) -> tuple[EngineSpec, EngineNeeds]:
    adapters = [plan.model.adapter for plan in plans if isinstance(plan.model, LocalModel)]
    ranks = [weights.read_adapter_rank(adapter) for adapter in adapters if adapter is not None]
    config = plans[0].config
    spec = engines.make_engine(config.engine.name, **config.engine.options)
    return spec, replace(derive_adapter_needs(spec, ranks), gpus=devices.find_engine_gpus(config, spec.capabilities))


def _needs_rounding(plan: ServingPlan) -> bool:
    """Whether the weights still have to be rounded to their quantised values."""
    form = plan.config.model.quantise
    if form == "none" or not isinstance(plan.model, LocalModel):
        return False
    return models.read_quantised_form(plan.model.folder) != form


def _has_same_weights(one: ServingPlan, other: ServingPlan) -> bool:
    first, second = one.model, other.model
    if not (isinstance(first, LocalModel) and isinstance(second, LocalModel)):
        return False
    return first.folder.resolve() == second.folder.resolve() and one.config.engine == other.config.engine
