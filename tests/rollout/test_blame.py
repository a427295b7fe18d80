"""Training, `crrl fix` and the exam of programs judge an agent alike, however it breaks."""

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
from coderepairrl.types import AgentReport, Ending, Endpoint, EngineNeeds, Limits, Sampling, Task

TASK = Task("toy/one", "repair it", "python", "dir:x", b"")
LIMITS = Limits(calls=1, seconds=1.0)
SUBMITTED = AgentReport("submitted", log="that was all")


class Way(NamedTuple):
    """How an agent ends after its requests, and how that is judged."""

    end: Callable[[], object]
    """Returns its result, or the error that it raises."""
    ending: Ending
    reason: str
    exit: str = ""
    """Exit in `crrl fix`; empty if that raises the fault."""
    printed: str = ""
    asks: int = 1
    replies: int = 9
    """Replies of the engine before it dies."""
    ignores_errors: bool = False
    """Whether it ends so although a request failed."""


def exit_3() -> AgentFault:
    return AgentFault("ended with exit code 3", how="exit 3", printed="3")


WAYS = {
    "submits": Way(lambda: SUBMITTED, Ending.DONE, "submitted", "submitted", "that was all"),
    "submits_unasked": Way(lambda: SUBMITTED, Ending.VOID, "agent", printed="that was all", asks=0),
    "submits_all_the_same": Way(
        lambda: SUBMITTED, Ending.VOID, "engine", printed="that was all", asks=2, replies=1, ignores_errors=True
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
    """Declares itself a program, but runs here."""

    name, placement = "breaks", "sandbox"

    def __init__(self, way: str) -> None:
        self.way = WAYS[way]

    async def run(self, task: Task, sandbox: Sandbox, endpoint: Endpoint) -> AgentReport:
        await sandbox.write("a.py", b"x = 1\n")
        if self.way.asks:
            try:
                await ScriptedAgent([Say("hello")] * self.way.asks).run(task, sandbox, endpoint)
            except GatewayFault:  # a program dies of an HTTP error
                if not self.way.ignores_errors:
                    how = {"how": "exit 1", "printed": "an HTTP error"}
                    raise AgentFault("ended with exit code 1: an HTTP error", **how) from None
        end = self.way.end()
        if isinstance(end, BaseException):
            raise end
        return cast(AgentReport, await end if isinstance(end, Awaitable) else end)


class Replies(EngineSpec):
    """An engine that dies after `count` replies."""

    name = "replies"

    def __init__(self, count: int) -> None:
        self.count = count

    async def start(self, model: Path, *, log_dir: Path, needs: EngineNeeds = EngineNeeds()) -> ScriptedEngine:
        return ScriptedEngine([[65, *tokens.load_codec(model).stop_ids[:1]]] * self.count)


def format_fault(fault: Fault | None) -> str:
    return "" if fault is None else f"{type(fault).__name__}: {fault}"


@pytest.fixture(autouse=True)
def shorten_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "_GRACE", 0.1)
    monkeypatch.setattr(exam, "_SHORT_SECONDS", 0.5)


@pytest.mark.parametrize("name", WAYS)
async def test_training_and_fix_judge_alike(miniature: Path, tmp_path: Path, name: str) -> None:
    way, agent = WAYS[name], Breaks(name)
    result = await attempt(agent, miniature)
    message = format_fault(result.fault)
    assert (result.ending, result.reason, result.printed) == (way.ending, way.reason, way.printed), message
    assert (result.fault is not None) == (result.ending is Ending.VOID)

    terms = AttemptSettings(agent, ScriptedBackend(), LIMITS, {"train": [(ScriptedReward(default=0.5), 1.0)]})
    async with open_rollout(await make_source(agent, miniature), tmp_path, terms) as rollout:
        episode = await rollout.run(PlannedAttempt(TASK, "train", 1, "toy/one-1", 0, 0, Sampling()))
    assert (episode.ending, episode.reason, episode.printed) == (result.ending, result.reason, result.printed)
    assert (episode.fault, episode.patch) == (message, result.patch)
    assert bool(episode.scores) == (result.fault is None)
    assert not episode.calls_known, "a program does not report its tool calls, nor does a broken one"

    options = ["agent=test_blame:Breaks", f"agent.options.way={name}", "engine=test_blame:Replies"]
    options += [f"engine.options.count={way.replies}", "rollout.calls=1", "rollout.seconds=1"]
    options += ["sandbox=coderepairrl.sandbox.fake:ScriptedBackend"]
    plan = Repair(tmp_path, tmp_path, plan_model(str(miniature), options, REPAIR))
    plan.repository, plan.issue, plan.task = Repository(tmp_path, "0" * 40), "", TASK
    raise_errors([*plan.served.errors(), *plan.errors()])
    try:
        patch, facts = await attempt_repair(plan)
    except Fault as fault:
        assert format_fault(fault) == message
    else:
        assert (facts["exit"], patch, result.fault) == (way.exit, result.patch, None)


@pytest.mark.parametrize(
    "name", sorted(WAYS.keys() - {"overruns", "is_refused_late", "loses_the_gateway", "loses_the_sandbox"})
)
async def test_so_does_the_exam_of_programs(miniature: Path, name: str) -> None:
    """A program that asked a broken endpoint is not blamed; one that never asked is."""
    result = await attempt(Breaks(name), miniature)
    checks = {check.name: check for check in await exam.examine_agent_program(Breaks(name), ScriptedBackend())}
    ended, broken = checks["ends by itself"], checks["a broken endpoint is a fault"]
    if result.reason != "engine":  # the exam's engine does not die
        assert ended.detail.partition(":")[0] == str(getattr(result.outcome, "exit", result.outcome)).partition(":")[0]
    asks = name not in ("submits_unasked", "raises_first", "exits_first")
    assert broken.ok == asks and ("answered 401" in broken.detail) == asks


async def make_source(agent: Breaks, model: Path) -> PolicySource:
    engine = await Replies(agent.way.replies).start(model, log_dir=model)
    return PolicySource(tokens.load_codec(model), engine)


async def attempt(
    agent: Breaks, model: Path, at_end: Any = None, task: Task = TASK, limits: Limits = LIMITS
) -> Attempt:
    source = await make_source(agent, model)
    async with Gateway(source, sampling=Sampling(), on_turn=lambda *_: None).listening() as gateway:
        return await make_attempt(
            gateway, task, agent, ScriptedBackend(), name="one", limits=limits, seed=0, at_end=at_end
        )


async def test_the_time_limit_of_a_task_counts_if_it_is_shorter_than_the_runs(miniature: Path) -> None:
    limited = replace(TASK, limits={"seconds": 0.3})
    result = await attempt(Breaks("overruns"), miniature, task=limited, limits=replace(LIMITS, seconds=30.0))
    assert (result.ending, result.reason) == (Ending.LIMIT, "time") and result.seconds < 20


@pytest.mark.parametrize(
    ("name", "boundary"), [("submits", "gateway"), ("raises_first", "agent"), ("dies_with_the_engine", "engine")]
)
async def test_the_first_fault_is_reported_and_not_a_later_one_of_the_workspace(
    miniature: Path, name: str, boundary: str
) -> None:
    async def fails(box: Sandbox, patch: bytes) -> None:
        raise GatewayFault("later")

    result = await attempt(Breaks(name), miniature, fails)
    assert (result.ending, result.reason, b"+x = 1" in result.patch) == (Ending.VOID, boundary, True)
