"""Attempts that training steps used, as flat records for the figures of the thesis and two CSV files."""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from coderepairrl.report.analysis import Report
from coderepairrl.report.rows import count_patch_lines
from coderepairrl.report.run import RunPages
from coderepairrl.stats.outcomes import is_resolved
from coderepairrl.types import Ending, ToolCall

END_SHARE = 0.2
"""Share of the steps, at each end of a run, that the thesis calls early and late."""


class Call(NamedTuple):
    """Tool call."""

    tool: str
    command: str
    """First command of `line`, or the tool's name if `line` is empty."""
    line: str
    """Command line; empty if the tool ran none."""
    ok: bool


@dataclass(frozen=True, slots=True)
class Attempt:
    """Attempt that a step trained on."""

    id: str
    step: int
    task: str
    group: str
    visit: int
    """1 in the first group of attempts at this task, 2 in the next."""
    language: str
    ending: str
    reason: str
    reward: float
    resolved: bool | None
    """None if no test ran."""
    empty: bool
    patch: str
    """First 12 digits of the patch's SHA-256; empty for an empty patch."""
    turns: int
    sampled: int
    """Sampled tokens."""
    changed: int
    """Added and deleted lines of the patch."""
    reference: int | None
    """Added and deleted lines of the reference patch; None without one."""
    calls: tuple[Call, ...]
    calls_known: bool
    """Whether the agent reported its tool calls."""


@dataclass(frozen=True, slots=True)
class ThesisRun:
    """Run, and the attempts that its steps trained on, in the order of the steps."""

    report: Report
    attempts: Sequence[Attempt]

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.report.name

    @property
    def is_evaluation(self) -> bool:
        """Whether the run evaluated a policy, so that it has no steps."""
        return "policy" in self.report.about


def select_trained(runs: Sequence[ThesisRun]) -> Sequence[ThesisRun]:
    """Select the runs that trained; all if none did."""
    return [run for run in runs if not run.is_evaluation] or runs


def read_attempts(run: RunPages, report: Report) -> ThesisRun:
    """Read the attempts that steps trained on."""
    tasks, rows = run.folder.tasks(), run.rows
    reference_sizes = {
        name: sum(count_patch_lines(task.reference)) for name, task in tasks.items() if task.reference.strip()
    }
    groups_by_task: dict[str, list[str]] = defaultdict(list)
    attempts = []
    for episode_id, step in rows.consumed.items():
        row = rows.by_id.get(episode_id)
        episode = None if row is None else rows.follower.verdict(episode_id)
        if row is None or row.reward is None or episode is None or episode.ending is Ending.VOID:
            continue
        if row.group not in groups_by_task[row.task]:
            groups_by_task[row.task].append(row.group)
        attempt = Attempt(
            id=row.id,
            step=step,
            task=row.task,
            group=row.group,
            visit=groups_by_task[row.task].index(row.group) + 1,
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
            reference=reference_sizes.get(row.task),
            calls=tuple(map(_convert_call, episode.tool_calls)),
            calls_known=episode.calls_known,
        )
        attempts.append(attempt)
    # infinite and NaN metrics, of a run that diverged, count as not measured
    steps = [
        {key: value for key, value in step.items() if not isinstance(value, float) or math.isfinite(value)}
        for step in report.steps
    ]
    return ThesisRun(replace(report, steps=steps), attempts)


def _convert_call(call: ToolCall) -> Call:
    try:
        arguments = json.loads(call.arguments)
    except ValueError:  # a model can write anything
        arguments = None
    line = arguments.get("cmd", arguments.get("command")) if isinstance(arguments, Mapping) else None
    commands = call.command.split()
    return Call(call.name, commands[0] if commands else call.name, line if isinstance(line, str) else "", call.ok)


class Ends(NamedTuple):
    """Attempts of a run's first and last steps; `missing` says why there are none."""

    early: Sequence[Attempt]
    late: Sequence[Attempt]
    steps: int
    """Number of steps at each end."""
    missing: str = ""

    @property
    def sides(self) -> Mapping[str, Sequence[Attempt]]:
        """Attempts by end."""
        return {"early": self.early, "late": self.late}


def split_ends(run: ThesisRun) -> Ends:
    """Select the attempts of the first and last `END_SHARE` of the steps, at least one step each."""
    steps = sorted({attempt.step for attempt in run.attempts})
    if len(steps) < 2:
        return Ends((), (), 0, "fewer than two steps with attempts")
    count = max(1, round(END_SHARE * len(steps)))
    early = [attempt for attempt in run.attempts if attempt.step <= steps[count - 1]]
    late = [attempt for attempt in run.attempts if attempt.step >= steps[-count]]
    return Ends(early, late, count)


ATTEMPT_COLUMNS = ("run", *(name for name in Attempt.__slots__ if name != "calls"), "tool_calls")
CALL_COLUMNS = ("run", "id", "step", "position", *Call._fields)


def list_attempt_rows(runs: Sequence[ThesisRun]) -> Iterator[Sequence[Any]]:
    """List the rows of ``attempts.csv``."""
    for run in runs:
        for attempt in run.attempts:
            yield run.name, *(getattr(attempt, name) for name in ATTEMPT_COLUMNS[1:-1]), len(attempt.calls)


def list_call_rows(runs: Sequence[ThesisRun]) -> Iterator[Sequence[Any]]:
    """List the rows of ``calls.csv``."""
    for run in runs:
        for attempt in run.attempts:
            for position, call in enumerate(attempt.calls):
                yield run.name, attempt.id, attempt.step, position, *call
