"""The original's rewards for shell use. They pay for commands, not for results: use weight 0."""

from __future__ import annotations

import json
import re
from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from coderepairrl.protocols import Reward, SandboxBackend
from coderepairrl.types import Episode, Score, Task

_LIST = re.compile(r"\bls\b")
_SEARCH = re.compile(r"\b(?:rg|grep|find)\b")
_SLICE = re.compile(r"\b(?:sed|head|tail)\b")
_PRECISE = re.compile(r"\b(?:sed\s+-n\s+'?\d+\s*,\s*\d+\s*p'?|(?:head|tail)\s+-n\s+\d+\b)")
_SCOPED = re.compile(r"(?:^|\s)-n\b|--type=\w+\b|/")
_PATH = re.compile(
    r"[\w./-]+\.(?:py|ts|js|java|go|rs|md|txt|json|yaml|yml|toml|ini)\b|\b(?:src|lib|tests?|docs)/[\w./-]+\b"
)
_ARGUMENTS = ("cmd", "command")


class _Call(NamedTuple):
    command: str
    ok: bool
    output: str


def _shell(episode: Episode) -> list[_Call]:
    calls = []
    for call, output in zip(episode.tool_calls, _outputs(episode), strict=True):
        try:
            arguments = json.loads(call.arguments)
        except ValueError:
            continue  # a malformed call ran nothing
        named = [arguments[key] for key in _ARGUMENTS if key in arguments] if isinstance(arguments, dict) else []
        if named and isinstance(named[0], str) and named[0].strip():
            calls.append(_Call(named[0].strip(), call.ok, output))
    return calls


def _outputs(episode: Episode) -> list[str]:
    """Output of each tool call, or "".

    Ids count within their turn only, since some models repeat them.
    """
    ids: defaultdict[tuple[int, str, str], deque[str]] = defaultdict(deque)
    printed: dict[tuple[int | None, str], str] = {}
    for turn in episode.turns:
        calling_turn = turn.base
        for message in turn.messages[:-1]:
            if message.get("role") == "assistant":
                calling_turn = None  # the client rewrote the history
            elif message.get("role") == "tool":
                printed.setdefault((calling_turn, str(message.get("tool_call_id"))), str(message.get("content") or ""))
        for call_in_reply in turn.messages[-1].get("tool_calls", ()) if turn.messages else ():
            function = call_in_reply["function"]
            ids[turn.index, function["name"], function["arguments"]].append(call_in_reply["id"])
    outputs = []
    for call in episode.tool_calls:
        equal_ids = ids[call.turn, call.name, call.arguments]  # equal calls of a reply run in their order
        id = equal_ids.popleft() if equal_ids else ""
        outputs.append(printed.get((call.turn, id), printed.get((None, id), "")))
    return outputs


class TerminalHabits(Reward):
    """Debugging habits in a shell, in [0, 1].

    0.3 for a successful ``ls`` among the first two commands, 0.4 for rg, grep or find among the first ten, and 0.3
    for sed, head or tail after the first two.

    Source: the original's code. Known weakness: pays for commands, not for results.
    """

    name = "terminal_habits"

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """Score the episode."""
        calls = _shell(episode)
        return Score(
            self.name,
            0.3 * _any(_LIST, calls[:2]) + 0.4 * _any(_SEARCH, calls[:10]) + 0.3 * _any(_SLICE, calls[2:]),
        )


class ExplorationDepth(Reward):
    """Purposeful exploration with a shell, in [0, 1].

    0.25 if the first successful search of the first ten commands printed a path that a later sed, head or tail reads;
    0.2 times the share of successes among the first six commands, if there are six; without that chain also 0.2 for
    a read of given lines, and 0.15 if that search was scoped or printed a path. Less, 0.2 at most: 0.07 for a repeated
    command, 0.07 for one that failed twice in a row, 0.1 for truncated output without a read of given lines.

    Source: the original's code. Known weakness: pays for looking, not for finding.
    """

    name = "exploration_depth"

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """Score the episode."""
        calls = _shell(episode)
        first = calls[:10]
        at = next((at for at, call in enumerate(first) if call.ok and _SEARCH.search(call.command)), None)
        paths = set(_PATH.findall(first[at].output)) if at is not None else set()
        later = [call.command for call in calls[(at or 0) + 1 :] if call.ok and _SLICE.search(call.command)]
        chain = any(path in command for path in paths for command in later)
        precise = not chain and _any(_PRECISE, calls)
        scoped = not chain and any(
            call.ok and _SEARCH.search(call.command) and (_SCOPED.search(call.command) or _PATH.search(call.output))
            for call in first
        )
        value = 0.25 * chain + 0.2 * precise + 0.15 * scoped
        if len(calls) >= 6:
            value += 0.2 * sum(call.ok for call in calls[:6]) / 6
        failed = any(a.command == b.command and not a.ok and not b.ok for a, b in pairwise(first))
        cut = not precise and any("truncated" in call.output.lower() for call in first)
        value -= min(0.07 * (len({call.command for call in first}) < len(first)) + 0.07 * failed + 0.1 * cut, 0.2)
        return Score(self.name, min(max(value, 0.0), 1.0))


def _any(pattern: re.Pattern[str], calls: Sequence[_Call]) -> bool:
    return any(call.ok and pattern.search(call.command) for call in calls)
