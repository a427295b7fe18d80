"""One attempt at one task: agent, sandbox and gateway meet here, and nowhere else.

Training, evaluation, ``crrl fix`` and the exam of agent programs all attempt in this way, and blame alike.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import cast

from coderepairrl.errors import AgentFault, CodeRepairError, Fault, UsageError
from coderepairrl.gateway import Gateway
from coderepairrl.protocols import Agent, Sandbox, SandboxBackend
from coderepairrl.sandbox.standing import workspace
from coderepairrl.types import AgentReport, Ending, Endpoint, Limits, Sampling, Task, Turn

_GRACE = 5.0
"""Seconds beyond the time limit that an agent has to notice by itself that its time is up."""

AgentOutcome = AgentReport | AgentFault
"""What an agent reports, or how it broke."""
AtEnd = Callable[[Sandbox, bytes], Awaitable[None]]
"""Called with an attempt's workspace and patch before the workspace is removed. May raise `Fault`."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """What came of an attempt.

    `reason` is the limit that ended it, or how the agent broke, or by its own account ended; of a VOID attempt the
    boundary of its fault.
    """

    ending: Ending
    reason: str
    fault: Fault | None
    """Why it is VOID: the part that broke first, where that was not the policy's doing."""
    outcome: AgentOutcome | None
    """The agent's own; None where another part broke before it ended."""
    turns: tuple[Turn, ...]
    patch: bytes
    seconds: float
    """How long the agent worked."""
    timings: Mapping[str, float]
    """Seconds by part: ``sandbox`` (until it was open), ``diff``, ``generate``; without what was not come to."""
    printed: str
    """By a program, all of it. The log of an agent on the host repeats its turns, and is not kept."""


async def attempt(
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
    """Let `agent` work on `task` in a sandbox of `backend`, with a session of `gateway` that is called `name`.

    `sampling` may replace the gateway's. Where a part breaks, the attempt says which, and no `Fault` is raised.
    """
    clock, timings = time.monotonic, dict[str, float]()
    outcome: AgentOutcome | None = None
    broken: Fault | None = None
    patch, seconds, began = b"", 0.0, clock()
    session = gateway.open(name, limits=limits, seed=seed, sampling=sampling)
    try:
        async with workspace(backend, task) as box:
            opened = clock()
            timings["sandbox"] = opened - began
            session.start_clock()
            outcome = await _outcome(agent, task, box, session.endpoint)
            worked = clock()
            seconds = worked - opened
            patch = await box.diff()
            timings["diff"] = clock() - worked
            if at_end is not None:
                await at_end(box, patch)
    except Fault as other:
        broken = other
    finally:
        turns = await gateway.close(session)
    timings["generate"] = sum(turn.ended - turn.started for turn in turns)
    reached_model = session.answered or session.limit  # a call that a limit refused was one, too
    if (
        isinstance(outcome, AgentReport)
        and agent.placement == "sandbox"
        and outcome.exit != "time"
        and not reached_model
    ):  # the program is broken or misconfigured: a zero would blame a policy that was never asked
        words = f"agent {agent.name} ended without a call to the model: {outcome.log[-2000:].strip()}"
        outcome = AgentFault(words, printed=outcome.log)
    # an agent that breaks after a reply may have been broken by it, which is a CRASH and scored; before, it is a fault
    own = outcome if isinstance(outcome, AgentFault) and not reached_model else None
    fault = session.fault or own or broken  # in the order in which they broke
    ending, reason = (Ending.VOID, fault.boundary) if fault else _ended(cast(AgentOutcome, outcome), session.limit)
    return Attempt(ending, reason, fault, outcome, turns, patch, seconds, timings, _printed(agent, outcome))


async def _outcome(agent: Agent, task: Task, box: Sandbox, endpoint: Endpoint) -> AgentOutcome:
    """What `agent` reports, that its time was up when it did not notice by itself, or how it broke.

    Whatever an agent raises that is no error of ours has broken it, with the traceback: its bugs end its episode and
    are counted, and end neither the run nor (by ``sys.exit``) the process. Raises the `Fault`s of other parts.
    """
    try:
        async with asyncio.timeout(endpoint.limits.seconds + _GRACE) as clock:
            report: object = await agent.run(task, box, endpoint)
    except AgentFault as fault:
        return fault
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        # a `UsageError` is what our own functions raise for text that a policy may have written, a diff for example
        if isinstance(error, CodeRepairError) and not isinstance(error, UsageError):
            raise
        if clock.expired():
            return AgentReport("time")
        being_stopped = cast(asyncio.Task[None], asyncio.current_task()).cancelling()
        if isinstance(error, asyncio.CancelledError) and being_stopped:
            raise
        where = "".join(traceback.format_exception(error))
        what = "".join(traceback.format_exception_only(error)).strip()  # also of an error whose own text fails
        return AgentFault(f"agent {agent.name} raised {what}\n{where}", how=type(error).__name__)
    if not isinstance(report, AgentReport):
        return AgentFault(f"agent {agent.name} returned {report!r}, not an AgentReport", how="no report")
    return report


def _ended(outcome: AgentOutcome, limit: str) -> tuple[Ending, str]:
    """How an attempt without a fault ended, and why. One that breaks at a `limit` of the gateway's ended at it."""
    if isinstance(outcome, AgentReport) and not limit and outcome.exit in ("calls", "tokens", "time"):
        limit = outcome.exit
    if limit:
        return Ending.LIMIT, limit
    return (Ending.DONE, outcome.exit) if isinstance(outcome, AgentReport) else (Ending.CRASH, outcome.how)


def _printed(agent: Agent, outcome: AgentOutcome | None) -> str:
    if agent.placement == "host" or outcome is None:
        return ""
    return str(outcome.log if isinstance(outcome, AgentReport) else outcome.printed)
