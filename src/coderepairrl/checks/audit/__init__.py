"""Audit of tasks, written to a folder: rates, intervals, counts of missing measurements."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from coderepairrl.checks.audit.trials import Say, Settings, TaskAudit, audit_tasks
from coderepairrl.checks.audit.wrong import KINDS
from coderepairrl.errors import UsageError
from coderepairrl.printable import format_count, logged
from coderepairrl.protocols import SandboxBackend, TaskSource
from coderepairrl.report.reading import to_plain_data
from coderepairrl.runs import codec, write_atomic
from coderepairrl.stats.intervals import Interval, cluster_tasks, mean_interval, wilson_interval
from coderepairrl.types import Task

METHOD = (
    "95 % intervals, without missing measurements. Wilson: tasks are taken as independent. Clustered: the score "
    "interval for the effective number of observations; a cluster is the tasks, or mutants, of one repository "
    "(if all are of one repository, those of one task)."
)


async def audit_into(
    folder: Path,
    source: TaskSource,
    tasks: Sequence[Task],
    sandbox: SandboxBackend,
    settings: Settings,
    *,
    resume: bool,
    jobs: int,
    say: Say,
) -> list[TaskAudit]:
    """Audit `tasks` of `source`; ``folder/audit.json`` gets the result.

    Raises as `audit_tasks`, and `UsageError` for a folder that cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}", fix="name another folder with -o") from error
    rows = folder / "trials.jsonl"
    audited = await audit_tasks(source, tasks, sandbox, settings, rows, resume=resume, jobs=jobs, say=say)
    write_atomic(folder / "audit.json", dumps(audit_as_json(settings, audited)))
    return audited


class Rate(NamedTuple):
    """Share of tasks or mutants."""

    name: str
    hits: int
    measured: int
    unmeasured: int
    independent: Interval | None
    """Wilson interval; None for mutants, and without measurements."""
    clustered: Interval | None


def compute_rates(audited: Sequence[TaskAudit]) -> list[Rate]:
    """Shares of tasks, then of mutants, overall and by kind."""
    cluster_of = cluster_tasks({each.task.id: each.task.repository for each in audited})

    def compute_rate(name: str, answers: Sequence[tuple[str, bool | None]], *, of_tasks: bool = True) -> Rate:
        answered = [(cluster_of[task], answer) for task, answer in answers if answer is not None]
        hits, number = sum(answer for _, answer in answered), len(answered)
        independent = wilson_interval(hits, number) if answered and of_tasks else None
        clustered = None
        if answered:
            values, clusters = [float(answer) for _, answer in answered], [cluster for cluster, _ in answered]
            clustered = mean_interval(values, clusters, share=True)
        return Rate(name, hits, number, len(answers) - number, independent, clustered)

    def rate_tasks(name: str, ask: Callable[[TaskAudit], bool | None]) -> Rate:
        return compute_rate(name, [(each.task.id, ask(each)) for each in audited])

    rates = [
        rate_tasks("the reference passes", lambda each: each.passes),
        rate_tasks("untouched fails", lambda each: each.fails),
        rate_tasks("flaky", lambda each: None if each.flaky is None else bool(each.flaky)),
        rate_tasks(
            "history holds later commits", lambda each: None if each.history is None else each.history.commits > 0
        ),
        rate_tasks(
            "history holds the repair", lambda each: None if each.history is None else bool(each.history.repair)
        ),
        rate_tasks("accepts a mutant", accepts_any_mutant),
    ]
    for kind in ("", *KINDS):
        answers = [
            (each.task.id, one.accepted) for each in audited for one in each.wrong if not kind or one.wrong.kind == kind
        ]
        if answers or not kind:
            name = f"mutants accepted: {kind}" if kind else "mutants accepted"
            rates.append(compute_rate(name, answers, of_tasks=False))
    return rates


def accepts_any_mutant(audited: TaskAudit) -> bool | None:
    """Whether a task accepts a mutant; None if none was judged."""
    judged = [each.accepted for each in audited.wrong if each.accepted is not None]
    return any(judged) if judged else None


def audit_as_json(settings: Settings, audited: Sequence[TaskAudit]) -> dict[str, Any]:
    """Convert an audit to plain data."""
    return {
        "settings": settings._asdict(),
        "method": METHOD,
        "rates": to_plain_data(compute_rates(audited)),
        "tasks": [_task_as_json(each) for each in audited],
    }


def _task_as_json(audited: TaskAudit) -> dict[str, Any]:
    return {
        "task": audited.task.id,
        "repository": audited.task.repository,
        "reference_passes": audited.passes,
        "untouched_fails": audited.fails,
        "flaky": None if audited.flaky is None else list(audited.flaky),
        "problems": list(audited.problems),
        "history": codec.dump(audited.history),
        "mutants": [
            {**codec.dump(each.wrong), "accepted": each.accepted, "problem": each.problem} for each in audited.wrong
        ],
        "no_mutants": audited.no_wrong,
        "same": audited.same,
        "faults": dict(sorted(audited.faults.items())),
    }


def format_rates_table(audited: Sequence[TaskAudit]) -> str:
    """Table: shares, failed trials, accepted mutants."""
    lines = [f"{format_count(len(audited), 'task'):<46} {'':>9}  {'Wilson':<22}  {'clustered':<22}  not measured"]
    for each in compute_rates(audited):
        ratio = f"{each.hits}/{each.measured}"
        wilson, clustered = _format_share(each.independent), _format_share(each.clustered)
        lines.append(f"  {each.name:<44} {ratio:>9}  {wilson:<22}  {clustered:<22}  {each.unmeasured or ''}".rstrip())
    for task in audited:
        if task.faults:
            reasons = "; ".join(
                f"{change}: {reason.splitlines()[0]}" for change, reason in task.faults.items() if reason
            )
            lines.append(f"  not tried: {task.task.id}: {logged(reasons)}")
        lines += [f"  does not hold: {task.task.id}: {logged(each)}" for each in task.problems]
        for one in task.wrong:
            if one.accepted:
                change = f" ({one.wrong.what})" if one.wrong.what else ""
                lines.append(f"  accepted: {task.task.id}: {one.wrong.kind}, {one.wrong.place}{logged(change)}")
    return "\n".join(lines)


def _format_share(interval: Interval | None) -> str:
    return "-" if interval is None else str(interval)


def dumps(plain: dict[str, Any]) -> str:
    """JSON for a file."""
    return json.dumps(plain, indent=1, allow_nan=False) + "\n"
