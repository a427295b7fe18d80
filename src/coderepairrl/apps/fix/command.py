"""One attempt at a user's own bug: the agent, sandbox and gateway of training, without a reward."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from coderepairrl.apps.fix.repository import Repository
from coderepairrl.apps.fix.trace import Trace
from coderepairrl.assembly.place import limits, place
from coderepairrl.assembly.policy import Choice, replying
from coderepairrl.errors import AgentFault, Fault
from coderepairrl.gateway import Server, Session
from coderepairrl.processes.scratch import scratch
from coderepairrl.protocols import Agent, Sandbox
from coderepairrl.rollout import how_it_ended, run_agent
from coderepairrl.runs.codec import dump
from coderepairrl.types import AgentReport, Ending, Sampling, Task

DEFAULTS = ("run.name=fix", "rollout.seconds=600", "rollout.tokens=32768")
"""For a model that no run tells us about: what one user waits for, not what a thousand episodes may cost."""
USED = (
    *("agent", "sandbox", "engine", "model.renderer", "model.thinking"),
    *("rollout.calls", "rollout.tokens", "rollout.seconds", "rollout.turn_tokens"),
    *("rollout.history_policy", "gateway.accept"),
)
"""Settings that mean something here."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """What came of it. `patch` are the bytes of ``git diff``, empty if there is none; `exit` is the agent's."""

    patch: bytes
    exit: str
    model: str
    repository: str
    commit: str
    seconds: float
    tool_calls: int | None = None
    sandbox: str = ""
    limits: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """As plain data; a patch that is not UTF-8 is ``base64:...``."""
        found: dict[str, Any] = dump(self)
        return found


async def fix(
    repository: Repository,
    issue: str,
    choice: Choice,
    *,
    temperature: float = 0.0,
    trace: Trace | None = None,
) -> Fixed:
    """Let the model of `choice` repair what `issue` describes, in a sandboxed copy of `repository`.

    The repository itself is only read. Raises `ConfigError`, `PrerequisiteError` (no sandbox), `TaskError`, and the
    `Fault` of whatever broke.
    """
    config, trace = choice.config, trace or Trace(quiet=True)
    here = place(config)
    agent, backend, chosen = here.agent, here.sandbox, here.choice
    task, allowed = repository.task(issue), limits(config)
    trace.say("repository", f"{repository.root} at {repository.commit[:12]}")
    trace.say("sandbox", f"{backend.name}: {chosen.why}")
    trace.say("model", f"{choice.name}, temperature {temperature:g}")
    sampling = Sampling(temperature=temperature, max_tokens=allowed.turn_tokens)
    with scratch("fix") as home:
        home.chmod(0o711)  # guests run as another user, and the socket is in it
        async with replying(choice, home) as source:
            server = Server(
                source, sampling=sampling, on_turn=lambda _, turn: trace.turn(turn), accept=config.gateway.accept
            )
            try:
                await server.start(socket=home / "gateway.sock")
                session = server.open("fix", limits=allowed, seed=0)
                async with backend.open(task) as box:
                    began = time.monotonic()
                    report = await _attempt(agent, task, box, session)
                    seconds = time.monotonic() - began
                    trace.ended(report, seconds)
                    patch = await box.diff()
                    if not patch:
                        trace.say("patch", "none: nothing in the repository has changed")
                    if not patch and agent.placement == "sandbox" and report.exit != "crash":  # which says it itself
                        trace.printed(report.log)
            finally:
                await server.stop()
    return Fixed(
        patch=patch,
        exit=report.exit,
        model=choice.name,
        repository=str(repository.root),
        commit=repository.commit,
        seconds=round(seconds, 3),
        tool_calls=None if report.tool_calls is None else len(report.tool_calls),
        sandbox=backend.name,
        limits=asdict(allowed),
    )


async def _attempt(agent: Agent, task: Task, box: Sandbox, session: Session) -> AgentReport:
    """What the agent reports; of one that broke, the limit at which it did, or that it crashed (`how_it_ended`).

    Raises the fault of what broke first.
    """
    outcome: AgentReport | AgentFault
    try:
        outcome = await run_agent(agent, task, box, session.endpoint, session.limits.seconds)
    except AgentFault as fault:
        outcome = fault
    except Fault as fault:
        raise session.fault or fault from None
    if session.fault is not None:  # the engine's death reaches the agent as an HTTP error
        raise session.fault
    if isinstance(outcome, AgentReport):
        return outcome
    ending, limit = how_it_ended(outcome, session)
    return AgentReport("crash", log=str(outcome)) if ending is Ending.CRASH else AgentReport(limit, log=outcome.printed)
