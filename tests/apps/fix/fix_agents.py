"""Agents that break, for `agent=fix_agents:...` in a command line."""

from __future__ import annotations

from coderepairrl.agents.scripted import Patch, Say, ScriptedAgent
from coderepairrl.protocols import Sandbox
from coderepairrl.types import AgentReport, Endpoint, Task


class Crashing(ScriptedAgent):
    """Repairs, and dies of what the model said."""

    name = "crashing"

    def __init__(self) -> None:
        super().__init__([Say("go on"), Patch("add.py", "a - b", "a + b")])

    async def run(self, task: Task, sandbox: Sandbox, endpoint: Endpoint) -> AgentReport:
        """See `Agent.run`."""
        await super().run(task, sandbox, endpoint)
        raise KeyError("cmd")
