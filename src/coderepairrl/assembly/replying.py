"""Opens the model of a plan: one way for every command that takes any model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from coderepairrl import engines, models
from coderepairrl.assembly import devices
from coderepairrl.assembly.model import LocalModel, RemoteModel, engine_of
from coderepairrl.assembly.plan import ServingPlan
from coderepairrl.errors import CodeRepairError, ConfigError, EngineFault
from coderepairrl.gateway import PolicySource, Remote, ReplySource
from coderepairrl.learn import merge, rounded
from coderepairrl.processes.scratch import scratch
from coderepairrl.protocols import Engine, EngineSpec, SharedServer
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
            await _load(engine, adapter, 1)
        yield PolicySource(model.codec, engine)


async def _load(engine: Engine, adapter: Path, version: int) -> None:
    await engine.load(adapter, version, await asyncio.to_thread(weights.checksum, adapter))


async def _started(spec: EngineSpec, folder: Path, plan: ServingPlan, log_dir: Path) -> SupervisedEngine:
    async def start() -> Engine:
        return await spec.start(folder, log_dir=log_dir)

    return SupervisedEngine(await start(), start, restarts=plan.config.run.retries)


class Part(NamedTuple):
    """Plans whose models are open at the same time, at most `at_once` of them: all share a server, or none does."""

    numbers: tuple[int, ...]
    """Of the plans."""
    at_once: int
    shared: bool = False


def parts(plans: Sequence[ServingPlan], at_once: int) -> list[Part]:
    """All of `plans`, in parts of which one is after the other.

    Adapters on the same weights, and those weights, share a server if one can be shared. Engines that are in nobody's
    way, and models elsewhere, are a part, too; what remains is one after the other, as `InTurn` has it.

    Raises `ConfigError` for several at once on Ray.
    """
    order = InTurn(plans).order
    if at_once == 1:
        return [Part(tuple(order), 1)]
    if any(plan.config.rollout.executor != "local" for plan in plans):
        raise ConfigError(
            "several policies at once, and rollout.executor=ray, of which a process has one cluster once",
            fix="leave --jobs out: rollout.concurrency says how many attempts are made at once",
        )
    found, shared = list[Part](), set[int]()
    for number, plan in enumerate(plans):
        alike = [other for other in range(len(plans)) if other == number or _alike(plan, plans[other])]
        if number not in shared and len(alike) > 1 and Shared.serves([plans[each] for each in alike]):
            found.append(Part(tuple(alike), at_once, shared=True))
            shared.update(alike)
    left = [number for number in order if number not in shared]
    free = sorted(number for number in left if not _exclusive(plans[number]))
    in_turn = [number for number in left if _exclusive(plans[number])]
    return [*found, *([Part(tuple(free), at_once)] if free else []), *([Part(tuple(in_turn), 1)] if in_turn else [])]


@asynccontextmanager
async def opening(
    plans: Sequence[ServingPlan], part: Part, address: Path, say: Callable[[str], None]
) -> AsyncIterator[Callable[[ServingPlan, Path], AbstractAsyncContextManager[ReplySource]]]:
    """As `replying`, for `part` of `plans`. A server that is shared is joined at `address`, beside which is its log."""
    if part.shared:
        async with Shared([plans[each] for each in part.numbers], part.at_once, address, say) as server:
            yield server.replying
    elif part.at_once > 1:
        yield replying
    else:
        async with InTurn(plans) as models:
            yield models.replying


class Shared:
    """Opens the models of several plans at the same time: adapters on the same weights, and those weights, at a server
    that is started for the first of them. Leaving it ends that server."""

    def __init__(self, plans: Sequence[ServingPlan], at_once: int, address: Path, say: Callable[[str], None]) -> None:
        self._runs, self._address, self._say = min(at_once, len(plans)), address, say
        self._spec, self._restarts = _with_room(plans), plans[0].config.run.retries
        self._server: SharedServer | None = None
        self._refusal: CodeRepairError | None = None
        """Why it did not start."""
        self._starting = asyncio.Lock()

    async def __aenter__(self) -> Shared:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            await self._server.close()

    @staticmethod
    def serves(plans: Sequence[ServingPlan]) -> bool:
        """Whether `plans`, which are alike, can share a server."""
        if any(_to_round(plan) for plan in plans):
            return False
        spec = _with_room(plans)
        try:
            spec.joining(Path())
        except ConfigError:
            return False
        return spec.adapters

    @asynccontextmanager
    async def replying(self, plan: ServingPlan, log_dir: Path) -> AsyncIterator[ReplySource]:
        """As `replying`."""
        assert isinstance(plan.model, LocalModel)
        server = await self._started(plan.model.folder)
        joined = engines.make(self._spec.name, **self._spec.joining(self._address))
        try:
            async with replying(replace(plan, model=replace(plan.model, engine=joined)), log_dir) as source:
                yield source
        finally:
            await server.forget(log_dir)

    async def _started(self, model: Path) -> SharedServer:
        """The server, started once. Raises what `EngineSpec.share` raises, again for who comes later, and `EngineFault`
        once it is given up."""
        log_dir = self._address.parent
        async with self._starting:
            if self._server is None and self._refusal is None:
                self._say(f"one {self._spec.name} server for {model}; its log is {log_dir / 'engine.log'}")
                try:
                    self._server = await self._spec.share(
                        model,
                        runs=self._runs,
                        train=False,
                        address=self._address,
                        log_dir=log_dir,
                        restarts=self._restarts,
                        say=self._say,
                    )
                except CodeRepairError as error:
                    self._refusal = error
        if self._server is None:
            assert self._refusal is not None
            raise self._refusal
        if self._server.failure:
            raise EngineFault(self._server.failure, fix=f"see {log_dir / 'engine.log'}")
        return self._server


def _with_room(plans: Sequence[ServingPlan]) -> EngineSpec:
    """The engine of `plans`, which are alike, with room for the largest of their adapters, on their GPUs."""
    local = [plan.model for plan in plans if isinstance(plan.model, LocalModel)]
    ranks = [weights.adapter_rank(model.adapter) for model in local if model.adapter is not None]
    config = plans[0].config
    return devices.serving(config, engine_of(config, max(ranks, default=None)))


def _exclusive(plan: ServingPlan) -> bool:
    return isinstance(plan.model, LocalModel) and plan.model.engine.exclusive


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
            await _load(self._engine, adapter, self._loaded + 1)
            self._loaded += 1
        yield PolicySource(plan.model.codec, self._engine)

    def _shared(self, plan: ServingPlan) -> EngineSpec | None:
        """The engine that `plan` shares with others, if it does."""
        if _to_round(plan):
            return None
        alike = [other for other in self._plans if other is plan or _alike(plan, other)]
        adapted = any(isinstance(each.model, LocalModel) and each.model.adapter is not None for each in alike)
        spec = _with_room(alike) if adapted and len(alike) > 1 else None
        return spec if spec is not None and spec.adapters else None

    async def _end(self) -> None:
        engine, self._engine, self._of, self._loaded = self._engine, None, None, 0
        if engine is not None:
            await engine.close()


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
