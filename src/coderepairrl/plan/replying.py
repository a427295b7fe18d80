"""Open the model of a plan, the same way for every command."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from coderepairrl import models
from coderepairrl.errors import ConfigError, EngineFault
from coderepairrl.gateway import PolicySource, Remote, ReplySource
from coderepairrl.learn import merge_adapter, round_model
from coderepairrl.plan import devices
from coderepairrl.plan.model import LocalModel, RemoteModel, ServingPlan, derive_adapter_needs, make_planned_engine
from coderepairrl.processes.scratch import scratch
from coderepairrl.protocols import Engine, EngineSpec
from coderepairrl.rollout.supervise import SupervisedEngine
from coderepairrl.sync import weights
from coderepairrl.types import EngineNeeds

Opens = Callable[[ServingPlan, Path], AbstractAsyncContextManager[ReplySource]]
"""Signature of `open_model`."""


@asynccontextmanager
async def open_model(plan: ServingPlan, log_dir: Path) -> AsyncIterator[ReplySource]:
    """A running reply source for the model of `plan`: a supervised engine, or the remote endpoint.

    Adapters are version 1, or merged into a temporary copy if the engine takes none. Raises `UsageError` for an unknown
    remote model, `EngineFault` and `RemoteFault`.
    """
    model, config = plan.model, plan.config
    if isinstance(model, RemoteModel):
        options = model.options.model_dump(exclude={"model_name", "key_env"})
        async with Remote(model.url, model=model.options.model_name, key=model.key, **options) as remote:
            yield remote
        return
    async with AsyncExitStack() as parts:
        folder, adapter = model.folder, model.adapter
        form = config.model.quantise
        if _needs_rounding(plan):
            home = parts.enter_context(scratch("rounded"))
            await round_model(folder, home, form, config.train.precision, log_dir=log_dir)
            folder = home
        if adapter is not None and not model.needs.adapter_rank:
            home = parts.enter_context(scratch("merged"))
            await merge_adapter(folder, adapter, home, config.train.precision, log_dir=log_dir)
            folder, adapter = home, None

        async def start() -> Engine:
            return await model.engine.start(folder, log_dir=log_dir, needs=model.needs)

        engine = SupervisedEngine(await start(), start, restarts=config.run.retries)
        parts.push_async_callback(engine.close)
        if adapter is not None:
            await engine.load(adapter, 1, await asyncio.to_thread(weights.compute_checksum, adapter))
        yield PolicySource(model.codec, engine)


class ModelGroup(NamedTuple):
    """Plans whose models are open together, at most `at_once` of them."""

    numbers: tuple[int, ...]
    """Indices of the plans."""
    at_once: int
    shared: bool = False
    """Whether one engine serves all."""


def split_by_engine(plans: Sequence[ServingPlan], at_once: int) -> list[ModelGroup]:
    """Split `plans` into parts that run one after another.

    Models on the same weights share an engine that takes adapters. Concurrent engines and remote models are one part;
    others run one by one. Raises `ConfigError` for several at once on Ray.
    """
    if at_once > 1 and any(plan.config.rollout.executor != "local" for plan in plans):
        raise ConfigError(
            "--jobs measures several policies at once, and rollout.executor=ray one at a time",
            fix="leave --jobs out, and raise rollout.concurrency for more attempts at a time",
        )
    shared_parts, alone, left = list[ModelGroup](), list[int](), list(range(len(plans)))
    while left:
        sharing = [each for each in left if each == left[0] or _has_same_weights(plans[left[0]], plans[each])]
        if _can_share([plans[each] for each in sharing]):
            shared_parts.append(ModelGroup(tuple(sharing), at_once, shared=True))
        else:
            sharing = sharing[:1]
            alone += sharing
        left = [each for each in left if each not in sharing]
    free = [each for each in alone if at_once > 1 and not plans[each].model.capabilities.is_exclusive]
    in_turn = [each for each in alone if each not in free]
    return [
        *shared_parts,
        *([ModelGroup(tuple(free), at_once)] if free else []),
        *([ModelGroup(tuple(in_turn), 1)] if in_turn else []),
    ]


@asynccontextmanager
async def open_model_group(plans: Sequence[ServingPlan], part: ModelGroup, log_dir: Path) -> AsyncIterator[Opens]:
    """Like `open_model`, for `part` of `plans`. A shared engine logs to `log_dir`."""
    if not part.shared:
        yield open_model
        return
    shared = _SharedEngine([plans[each] for each in part.numbers], log_dir)
    try:
        await shared.serve()
        yield shared.open_model
    finally:
        await shared.close()


class _SharedEngine:
    """One engine for several plans, each of which is a version."""

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
        version = next(self._version(number) for number, each in enumerate(self._plans) if each is plan)

        async def start() -> Engine:
            return (await self.serve()).at(version)

        engine = SupervisedEngine(await start(), start, restarts=plan.config.run.retries)
        yield PolicySource(plan.model.codec, engine)

    def _version(self, number: int) -> int:
        return 0 if self._adapters[number] is None else number + 1

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
                for number, adapter in enumerate(self._adapters):
                    if adapter is not None:
                        checksum = await asyncio.to_thread(weights.compute_checksum, adapter)
                        await engine.load(adapter, self._version(number), checksum)
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
    spec = make_planned_engine(config)
    return spec, replace(derive_adapter_needs(spec, ranks), gpus=devices.find_engine_gpus(config, spec.capabilities))


def _needs_rounding(plan: ServingPlan) -> bool:
    """Whether the weights still have to be rounded to their quantised values."""
    form = plan.config.model.quantise
    return (
        form != "none" and isinstance(plan.model, LocalModel) and models.read_quantised_form(plan.model.folder) != form
    )


def _has_same_weights(one: ServingPlan, other: ServingPlan) -> bool:
    first, second = one.model, other.model
    if not (isinstance(first, LocalModel) and isinstance(second, LocalModel)):
        return False
    return first.folder.resolve() == second.folder.resolve() and one.config.engine == other.config.engine
