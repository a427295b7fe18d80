"""Opens the model of a plan: one way for every command that takes any model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from coderepairrl.assembly.model import RemoteModel
from coderepairrl.assembly.plan import ServingPlan
from coderepairrl.gateway import PolicySource, Remote, ReplySource
from coderepairrl.learn import merge
from coderepairrl.processes.scratch import scratch
from coderepairrl.protocols import Engine
from coderepairrl.rollout import SupervisedEngine
from coderepairrl.sync import weights


@asynccontextmanager
async def replying(plan: ServingPlan, log_dir: Path) -> AsyncIterator[ReplySource]:
    """Who replies for the model of `plan`, running: an engine, restarted when it dies, or the remote.

    Adapters are loaded by an engine that takes them, which serves version 1 then, and else merged into a temporary
    copy of the model.

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
        if adapter is not None and not model.engine.adapters:
            home = parts.enter_context(scratch("merged"))
            await merge(folder, adapter, home, config.train.precision, log_dir=log_dir)
            folder, adapter = home, None

        async def start() -> Engine:
            return await model.engine.start(folder, log_dir=log_dir)

        engine = SupervisedEngine(await start(), start, restarts=config.run.retries)
        parts.push_async_callback(engine.close)
        if adapter is not None:
            await engine.load(adapter, 1, await asyncio.to_thread(weights.checksum, adapter))
        yield PolicySource(model.codec, engine, config.rollout.history_policy)
