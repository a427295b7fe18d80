"""Nano's two tools, executed in a sandbox, and statistics of tool calls.

A model's mistake is a result with ``ok=False``, never an exception.
"""

from __future__ import annotations

import errno
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from coderepairrl.agents.patching import Ambiguous, NoMatch, replace_lines, replace_once
from coderepairrl.agents.texts import Texts, fill_template
from coderepairrl.protocols import Sandbox
from coderepairrl.types import ToolCall

SIGPIPE = 141
"""Exit code 128 + SIGPIPE: a pipe's reader closed it, as in ``grep -r x . | head -3``."""

# programs that exit with 1 if nothing matches
_SEARCH = re.compile(r"(?:^|[\s|&;(])(?:[efz]?grep|rg|ag|ack)\s")
_CHECK_SECONDS = 10.0
_LARGEST_TEXT = 4 << 20  # bytes of a file that is edited or shown
_LONGEST_ARGUMENT = 100_000  # Linux takes 128 KiB per argument of a program


@dataclass(frozen=True, slots=True)
class Result:
    """A tool's answer to the model, before truncation."""

    text: str
    ok: bool
    truncated: bool = False


class Tools:
    """`shell` and `apply_patch` on one sandbox, with change tracking."""

    def __init__(
        self, sandbox: Sandbox, texts: Texts, output_chars: int, names: Mapping[str, str] | None = None
    ) -> None:
        """Create the tools; `names` maps them to those that the model knows."""
        self._sandbox = sandbox
        self._texts = texts
        self._names = names or {}
        self._max_bytes = 4 * output_chars + 4  # UTF-8 needs at most 4 bytes for a character
        self.originals: dict[str, bytes | None] = {}
        """Contents of edited files before their first edit, by path; None for new files."""
        self.edits: dict[str, bytes] = {}
        """Their contents now."""
        self._shell_ran = False  # since the last edit
        self._head = b""  # the commit before the first command with "git" in it, which may move HEAD

    async def run(self, name: str, arguments: Mapping[str, Any], timeout: float) -> Result | None:
        """Execute a tool (a command within `timeout` seconds); None if unknown."""
        if name == "shell":
            return await self.shell(arguments, timeout)
        return await self.apply_patch(arguments) if name == "apply_patch" else None

    def command_line(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call's command line, empty if it runs none."""
        return str(arguments.get("cmd", "")) if name == "shell" else ""

    async def shell(self, arguments: Mapping[str, Any], timeout: float) -> Result:
        """Run ``cmd`` with bash in the repository root.

        ``pipefail`` is set; a writer cut off by ``head`` and a search without a match succeed.
        """
        cmd = arguments.get("cmd")
        if problem := self._check_arguments("shell", cmd=cmd):
            return problem
        assert cmd is not None
        if "git" in cmd and not self._head:
            self._head = await self._read_head()
        self._shell_ran = True
        done = await self._sandbox.exec(
            ["bash", "-o", "pipefail", "-c", cmd], timeout=timeout, max_bytes=self._max_bytes
        )
        # Leading blanks stay: the indentation of a first line is needed for a patch.
        output = done.output.decode("utf-8", "replace").strip("\n").rstrip()
        if done.timed_out:
            text = fill_template(self._texts.timed_out, seconds=f"{timeout:.3g}")
        elif done.exit_code in (0, SIGPIPE):
            return Result(output or self._texts.silent, True, done.truncated)
        elif done.exit_code == 1 and output in ("", "0") and _SEARCH.search(cmd):
            return Result(self._texts.no_match, True)
        else:
            text = fill_template(self._texts.failed, code=done.exit_code)
        return Result(f"{text}\n{output}" if output else text, False, done.truncated)

    def _fail(self, text: str, **values: object) -> Result:
        return Result(fill_template(text, **values), False)

    def _fail_on_file(self, path: str, error: OSError) -> Result:
        if isinstance(error, PermissionError):
            return self._fail(self._texts.outside, path=path)
        return self._fail(self._texts.unreadable, path=path, problem=error.strerror or str(error))

    async def apply_patch(self, arguments: Mapping[str, Any], *, lines: bool = False) -> Result:
        """Replace ``old_content`` in ``file_path``; an empty ``old_content`` fills a new or empty file.

        With `lines`, both contents are whole lines (`patching.replace_lines`).
        """
        path = arguments.get("file_path", arguments.get("file"))
        old = arguments.get("old_content", arguments.get("search"))
        new = arguments.get("new_content", arguments.get("replace"))
        context = arguments.get("context") or ""
        if problem := self._check_arguments(
            "apply_patch", file_path=path, old_content=old, new_content=new, context=context
        ):
            return problem
        assert path is not None and old is not None and new is not None
        texts = self._texts
        if old == new:
            return Result(texts.identical, False)
        path = self._relative_to_root(path)
        try:
            data = await self._read_text_file(path)
            if data is None and old:
                return self._fail(texts.no_file, path=path)
            if data and not old:
                return self._fail(texts.empty_old, path=path)
            if not old:
                changed = new.encode()
            elif lines:
                changed = replace_lines(data or b"", old, new)
            else:
                changed = replace_once(data or b"", old, new, context)
            await self._sandbox.write(path, changed)
        except NoMatch:
            return self._fail(texts.absent, path=path)
        except Ambiguous as error:
            text = texts.context_absent if error.context else texts.ambiguous
            return self._fail(text, path=path, count=error.count)
        except UnicodeEncodeError as error:
            return self._fail(texts.unreadable, path=path, problem=f"{error.encoding} cannot hold the new text")
        except OSError as error:
            return self._fail_on_file(path, error)
        self._record_edit(path, data, changed)
        return Result(fill_template(texts.created if data is None else texts.patched, path=path), True)

    def _record_edit(self, path: str, before: bytes | None, after: bytes) -> None:
        self.originals.setdefault(path, before)
        self.edits[path] = after
        self._shell_ran = False

    async def has_changed(self) -> bool:
        """Whether the repository differs from the task's commit.

        Asks git about working tree and HEAD, unless the recorded edits suffice; a failing git counts as a change.
        """
        if not self._shell_ran and any(self.originals[path] != data for path, data in self.edits.items()):
            return True
        if not self._shell_ran and not self.edits:
            return False
        ok, status = await self._git("status", "--porcelain")
        if not ok or status:
            return True
        return bool(self._head) and await self._read_head() != self._head

    async def _read_head(self) -> bytes:
        ok, output = await self._git("rev-parse", "HEAD")
        return output if ok else b""

    async def _git(self, *arguments: str) -> tuple[bool, bytes]:
        done = await self._sandbox.exec(["git", *arguments], timeout=_CHECK_SECONDS, max_bytes=4096)
        return done.ok, done.output.strip()

    async def _read(self, path: str) -> bytes | None:
        try:
            return await self._sandbox.read(path)
        except FileNotFoundError:
            return None

    async def _read_text_file(self, path: str) -> bytes | None:
        """Read a file. Raises OSError for a large one."""
        data = await self._read(path)
        if data is not None and len(data) > _LARGEST_TEXT:
            raise OSError(errno.EFBIG, f"it is larger than {_LARGEST_TEXT >> 20} MiB")
        return data

    def _relative_to_root(self, path: str) -> str:
        requested, root = PurePosixPath(path), self._sandbox.workdir
        return str(requested.relative_to(root) if requested.is_relative_to(root) else requested)

    def _check_arguments(self, tool: str, **arguments: object) -> Result | None:
        tool = self._names.get(tool, tool)
        if missing := [name for name, value in arguments.items() if value is None]:
            return self._fail(self._texts.missing, name=tool, missing=", ".join(missing))
        for name, value in arguments.items():
            if problem := _find_argument_problem(name, value):
                return self._fail(self._texts.not_text, name=tool, argument=name, problem=problem)
        return None


def _find_argument_problem(name: str, value: object) -> str:
    if not isinstance(value, str):
        return "not a string"
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        return "it holds a surrogate, which is no character"
    if name in ("cmd", "command", "file_path", "path"):
        if not value.strip():
            return "it is empty"
        if "\0" in value:
            return "it holds a NUL character"
        if size > _LONGEST_ARGUMENT:
            return f"longer than {_LONGEST_ARGUMENT} bytes"
    return ""


MONITORED = (
    "awk", "bash", "cat", "cd", "cp", "diff", "echo", "find", "git", "grep", "head", "ls", "mkdir",
    "mv", "pytest", "python", "python3", "rg", "rm", "sed", "sort", "tail", "tree", "wc", "xargs",
)  # fmt: skip
"""Commands whose use is counted."""

WORDS = 10
"""Words of a command line that are read, so that a script in an argument is not counted."""

_CHARS = 10_000
"""Characters of a command line that are read, since one word can be very long."""

_SEPARATORS = re.compile(r"[|&;()]+")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_PREFIXES = frozenset({"time", "sudo", "env", "nohup", "exec", "command", "!", "{", "if", "then", "do", "while"})


def command_names(cmd: str) -> tuple[str, ...]:
    """Names of the commands that start within a bash command line's first ten words.

    >>> command_names("cd src && LC_ALL=C grep -rn 'cat; rm' . | head -5")
    ('cd', 'grep', 'head')
    >>> command_names("echo 'unfinished")
    ('echo',)
    """
    return tuple(words[0].rpartition("/")[2] for words in split_commands(cmd))


def split_commands(cmd: str) -> list[list[str]]:
    """Commands among a bash command line's first ten words, as lists of words.

    >>> split_commands("cd src && LC_ALL=C grep -rn 'cat; rm' . | head -5")
    [['cd', 'src'], ['grep', '-rn', 'cat; rm', '.'], ['head', '-5']]
    """
    lexer = shlex.shlex(cmd[:_CHARS].replace("\n", " ; "), posix=True, punctuation_chars="|&;()")
    lexer.whitespace_split = True
    lexer.commenters = ""
    commands: list[list[str]] = []
    is_first_word = True
    words = 0
    try:
        for word in lexer:
            if _SEPARATORS.fullmatch(word):
                is_first_word = True
                continue
            words += 1
            if words > WORDS:
                break
            if not is_first_word:
                commands[-1].append(word)
            elif word not in _PREFIXES and not _ASSIGNMENT.match(word):
                commands.append([word])
                is_first_word = False
    except ValueError:  # an unclosed quote: keep what was read before it
        pass
    return commands


@dataclass(frozen=True, slots=True)
class ToolStats:
    """Calls and successes per tool, starts per monitored command."""

    calls: Mapping[str, int]
    succeeded: Mapping[str, int]
    commands: Mapping[str, int]

    def rate(self, tool: str) -> float | None:
        """Success rate of `tool`; None without calls."""
        return self.succeeded[tool] / self.calls[tool] if self.calls.get(tool) else None


def count_tool_calls(calls: Iterable[ToolCall]) -> ToolStats:
    """Count `calls`.

    >>> stats = count_tool_calls(
    ...     [ToolCall(0, "shell", "{}", True, command="ls head"), ToolCall(1, "shell", "{}", False)]
    ... )
    >>> stats.calls, stats.rate("shell"), stats.rate("apply_patch"), stats.commands
    ({'shell': 2}, 0.5, None, {'ls': 1, 'head': 1})
    """
    total: Counter[str] = Counter()
    succeeded: Counter[str] = Counter()
    commands: Counter[str] = Counter()
    for call in calls:
        total[call.name] += 1
        succeeded[call.name] += call.ok
        commands.update(name for name in call.command.split() if name in MONITORED)
    return ToolStats(dict(total), dict(succeeded), dict(commands))
