"""Training, `crrl fix` and the exam of programs blame alike: an agent that breaks in every way, driven through each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from coderepairrl import tokens
from coderepairrl.agents.scripted import Say, ScriptedAgent
from coderepairrl.checks import agent as exam
from coderepairrl.engines import ScriptedEngine
from coderepairrl.errors import AgentFault, Fault, GatewayFault, SandboxFault
from coderepairrl.gateway import Gateway, PolicySource
from coderepairrl.plan import RepairPlan
from coderepairrl.plan.model import name_model
from coderepairrl.plan.parts import raise_all
from coderepairrl.protocols import Agent, EngineSpec, Sandbox
from coderepairrl.rewards import ScriptedReward
from coderepairrl.rollout import Attempt, LocalExecutor, Rollout, Terms, Ticket, attempts, make_attempt
from coderepairrl.runs import Log
from coderepairrl.sandbox.fake import ScriptedBackend
from coderepairrl.stages.fix import USE, Repair, Repository, fix
from coderepairrl.types import AgentReport, Ending, Endpoint, EngineNeeds, Episode, Limits, Sampling, Task

TASK = Task("toy/one", "repair it", "python", "dir:x", b"")
LIMITS = Limits(calls=1, seconds=1.0)
SUBMITTED = AgentReport("submitted", log="that was all")


async def ask(task: Task, box: Sandbox, endpoint: Endpoint, times: int = 1) -> None:
    """As a program does, which dies of an HTTP error."""
    try:
        await ScriptedAgent([Say("hello")] * times).run(task, box, endpoint)
    except GatewayFault:
        raise AgentFault("ended with exit code 1: an HTTP error", how="exit 1", printed="an HTTP error") from None


async def submits(*at: Any) -> object:
    await ask(*at)
    return SUBMITTED


async def submits_unasked(*at: Any) -> object:
    return SUBMITTED


async def submits_all_the_same(*at: Any) -> object:
    for _ in range(2):
        try:
            await ask(*at)
        except AgentFault:
            return SUBMITTED
    return SUBMITTED


async def returns_nothing(*at: Any) -> object:
    await ask(*at)
    return None


async def raises(*at: Any) -> object:
    await ask(*at)
    raise ValueError("odd")


async def raises_first(*at: Any) -> object:
    raise ValueError("odd")


async def gives_up_waiting(*at: Any) -> object:
    await ask(*at)
    raise TimeoutError


async def exits(*at: Any) -> object:
    await ask(*at)
    raise AgentFault("ended with exit code 3", how="exit 3", printed="3")


async def exits_first(*at: Any) -> object:
    raise AgentFault("ended with exit code 3", how="exit 3", printed="3")


async def cancels(*at: Any) -> object:
    await ask(*at)
    raise asyncio.CancelledError


async def breaks_at_a_limit(*at: Any) -> object:
    await ask(*at, times=LIMITS.calls + 3)
    raise ValueError("odd")


async def overruns(*at: Any) -> object:
    await ask(*at)
    await asyncio.sleep(60.0)
    return SUBMITTED


async def dies_with_the_engine(*at: Any) -> object:
    await ask(*at, times=2)
    return SUBMITTED


async def loses_the_gateway(*at: Any) -> object:
    await ask(*at)
    raise GatewayFault("no answer")


async def loses_the_sandbox(*at: Any) -> object:
    await ask(*at)
    raise SandboxFault("it died")


class Way(NamedTuple):
    """How to break, how it is judged, and what else is expected."""

    act: Callable[..., Awaitable[object]]
    ending: Ending
    reason: str
    exit: str = ""
    """What `crrl fix` calls it; empty: it raises the fault."""
    printed: str = ""
    replies: int = 9
    """Of the engine's, which dies then."""


WAYS = [
    Way(submits, Ending.DONE, "submitted", "submitted", "that was all"),
    Way(submits_unasked, Ending.VOID, "agent", printed="that was all"),
    Way(submits_all_the_same, Ending.VOID, "engine", printed="that was all", replies=1),
    Way(returns_nothing, Ending.CRASH, "no report", "crash"),
    Way(raises, Ending.CRASH, "ValueError", "crash"),
    Way(raises_first, Ending.VOID, "agent"),
    Way(gives_up_waiting, Ending.CRASH, "TimeoutError", "crash"),
    Way(exits, Ending.CRASH, "exit 3", "crash", "3"),
    Way(exits_first, Ending.VOID, "agent", printed="3"),
    Way(cancels, Ending.CRASH, "CancelledError", "crash"),
    Way(breaks_at_a_limit, Ending.LIMIT, "calls", "calls"),
    Way(overruns, Ending.LIMIT, "time", "time"),
    Way(dies_with_the_engine, Ending.VOID, "engine", printed="an HTTP error", replies=1),
    Way(loses_the_gateway, Ending.VOID, "gateway"),
    Way(loses_the_sandbox, Ending.VOID, "sandbox"),
]
BY_NAME = {way.act.__name__: way for way in WAYS}


class Breaks(Agent):
    """A program by its own account, though it runs here."""

    name, placement = "breaks", "sandbox"

    def __init__(self, way: str) -> None:
        self.way = BY_NAME[way]

    async def run(self, task: Task, sandbox: Sandbox, endpoint: Endpoint) -> AgentReport:
        await sandbox.write("a.py", b"x = 1\n")
        return await self.way.act(task, sandbox, endpoint)  # type: ignore[return-value]


class Replies(EngineSpec):
    """Says as much, and dies."""

    name = "replies"

    def __init__(self, count: int) -> None:
        self.count = count

    async def start(self, model: Path, *, log_dir: Path, needs: EngineNeeds = EngineNeeds()) -> ScriptedEngine:
        return ScriptedEngine([[65, *tokens.load_codec(model).stop_ids[:1]]] * self.count)


def words(fault: Fault | None) -> str:
    return "" if fault is None else f"{type(fault).__name__}: {fault}"


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "_GRACE", 0.1)
    monkeypatch.setattr(exam, "_SHORT", 0.5)


@pytest.mark.parametrize("name", BY_NAME)
async def test_all_blame_alike(miniature: Path, tmp_path: Path, name: str) -> None:
    way, agent = BY_NAME[name], Breaks(name)
    made = await attempted(agent, miniature)
    assert (made.ending, made.reason, made.printed) == (way.ending, way.reason, way.printed), words(made.fault)
    assert (made.fault is not None) == (made.ending is Ending.VOID)

    episode = await trained(agent, miniature, tmp_path)
    assert (episode.ending, episode.reason, episode.printed) == (made.ending, made.reason, made.printed)
    assert (episode.fault, episode.patch) == (words(made.fault), made.patch)
    assert bool(episode.scores) == (made.fault is None)
    assert not episode.calls_known, "a program does not say which tools it called, nor does one that broke"

    options = [
        "agent=test_blame:Breaks",
        f"agent.options.way={name}",
        "sandbox=coderepairrl.sandbox.fake:ScriptedBackend",
    ]
    options += [
        "engine=test_blame:Replies",
        f"engine.options.count={way.replies}",
        "rollout.calls=1",
        "rollout.seconds=1",
    ]
    plan = RepairPlan(name_model(str(miniature), options, USE))
    plan.task = TASK
    raise_all([*plan.served.errors(), *plan.errors()])
    try:
        fixed = await fix(Repair(Repository(tmp_path, "0" * 40), TASK, plan))
    except Fault as fault:
        assert words(fault) == words(made.fault)
    else:
        assert (fixed.exit, fixed.patch, made.fault) == (way.exit, made.patch, None)


@pytest.mark.parametrize("name", sorted(BY_NAME.keys() - {"overruns", "loses_the_gateway", "loses_the_sandbox"}))
async def test_and_so_does_the_exam(miniature: Path, name: str) -> None:
    """Who asked an endpoint that is broken is not blamed, however it ended; who never asked is."""
    made = await attempted(Breaks(name), miniature)
    checks = {check.name: check for check in await exam.examine_agent_program(Breaks(name), ScriptedBackend())}
    ended, broken = checks["ends by itself"], checks["a broken endpoint is a fault"]
    if made.reason != "engine":  # the exam's own does not die
        assert ended.detail.partition(":")[0] == str(getattr(made.outcome, "exit", made.outcome)).partition(":")[0]
    asks = name not in ("submits_unasked", "raises_first", "exits_first")
    assert broken.ok == asks and ("answered 401" in broken.detail) == asks


@asynccontextmanager
async def gateway(agent: Breaks, model: Path, on_turn: Any = lambda *_: None) -> AsyncIterator[Gateway]:
    engine = await Replies(agent.way.replies).start(model, log_dir=model)
    source = PolicySource(tokens.load_codec(model), engine)
    async with Gateway(source, sampling=Sampling(), on_turn=on_turn).listening() as made:
        yield made


async def attempted(agent: Breaks, model: Path, standing: Any = None) -> Attempt:
    async with gateway(agent, model) as made:
        return await make_attempt(
            made, TASK, agent, ScriptedBackend(), name="one", limits=LIMITS, seed=0, at_end=standing
        )


async def trained(agent: Breaks, model: Path, folder: Path) -> Episode:
    terms = Terms(agent, ScriptedBackend(), LIMITS, {"train": [(ScriptedReward(default=0.5), 1.0)]})
    with closing(Log(folder / "log.jsonl")) as log:
        async with gateway(agent, model, log.turn) as made:
            rollout = Rollout(executor=LocalExecutor(made, {"": terms}), log=log, concurrency=1)
            return await rollout.run(Ticket(TASK, "train", 1, "toy/one-1", 0, 0, Sampling()))


@pytest.mark.parametrize(
    ("name", "boundary"), [("submits", "gateway"), ("raises_first", "agent"), ("dies_with_the_engine", "engine")]
)
async def test_what_broke_first_is_blamed_and_not_what_is_done_with_the_workspace_then(
    miniature: Path, name: str, boundary: str
) -> None:
    async def fails(box: Sandbox, patch: bytes) -> None:
        raise GatewayFault("later")

    made = await attempted(Breaks(name), miniature, fails)
    assert (made.ending, made.reason, b"+x = 1" in made.patch) == (Ending.VOID, boundary, True)
