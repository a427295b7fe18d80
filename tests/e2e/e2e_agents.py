"""An agent that knows the answer to some tasks, without asking the model."""

from __future__ import annotations

from coderepairrl.grading import apply_patch
from coderepairrl.protocols import Agent, Sandbox
from coderepairrl.types import AgentReport, Endpoint, Task


class Gold(Agent):
    """Repairs the tasks whose id has an ``r`` in its last part, leaves an edit that helps nobody in those with an
    ``s``, and does nothing to others."""

    name = "gold"
    placement = "host"

    async def run(self, task: Task, sandbox: Sandbox, endpoint: Endpoint) -> AgentReport:
        last = task.id.rpartition("/")[2]
        if "r" in last:
            assert not await apply_patch(sandbox, task.reference)
        elif "s" in last:
            await sandbox.write("notes.txt", b"I was here.\n")
        return AgentReport("submitted")
