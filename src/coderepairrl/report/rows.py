"""A run's log, read once: its records, and its episodes as rows to filter and sort."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from coderepairrl.learn.account import AccountBuilder
from coderepairrl.printable import visible
from coderepairrl.runs.codec import text_to_bytes
from coderepairrl.runs.log import Follower
from coderepairrl.types import Ending

Record = Mapping[str, Any]
OPEN, UNFINISHED = "open", "unfinished"
"""States before an ending: no verdict yet, or a process that ended without one."""
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def file_name(name: str) -> str:
    """File name for `name`: itself if safe in any file system and URL.

    >>> file_name("train-00001-000-00"), file_name("mutants/a's b")
    ('train-00001-000-00', 'mutants-a-s-b-8f750b0c6a')
    """
    if _SAFE_NAME.fullmatch(name):
        return name
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:10]
    return f"{_UNSAFE.sub('-', name).strip('-._')[:60]}-{digest}".lstrip("-")


@dataclass(slots=True)
class EpisodeRow:
    """Episode in the list."""

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
    failed: int = 0  # calls that failed
    tokens: int = 0
    added: int = 0
    deleted: int = 0
    seconds: float | None = None
    tools: tuple[str, ...] = ()
    scores: dict[str, float] = field(default_factory=dict)
    changed: int = 0  # `EpisodeRows.state` at its last change

    def cells(self) -> list[Any]:
        """Values of `CELLS`, safe for JSON and HTML; an empty page name stands for the id."""
        pages = ["" if file_name(name) == name else file_name(name) for name in (self.id, self.group)]
        return [*(_make_cell_safe(getattr(self, name)) for name in _ROW_FIELDS), *pages]


_ROW_FIELDS = tuple(each.name for each in fields(EpisodeRow) if each.name != "changed")
CELLS = (*_ROW_FIELDS, "page", "group_page")  # names of the columns that list.js gets


def _make_cell_safe(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {visible(name): _make_cell_safe(each) for name, each in value.items()}
    return [_make_cell_safe(each) for each in value] if isinstance(value, tuple) else value


class EpisodeRows:
    """Rows of the log that `follower` reads, in starting order."""

    def __init__(self, follower: Follower, *, one_advantage: bool = True) -> None:
        """Without `one_advantage`, rows have no advantage: a value head's differ by token."""
        self.by_id: dict[str, EpisodeRow] = {}
        self.groups: dict[str, list[str]] = {}
        self.tasks: dict[str, list[str]] = {}
        self.consumed: dict[str, int] = {}
        """Step that consumed an episode, by id."""
        self.trained: dict[str, bool] = {}
        """Whether a step trained on a consumed episode, by id, if advantages were logged."""
        self.state = 0
        """Number of updates."""
        self.last: Record = {"type": ""}
        """Last ``start``, ``stop`` or ``end`` record."""
        self.start: Record = {}
        """Last ``start`` record."""
        self.steps: list[Record] = []
        self.changes: list[Record] = []
        self.used: list[Record] = []
        """``start`` and ``used`` records, for `processes.meter.sum_usage`."""
        self.evaluations: dict[tuple[str, int], tuple[float, Record]] = {}
        """Seconds in the last process, and `summarise_answers`, by (name, step)."""
        self.sessions: list[tuple[float, float]] = []
        """Start and end (Unix seconds) of each process."""
        self.tries: Counter[tuple[str, int]] = Counter()
        """Started episodes by (group, attempt), several after retries."""
        self.accounts = AccountBuilder()
        # time of the first episode in this process, by (phase, step)
        self._open_since: dict[tuple[str, int], float] = {}
        self.follower = follower
        self._one_advantage = one_advantage

    def update(self) -> None:
        """Read new log records."""
        self.state += 1
        for record in self.follower.records():
            try:
                self._apply_record(record)
            except (ValueError, TypeError, LookupError, AttributeError) as error:  # another version's, or edited
                self.follower.mark_damaged(error)

    def _apply_record(self, record: Record) -> None:
        self.accounts.take(record)
        time = record.get("time", 0.0)
        if record["type"] == "start" or not self.sessions:
            self.sessions.append((time, time))
            self._open_since.clear()
        match record["type"]:
            case "episode":
                self._add_row(record)
                self._open_since.setdefault((record["phase"], record["step"]), time)
                self.tries[record["group"], record["attempt"]] += 1
            case "turn":
                self._count_turn(record)
            case "verdict":
                self._apply_verdict(record["verdict"])
            case "step":
                self.consumed |= dict.fromkeys(record["episodes"], record["step"])
                if "advantages" in record:
                    self._apply_advantages(record["episodes"], record["advantages"])
                self.steps.append({**record, "metrics": record["metrics"]})  # KeyError without metrics: damaged
            case "change":
                self.changes.append(record)
            case "eval":
                # its episodes may all be from an earlier process: then this one spent no time on it
                key = record["name"], record["step"]
                seconds = time - self._open_since.get(key, time)
                self.evaluations[key] = seconds, record["summary"].get("answers") or {}
            case "start" | "stop" | "end":
                self.last = record
                for row in self.by_id.values():
                    if row.ending == OPEN:
                        row.ending, row.changed = UNFINISHED, self.state
        if record["type"] == "start":
            self.start = record
        if record["type"] in ("start", "used"):
            self.used.append(record)
        if record["type"] != "turn":
            self.sessions[-1] = (self.sessions[-1][0], time)

    def _add_row(self, record: Mapping[str, Any]) -> None:
        name = record["id"]
        values = {key: record[key] for key in ("id", "phase", "step", "group", "attempt", "task")}
        row = EpisodeRow(**values, kind=record.get("kind", ""), changed=self.state)
        if name not in self.by_id:
            self.groups.setdefault(row.group, []).append(name)
            self.tasks.setdefault(row.task, []).append(name)
        self.by_id[name] = row

    def _count_turn(self, record: Mapping[str, Any]) -> None:
        if row := self.by_id.get(record["episode"]):
            row.turns += 1
            row.tokens += record["sampled"]
            row.changed = self.state

    def _apply_verdict(self, verdict: Mapping[str, Any]) -> None:
        row = self.by_id[verdict["id"]]
        calls = verdict.get("tool_calls", ())
        scores = verdict.get("scores", ())
        row.language, row.kind = verdict.get("language", ""), verdict.get("kind", "")
        row.ending, row.reason = str(Ending(verdict["ending"])), verdict.get("reason", "")
        reward = float(sum(score["value"] * score.get("weight", 1.0) for score in scores))
        if not math.isfinite(reward):
            raise ValueError("a score is not finite")
        row.reward = None if row.ending == "void" else reward
        row.scores = {score["name"]: score["value"] for score in scores}
        row.calls, row.failed = len(calls), sum(not call["ok"] for call in calls)
        row.tools = tuple(dict.fromkeys(call["name"] for call in calls))
        row.added, row.deleted = count_patch_lines(text_to_bytes(verdict.get("patch", "")))
        row.seconds = verdict.get("timings", {}).get("total")
        row.changed = self.state

    def _apply_advantages(self, episodes: Sequence[str], advantages: Mapping[str, float]) -> None:
        for name in episodes:
            if row := self.by_id.get(name):
                self.trained[name] = name in advantages
                row.advantage = advantages.get(name) if self._one_advantage else None
                row.changed = self.state


def count_patch_lines(patch: bytes) -> tuple[int, int]:
    r"""Count added and deleted lines of a unified diff.

    >>> count_patch_lines(b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1,2 @@\n--- a\n+b\n+++c\n")
    (2, 1)
    """
    kinds = Counter(kind for kind, _ in classify_patch_lines(patch.decode(errors="replace")))
    return kinds["add"], kinds["del"]


def classify_patch_lines(patch: str) -> Iterator[tuple[str, str]]:
    """Pair each line of a unified diff with its kind: ``file``, ``hunk``, ``add``, ``del`` or ``same``."""
    in_hunk = False
    for line in patch.split("\n"):
        is_header = line.startswith("@@ ")
        in_hunk = is_header or (in_hunk and not line.startswith("diff --git "))
        kind = {"+": "add", "-": "del"}.get(line[:1], "same") if in_hunk else "file"
        yield "hunk" if is_header else kind, line
