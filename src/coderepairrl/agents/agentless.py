"""`agentless`: no tools. A script localises the defect (files, elements, lines), samples repairs, and takes a vote.

Follows Xia et al., Agentless: Demystifying LLM-based Software Engineering Agents (arXiv 2407.01489), without embeddings
and generated tests.
"""

from __future__ import annotations

import ast
import json
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from coderepairrl.agents.chat import Budget, Chat, LimitReached, Message
from coderepairrl.agents.direct import FORMATS, choose_files, limit_context_chars, list_tracked_files, read_edits
from coderepairrl.agents.examples import Examples, format_as_turns, resolve_examples
from coderepairrl.agents.fences import Format, Unreadable
from coderepairrl.agents.localising import (
    Place,
    Source,
    find_elements,
    find_lines,
    find_paths,
    format_excerpt,
    number_lines,
)
from coderepairrl.agents.texts import FULL, build_options
from coderepairrl.agents.tools import Tools
from coderepairrl.errors import AgentFault, ConfigError
from coderepairrl.protocols import Agent, Sandbox
from coderepairrl.types import AgentReport, Endpoint, FirstRequest, SideCalls, Task, ToolCall

_LARGEST_SOURCE = 100_000
"""Most bytes of a Python file to parse in this process, which all episodes share."""
_COPY_SECONDS = 300.0
# scripts that copy the workspace to, and back from, the folder "$0"
# without cp's -p, which fails where modes cannot be changed; copies of executable files are executable anyway
_SAVE = 'find . -mindepth 1 -maxdepth 1 ! -name .git -exec cp -dR -t "$0" {} +'
_RESTORE = 'find . -mindepth 1 -maxdepth 1 ! -name .git -exec rm -rf {} + && cp -dR "$0"/. .'
_COMMENTS = ("#", "//")


@dataclass(frozen=True, slots=True)
class Proposal:
    """New file contents by path."""

    files: Mapping[str, bytes]

    @property
    def key(self) -> frozenset[tuple[str, tuple[str, ...]]]:
        """Key that ignores blanks, empty lines and comment lines.

        >>> Proposal({"a.py": b"# add\\nx = 1\\n"}).key == Proposal({"a.py": b"x  = 1\\n\\n"}).key
        True
        """
        return frozenset((path, tuple(_normalise_code(data))) for path, data in self.files.items())

    async def write(self, sandbox: Sandbox) -> bool:
        """Write all files; returns False if any failed. Raises `SandboxFault`."""
        try:
            for path, data in self.files.items():
                await sandbox.write(path, data)
        except OSError:  # the workspace is full, or a link leads out of it
            return False
        return True


def _normalise_code(data: bytes) -> list[str]:
    lines = data.decode("utf-8", "replace").expandtabs().splitlines()
    indented = ((len(line) - len(line.lstrip()), " ".join(line.split())) for line in lines)
    return [f"{depth}:{text}" for depth, text in indented if text and not text.startswith(_COMMENTS)]


@dataclass(slots=True)
class _DraftSandbox:
    """Sandbox whose writes stay in `files`."""

    sandbox: Sandbox
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def workdir(self) -> str:
        return self.sandbox.workdir

    async def read(self, path: str) -> bytes:
        return self.files[path] if path in self.files else await self.sandbox.read(path)

    async def write(self, path: str, data: bytes, *, follow: bool = True) -> None:
        self.files[path] = data


async def apply_in_memory(sandbox: Sandbox, edits: Sequence[Mapping[str, str]]) -> Proposal | None:
    """Apply `edits` (`direct.read_edits`) in memory.

    Returns None if one does not apply, nothing changes, or a Python file stops parsing. Raises `SandboxFault`.
    """
    # `apply_patch` only reads and writes files
    tools = Tools(_DraftSandbox(sandbox), FULL, output_chars=0)  # type: ignore[arg-type]
    for edit in edits:
        if not (await tools.apply_patch(edit, lines=True)).ok:
            return None
    before = tools.originals
    changed = {path: data for path, data in tools.edits.items() if data != before[path]}
    breaks_file = any(
        not _can_parse(path, data) and _can_parse(path, before[path] or b"") for path, data in changed.items()
    )
    return Proposal(changed) if changed and not breaks_file else None


def _can_parse(path: str, data: bytes) -> bool:
    if not path.endswith((".py", ".pyi")) or len(data) > _LARGEST_SOURCE:
        return True
    with warnings.catch_warnings():  # about invalid escapes
        warnings.simplefilter("ignore")
        try:
            ast.parse(data)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True


async def run_tests_on(sandbox: Sandbox, proposal: Proposal, command: str, seconds: float) -> bool:
    """Whether `command` exits with 0 with `proposal` applied; then restore the workspace, except ``.git``.

    Raises `SandboxFault`, and `AgentFault` if the workspace cannot be copied.
    """
    result = await sandbox.exec(["mktemp", "-d"])
    copy = result.output.decode(errors="replace").strip()
    await _run_copy_script(sandbox, _SAVE, copy)
    try:
        if not await proposal.write(sandbox):
            return False
        return (await sandbox.exec(["bash", "-c", command], timeout=seconds)).ok
    finally:
        await _run_copy_script(sandbox, _RESTORE, copy)
        await sandbox.exec(["rm", "-rf", copy], timeout=_COPY_SECONDS)


async def _run_copy_script(sandbox: Sandbox, script: str, copy: str) -> None:
    result = await sandbox.exec(["sh", "-c", script, copy], timeout=_COPY_SECONDS)
    if not result.ok:
        raise AgentFault(f"the workspace cannot be copied: {result.output[-300:].decode(errors='replace').strip()}")


def choose_most_common(proposals: Sequence[Proposal]) -> Proposal | None:
    """Return the most common proposal; the first wins ties.

    >>> one, other = Proposal({"a.py": b"x = 1\\n"}), Proposal({"a.py": b"x = 2\\n"})
    >>> choose = choose_most_common
    >>> choose([one, other, other]) == other, choose([one, other]) == one, choose([])
    (True, True, None)
    """
    votes = Counter(each.key for each in proposals)
    return max(proposals, key=lambda each: votes[each.key], default=None)


SYSTEM = """\
You repair software. You are given an issue of a repository and are asked, step by step, where the defect is, and at \
last for the edits that repair it. You cannot run anything. Answer each question in exactly the form it asks for."""
_FILES = """\
Which files have to be changed to resolve this issue? Name at most {most} of the files above, the likeliest first, one \
path on each line."""
_ELEMENTS = """\
Which of these classes and functions have to be changed, or read to know what to change? One on each line, as
path/to/file.py: name"""
_LINES = """\
Which lines have to be changed, or stand next to new ones? One place on each line, as
path/to/file.py: 12-15"""
_REPAIR = "Reply with the edits that resolve the issue, and with nothing that is not needed for it. {format}"
_LARGEST_FILE = 1 << 20
"""Most bytes of a file to show: larger ones are not written by hand."""


@dataclass(frozen=True, slots=True)
class AgentlessOptions:
    """Options of `agentless`. Raises `ConfigError` for invalid values."""

    files: Literal["model", "oracle"] = "model"
    """Chooses the files: the model, or the task's reference (an upper bound for any search)."""
    most_files: int = 3
    """Most files to look into."""
    format: Format = "blocks"
    """Format of repairs, as `DirectOptions.format`; all but ``blocks`` show whole files."""
    examples: Examples = 0
    """Worked examples before each question for a repair, as `DirectOptions.examples`."""
    samples: int = 4
    """Repairs to sample; greedy sampling makes all the same."""
    around: int = 10
    """Lines shown before and after the named ones."""
    context_chars: int = 20_000
    """Most characters of file list, outlines or code in a question; at most two per token of the episode's limit."""
    tests: str = ""
    """Command line of the repository's own tests, such as ``python -m pytest -q``, run by bash with each different
    repair; repairs that pass are preferred. The tests that judge the repair are not in the sandbox."""
    test_seconds: float = 60.0
    """Time limit of the tests, which then fail."""

    def __post_init__(self) -> None:
        for name, least in (("most_files", 1), ("samples", 1), ("around", 0), ("context_chars", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"agent.options.{name} is below {least}")
        if self.test_seconds <= 0:
            raise ConfigError("agent.options.test_seconds must be positive")


class Agentless(Agent):
    """Localise, repair, validate. Takes `AgentlessOptions` by name.

    Every question is a separate, trained conversation.
    """

    name = "agentless"
    placement: Literal["host", "sandbox"] = "host"
    side_calls: SideCalls = "train"

    def __init__(self, **options: Any) -> None:
        self.options = build_options(AgentlessOptions, self.name, options)

    @property
    def reads_reference(self) -> bool:
        """True with ``files="oracle"``."""
        return self.options.files == "oracle"

    def first_request(self, task: Task) -> FirstRequest:
        """Request with the examples, but without files, which only the sandbox has."""
        return FirstRequest(_prompt_messages(task.prompt, _example_messages(self.options, task)))

    async def run(self, task: Task, sandbox: Sandbox, endpoint: Endpoint) -> AgentReport:
        """Ask for files, elements, lines and repairs, then apply the repair that most samples agree on.

        The report has a call per question (ok if the answer matched or applied) and per run of ``tests``. Its `exit` is
        ``submitted``, or the limit that ended the questions. Raises `GatewayFault`, `SandboxFault`, and `AgentFault`.
        """
        async with Chat(endpoint, {}) as chat:
            return await _AgentlessRun(self.options, task, sandbox, endpoint, chat).run()


class _AgentlessRun:
    def __init__(self, options: AgentlessOptions, task: Task, sandbox: Sandbox, endpoint: Endpoint, chat: Chat) -> None:
        self.options, self.task, self.sandbox, self.chat = options, task, sandbox, chat
        self.budget = Budget(endpoint.limits)
        self.context_chars = limit_context_chars(options.context_chars, endpoint.limits)
        self.turn = -1
        self.paths: list[str] = []
        self.cut_off = False  # whether the token limit ended the latest reply
        self.tool_calls: list[ToolCall] = []
        self.log: list[Message] = []

    async def run(self) -> AgentReport:
        exit = "submitted"
        repairs: list[Proposal] = []
        try:
            places = await self._choose_places(await self._choose_sources())
            for _ in range(self.options.samples):
                if (repair := await self._sample_repair(places)) is not None:
                    repairs.append(repair)
        except LimitReached as reached:
            exit = reached.limit
        if self.options.tests:
            repairs = await self._prefer_passing(repairs)
        if (chosen := choose_most_common(repairs)) is not None:
            await chosen.write(self.sandbox)
        return AgentReport(exit, tuple(self.tool_calls), "\n".join(map(json.dumps, self.log)))

    async def _ask(self, question: str, texts: Sequence[str], examples: Sequence[Message] = ()) -> str:
        if limit := self.budget.exhausted():
            raise LimitReached(limit)
        self.budget.act()
        prompt = "\n\n".join([self.task.prompt, *_cut_parts(texts, self.context_chars), question])
        messages = _prompt_messages(prompt, examples)
        reply = await self.chat.complete(messages, (), self.budget.reply_tokens(), self.budget.seconds_left)
        self.turn = self.turn + 1 if reply.turn is None else reply.turn
        self.log += [*messages, reply.message]
        self.cut_off = reply.cut_off
        return str(reply.message.get("content") or "")

    def _record_call(self, name: str, arguments: dict[str, str], ok: bool, seconds: float = 0.0) -> None:
        self.tool_calls.append(ToolCall(self.turn, name, json.dumps(arguments), ok, seconds=seconds))

    async def _choose_sources(self) -> list[Source]:
        """Choose the files that the model names, else those that the issue mentions, else the first."""
        self.paths = paths = await list_tracked_files(self.sandbox) if self.task.workspace else []
        if self.options.files == "oracle":
            named = choose_files("oracle", self.task, paths)
        elif paths:
            mentioned = choose_files("mentioned", self.task, paths)
            ordered = list(dict.fromkeys([*mentioned, *paths]))
            listing = "Files of the repository:\n" + "\n".join(ordered)
            answer = await self._ask(_FILES.format(most=self.options.most_files), [listing])
            named = find_paths(answer, paths)
            self._record_call("files", {"answer": answer}, bool(named))
            named = named or ordered
        else:
            named = []
        sources: list[Source] = []
        for path in named:
            if len(sources) == self.options.most_files:
                break
            try:
                if len(data := await self.sandbox.read(path)) <= _LARGEST_FILE:
                    sources.append(Source.parse(path, data))
            except (OSError, UnicodeDecodeError):  # a link to nowhere, a picture
                continue
        return sources

    async def _choose_places(self, sources: Sequence[Source]) -> list[Place]:
        places = [source.whole for source in sources]
        if outlines := [source.outline for source in sources if source.elements]:
            answer = await self._ask(_ELEMENTS, outlines)
            elements = find_elements(answer, sources)
            self._record_call("elements", {"answer": answer}, bool(elements))
            places = elements or places
        if places:
            answer = await self._ask(_LINES, [number_lines(place) for place in places])
            lines = find_lines(answer, sources, self.options.around)
            self._record_call("lines", {"answer": answer}, bool(lines))
            places = lines or places
        return places

    async def _sample_repair(self, places: Sequence[Place]) -> Proposal | None:
        form = self.options.format
        sources = list(dict.fromkeys(place.source for place in places))
        excerpted = places if form == "blocks" else [source.whole for source in sources]
        question = _REPAIR.format(format=FORMATS[form])
        answer = await self._ask(
            question, [format_excerpt(place) for place in excerpted], _example_messages(self.options, self.task)
        )
        paths = [source.path for source in sources]
        try:
            edits = await read_edits(form, answer, self.sandbox, self.paths, paths, cut_off=self.cut_off)
        except Unreadable:
            edits = []
        proposal = await apply_in_memory(self.sandbox, edits)
        self._record_call("repair", {"answer": answer}, proposal is not None)
        return proposal

    async def _prefer_passing(self, repairs: Sequence[Proposal]) -> list[Proposal]:
        passed = []
        for repair in {each.key: each for each in repairs}.values():
            seconds = min(self.options.test_seconds, self.budget.seconds_left)
            if seconds <= 0:
                break
            began = time.monotonic()
            ok = await run_tests_on(self.sandbox, repair, self.options.tests, seconds)
            self._record_call("tests", {"command": self.options.tests}, ok, time.monotonic() - began)
            if ok:
                passed.append(repair.key)
        return [each for each in repairs if each.key in passed] or list(repairs)


def _prompt_messages(prompt: str, examples: Sequence[Message] = ()) -> list[Message]:
    return [{"role": "system", "content": SYSTEM}, *examples, {"role": "user", "content": prompt}]


def _example_messages(options: AgentlessOptions, task: Task) -> list[Message]:
    question = _REPAIR.format(format=FORMATS[options.format])
    return format_as_turns(resolve_examples(options.examples, task.id), options.format, question=question)


def _cut_parts(parts: Sequence[str], chars: int) -> list[str]:
    """Keep the first `chars` characters, up to a line end.

    >>> _cut_parts(["one\\ntwo", "three"], 6), _cut_parts(["one", "three"], 8)
    (['one\\n(cut off)'], ['one', 'three'])
    """
    parts_kept: list[str] = []
    for part in parts:
        if len(part) > chars:
            lines = part[:chars].rpartition("\n")[0]
            return [*parts_kept, f"{lines}\n(cut off)"] if lines else parts_kept
        parts_kept.append(part)
        chars -= len(part)
    return parts_kept
