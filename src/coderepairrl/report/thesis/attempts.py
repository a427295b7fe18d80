"""Training attempts of a run as flat records: what every figure of the thesis is computed from, and its CSV."""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from coderepairrl.report.analysis import Report
from coderepairrl.report.rows import EpisodeRow, count_patch_lines
from coderepairrl.report.run import RunPages
from coderepairrl.stats.outcomes import is_resolved
from coderepairrl.types import Ending, Episode, ToolCall

END_SHARE = 0.2
"""Share of the steps that count as early, and as late, as in the thesis."""
_NOT_ENOUGH = "fewer than two steps with attempts"


class Call(NamedTuple):
    """Tool call: `command` is the first command of `line`, or the tool's name if it ran no command line."""

    tool: str
    command: str
    line: str
    ok: bool


@dataclass(frozen=True, slots=True)
class Attempt:
    """Attempt that a step trained on."""

    id: str
    step: int
    task: str
    group: str
    visit: int
    """1 for the first group of attempts at this task, 2 for the next."""
    language: str
    ending: str
    reason: str
    reward: float
    resolved: bool | None
    """None if no test ran."""
    empty: bool
    patch: str
    """Start of the patch's SHA-256; empty like the patch."""
    turns: int
    sampled: int
    """Sampled tokens."""
    changed: int
    """Added and deleted lines of the patch."""
    reference: int | None
    """Those of the reference patch; None without one."""
    calls: tuple[Call, ...]
    calls_known: bool


@dataclass(frozen=True, slots=True)
class ThesisRun:
    """Run with its attempts, in the order of steps."""

    report: Report
    attempts: Sequence[Attempt]

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.report.name


def read_attempts(run: RunPages, report: Report) -> ThesisRun:
    """Read the attempts that steps trained on."""
    tasks, rows = run.folder.tasks(), run.rows
    references = {
        name: sum(count_patch_lines(task.reference)) for name, task in tasks.items() if task.reference.strip()
    }
    visits: dict[str, list[str]] = defaultdict(list)
    attempts = []
    for name, step in rows.consumed.items():
        row, episode = rows.by_id.get(name), rows.follower.verdict(name) if name in rows.by_id else None
        if row is None or row.reward is None or episode is None or episode.ending is Ending.VOID:
            continue
        if row.group not in visits[row.task]:
            visits[row.task].append(row.group)
        visit = visits[row.task].index(row.group) + 1
        attempts.append(_make_attempt(row, episode, step, visit, references.get(row.task)))
    # of a run that diverged, a metric can be infinite, or no number: it is left out like one that was not measured
    steps = [
        {key: value for key, value in step.items() if not isinstance(value, float) or math.isfinite(value)}
        for step in report.steps
    ]
    return ThesisRun(replace(report, steps=steps), attempts)


def _make_attempt(row: EpisodeRow, episode: Episode, step: int, visit: int, reference: int | None) -> Attempt:
    assert row.reward is not None
    return Attempt(
        id=row.id,
        step=step,
        task=row.task,
        group=row.group,
        visit=visit,
        language=row.language,
        ending=row.ending,
        reason=row.reason,
        reward=row.reward,
        resolved=is_resolved(episode),
        empty=not episode.patch,
        patch=hashlib.sha256(episode.patch).hexdigest()[:12] if episode.patch else "",
        turns=row.turns,
        sampled=row.tokens,
        changed=row.added + row.deleted,
        reference=reference,
        calls=tuple(map(_make_call, episode.tool_calls)),
        calls_known=episode.calls_known,
    )


def _make_call(call: ToolCall) -> Call:
    try:
        arguments = json.loads(call.arguments)
    except ValueError:  # a policy can write anything
        arguments = None
    line = arguments.get("cmd", arguments.get("command")) if isinstance(arguments, Mapping) else None
    names = call.command.split()
    return Call(call.name, names[0] if names else call.name, line if isinstance(line, str) else "", call.ok)


class Ends(NamedTuple):
    """Attempts of the first and of the last steps; `missing` says why there are none."""

    early: Sequence[Attempt]
    late: Sequence[Attempt]
    steps: int
    """Steps at each end."""
    missing: str = ""


def split_ends(run: ThesisRun, share: float = END_SHARE) -> Ends:
    """Attempts of the first and last `share` of the steps, at least one step each."""
    steps = sorted({attempt.step for attempt in run.attempts})
    if len(steps) < 2:
        return Ends((), (), 0, _NOT_ENOUGH)
    count = max(1, round(share * len(steps)))
    first, last = set(steps[:count]), set(steps[-count:])
    early, late = ([each for each in run.attempts if each.step in chosen] for chosen in (first, last))
    return Ends(early, late, count)


ATTEMPT_HEADS = ("run", *(name for name in Attempt.__slots__ if name != "calls"), "tool_calls")
CALL_HEADS = ("run", "id", "step", "position", *Call._fields)


def list_attempt_rows(runs: Sequence[ThesisRun]) -> Iterator[Sequence[Any]]:
    """Rows of ``attempts.csv``."""
    for run in runs:
        for each in run.attempts:
            yield run.name, *(getattr(each, name) for name in ATTEMPT_HEADS[1:-1]), len(each.calls)


def list_call_rows(runs: Sequence[ThesisRun]) -> Iterator[Sequence[Any]]:
    """Rows of ``calls.csv``."""
    for run in runs:
        for each in run.attempts:
            for position, call in enumerate(each.calls):
                yield run.name, each.id, each.step, position, *call
