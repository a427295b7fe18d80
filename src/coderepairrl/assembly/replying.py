"""Opens the model of a plan: one way for every command that takes any model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from coderepairrl import models
from coderepairrl.assembly.model import LocalModel, RemoteModel, engine_of
from coderepairrl.assembly.plan import ServingPlan
from coderepairrl.gateway import PolicySource, Remote, ReplySource
from coderepairrl.learn import engine_form, merge, rounded
from coderepairrl.processes.scratch import scratch
from coderepairrl.protocols import Engine, EngineSpec
from coderepairrl.rollout import SupervisedEngine
from coderepairrl.sync import weights


@asynccontextmanager
async def replying(plan: ServingPlan, log_dir: Path) -> AsyncIterator[ReplySource]:
    """Who replies for the model of `plan`, running: an engine, restarted when it dies, or the remote.

    Adapters are loaded by an engine that takes them, which serves version 1 then, and else merged into a temporary
    copy of the model. Where weights are to be quantised, those of a temporary copy are rounded first.

    Raises `UsageError` (an endpoint that has no such model), `EngineFault` and `RemoteFault`.
    """
    model, config = plan.model, plan.config
    if isinstance(model, RemoteModel):
        about = model.options.model_dump(exclude={"model_name", "key_env"})
        async with Remote(model.url, model=model.options.model_name, key=model.key, **about) as remote:
            yield remote
        return
    async with AsyncExitStack() as parts:
        folder, adapter = model.folder, model.adapter
        form = config.model.quantise
        if _to_round(plan):
            home = parts.enter_context(scratch("rounded"))
            await rounded(folder, home, form, config.train.precision, log_dir=log_dir)
            folder = home
        if adapter is not None and not model.engine.adapters:
            home = parts.enter_context(scratch("merged"))
            await merge(folder, adapter, home, config.train.precision, log_dir=log_dir)
            folder, adapter = home, None

        engine = await _started(model.engine, folder, plan, log_dir)
        parts.push_async_callback(engine.close)
        if adapter is not None:
            await _load(engine, adapter, 1, model.folder, parts, log_dir)
        yield PolicySource(model.codec, engine, config.rollout.history_policy)


async def _load(engine: Engine, adapter: Path, version: int, base: Path, parts: AsyncExitStack, log_dir: Path) -> None:
    """Serve `adapter` on the model in `base`; in the form that engines read, which lasts as long as `parts`."""
    if weights.on_experts(adapter):
        home = parts.enter_context(scratch("adapter"))
        await engine_form(base, adapter, home, log_dir=log_dir)
        adapter = home
    await engine.load(adapter, version, await asyncio.to_thread(weights.checksum, adapter))


async def _started(spec: EngineSpec, folder: Path, plan: ServingPlan, log_dir: Path) -> SupervisedEngine:
    async def start() -> Engine:
        return await spec.start(folder, log_dir=log_dir)

    return SupervisedEngine(await start(), start, restarts=plan.config.run.retries)


class InTurn:
    """Opens the models of several plans, one after the other: adapters on the same weights share an engine that takes
    them, started once with room for the largest, and so do those weights themselves. Leaving it ends that engine."""

    def __init__(self, plans: Sequence[ServingPlan]) -> None:
        self._plans = plans
        self._engine: SupervisedEngine | None = None
        self._of: ServingPlan | None = None
        """The plan that the engine was started for."""
        self._loaded = 0
        """Adapters that it was given, each as the next version."""
        self._forms = AsyncExitStack()
        """What it reads of them, which a restarted one reads again."""

    async def __aenter__(self) -> InTurn:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    @property
    def order(self) -> list[int]:
        """Of the plans, by their numbers: those that share an engine after one another, adapters after their model."""

        def key(number: int) -> tuple[int, bool]:
            plan = self._plans[number]
            first = next(at for at, other in enumerate(self._plans) if other is plan or _alike(plan, other))
            return first, isinstance(plan.model, LocalModel) and plan.model.adapter is not None

        return sorted(range(len(self._plans)), key=key)

    @asynccontextmanager
    async def replying(self, plan: ServingPlan, log_dir: Path) -> AsyncIterator[ReplySource]:
        """As `replying`; the log of an engine that is shared is in the `log_dir` of its first plan."""
        spec = self._shared(plan)
        if spec is None or not isinstance(plan.model, LocalModel):
            await self._end()
            async with replying(plan, log_dir) as source:
                yield source
            return
        adapter = plan.model.adapter
        if self._of is None or not _alike(plan, self._of) or (adapter is None and self._loaded):
            await self._end()
            self._engine = await _started(spec, plan.model.folder, plan, log_dir)
            self._of = plan
        assert self._engine is not None
        if adapter is not None:
            await _load(self._engine, adapter, self._loaded + 1, plan.model.folder, self._forms, log_dir)
            self._loaded += 1
        yield PolicySource(plan.model.codec, self._engine, plan.config.rollout.history_policy)

    def _shared(self, plan: ServingPlan) -> EngineSpec | None:
        """The engine that `plan` shares with others, if it does."""
        if _to_round(plan):
            return None
        alike = [other for other in self._plans if other is plan or _alike(plan, other)]
        places = [each.model.adapter for each in alike if isinstance(each.model, LocalModel)]
        ranks = [weights.adapter_rank(place) for place in places if place is not None]
        spec = engine_of(plan.config, max(ranks)) if ranks and len(alike) > 1 else None
        return spec if spec is not None and spec.adapters else None

    async def _end(self) -> None:
        engine, self._engine, self._of, self._loaded = self._engine, None, None, 0
        if engine is not None:
            await engine.close()
        await self._forms.aclose()


def _to_round(plan: ServingPlan) -> bool:
    """Whether the model's weights have not yet the numbers that its settings quantise them to."""
    form = plan.config.model.quantise
    return form != "none" and isinstance(plan.model, LocalModel) and models.quantised(plan.model.folder) != form


def _alike(one: ServingPlan, other: ServingPlan) -> bool:
    """Whether an engine for the model of `one`, without its adapters, is one for that of `other`."""
    here, there = one.model, other.model
    if not (isinstance(here, LocalModel) and isinstance(there, LocalModel)):
        return False
    return here.folder.resolve() == there.folder.resolve() and one.config.engine == other.config.engine
