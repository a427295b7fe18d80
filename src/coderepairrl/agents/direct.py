"""`direct`: no scaffold. One request with the issue and some files, one reply with the edits."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from coderepairrl.agents.budget import Budget
from coderepairrl.agents.chat import Chat, LimitReached, Message
from coderepairrl.agents.options import parse
from coderepairrl.agents.texts import FULL
from coderepairrl.agents.tools import Result, Tools
from coderepairrl.errors import AgentFault, ConfigError
from coderepairrl.protocols import Agent, FirstRequest, Sandbox
from coderepairrl.types import AgentReport, Endpoint, Limits, Task, ToolCall

FORMAT = """\
Write each edit like this, with the path of the file on the line before:

path/to/file.py
<<<<<<< SEARCH
lines of the file, exactly as they stand there
=======
the lines to put in their place
>>>>>>> REPLACE

The lines under SEARCH must occur exactly once in the file. With nothing under SEARCH the file is created."""
SYSTEM = f"""\
You repair software. You are given an issue and files of the repository that it is about. Reply with the edits that \
repair the defect, and with nothing that is not needed for it. {FORMAT} You cannot run anything and have this one \
reply."""

HEAD, _DIVIDER, _TAIL = "<<<<<<< SEARCH", "=======", ">>>>>>> REPLACE"
_LISTING_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class DirectOptions:
    """What the model is shown. Raises `ConfigError` for an option that cannot work."""

    files: Literal["mentioned", "oracle", "all"] = "mentioned"
    """Which files: those whose path or name the issue has, those that the reference changes (an upper bound for any
    search), or all. Where none is found, all."""
    context_chars: int = 20_000
    """At most so much of them: whole files, in the order of their paths, until one does not fit. Never more than two
    characters for each token that the episode may have."""
    system: str = SYSTEM
    """The system prompt; empty sends none."""

    def __post_init__(self) -> None:
        if self.context_chars < 0:
            raise ConfigError("agent.options.context_chars is negative")


class Direct(Agent):
    """One turn. Takes `DirectOptions` by name."""

    name = "direct"
    placement: Literal["host", "sandbox"] = "host"

    def __init__(self, **options: Any) -> None:
        self.options = parse(DirectOptions, self.name, options)

    @property
    def reads_reference(self) -> bool:
        """With ``files="oracle"``."""
        return self.options.files == "oracle"

    def first_request(self, task: Task) -> FirstRequest:
        """Without files, which are only known in the sandbox."""
        return FirstRequest(self._messages(task.prompt))

    async def run(self, task: Task, sandbox: Sandbox, endpoint: Endpoint) -> AgentReport:
        """Ask once and apply the edits of the reply, each a call of `edit` in the report.

        The report's `exit` is ``submitted``, or the limit that left no room for a reply. Raises `GatewayFault`,
        `AgentFault` (no git, or the endpoint refuses our request) and `SandboxFault`.
        """
        budget = Budget(endpoint.limits)
        messages = self._messages(
            await self._prompt(task, sandbox, within(self.options.context_chars, endpoint.limits))
        )
        done: list[ToolCall] = []
        exit = "submitted"
        try:
            async with Chat(endpoint, {}) as chat:
                reply = await chat.complete(messages, (), budget.reply_tokens(), budget.seconds_left)
        except LimitReached as reached:
            exit = reached.limit
        else:
            messages.append(reply.message)
            tools = Tools(sandbox, FULL, output_chars=0)
            for edit in edits(str(reply.message.get("content") or "")):
                started = time.monotonic()
                result: Result = await tools.apply_patch(edit)
                seconds = time.monotonic() - started
                done.append(ToolCall(0, "edit", json.dumps(edit), result.ok, len(result.text), seconds))
        return AgentReport(exit, tuple(done), "\n".join(map(json.dumps, messages)))

    def _messages(self, prompt: str) -> list[Message]:
        system = [{"role": "system", "content": self.options.system}] if self.options.system else []
        return [*system, {"role": "user", "content": prompt}]

    async def _prompt(self, task: Task, sandbox: Sandbox, room: int) -> str:
        shown = []
        there = await files_of(sandbox) if task.workspace else []
        for path in choose(self.options.files, task, there):
            try:
                text = (await sandbox.read(path)).decode()
            except (OSError, UnicodeDecodeError):  # a link to nowhere, a picture
                continue
            room -= len(text)
            if room < 0:
                break
            shown.append(f"{path}\n```\n{text.rstrip()}\n```")
        return "\n\n".join([task.prompt, *shown])


def within(chars: int, limits: Limits) -> int:
    """At most `chars`, and so few that the episode's tokens suffice for the issue and a reply, too.

    >>> within(20_000, Limits()), within(20_000, Limits(tokens=2_000))
    (20000, 4000)
    """
    return min(chars, 2 * limits.tokens)  # of code a token is 3 to 4 characters


def choose(which: str, task: Task, paths: list[str]) -> list[str]:
    """The files among `paths` to show, all of them where the choice `which` leaves none.

    >>> task = Task("t", "add() in calc.py subtracts", "python", "dir:x", b"--- a/calc.py\\n+++ b/calc.py\\n")
    >>> choose("mentioned", task, ["calc.py", "other.py"]), choose("oracle", task, ["a.py", "calc.py"])
    (['calc.py'], ['calc.py'])
    """
    chosen = paths
    if which == "mentioned":
        chosen = [path for path in paths if PurePosixPath(path).name in task.prompt]
    elif which == "oracle":
        changed = set(re.findall(rb"^--- a/([^\t\n]+)", task.reference, re.M))
        chosen = [path for path in paths if path.encode() in changed]
    return chosen or paths


def edits(reply: str) -> list[dict[str, str]]:
    """The edits in a reply, as arguments of `Tools.apply_patch`.

    >>> edits("So:\\n\\na.py\\n<<<<<<< SEARCH\\nx = 1\\n=======\\nx = 2\\n>>>>>>> REPLACE\\n")
    [{'file_path': 'a.py', 'old_content': 'x = 1\\n', 'new_content': 'x = 2\\n'}]
    """
    lines = reply.split("\n")
    found: list[dict[str, str]] = []
    free = 0  # lines before are of earlier edits
    while True:
        # Each is the first after the other: where one is missing, no later edit is whole either. So no line is looked
        # at twice, whatever a policy repeats.
        head = next((at for at in range(free, len(lines)) if lines[at] == HEAD and _path(lines, at, free)), -1)
        divider = _after(lines, head, lambda line: line == _DIVIDER)
        tail = _after(lines, divider, lambda line: line.startswith(_TAIL))
        if -1 in (head, divider, tail):
            return found
        old, new = (
            "".join(f"{line}\n" for line in part) for part in (lines[head + 1 : divider], lines[divider + 1 : tail])
        )
        path = _path(lines, head, free).strip("`* :")
        found.append({"file_path": path, "old_content": old, "new_content": new})
        free = tail + 1


def _path(lines: list[str], head: int, free: int) -> str:
    """The line above an edit, or above the fence above it, from line `free` on."""

    def named(at: int) -> bool:
        return at >= free and lines[at] != "" and not lines[at][0].isspace()

    if named(head - 2) and lines[head - 1].startswith("```"):
        return lines[head - 2]
    return lines[head - 1] if named(head - 1) else ""


def _after(lines: list[str], at: int, fits: Callable[[str], bool]) -> int:
    return -1 if at < 0 else next((n for n in range(at + 1, len(lines)) if fits(lines[n])), -1)


async def files_of(sandbox: Sandbox) -> list[str]:
    """Paths of the task's commit, in order. Raises `AgentFault` without git."""
    done = await sandbox.exec(["git", "ls-files", "-z"], timeout=_LISTING_SECONDS, max_bytes=1 << 24)
    if not done.ok:
        raise AgentFault(f"git cannot list the files: {done.output.decode(errors='replace')}")
    return sorted(done.output.decode(errors="surrogateescape").rstrip("\0").split("\0"))
