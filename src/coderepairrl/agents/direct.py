"""`direct`: no scaffold. One request with the issue and some files, one reply with the edits."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from coderepairrl.agents import patching
from coderepairrl.agents.chat import Budget, Chat, LimitReached, Message
from coderepairrl.agents.examples import Examples, format_as_turns, resolve_examples
from coderepairrl.agents.fences import (
    Format,
    Unreadable,
    express_as_edit,
    fence_file,
    group_by_file,
    replace_functions_by_block,
    replace_whole_file,
)
from coderepairrl.agents.patching import Text
from coderepairrl.agents.texts import FULL, build_options
from coderepairrl.agents.tools import Result, Tools
from coderepairrl.errors import AgentFault, ConfigError
from coderepairrl.protocols import Agent, Sandbox
from coderepairrl.types import AgentReport, Endpoint, FirstRequest, Limits, Task, ToolCall

FORMAT = """\
Write each edit like this, with the path of the file on the line before:

path/to/file.py
<<<<<<< SEARCH
lines of the file, exactly as they stand there
=======
the lines to put in their place
>>>>>>> REPLACE

The lines under SEARCH must occur exactly once in the file. With nothing under SEARCH the file is created."""
WHOLE = """\
Write each file that changes like this, all of it as it should be, with its path on the line before:

path/to/file.py
```
the whole file
```

Leave nothing out of a file: what is not in the block is gone."""
FUNCTION = """\
Write each function that changes like this, all of it as it should be, with the path of its file on the line before:

path/to/file.py
```python
the whole function
```

It replaces the function of that name. A method may be written within its class. Put imports that it needs above it."""
FORMATS: Mapping[Format, str] = {"blocks": FORMAT, "whole": WHOLE, "function": FUNCTION}
_SYSTEM = """\
You repair software. You are given an issue and files of the repository that it is about. Reply with the edits that \
repair the defect, and with nothing that is not needed for it. {format} You cannot run anything and have this one \
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
_MOST_SEARCHED = 20  # most files searched for a reply's functions: without shown files, all are candidates
_FUNCTION_NAME = re.compile(r"^[ \t]*(?:async[ \t]+)?def[ \t]+(\w+)", re.M)


@dataclass(frozen=True, slots=True)
class DirectOptions:
    """Options of `direct`. Raises `ConfigError` for invalid values."""

    files: Literal["mentioned", "oracle", "all", "none"] = "mentioned"
    """Files to show: those whose name is in the issue, those that the reference changes (an upper bound for any
    search), or all; also all if none match. ``none`` is for issues that contain the code."""
    context_chars: int = 20_000
    """Most characters of shown files: whole ones by path, until one does not fit; at most two per token of the
    episode's limit."""
    format: Format = "blocks"
    """Format of a reply: search/replace blocks, whole files in fences, or functions in fences (Python only)."""
    system: str | None = None
    """System prompt that replaces the format's; empty sends none."""
    tags: bool = False
    """Whether the system prompt also asks for a thought and an answer between tags. A reply's answer between tags is
    always used alone, even without this option."""
    examples: Examples = 0
    """Worked examples before the issue: a number to draw from the training tasks, a file, or the examples."""

    def __post_init__(self) -> None:
        if self.context_chars < 0:
            raise ConfigError("agent.options.context_chars is negative")
        if self.examples and self.tags:
            raise ConfigError("agent.options.examples exclude agent.options.tags: they have no thoughts")


class Direct(Agent):
    """Single-turn agent. Takes `DirectOptions` by name."""

    name = "direct"
    placement: Literal["host", "sandbox"] = "host"

    def __init__(self, **options: Any) -> None:
        self.options = build_options(DirectOptions, self.name, options)

    @property
    def reads_reference(self) -> bool:
        """True with ``files="oracle"``."""
        return self.options.files == "oracle"

    def first_request(self, task: Task) -> FirstRequest:
        """Request without files, which only the sandbox has; complete with ``files="none"``."""
        return FirstRequest(self._build_messages(task, task.prompt))

    async def run(self, task: Task, sandbox: Sandbox, endpoint: Endpoint) -> AgentReport:
        """Ask once and apply the reply's edits, each reported as a call of `edit`.

        The report's `exit` is ``submitted``, or the limit that prevented a reply. Raises `GatewayFault`,
        `SandboxFault`, and `AgentFault`.
        """
        budget = Budget(endpoint.limits)
        paths = await list_tracked_files(sandbox) if task.workspace else []
        prompt, files = await self._build_prompt(
            task, sandbox, paths, limit_context_chars(self.options.context_chars, endpoint.limits)
        )
        messages = self._build_messages(task, prompt)
        calls: list[ToolCall] = []
        exit = "submitted"
        try:
            async with Chat(endpoint, {}) as chat:
                reply = await chat.complete(messages, (), budget.reply_tokens(), budget.seconds_left)
        except LimitReached as reached:
            exit = reached.limit
        else:
            messages.append(reply.message)
            text = str(reply.message.get("content") or "")
            calls = await self._apply_reply_edits(text, sandbox, paths, files, cut_off=reply.cut_off)
        return AgentReport(exit, tuple(calls), "\n".join(map(json.dumps, messages)))

    async def _apply_reply_edits(
        self, reply: str, sandbox: Sandbox, paths: list[str], files: list[str], *, cut_off: bool
    ) -> list[ToolCall]:
        calls: list[ToolCall] = []
        tools = Tools(sandbox, FULL, output_chars=0)
        try:
            edits = await read_edits(self.options.format, reply, sandbox, paths, files, cut_off=cut_off)
        except Unreadable as problem:
            return [ToolCall(0, "edit", json.dumps({"problem": str(problem)}), False, len(str(problem)))]
        for each in edits:
            started = time.monotonic()
            if self.options.format != "blocks" and each["old_content"] == each["new_content"]:
                result = Result("nothing changes", True)
            else:
                result = await tools.apply_patch(each, lines=True)
            seconds = time.monotonic() - started
            calls.append(ToolCall(0, "edit", json.dumps(each), result.ok, len(result.text), seconds))
        return calls

    def _build_messages(self, task: Task, prompt: str) -> list[Message]:
        options = self.options
        system = _SYSTEM.format(format=FORMATS[options.format]) if options.system is None else options.system
        instructions = "\n\n".join(filter(None, (system, TAGS if options.tags else "")))
        opening: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
        repairs = resolve_examples(options.examples, task.id)
        examples = format_as_turns(repairs, options.format, code=options.files != "none")
        return [*opening, *examples, {"role": "user", "content": prompt}]

    async def _build_prompt(self, task: Task, sandbox: Sandbox, paths: list[str], chars: int) -> tuple[str, list[str]]:
        """Build the prompt; return it with its files (without any, those that the issue names)."""
        files: dict[str, str] = {}
        for path in choose_files(self.options.files, task, paths):
            try:
                text = (await sandbox.read(path)).decode()
            except (OSError, UnicodeDecodeError):  # a link to nowhere, a picture
                continue
            chars -= len(text)
            if chars < 0:
                break
            files[path] = fence_file(path, text)
        return "\n\n".join([task.prompt, *files.values()]), [*files] or choose_files("mentioned", task, paths)


def limit_context_chars(chars: int, limits: Limits) -> int:
    """Limit `chars` so that tokens for the issue and a reply remain.

    >>> limit_context_chars(20_000, Limits()), limit_context_chars(20_000, Limits(tokens=2_000))
    (20000, 4000)
    """
    return min(chars, 2 * limits.tokens)  # a token of code has 3 to 4 characters


def choose_files(which: str, task: Task, paths: list[str]) -> list[str]:
    """Select files by the option `files`: all if none match, no files for ``none``.

    >>> task = Task("t", "add() in calc.py subtracts", "python", "dir:x", b"--- a/calc.py\\n+++ b/calc.py\\n")
    >>> choose_files("mentioned", task, ["calc.py", "other.py"]), choose_files("oracle", task, ["a.py", "calc.py"])
    (['calc.py'], ['calc.py'])
    """
    if which == "none":
        return []
    chosen = paths
    if which == "mentioned":
        chosen = [path for path in paths if PurePosixPath(path).name in task.prompt]
    elif which == "oracle":
        changed = set(re.findall(rb"^--- a/([^\t\n]+)", task.reference, re.M))
        chosen = [path for path in paths if path.encode(errors="surrogateescape") in changed]
    return chosen or paths


async def read_edits(
    form: Format, reply: str, sandbox: Sandbox, paths: Sequence[str], files: Sequence[str], *, cut_off: bool
) -> list[dict[str, str]]:
    """Read the reply's edits in the format `form`, as arguments of `Tools.apply_patch`.

    An unnamed search/replace block belongs to the repository's only file, an unnamed fence to the only one of the shown
    `files`, unnamed functions to the only one that defines any of them. At least one block of functions must match its
    file. Raises `Unreadable`.
    """
    if form == "blocks":
        blocks = patching.parse_blocks(patching.extract_answer(reply))
        if not blocks:
            raise Unreadable("no search/replace block")
        only_path = paths[0] if len(paths) == 1 else ""
        return [
            {"file_path": block.path or only_path, "old_content": block.old, "new_content": block.new}
            for block in blocks
        ]
    candidates = files
    if form == "function" and 1 < len(files) <= _MOST_SEARCHED:
        candidates = await _find_defining_files(reply, sandbox, files)
    default_path = candidates[0] if len(candidates) == 1 else ""
    edits = []
    for path, codes in group_by_file(form, reply, paths, default_path, cut_off):
        before = ""
        try:
            before = Text.parse(await sandbox.read(path)).text
        except FileNotFoundError:
            if form == "function":
                raise Unreadable(f"{path} does not exist") from None
        except OSError as error:
            raise Unreadable(f"{path}: {error.strerror or error}") from None
        after = replace_whole_file(before, codes[0]) if form == "whole" else replace_functions_by_block(before, codes)
        edits.append(express_as_edit(path, before, after))
    return edits


async def _find_defining_files(reply: str, sandbox: Sandbox, files: Sequence[str]) -> list[str]:
    names = set(_FUNCTION_NAME.findall(reply))
    defining = []
    for path in files:
        try:
            text = Text.parse(await sandbox.read(path)).text
        except OSError:  # deleted since it was shown
            continue
        if not names.isdisjoint(_FUNCTION_NAME.findall(text)):
            defining.append(path)
    return defining


async def list_tracked_files(sandbox: Sandbox) -> list[str]:
    """List the paths of the task's commit, sorted. Raises `AgentFault` without git."""
    done = await sandbox.exec(["git", "ls-files", "-z"], timeout=_LISTING_SECONDS, max_bytes=1 << 24)
    if not done.ok:
        raise AgentFault(f"git cannot list the files: {done.output.decode(errors='replace')}")
    return sorted(done.output.decode(errors="surrogateescape").rstrip("\0").split("\0"))
