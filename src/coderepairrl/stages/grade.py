"""``crrl grade``: judge patches by a benchmark's rules."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from coderepairrl import rewards
from coderepairrl.errors import Fault, TaskError, UsageError
from coderepairrl.printable import counted
from coderepairrl.protocols import SandboxBackend
from coderepairrl.runs import write_atomic
from coderepairrl.runs.log import Lines
from coderepairrl.stages.predictions import Prediction
from coderepairrl.stages.shards import WHOLE, Shard
from coderepairrl.stats import Interval, mean_interval, wilson
from coderepairrl.stats.intervals import clusters_by
from coderepairrl.tasks.prepare import prepare_tasks
from coderepairrl.types import Ending, Episode, Task

_NAMED = 3
Say = Callable[[str], None]


class Graded(NamedTuple):
    """Verdict on a prediction, or `fault`."""

    instance: str
    model: str
    resolved: bool
    empty: bool
    problem: str = ""
    """Grader's reason for not resolved."""
    seconds: float = 0.0
    patch: str = ""
    """SHA-256 of the patch."""
    task: str = ""
    """SHA-256 of workspace, environment and checks."""
    fault: str = ""

    def as_json(self) -> dict[str, Any]:
        """Convert to a row of the results file."""
        return {
            "instance_id": self.instance,
            "model_name_or_path": self.model,
            "resolved": self.resolved,
            "empty": self.empty,
            "problem": self.problem,
            "seconds": self.seconds,
            "patch_sha256": self.patch,
            "task_sha256": self.task,
        }


class Totals(NamedTuple):
    """Totals of a model's patches; shares leave out tasks with a fault."""

    model: str
    tasks: int
    """Tasks that shares refer to."""
    source: int
    graded: int
    empty: int
    missing: tuple[str, ...]
    """Tasks without a prediction, counted as not resolved."""
    faults: Mapping[str, str]
    """Reasons of missing verdicts, by task."""
    resolved: int
    wilson: Interval | None
    """Wilson's interval over `tasks`, or None."""
    clustered: Interval | None
    """Clustered by repository (`stats.intervals`)."""
    per_patch: Interval | None
    """Clustered share of non-empty patches, or None."""

    def as_json(self) -> dict[str, Any]:
        """Convert to plain data."""
        plain = self._asdict() | {"missing": list(self.missing), "faults": dict(self.faults)}
        return {key: part._asdict() if isinstance(part, Interval) else part for key, part in plain.items()}


def choose_predictions(
    predictions: Sequence[Prediction],
    tasks: Iterable[Task],
    shard: Shard = WHOLE,
    *,
    skip_unknown: bool = False,
    checks: bool = True,
) -> tuple[dict[str, Task], list[Prediction], list[str]]:
    """Tasks of `shard` by id, their predictions, and unknown instances.

    Raises `UsageError` for these unless `skip_unknown`, and with `checks` `TaskError` for tasks without.
    """
    by_id = {task.id: task for task in tasks}
    unknown = sorted({each.instance for each in predictions} - by_id.keys())
    if unknown and not skip_unknown:
        some = ", ".join(unknown[:_NAMED]) + (", ..." if len(unknown) > _NAMED else "")
        raise UsageError(
            f"{counted(len(unknown), 'instance')} of the predictions not among the {counted(len(by_id), 'task')} of the"
            f" source: {some}",
            fix="name the benchmark that they are for, or leave them out with --skip-unknown",
        )
    by_id = {name: by_id[name] for name in shard.share(sorted(by_id))} if shard != WHOLE else by_id
    gradable = [each for each in predictions if each.instance in by_id]
    if not gradable:
        raise UsageError("no prediction is for a task of the source", fix="name the benchmark that they are for")
    if checks and (untestable := next((each.instance for each in gradable if not by_id[each.instance].checks), "")):
        raise TaskError(
            f"task {untestable} has no checks, so no patch for it can be judged",
            fix="where the benchmark has images or native environments: workspace=image, workspace=native",
        )
    return by_id, gradable, unknown


async def grade(
    predictions: Sequence[Prediction],
    tasks: Mapping[str, Task],
    sandbox: SandboxBackend,
    output: Path,
    *,
    resume: bool = False,
    jobs: int = 2,
    say: Say = lambda _: None,
) -> list[Graded]:
    """Grade `predictions`, `jobs` at a time, in fresh sandboxes; return verdicts in order.

    Prepares tasks' needs first. `output` gets verdicts as JSON lines; `resume` keeps those present. Infrastructure
    faults are not written, so that `resume` retries them. Raises `UsageError` for an existing file (without `resume`)
    or verdicts on other patches or tasks, and like `prepare_tasks`.
    """
    verdicts = _read_grades(output, predictions, tasks) if resume else {}
    if output.exists() and not resume:
        raise UsageError(f"{output} exists already", fix="continue it with --resume, or name another file with -o")
    left = [each for each in predictions if (each.model, each.instance) not in verdicts]
    if needed := {each.instance: tasks[each.instance] for each in left if not each.empty}:
        await prepare_tasks(needed.values(), jobs=jobs, say=say)
    judged = rewards.make_rewards("tests")
    room, done = asyncio.Semaphore(jobs), len(verdicts)
    lines = Lines(output)
    try:

        async def one(made: Prediction) -> Graded:
            nonlocal done
            async with room:
                verdict = await _grade_prediction(made, tasks[made.instance], judged, sandbox)
            if not verdict.fault:
                lines.append(verdict.as_json())
            verdicts[made.model, made.instance] = verdict
            done += 1
            say(f"[{done}/{len(predictions)}] {_grade_line(verdict)}")
            return verdict

        async with asyncio.TaskGroup() as pending:
            for each in left:
                pending.create_task(one(each))
    except BaseExceptionGroup as several:  # the first is the cause; the others were cancelled
        raise several.exceptions[0] from None
    finally:
        lines.close()
    ordered = [verdicts[each.model, each.instance] for each in predictions]
    write_atomic(output, "".join(json.dumps(each.as_json()) + "\n" for each in ordered if not each.fault))
    return ordered


async def _grade_prediction(
    made: Prediction, task: Task, judged: Sequence[rewards.Weighted], sandbox: SandboxBackend
) -> Graded:
    graded = Graded(made.instance, made.model, False, made.empty, patch=_sha(made.patch), task=task_digest(task))
    if made.empty:
        return graded._replace(problem="empty patch")
    began = time.monotonic()
    episode = Episode(made.instance, task.id, "grade", 0, "", 0, Ending.DONE, patch=made.patch)
    try:
        [score] = await rewards.score(judged, task, episode, sandbox)
    except Fault as fault:
        return graded._replace(fault=f"{type(fault).__name__}: {fault}")
    return graded._replace(resolved=bool(score.passed), problem=score.note, seconds=round(time.monotonic() - began, 1))


def task_digest(task: Task) -> str:
    """SHA-256 of what decides on patches."""
    place = "" if task.workspace.startswith("dir:") else task.workspace  # a path of this machine
    return _sha(repr((place, task.environment, task.checks)).encode("utf-8", "surrogateescape"))


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read_grades(
    output: Path, predictions: Iterable[Prediction], tasks: Mapping[str, Task]
) -> dict[tuple[str, str], Graded]:
    """Verdicts in `output` by model and instance. Raises `UsageError`."""
    by_key = {(each.model, each.instance): each for each in predictions}
    verdicts = {}
    for number, row in enumerate(Lines.read(output), 1):
        try:
            verdict = _graded_from_json(row)
        except (KeyError, TypeError) as error:
            raise UsageError(f"{output}, line {number}: no verdict ({error})", fix="name another file") from None
        prediction = by_key.get((verdict.model, verdict.instance))
        if (
            prediction is None
            or verdict.patch != _sha(prediction.patch)
            or verdict.task != task_digest(tasks[verdict.instance])
        ):
            difference = (
                "another patch"
                if prediction is not None and verdict.patch != _sha(prediction.patch)
                else "another task"
            )
            raise UsageError(
                f"{output}, line {number}: a verdict on {difference} for {verdict.instance}",
                fix="name another file with -o",
            )
        verdicts[verdict.model, verdict.instance] = verdict
    return verdicts


def _graded_from_json(row: Mapping[str, Any]) -> Graded:
    """Inverse of `Graded.as_json`. Raises KeyError and TypeError."""
    example = Graded("", "", False, False).as_json()
    for key, value in example.items():
        is_whole = isinstance(value, float) and type(row[key]) is int  # seconds, as somebody may write them
        if type(row[key]) is not type(value) and not is_whole:
            raise TypeError(f"{key} is {json.dumps(row[key])[:80]}")
    return Graded(*(row[key] for key in example))


def _grade_line(found: Graded) -> str:
    if found.fault:
        return f"{found.instance}: no verdict: {found.fault.partition(chr(10))[0]}"
    how = "resolved" if found.resolved else f"not resolved: {found.problem.partition(chr(10))[0][:100]}"
    return f"{found.instance} ({found.seconds:g} s): {how}"


def totals(graded: Sequence[Graded], tasks: Mapping[str, Task], *, listed: bool = False) -> list[Totals]:
    """Totals by model, in the order of `graded`.

    Counts all `tasks`, missing predictions unresolved as in the SWE-bench leaderboard, or predicted ones (`listed`).
    """
    return [
        _totals(model, [each for each in graded if each.model == model], tasks, listed)
        for model in dict.fromkeys(each.model for each in graded)
    ]


def _totals(model: str, graded: Sequence[Graded], source: Mapping[str, Task], listed: bool) -> Totals:
    tasks = {each.instance: source[each.instance] for each in graded} if listed else source
    faults = {each.instance: each.fault for each in graded if each.fault}
    verdicts = {each.instance: each.resolved for each in graded if not each.fault}
    filled = [each.instance for each in graded if not each.fault and not each.empty]
    counted_in = [name for name in tasks if name not in faults]
    cluster_of = clusters_by({name: task.repository for name, task in tasks.items()})

    def share(names: Sequence[str]) -> Interval | None:
        values = [float(verdicts.get(name, False)) for name in names]
        return mean_interval(values, [cluster_of[name] for name in names], share=True) if names else None

    return Totals(
        model=model,
        tasks=len(tasks),
        source=len(source),
        graded=len(verdicts),
        empty=sum(each.empty for each in graded),
        missing=tuple(name for name in tasks if name not in verdicts and name not in faults),
        faults=faults,
        resolved=sum(verdicts.values()),
        wilson=wilson(sum(verdicts.values()), len(counted_in)) if counted_in else None,
        clustered=share(counted_in),
        per_patch=share(filled),
    )


def format_grades_table(found: Sequence[Totals]) -> str:
    """Table with a block per model."""
    lines = []
    for each in found:
        of = f"of {'all ' if each.tasks == each.source else 'the '}{counted(each.tasks, 'task')}"
        of += "" if each.tasks == each.source else " listed"
        patches = "of patches, not empty"
        wide = max(len(of), len(patches))
        lines += [
            f"{each.model}: {counted(each.source, 'task')}, {each.graded:,} graded ({each.empty:,} empty), "
            f"{len(each.missing):,} missing, {len(each.faults):,} without a verdict",
            f"  resolved {each.resolved:,}",
            f"  {of:<{wide}}   {_or_none(each.wilson)}  (Wilson, tasks taken as independent)",
            f"  {of:<{wide}}   {_or_none(each.clustered)}  (clustered by repository, if of several)",
            f"  {patches:<{wide}}   {_or_none(each.per_patch)}  (clustered)",
        ]
        if each.missing:
            more = f", ... ({len(each.missing):,})" if len(each.missing) > _NAMED else ""
            lines += [
                f"  missing, counted as not resolved: {', '.join(each.missing[:_NAMED])}{more}",
                "  (as the SWE-bench leaderboard counts; --of listed: of the tasks that the predictions list)",
            ]
        if each.faults:
            name, reason = next(iter(each.faults.items()))
            lines.append(f"  without a verdict, in no share: {', '.join(list(each.faults)[:_NAMED])}; {name}: {reason}")
    return "\n".join(lines)


def _or_none(found: Interval | None) -> str:
    return "none" if found is None else str(found)
