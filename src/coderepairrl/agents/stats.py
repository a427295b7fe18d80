"""Statistics of an agent's tool calls."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from coderepairrl.types import ToolCall

MONITORED = (
    "awk", "bash", "cat", "cd", "cp", "diff", "echo", "find", "git", "grep", "head", "ls", "mkdir",
    "mv", "pytest", "python", "python3", "rg", "rm", "sed", "sort", "tail", "tree", "wc", "xargs",
)  # fmt: skip
"""The 25 commands whose use is counted."""

WORDS = 10
"""Only so many words of a command line are looked at, so that a script in an argument counts for nothing."""

_CHARS = 10_000
"""And only so many characters of it: a word can be as long as a reply."""

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
    lexer = shlex.shlex(cmd[:_CHARS].replace("\n", " ; "), posix=True, punctuation_chars="|&;()")
    lexer.whitespace_split = True
    lexer.commenters = ""
    names: list[str] = []
    starts = True
    words = 0
    try:
        for word in lexer:
            if _SEPARATORS.fullmatch(word):
                starts = True
                continue
            words += 1
            if words > WORDS:
                break
            if starts and word not in _PREFIXES and not _ASSIGNMENT.match(word):
                names.append(word.rpartition("/")[2])
                starts = False
    except ValueError:  # an unclosed quote: what was read until there stands
        pass
    return tuple(names)


@dataclass(frozen=True, slots=True)
class ToolStats:
    """Calls and successes per tool, starts per monitored command."""

    calls: Mapping[str, int]
    succeeded: Mapping[str, int]
    commands: Mapping[str, int]

    def rate(self, tool: str) -> float | None:
        """Success rate of `tool`; None without calls."""
        return self.succeeded[tool] / self.calls[tool] if self.calls.get(tool) else None


def tally(calls: Iterable[ToolCall]) -> ToolStats:
    """Count `calls`.

    >>> stats = tally([ToolCall(0, "shell", "{}", True, command="ls head"), ToolCall(1, "shell", "{}", False)])
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
