"""One attempt at one task: the only place where agent, sandbox and gateway meet.

Training, evaluation, ``crrl fix`` and the exam of agent programs share it.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

from coderepairrl.errors import AgentFault, CodeRepairError, Fault, GatewayFault, UsageError
from coderepairrl.gateway import Gateway, Session
from coderepairrl.protocols import Agent, Sandbox, SandboxBackend
from coderepairrl.sandbox.wrapped import open_workspace
from coderepairrl.types import AgentReport, Ending, Limits, Sampling, Task, Turn

_GRACE = 5.0
"""Seconds for an agent to end by itself after its time limit."""

AgentOutcome = AgentReport | AgentFault
AtEnd = Callable[[Sandbox, bytes], Awaitable[None]]
"""Called with workspace and patch before the workspace is removed. May raise `Fault`."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """Result of an attempt.

    `reason` is the limit that ended it, or the agent's failure or reported exit; if VOID, the fault's boundary.
    """

    ending: Ending
    reason: str
    fault: Fault | None
    """First failure, if VOID."""
    outcome: AgentOutcome | None
    turns: tuple[Turn, ...]
    patch: bytes
    seconds: float
    timings: Mapping[str, float]
    """Seconds by part: ``sandbox`` (opening), ``diff``, ``generate``."""
    printed: str
    """The program's full output; empty for agents on the host, whose log repeats the turns."""


async def make_attempt(
    gateway: Gateway,
    task: Task,
    agent: Agent,
    backend: SandboxBackend,
    *,
    name: str,
    limits: Limits,
    seed: int,
    sampling: Sampling | None = None,
    at_end: AtEnd | None = None,
) -> Attempt:
    """Let `agent` work on `task` in a sandbox, with a `gateway` session called `name`.

    A `Fault` is returned in the result, not raised.
    """
    clock, timings = time.monotonic, dict[str, float]()
    limits = replace(limits, seconds=min(limits.seconds, task.limits.get("seconds", limits.seconds)))
    outcome: AgentOutcome | None = None
    raised_fault: Fault | None = None
    patch, seconds, began = b"", 0.0, clock()
    session = gateway.open(name, limits=limits, seed=seed, sampling=sampling)
    try:
        async with open_workspace(backend, task) as box:
            agent_began = clock()
            timings["sandbox"] = agent_began - began
            session.start_clock()
            outcome = await _run_agent(agent, task, box, session)
            agent_ended = clock()
            seconds = agent_ended - agent_began
            patch = await box.diff()
            timings["diff"] = clock() - agent_ended
            if at_end is not None:
                await at_end(box, patch)
    except Fault as error:
        raised_fault = error
    finally:
        turns = await gateway.close(session)
    timings["generate"] = sum(turn.ended - turn.started for turn in turns)
    reached_model = session.has_sampled or session.limit  # a call that a limit refused also reached it
    if (
        isinstance(outcome, AgentReport)
        and agent.placement == "sandbox"
        and outcome.exit != "time"
        and not reached_model
    ):  # the program is broken or misconfigured: a reward of 0 would blame a policy that was never called
        message = f"agent {agent.name} ended without a call to the model: {outcome.log[-2000:].strip()}"
        outcome = AgentFault(message, printed=outcome.log)
    # an agent's failure after a reply may be caused by it: a CRASH, which is scored; before any reply, it is a fault
    agent_fault = outcome if isinstance(outcome, AgentFault) and not reached_model else None
    fault = session.fault or agent_fault or raised_fault  # in the order of events
    if fault is not None:
        ending, reason = Ending.VOID, fault.boundary
    else:
        ending, reason = _choose_ending(cast(AgentOutcome, outcome), session.limit)
    return Attempt(ending, reason, fault, outcome, turns, patch, seconds, timings, _printed_output(agent, outcome))


async def _run_agent(agent: Agent, task: Task, box: Sandbox, session: Session) -> AgentOutcome:
    # an agent's bug ends its episode and is counted; it must not end the run, nor the process by ``sys.exit``
    try:
        async with asyncio.timeout(session.limits.seconds + _GRACE) as timeout:
            report: object = await agent.run(task, box, session.endpoint)
    except AgentFault as fault:
        return fault
    except GatewayFault:
        if session.fault is not None or not session.limit:
            raise
        return AgentReport(session.limit)  # a limit that refuses a call after its first heartbeat breaks the connection
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        # our own functions raise `UsageError` for text that a policy may have written, such as a diff
        if isinstance(error, CodeRepairError) and not isinstance(error, UsageError):
            raise
        if timeout.expired():
            return AgentReport("time")
        is_stopping = cast(asyncio.Task[None], asyncio.current_task()).cancelling()
        if isinstance(error, asyncio.CancelledError) and is_stopping:
            raise
        where = "".join(traceback.format_exception(error))
        message = "".join(traceback.format_exception_only(error)).strip()  # works even if `str(error)` raises
        return AgentFault(f"agent {agent.name} raised {message}\n{where}", how=type(error).__name__)
    if not isinstance(report, AgentReport):
        return AgentFault(f"agent {agent.name} returned {report!r}, not an AgentReport", how="no report")
    return report


def _choose_ending(outcome: AgentOutcome, limit: str) -> tuple[Ending, str]:
    if isinstance(outcome, AgentReport) and not limit and outcome.exit in ("calls", "tokens", "time"):
        limit = outcome.exit
    if limit:  # also if the agent crashed at the limit
        return Ending.LIMIT, limit
    return (Ending.DONE, outcome.exit) if isinstance(outcome, AgentReport) else (Ending.CRASH, outcome.how)


def _printed_output(agent: Agent, outcome: AgentOutcome | None) -> str:
    if agent.placement == "host" or outcome is None:
        return ""
    return str(outcome.log if isinstance(outcome, AgentReport) else outcome.printed)
