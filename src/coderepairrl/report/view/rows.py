"""Episodes of a run as rows to filter and sort."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coderepairrl.printable import visible
from coderepairrl.runs.codec import text_to_bytes
from coderepairrl.runs.following import Follower
from coderepairrl.types import Ending

OPEN, UNFINISHED = "open", "unfinished"
"""States before an ending: no verdict yet, or a process that ended without one."""
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_OTHER = re.compile(r"[^A-Za-z0-9._-]+")


def file_name(name: str) -> str:
    """File name for `name`: itself if safe in any file system and URL.

    >>> file_name("train-00001-000-00"), file_name("mutants/a's b")
    ('train-00001-000-00', 'mutants-a-s-b-8f750b0c6a')
    """
    if _PLAIN.fullmatch(name):
        return name
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:10]
    return f"{_OTHER.sub('-', name).strip('-._')[:60]}-{digest}".lstrip("-")


@dataclass(slots=True)
class Row:
    """Episode in the list; `changed` is the `Rows` state at its last change."""

    id: str
    phase: str
    step: int
    group: str
    attempt: int
    task: str
    language: str = ""
    kind: str = ""
    ending: str = OPEN
    reason: str = ""
    reward: float | None = None
    """None if void or without a verdict."""
    advantage: float | None = None
    turns: int = 0
    calls: int = 0
    failed: int = 0
    tokens: int = 0
    added: int = 0
    deleted: int = 0
    seconds: float | None = None
    tools: tuple[str, ...] = ()
    scores: dict[str, float] = field(default_factory=dict)
    changed: int = 0

    def cells(self) -> list[Any]:
        """Values except `changed`, safe for JSON and HTML; last the pages of episode and group, if named otherwise."""
        pages = [file_name(name) for name in (self.id, self.group)]
        return [
            *map(visible, (self.id, self.phase)),
            *(self.step, visible(self.group), self.attempt),
            *map(visible, (self.task, self.language, self.kind, self.ending, self.reason)),
            *(_short(self.reward), _short(self.advantage)),
            *(self.turns, self.calls, self.failed, self.tokens, self.added, self.deleted, _short(self.seconds)),
            [visible(tool) for tool in self.tools],
            {visible(name): _short(value) for name, value in self.scores.items()},
            *("" if page == name else page for page, name in zip(pages, (self.id, self.group), strict=True)),
        ]


CELLS = (
    *("id", "phase", "step", "group", "attempt", "task", "language", "kind", "ending", "reason", "reward", "advantage"),
    *("turns", "calls", "failed", "tokens", "added", "deleted", "seconds", "tools", "scores", "page", "group_page"),
)

Advantages = Callable[[list[float | None]], tuple[float | None, ...]]
"""Advantages of a group from its rewards, None for void episodes."""


class Rows:
    """Rows of the log that `follower` reads, in starting order."""

    def __init__(self, follower: Follower, advantages: Advantages, *, alike: bool = True) -> None:
        """Predict advantages by `advantages` until logged; without `alike`, an attempt's tokens differ in theirs."""
        self.by_id: dict[str, Row] = {}
        self.groups: dict[str, list[str]] = {}
        self.tasks: dict[str, list[str]] = {}
        self.consumed: dict[str, int] = {}
        """Step that trained on an episode, by id."""
        self.trained: dict[str, bool] = {}
        """Whether a consumed episode has rows, by id; older logs do not say."""
        self.state = 0
        """Number of updates."""
        self.last = ""
        """Type of the last ``start``, ``stop`` or ``end`` record."""
        self._follower = follower
        self._advantages = advantages
        self._alike = alike

    def update(self) -> None:
        """Read new log records."""
        touched: dict[str, None] = {}
        self.state += 1
        for record in self._follower.records():
            try:
                self._take(record, touched)
            except (ValueError, TypeError, LookupError, AttributeError) as error:  # of another version, or edited
                self._follower.refuse(error)
        for group in touched:
            self._compare(group)

    def _take(self, record: Mapping[str, Any], touched: dict[str, None]) -> None:
        match record["type"]:
            case "episode":
                self._begin(record)
            case "turn":
                self._turn(record)
            case "verdict":
                touched[self._judge(record["verdict"])] = None
            case "step":
                self.consumed |= dict.fromkeys(record.get("episodes", ()), record["step"])
                if "advantages" in record:
                    self._learn(record["episodes"], record["advantages"])
            case "start" | "stop" | "end":
                self.last = record["type"]
                for row in self.by_id.values():
                    if row.ending == OPEN:
                        row.ending, row.changed = UNFINISHED, self.state

    def _begin(self, record: Mapping[str, Any]) -> None:
        name = record["id"]
        row = Row(
            name,
            record["phase"],
            record["step"],
            record["group"],
            record["attempt"],
            record["task"],
            kind=record.get("kind", ""),
            changed=self.state,
        )
        if name not in self.by_id:
            self.groups.setdefault(row.group, []).append(name)
            self.tasks.setdefault(row.task, []).append(name)
        self.by_id[name] = row

    def _turn(self, record: Mapping[str, Any]) -> None:
        if row := self.by_id.get(record["episode"]):
            row.turns += 1
            row.tokens += record["sampled"]
            row.changed = self.state

    def _judge(self, verdict: Mapping[str, Any]) -> str:
        name = verdict["id"]
        if name not in self.by_id:  # of a log whose episodes nobody announced
            self._begin({**verdict, "task": verdict["task_id"]})
        row = self.by_id[name]
        calls = verdict.get("tool_calls", ())
        scores = verdict.get("scores", ())
        row.language, row.kind = verdict.get("language", ""), verdict.get("kind", "")
        row.ending, row.reason = str(Ending(verdict["ending"])), verdict.get("reason", "")
        void = row.ending == "void"
        reward = float(sum(score["value"] * score.get("weight", 1.0) for score in scores))
        if not math.isfinite(reward):
            raise ValueError("a score that is not finite")
        row.reward = None if void else reward
        row.scores = {score["name"]: score["value"] for score in scores}
        row.calls, row.failed = len(calls), sum(not call["ok"] for call in calls)
        row.tools = tuple(dict.fromkeys(call["name"] for call in calls))
        row.added, row.deleted = changed_lines(text_to_bytes(verdict.get("patch", "")))
        row.seconds = verdict.get("timings", {}).get("total")
        row.changed = self.state
        return row.group

    def _learn(self, episodes: Sequence[str], advantages: Mapping[str, float]) -> None:
        for row in (self.by_id[name] for name in episodes if name in self.by_id):
            self.trained[row.id] = row.id in advantages
            row.advantage, row.changed = advantages.get(row.id) if self._alike else None, self.state

    def _compare(self, group: str) -> None:
        if any(name in self.trained for name in self.groups[group]):  # known, and not only expected
            return
        rows = [row for name in self.groups[group] if (row := self.by_id[name]).phase == "train"]
        rows = [row for row in rows if row.ending not in (OPEN, UNFINISHED)]
        for row, advantage in zip(rows, self._advantages([row.reward for row in rows]), strict=True):
            if row.advantage != advantage:
                row.advantage, row.changed = advantage, self.state


def changed_lines(patch: bytes) -> tuple[int, int]:
    r"""Count added and deleted lines of a unified diff.

    >>> changed_lines(b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1,2 @@\n--- a\n+b\n+++c\n")
    (2, 1)
    """
    added = deleted = 0
    body = False
    for line in patch.split(b"\n"):
        if line.startswith(b"diff --git "):
            body = False
        elif line.startswith(b"@@ "):
            body = True
        elif body:
            added += line.startswith(b"+")
            deleted += line.startswith(b"-")
    return added, deleted


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
