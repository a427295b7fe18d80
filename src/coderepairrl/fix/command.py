"""One attempt at a user's own bug: the agent, sandbox and gateway of training, without a reward."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from coderepairrl.errors import AgentFault, GatewayFault
from coderepairrl.fix.model import Choice, served
from coderepairrl.fix.relay import Relay
from coderepairrl.fix.repository import Repository
from coderepairrl.fix.trace import Trace
from coderepairrl.rollout import run_agent
from coderepairrl.runs.codec import dump
from coderepairrl.train.parts import limits, placed_agent


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
    key_env: str | None = None,
    model_name: str = "",
    trace: Trace | None = None,
) -> Fixed:
    """Let the model of `choice` repair what `issue` describes, in a sandboxed copy of `repository`.

    The repository itself is only read. Raises `ConfigError`, `PrerequisiteError` (no sandbox), `TaskError`, and the
    `Fault` of whatever broke.
    """
    config, trace = choice.config, trace or Trace(quiet=True)
    agent, backend = placed_agent(config)
    task, allowed = repository.task(issue), limits(config)
    trace.say("repository", f"{repository.root} at {repository.commit[:12]}, in the sandbox {backend.name}")
    trace.say("model", f"{choice.name}, temperature {temperature:g}")
    async with (
        served(choice, temperature, key_env=key_env, model_name=model_name) as upstream,
        Relay(upstream, trace, {"temperature": temperature}) as relay,
        backend.open(task) as box,
    ):
        began = time.monotonic()
        try:
            report = await run_agent(agent, task, box, relay.endpoint, allowed.seconds)
        except (AgentFault, GatewayFault) as fault:
            if choice.url and not fault.fix:
                fault.fix = "check the URL (it ends in /v1), the key, --model-name and --temperature"
            raise
        seconds = time.monotonic() - began
        trace.ended(report, seconds)
        patch = await box.diff()
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
