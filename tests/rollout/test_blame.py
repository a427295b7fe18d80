"""Training, `crrl fix` and the exam of programs blame alike: an agent that breaks in every way, driven through each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
from rollouts import open_rollout

from coderepairrl import tokens
from coderepairrl.agents.scripted import Say, ScriptedAgent
from coderepairrl.checks import agent as exam
from coderepairrl.engines import ScriptedEngine
from coderepairrl.errors import AgentFault, Fault, GatewayFault, SandboxFault
from coderepairrl.gateway import Gateway, PolicySource
from coderepairrl.plan.model import plan_model
from coderepairrl.plan.parts import raise_errors
from coderepairrl.protocols import Agent, EngineSpec, Sandbox
from coderepairrl.rewards import ScriptedReward
from coderepairrl.rollout import attempts
from coderepairrl.rollout.attempts import Attempt, make_attempt
from coderepairrl.rollout.episodes import AttemptSettings, PlannedAttempt
from coderepairrl.sandbox.fake import ScriptedBackend
from coderepairrl.stages.fix import REPAIR, Repair, Repository, attempt_repair
from coderepairrl.types import AgentReport, Ending, Endpoint, EngineNeeds, Episode, Limits, Sampling, Task

TASK = Task("toy/one", "repair it", "python", "dir:x", b"")
LIMITS = Limits(calls=1, seconds=1.0)
SUBMITTED = AgentReport("submitted", log="that was all")


class Way(NamedTuple):
    """How an agent ends once it has asked, how that is judged, and what else is expected."""

    end: Callable[[], object]
    """What it returns, or raises if that is an error."""
    ending: Ending
    reason: str
    exit: str = ""
    """What `crrl fix` calls it; empty: it raises the fault."""
    printed: str = ""
    asks: int = 1
    replies: int = 9
    """Of the engine's, which dies then."""
    insists: bool = False
    """It ends so whatever became of its requests."""


def exit_3() -> AgentFault:
    return AgentFault("ended with exit code 3", how="exit 3", printed="3")


WAYS = {
    "submits": Way(lambda: SUBMITTED, Ending.DONE, "submitted", "submitted", "that was all"),
    "submits_unasked": Way(lambda: SUBMITTED, Ending.VOID, "agent", printed="that was all", asks=0),
    "submits_all_the_same": Way(
        lambda: SUBMITTED, Ending.VOID, "engine", printed="that was all", asks=2, replies=1, insists=True
    ),
    "returns_nothing": Way(lambda: None, Ending.CRASH, "no report", "crash"),
    "raises": Way(lambda: ValueError("odd"), Ending.CRASH, "ValueError", "crash"),
    "raises_first": Way(lambda: ValueError("odd"), Ending.VOID, "agent", asks=0),
    "gives_up_waiting": Way(TimeoutError, Ending.CRASH, "TimeoutError", "crash"),
    "exits": Way(exit_3, Ending.CRASH, "exit 3", "crash", "3"),
    "exits_first": Way(exit_3, Ending.VOID, "agent", printed="3", asks=0),
    "cancels": Way(asyncio.CancelledError, Ending.CRASH, "CancelledError", "crash"),
    "breaks_at_a_limit": Way(lambda: ValueError("odd"), Ending.LIMIT, "calls", "calls", asks=LIMITS.calls + 3),
    "overruns": Way(lambda: asyncio.sleep(60.0), Ending.LIMIT, "time", "time"),
    "dies_with_the_engine": Way(lambda: SUBMITTED, Ending.VOID, "engine", printed="an HTTP error", asks=2, replies=1),
    "loses_the_gateway": Way(lambda: GatewayFault("no answer"), Ending.VOID, "gateway"),
    "is_refused_late": Way(lambda: GatewayFault("no answer"), Ending.LIMIT, "calls", "calls", asks=LIMITS.calls + 3),
    "loses_the_sandbox": Way(lambda: SandboxFault("it died"), Ending.VOID, "sandbox"),
}


class Breaks(Agent):
    """A program by its own account, though it runs here."""

    name, placement = "breaks", "sandbox"

    def __init__(self, way: str) -> None:
        self.way = WAYS[way]

    async def run(self, task: Task, sandbox: Sandbox, endpoint: Endpoint) -> AgentReport:
        await sandbox.write("a.py", b"x = 1\n")
        if self.way.asks:
            try:
                await ScriptedAgent([Say("hello")] * self.way.asks).run(task, sandbox, endpoint)
            except GatewayFault:  # a program dies of an HTTP error
                if not self.way.insists:
                    how = {"how": "exit 1", "printed": "an HTTP error"}
                    raise AgentFault("ended with exit code 1: an HTTP error", **how) from None
        end = self.way.end()
        if isinstance(end, BaseException):
            raise end
        return cast(AgentReport, await end if isinstance(end, Awaitable) else end)


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
    monkeypatch.setattr(exam, "_SHORT_SECONDS", 0.5)


@pytest.mark.parametrize("name", WAYS)
async def test_all_blame_alike(miniature: Path, tmp_path: Path, name: str) -> None:
    way, agent = WAYS[name], Breaks(name)
    made = await attempted(agent, miniature)
    assert (made.ending, made.reason, made.printed) == (way.ending, way.reason, way.printed), words(made.fault)
    assert (made.fault is not None) == (made.ending is Ending.VOID)

    episode = await trained(agent, miniature, tmp_path)
    assert (episode.ending, episode.reason, episode.printed) == (made.ending, made.reason, made.printed)
    assert (episode.fault, episode.patch) == (words(made.fault), made.patch)
    assert bool(episode.scores) == (made.fault is None)
    assert not episode.calls_known, "a program does not say which tools it called, nor does one that broke"

    options = ["agent=test_blame:Breaks", f"agent.options.way={name}", "engine=test_blame:Replies"]
    options += [f"engine.options.count={way.replies}", "rollout.calls=1", "rollout.seconds=1"]
    options += ["sandbox=coderepairrl.sandbox.fake:ScriptedBackend"]
    plan = Repair(tmp_path, tmp_path, plan_model(str(miniature), options, REPAIR))
    plan.repository, plan.issue, plan.task = Repository(tmp_path, "0" * 40), "", TASK
    raise_errors([*plan.served.errors(), *plan.errors()])
    try:
        patch, facts = await attempt_repair(plan)
    except Fault as fault:
        assert words(fault) == words(made.fault)
    else:
        assert (facts["exit"], patch, made.fault) == (way.exit, made.patch, None)


@pytest.mark.parametrize(
    "name", sorted(WAYS.keys() - {"overruns", "is_refused_late", "loses_the_gateway", "loses_the_sandbox"})
)
async def test_and_so_does_the_exam(miniature: Path, name: str) -> None:
    """Who asked an endpoint that is broken is not blamed, however it ended; who never asked is."""
    made = await attempted(Breaks(name), miniature)
    checks = {check.name: check for check in await exam.examine_agent_program(Breaks(name), ScriptedBackend())}
    ended, broken = checks["ends by itself"], checks["a broken endpoint is a fault"]
    if made.reason != "engine":  # the exam's own does not die
        assert ended.detail.partition(":")[0] == str(getattr(made.outcome, "exit", made.outcome)).partition(":")[0]
    asks = name not in ("submits_unasked", "raises_first", "exits_first")
    assert broken.ok == asks and ("answered 401" in broken.detail) == asks


async def source(agent: Breaks, model: Path) -> PolicySource:
    engine = await Replies(agent.way.replies).start(model, log_dir=model)
    return PolicySource(tokens.load_codec(model), engine)


async def attempted(
    agent: Breaks, model: Path, standing: Any = None, task: Task = TASK, limits: Limits = LIMITS
) -> Attempt:
    gateway = Gateway(await source(agent, model), sampling=Sampling(), on_turn=lambda *_: None)
    async with gateway.listening() as made:
        return await make_attempt(
            made, task, agent, ScriptedBackend(), name="one", limits=limits, seed=0, at_end=standing
        )


async def test_the_time_of_a_task_ends_its_attempt_before_that_of_the_run(miniature: Path) -> None:
    limited = replace(TASK, limits={"seconds": 0.3})
    made = await attempted(Breaks("overruns"), miniature, task=limited, limits=replace(LIMITS, seconds=30.0))
    assert (made.ending, made.reason) == (Ending.LIMIT, "time") and made.seconds < 20


async def trained(agent: Breaks, model: Path, folder: Path) -> Episode:
    terms = AttemptSettings(agent, ScriptedBackend(), LIMITS, {"train": [(ScriptedReward(default=0.5), 1.0)]})
    async with open_rollout(await source(agent, model), folder, terms) as rollout:
        return await rollout.run(PlannedAttempt(TASK, "train", 1, "toy/one-1", 0, 0, Sampling()))


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
