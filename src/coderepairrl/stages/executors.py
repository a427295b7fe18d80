"""Executors of attempts: this machine, or a Ray cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from coderepairrl.gateway import Gateway, PolicySource, ReplySource
from coderepairrl.plan.plan import Plan
from coderepairrl.plan.terms import AgentPlan, worker_setup
from coderepairrl.rollout import Executor, LocalExecutor, Rollout, Terms, Ticket, warm_up
from coderepairrl.rollout.ray_executor import ray_executor
from coderepairrl.runs import Log
from coderepairrl.types import Episode, Sampling, Turn


@asynccontextmanager
async def open_rollout(
    plan: Plan | AgentPlan,
    source: ReplySource,
    log: Log,
    socket: Path,
    on_episode: Callable[[Episode], None],
    say: Callable[[str], None],
    on_turn: Callable[[str, Turn], None] | None = None,
) -> AsyncIterator[Rollout]:
    """Open the rollout of `plan`; `on_episode` gets each episode once its verdict is in `log`.

    `on_turn` (default: `log`) gets each turn, `socket` is for a local gateway, `say` reports lost machines and slow
    engines. Raises `PrerequisiteError` and `RunError` for a failing Ray cluster.
    """
    concurrency = plan.config.rollout.concurrency

    async def warm(ticket: Ticket) -> None:
        terms = Terms.of_ticket(plan.kinds, ticket)
        if warning := await warm_up(source, terms.agent.first_request(ticket.task), terms.limits, concurrency):
            say(f"WARNING: {warning}")

    async with _executor(plan, source, on_turn or log.turn, socket, say) as executor:
        yield Rollout(executor=executor, log=log, concurrency=concurrency, on_episode=on_episode, warm_up=warm)


@asynccontextmanager
async def _executor(
    plan: Plan | AgentPlan,
    source: ReplySource,
    on_turn: Callable[[str, Turn], None],
    socket: Path,
    say: Callable[[str], None],
) -> AsyncIterator[Executor]:
    config = plan.config
    if config.rollout.executor == "local":
        gateway = Gateway(source, sampling=Sampling(), on_turn=on_turn)
        async with gateway.listening(socket=socket):
            yield LocalExecutor(gateway, plan.kinds)
        return
    if not isinstance(source, PolicySource):
        raise AssertionError("the plan allows no other model")
    cluster, concurrency = config.rollout.ray, config.rollout.concurrency
    async with ray_executor(
        worker_setup(
            config,
            source.codec,
            sandbox=plan.place.sandbox.name,
            learns=isinstance(plan, Plan),
        ),
        source.engine,
        on_turn,
        address=cluster.address,
        concurrency=concurrency,
        capacity=min(cluster.episodes, concurrency),
        memory=plan.place.sandbox.info().limits.get("memory", 0),
        say=say,
    ) as executor:
        yield executor
