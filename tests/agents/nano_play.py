"""One run of Nano against a scripted model, in a real git repository with real commands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coderepairrl import agents
from coderepairrl.agents.scripted import Answer, Request, ScriptedEndpoint
from coderepairrl.types import AgentReport, Limits, Task, ToolCall
from folder_sandbox import FolderSandbox

ISSUE = "add() subtracts {braces} stay"
FILES = {"add.py": b"def add(a, b):\n    return a - b\n", "notes.txt": b"one\ntwo\n"}
DONE = Answer("The repair is in place.")


def shell(*cmds: str, tokens: int | None = None) -> Answer:
    return Answer(None, tuple(("shell", {"cmd": cmd}) for cmd in cmds), tokens)


def patch(path: str, old: str, new: str, **more: str) -> Answer:
    return Answer(None, (("apply_patch", {"file_path": path, "old_content": old, "new_content": new, **more}),))


@dataclass(frozen=True)
class Outcome:
    report: AgentReport
    requests: list[Request]
    sandbox: FolderSandbox

    @property
    def conversation(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.report.log.splitlines()]

    @property
    def results(self) -> list[str]:
        """Results of the tools."""
        return [message["content"] for message in self.conversation if message["role"] == "tool"]

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return self.report.tool_calls or ()

    @property
    def ok(self) -> list[bool]:
        return [call.ok for call in self.calls]


async def play(
    folder: Path,
    *answers: Answer,
    limits: Limits | None = None,
    files: Mapping[str, bytes] = FILES,
    agent: str = "nano",
    **options: Any,
) -> Outcome:
    """Run `agent`, a Nano, on `files`; the last answer repeats."""
    if agent.startswith("nano"):
        options = {"warnings": False, **options}
    root = folder / "repo"
    root.mkdir(parents=True)
    sandbox = FolderSandbox(root, files)
    task = Task("toy/add", ISSUE, "python", f"dir:{root}", b"")
    async with ScriptedEndpoint(answers) as server:
        report = await agents.make_agent(agent, **options).run(task, sandbox, server.endpoint(limits))
        return Outcome(report, server.requests, sandbox)
