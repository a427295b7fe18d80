"""`direct`: no scaffold. One request with the issue and some files, one reply with the edits."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from coderepairrl.agents import blocks
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

TAGS = """\
Think first, and then answer. Reply in exactly this form, each tag on a line of its own:

<think>
your thoughts
</think>
<answer>
the edits
</answer>"""
_LISTING_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class DirectOptions:
    """What the model is shown. Raises `ConfigError` for an option that cannot work."""

    files: Literal["mentioned", "oracle", "all", "none"] = "mentioned"
    """Which files: those whose path or name the issue has, those that the reference changes (an upper bound for any
    search), or all. Where none is found, all. With `none` the issue says what there is to know."""
    context_chars: int = 20_000
    """At most so much of them: whole files, in the order of their paths, until one does not fit. Never more than two
    characters for each token that the episode may have."""
    system: str = SYSTEM
    """The system prompt; empty sends none."""
    tags: bool = False
    """Whether the system prompt also asks for a thought and an answer between tags. Where a reply has an answer between
    tags, only its edits are made, whatever was asked for."""

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
        """Without files, which are only known in the sandbox: all of it with ``files="none"``."""
        return FirstRequest(self._messages(task.prompt))

    async def run(self, task: Task, sandbox: Sandbox, endpoint: Endpoint) -> AgentReport:
        """Ask once and apply the edits of the reply, each a call of `edit` in the report.

        The report's `exit` is ``submitted``, or the limit that left no room for a reply. Raises `GatewayFault`,
        `AgentFault` (no git, or the endpoint refuses our request) and `SandboxFault`.
        """
        budget = Budget(endpoint.limits)
        there = await files_of(sandbox) if task.workspace else []
        only = there[0] if len(there) == 1 else ""
        messages = self._messages(
            await self._prompt(task, sandbox, there, within(self.options.context_chars, endpoint.limits))
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
            for edit in edits(str(reply.message.get("content") or ""), only):
                started = time.monotonic()
                result: Result = await tools.apply_patch(edit, lines=True)
                seconds = time.monotonic() - started
                done.append(ToolCall(0, "edit", json.dumps(edit), result.ok, len(result.text), seconds))
        return AgentReport(exit, tuple(done), "\n".join(map(json.dumps, messages)))

    def _messages(self, prompt: str) -> list[Message]:
        asked = "\n\n".join(filter(None, (self.options.system, TAGS if self.options.tags else "")))
        system = [{"role": "system", "content": asked}] if asked else []
        return [*system, {"role": "user", "content": prompt}]

    async def _prompt(self, task: Task, sandbox: Sandbox, there: list[str], room: int) -> str:
        shown = []
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
    """The files among `paths` to show, all of them where the choice `which` finds none; none if it is ``none``.

    >>> task = Task("t", "add() in calc.py subtracts", "python", "dir:x", b"--- a/calc.py\\n+++ b/calc.py\\n")
    >>> choose("mentioned", task, ["calc.py", "other.py"]), choose("oracle", task, ["a.py", "calc.py"])
    (['calc.py'], ['calc.py'])
    """
    if which == "none":
        return []
    chosen = paths
    if which == "mentioned":
        chosen = [path for path in paths if PurePosixPath(path).name in task.prompt]
    elif which == "oracle":
        changed = set(re.findall(rb"^--- a/([^\t\n]+)", task.reference, re.M))
        chosen = [path for path in paths if path.encode() in changed]
    return chosen or paths


def edits(reply: str, path: str = "") -> list[dict[str, str]]:
    """The edits in a reply's answer (`blocks.answer`), as arguments of `Tools.apply_patch`; those that name no file are
    of the file `path`.

    >>> edits("So:\\n\\na.py\\n<<<<<<< SEARCH\\nx = 1\\n=======\\nx = 2\\n>>>>>>> REPLACE\\n")
    [{'file_path': 'a.py', 'old_content': 'x = 1\\n', 'new_content': 'x = 2\\n'}]
    """
    found = blocks.read(blocks.answer(reply))
    return [{"file_path": each.path or path, "old_content": each.old, "new_content": each.new} for each in found]


async def files_of(sandbox: Sandbox) -> list[str]:
    """Paths of the task's commit, in order. Raises `AgentFault` without git."""
    done = await sandbox.exec(["git", "ls-files", "-z"], timeout=_LISTING_SECONDS, max_bytes=1 << 24)
    if not done.ok:
        raise AgentFault(f"git cannot list the files: {done.output.decode(errors='replace')}")
    return sorted(done.output.decode(errors="surrogateescape").rstrip("\0").split("\0"))
