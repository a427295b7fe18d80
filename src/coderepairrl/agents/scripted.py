"""A scripted agent for tests of everything around an agent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from coderepairrl.agents.chat import Chat, LimitReached, Message
from coderepairrl.agents.patching import replace_once
from coderepairrl.agents.stats import command_names
from coderepairrl.errors import AgentFault
from coderepairrl.protocols import Agent, Sandbox
from coderepairrl.types import AgentReport, Endpoint, Task, ToolCall


@dataclass(frozen=True, slots=True)
class Say:
    """Call the model with `text` as the next user message."""

    text: str
    max_tokens: int = 64


@dataclass(frozen=True, slots=True)
class Shell:
    """Run a bash command in the sandbox."""

    cmd: str
    timeout: float = 10.0


@dataclass(frozen=True, slots=True)
class Patch:
    """Replace the only occurrence of `old` in a file."""

    path: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Write:
    """Write a whole file."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Pause."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Crash:
    """Fail as an agent program would."""

    message: str = "scripted crash"


Action = Say | Shell | Patch | Write | Wait | Crash
Script = Sequence[Action] | Callable[[Task], Sequence[Action]]


class ScriptedAgent(Agent):
    """Performs `script`, a list of actions or a function of the task, and reports `exit`.

    A limit of the gateway ends the script and is reported; errors of actions are raised.
    """

    name = "scripted"

    def __init__(
        self, script: Script = (), *, exit: str = "submitted", placement: Literal["host", "sandbox"] = "host"
    ) -> None:
        self.script = script
        self.exit = exit
        self.placement: Literal["host", "sandbox"] = placement

    async def run(self, task: Task, sandbox: Sandbox, endpoint: Endpoint) -> AgentReport:
        """Perform the script. Raises `AgentFault` for `Crash`, and `GatewayFault`."""
        history: list[Message] = [{"role": "user", "content": task.prompt}]
        calls: list[ToolCall] = []
        turn = -1
        async with Chat(endpoint, {}) as chat:
            for action in self.script(task) if callable(self.script) else self.script:
                started = time.monotonic()
                if isinstance(action, Say):
                    history.append({"role": "user", "content": action.text})
                    try:
                        reply = await chat.complete(history, (), action.max_tokens, endpoint.limits.seconds)
                    except LimitReached as reached:
                        return AgentReport(reached.limit, tuple(calls))
                    history.append(reply.message)
                    turn += 1
                    continue
                ok, size = await _perform(action, sandbox)
                command = " ".join(command_names(action.cmd)) if isinstance(action, Shell) else ""
                seconds = time.monotonic() - started
                name = type(action).__name__.lower()
                calls.append(ToolCall(turn, name, str(asdict(action)), ok, size, seconds, command))
        return AgentReport(self.exit, tuple(calls))


async def _perform(action: Action, sandbox: Sandbox) -> tuple[bool, int]:
    if isinstance(action, Shell):
        done = await sandbox.exec(["bash", "-c", action.cmd], timeout=action.timeout)
        return done.ok, len(done.output)
    if isinstance(action, Patch):
        await sandbox.write(action.path, replace_once(await sandbox.read(action.path), action.old, action.new))
    elif isinstance(action, Write):
        await sandbox.write(action.path, action.text.encode())
    elif isinstance(action, Wait):
        await asyncio.sleep(action.seconds)
    elif isinstance(action, Crash):
        raise AgentFault(action.message)
    return True, 0
