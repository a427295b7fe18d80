"""Costs, results and answers of a jobs file, read from its folders."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from coderepairrl.errors import RunError, UsageError
from coderepairrl.printable import format_count
from coderepairrl.processes.meter import ResourceUsage, sum_usage
from coderepairrl.report import arms
from coderepairrl.report.kit import PageContext, render_page
from coderepairrl.report.reading import to_plain_data
from coderepairrl.report.site import write_page
from coderepairrl.report.verdict import Result, Table
from coderepairrl.runs import RunFolder, logged_episodes
from coderepairrl.stats.intervals import Interval
from coderepairrl.stats.measures import Cost, sum_costs

JOBS_FILE = "jobs.json"
_LOSS = "held_out/loss"


@dataclass(frozen=True, slots=True)
class Job:
    """Job as recorded in its folder."""

    name: str
    kind: str
    about: str
    missing: str
    """Why its output is missing or stale; else empty."""
    used: ResourceUsage | None
    """None before the first measurement."""
    cost: Cost
    result: str
    commit: str


def is_jobs_folder(folder: Path) -> bool:
    """Whether `folder` belongs to a jobs file."""
    return (folder / JOBS_FILE).is_file()


def job_record_path(job: Path) -> Path:
    """Record next to the folder `job`."""
    return job.with_name(f"{job.name}.job.json")


def read_job_record(job: Path) -> dict[str, Any] | None:
    """Record of the folder `job`, or None. Raises `RunError` for a damaged one."""
    record = job_record_path(job)
    try:
        state = json.loads(record.read_text("utf-8"))
        required = {name: state[name] for name in ("made_by", "ended", "port")}  # KeyError: damaged
        return {"failed": "", **state, **required}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        remove = shlex.join(["rm", "-r", str(job), str(record)])
        raise RunError(
            f"{record} is damaged: {error!r}",
            fix=f"restore it from a copy, or run the job again: {remove}; crrl run FILE",
        ) from None


def read_jobs_folder(folder: Path) -> tuple[dict[str, Any], list[Job]]:
    """Record and jobs of `folder`. Raises `UsageError` if it belongs to no jobs file, `RunError` for damage."""
    try:
        data: dict[str, Any] = json.loads((folder / JOBS_FILE).read_text("utf-8"))
        return data, [_read_job(folder, row) for row in data["jobs"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{folder} is not a folder of jobs: {error!r}", fix="make one: crrl run FILE") from error


def _read_job(home: Path, row: Mapping[str, str]) -> Job:
    folder = RunFolder(home / row["name"])
    state = read_job_record(folder.path) or {}
    has_run = (folder.path / "run.json").is_file() and folder.log.is_file()
    records = list(folder.records()) if has_run else []
    missing = row["stale"] and f"is not what the file asks for now: {row['stale']}"
    if not state.get("ended"):
        reason = f": {state['failed']}" if state.get("failed") else ""
        missing = f"{'is not finished' if state else 'has not begun'}{reason}"
    return Job(
        name=row["name"],
        kind=row["kind"],
        about=row["about"],
        missing=missing,
        used=sum_usage(records),
        cost=sum_costs(logged_episodes(records)),
        result=_FORMAT_RESULT[row["kind"]](folder) if has_run else "",
        commit=folder.about().get("commit", "") if has_run else "",
    )


def _format_collected(folder: RunFolder) -> str:
    path = folder.path / "examples.json"
    if not path.is_file():
        return ""
    counts = json.loads(path.read_text("utf-8"))
    return f"{counts['kept']:,} of {counts['attempts']:,} attempts kept"


def _format_trained(folder: RunFolder) -> str:
    steps = folder.metrics()
    before = [record["metrics"] for record in folder.records() if record["type"] == "held_out"]
    losses = [float(each[_LOSS]) for each in [*before, *steps] if _LOSS in each]
    return format_count(len(steps), "step") + (f", held-out loss {losses[0]:.3f} to {losses[-1]:.3f}" if losses else "")


def _format_evaluated(folder: RunFolder) -> str:
    for record in folder.records():
        if record["type"] == "eval" and record["name"] == "eval":
            intervals = record["summary"].get("outcomes", {}) | record["summary"]["values"]
            return ", ".join(
                f"{name} {Interval(**intervals[name])}" for name in ("reward", "resolved") if name in intervals
            )
    return ""


_FORMAT_RESULT: dict[str, Callable[[RunFolder], str]] = {
    "collect": _format_collected,
    "sft": _format_trained,
    "train": _format_trained,
    "eval": _format_evaluated,
    "command": lambda folder: "",
}


def summarise_jobs(folder: Path) -> Result:
    """Answers and tables of the jobs in `folder`. Raises `UsageError`."""
    data, jobs = read_jobs_folder(folder)
    missing = [each for each in jobs if each.missing]
    notes = [f"{each.name} {each.missing}." for each in missing]
    if missing:
        notes.append(f"{len(missing)} of {len(jobs)} jobs are missing: the table shows only the others.")
    commits = {each.commit: each.name for each in jobs if each.commit}
    if len(commits) > 1:
        versions = ", ".join(f"{name} {commit[:12]}" for commit, name in commits.items())
        notes.append(f"Jobs were made by different commits: {versions}.")
    done = {each.name for each in jobs if not each.missing}
    runs = {
        arm: {int(seed): folder / name for seed, name in arm_data["jobs"].items() if name in done}
        for arm, arm_data in data["arms"].items()
    }
    questions = [arms.ArmQuestion(**each) for each in data["questions"]]
    rows = [(arm, arm_data["about"]) for arm, arm_data in data["arms"].items() if arm_data["about"]]
    arms_table = Table("arms", ("arm", "what it is"), rows)
    answers = (
        arms.answer_questions(questions, runs, data["seeds"], arms_table, notes, data.get("criteria", {}))
        if questions
        else Result([], [], notes, {})
    )
    numbers = {
        "name": data["name"],
        **answers.numbers,
        "jobs": [to_plain_data(each) | {"done": not each.missing} for each in jobs],
        "notes": [*answers.notes],
    }
    return Result(answers.verdicts, [*answers.tables, _make_cost_table(data["name"], jobs)], answers.notes, numbers)


def _make_cost_table(name: str, jobs: Sequence[Job]) -> Table:
    rows = [(each.name, each.kind, *_format_spent(each.used, each.cost), each.result or "-") for each in jobs]
    cost = reduce(Cost.plus, (each.cost for each in jobs), Cost())
    used = [each.used for each in jobs if each.used]
    total = ResourceUsage(sum(each.seconds for each in used), sum(each.cpu_seconds for each in used))
    rows.append(("all", "", *_format_spent(total, cost), ""))
    heads = ("job", "kind", "seconds", "CPU seconds", "prompt tokens", "sampled tokens", "result")
    return Table(f"{name}: jobs", heads, rows)


def _format_spent(used: ResourceUsage | None, cost: Cost) -> tuple[str, str, str, str]:
    seconds = ("-", "-") if used is None else (f"{used.seconds:,.0f}", f"{used.cpu_seconds:,.0f}")
    return (*seconds, f"{cost.prompt_tokens:,}", f"{cost.sampled_tokens:,}")


def write_jobs_page(folder: Path, output: Path | None) -> Path:
    """Write the result as a page to `output`, a folder or a ``.html`` file (default: ``report`` in `folder`)."""
    page = render_page("jobs.html.j2", PageContext(), name=folder.resolve().name, result=summarise_jobs(folder))
    output = output or folder / "report"
    return write_page(output if output.suffix == ".html" else output / "index.html", page)
