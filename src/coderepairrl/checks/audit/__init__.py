"""``crrl tasks verify --deep``: whether tasks are sound (docs/guides/audit.md)."""

from __future__ import annotations

from pathlib import Path

from coderepairrl.checks.audit.rates import Rate, as_json, dumps, rates, table
from coderepairrl.checks.audit.trials import Audited, Say, Settings, apart, audit, chosen
from coderepairrl.errors import UsageError
from coderepairrl.protocols import SandboxBackend, TaskSource
from coderepairrl.runs.folder import write_atomic

__all__ = [
    "Audited",
    "Rate",
    "Settings",
    "apart",
    "as_json",
    "audit",
    "audit_into",
    "chosen",
    "dumps",
    "rates",
    "table",
]


async def audit_into(
    folder: Path,
    source: TaskSource,
    sandbox: SandboxBackend,
    settings: Settings,
    limit: int,
    *,
    resume: bool,
    jobs: int,
    say: Say,
) -> list[Audited]:
    """Audit `limit` tasks (0: all) of `source`, drawn by the seed; ``folder/audit.json`` gets the result.

    Raises as `chosen` and `audit`, and `UsageError` for a folder that cannot be made.
    """
    tasks = chosen(source, limit, settings.seed)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}", fix="name another folder with -o") from error
    rows = folder / "trials.jsonl"
    audited = await audit(source, tasks, sandbox, settings, rows, resume=resume, jobs=jobs, say=say)
    write_atomic(folder / "audit.json", dumps(as_json(settings, audited)))
    return audited
