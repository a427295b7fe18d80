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
from coderepairrl.printable import format_count, join_first
from coderepairrl.protocols import SandboxBackend
from coderepairrl.rollout.groups import gather_or_cancel
from coderepairrl.runs import write_atomic
from coderepairrl.runs.log import JsonLines
from coderepairrl.stages.predictions import Prediction
from coderepairrl.stages.shards import WHOLE, Shard
from coderepairrl.stats.intervals import Interval, cluster_tasks, mean_interval, wilson_interval
from coderepairrl.tasks.prepare import prepare_tasks
from coderepairrl.types import Ending, Episode, Task

_LISTED = 3  # Ids in a message; the others are counted.
Say = Callable[[str], None]


class GradedPrediction(NamedTuple):
    """Verdict on a prediction, or the fault that prevented it."""

    instance_id: str
    model_name_or_path: str
    resolved: bool
    empty: bool
    problem: str = ""
    """The grader's reason if not resolved."""
    seconds: float = 0.0
    patch_sha256: str = ""
    task_sha256: str = ""
    """Digest of workspace, environment and checks."""
    fault: str = ""

    def as_json(self) -> dict[str, Any]:
        """Convert to a row of the results file, which has no faults."""
        return {key: value for key, value in self._asdict().items() if key != "fault"}


class GradeTotals(NamedTuple):
    """Totals of a model's patches; resolved shares leave out tasks with a fault."""

    model: str
    tasks: int
    """Number of tasks in the denominator: all, or the predicted."""
    source: int
    """Number of source tasks."""
    graded: int
    empty: int
    missing: tuple[str, ...]
    """Tasks without a prediction, counted as not resolved."""
    faults: Mapping[str, str]
    """Reason for a missing verdict, by task."""
    resolved: int
    wilson: Interval | None
    """Resolved share of `tasks`, with Wilson's interval; None if all have faults."""
    clustered: Interval | None
    """The same share, with an interval clustered by repository (`stats.intervals`)."""
    per_patch: Interval | None
    """Resolved share of non-empty patches, clustered; None if all are empty."""

    def as_json(self) -> dict[str, Any]:
        """Convert to plain data."""
        return {key: part._asdict() if isinstance(part, Interval) else part for key, part in self._asdict().items()}


def choose_predictions(
    predictions: Sequence[Prediction],
    tasks: Iterable[Task],
    shard: Shard = WHOLE,
    *,
    skip_unknown: bool = False,
) -> tuple[dict[str, Task], list[Prediction], list[str]]:
    """Choose the tasks of `shard` by id and their predictions; also return predicted instances that are not tasks.

    Raises `UsageError` for such instances unless `skip_unknown`, and `TaskError` for a task without checks.
    """
    by_id = {task.id: task for task in tasks}
    unknown = sorted({each.instance for each in predictions} - by_id.keys())
    if unknown and not skip_unknown:
        raise UsageError(
            f"{format_count(len(unknown), 'instance')} of the predictions not found among the"
            f" {format_count(len(by_id), 'task')} of the source: {join_first(unknown, _LISTED)}",
            fix="name the benchmark of the predictions, or leave these out with --skip-unknown",
        )
    by_id = {name: by_id[name] for name in shard.share(sorted(by_id))} if shard != WHOLE else by_id
    gradable = [each for each in predictions if each.instance in by_id]
    if not gradable:
        raise UsageError("no prediction is for a task of the source", fix="name the benchmark of the predictions")
    if untestable := next((each.instance for each in gradable if not by_id[each.instance].checks), ""):
        raise TaskError(
            f"task {untestable} has no checks, so no patch for it can be judged",
            fix="where the benchmark has images or native environments: workspace=image, workspace=native",
        )
    return by_id, gradable, unknown


async def grade_predictions(
    predictions: Sequence[Prediction],
    tasks: Mapping[str, Task],
    sandbox: SandboxBackend,
    output: Path,
    *,
    resume: bool = False,
    jobs: int = 2,
    say: Say = lambda _: None,
) -> list[GradedPrediction]:
    """Grade `predictions`, `jobs` at a time, in fresh sandboxes; return verdicts in order.

    Prepares commits, images and environments first. Writes verdicts, without infrastructure faults, to `output` as JSON
    lines; `resume` keeps them and retries the faults. Raises `UsageError` if `output` exists (without `resume`) or has
    verdicts on other patches or tasks, and as `prepare_tasks`.
    """
    verdicts = _read_grades(output, predictions, tasks) if resume else {}
    if output.exists() and not resume:
        raise UsageError(f"{output} already exists", fix="continue it with --resume, or name another file with -o")
    pending = [each for each in predictions if (each.model, each.instance) not in verdicts]
    if needed := {each.instance: tasks[each.instance] for each in pending if not each.is_empty}:
        await prepare_tasks(needed.values(), jobs=jobs, say=say)
    tests_reward = rewards.make_rewards("tests")
    slots, done = asyncio.Semaphore(jobs), len(verdicts)
    lines = JsonLines(output)

    async def grade_one(prediction: Prediction) -> None:
        nonlocal done
        async with slots:
            verdict = await _grade_prediction(prediction, tasks[prediction.instance], tests_reward, sandbox)
        if not verdict.fault:
            lines.append(verdict.as_json())
        verdicts[prediction.model, prediction.instance] = verdict
        done += 1
        say(f"[{done}/{len(predictions)}] {_format_verdict(verdict)}")

    try:
        await gather_or_cancel(grade_one(each) for each in pending)
    finally:
        lines.close()
    ordered = [verdicts[each.model, each.instance] for each in predictions]
    write_atomic(output, "".join(json.dumps(each.as_json()) + "\n" for each in ordered if not each.fault))
    return ordered


async def _grade_prediction(
    prediction: Prediction, task: Task, tests_reward: Sequence[rewards.Weighted], sandbox: SandboxBackend
) -> GradedPrediction:
    instance, patch = prediction.instance, prediction.patch
    graded = GradedPrediction(
        instance_id=instance,
        model_name_or_path=prediction.model,
        resolved=False,
        empty=prediction.is_empty,
        patch_sha256=_sha256(patch),
        task_sha256=digest_task(task),
    )
    if prediction.is_empty:
        return graded._replace(problem="empty patch")
    began = time.monotonic()
    episode = Episode(instance, task.id, "grade", 0, "", 0, Ending.DONE, patch=patch)
    try:
        [score] = await rewards.score_episode(tests_reward, task, episode, sandbox)
    except Fault as fault:
        return graded._replace(fault=f"{type(fault).__name__}: {fault}")
    return graded._replace(resolved=bool(score.passed), problem=score.note, seconds=round(time.monotonic() - began, 1))


def digest_task(task: Task) -> str:
    """SHA-256 of the parts of `task` that verdicts depend on."""
    # the path of a folder depends on the machine
    workspace = "" if task.workspace.startswith("dir:") else task.workspace
    return _sha256(repr((workspace, task.environment, task.checks)).encode("utf-8", "surrogateescape"))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read_grades(
    output: Path, predictions: Iterable[Prediction], tasks: Mapping[str, Task]
) -> dict[tuple[str, str], GradedPrediction]:
    """Read verdicts by model and instance. Raises `UsageError` for those on other patches or tasks."""
    by_key = {(each.model, each.instance): each for each in predictions}
    verdicts = {}
    for number, row in enumerate(JsonLines.read(output), 1):
        try:
            verdict = _graded_from_json(row)
        except (KeyError, TypeError) as error:
            raise UsageError(f"{output}, line {number}: not a verdict ({error})", fix="name another file") from None
        key = verdict.model_name_or_path, verdict.instance_id
        prediction = by_key.get(key)
        difference = ""
        if prediction is not None and verdict.patch_sha256 != _sha256(prediction.patch):
            difference = "another patch"
        elif prediction is None or verdict.task_sha256 != digest_task(tasks[verdict.instance_id]):
            difference = "another task"
        if difference:
            message = f"{output}, line {number}: a verdict on {difference} for {verdict.instance_id}"
            raise UsageError(message, fix="name another file with -o")
        verdicts[key] = verdict
    return verdicts


def _graded_from_json(row: Mapping[str, Any]) -> GradedPrediction:
    """Inverse of `GradedPrediction.as_json`. Raises KeyError and TypeError."""
    example = GradedPrediction("", "", False, False).as_json()
    for key, value in example.items():
        is_whole_number = isinstance(value, float) and type(row[key]) is int  # seconds that another program wrote
        if type(row[key]) is not type(value) and not is_whole_number:
            raise TypeError(f"{key} is {json.dumps(row[key])[:80]}")
    return GradedPrediction(*(row[key] for key in example))


def _format_verdict(verdict: GradedPrediction) -> str:
    reason, _, _ = (verdict.fault or verdict.problem).partition("\n")
    if verdict.fault:
        return f"{verdict.instance_id}: no verdict: {reason}"
    outcome = "resolved" if verdict.resolved else f"not resolved: {reason[:100]}"
    return f"{verdict.instance_id} ({verdict.seconds:g} s): {outcome}"


def compute_totals(
    graded: Sequence[GradedPrediction], tasks: Mapping[str, Task], *, listed: bool = False
) -> list[GradeTotals]:
    """Compute totals for each model, in the order of `graded`.

    Shares are of all `tasks`, where a missing prediction counts as unresolved like on the SWE-bench leaderboard, or
    with `listed` of the predicted tasks.
    """
    return [
        _compute_model_totals(model, [each for each in graded if each.model_name_or_path == model], tasks, listed)
        for model in dict.fromkeys(each.model_name_or_path for each in graded)
    ]


def _compute_model_totals(
    model: str, graded: Sequence[GradedPrediction], source: Mapping[str, Task], listed: bool
) -> GradeTotals:
    tasks = {each.instance_id: source[each.instance_id] for each in graded} if listed else source
    faults = {each.instance_id: each.fault for each in graded if each.fault}
    verdicts = {each.instance_id: each.resolved for each in graded if not each.fault}
    with_patch = [each.instance_id for each in graded if not each.fault and not each.empty]
    without_fault = [name for name in tasks if name not in faults]
    cluster_of = cluster_tasks({name: task.repository for name, task in tasks.items()})

    def share(names: Sequence[str]) -> Interval | None:
        values = [float(verdicts.get(name, False)) for name in names]
        return mean_interval(values, [cluster_of[name] for name in names], share=True) if names else None

    return GradeTotals(
        model=model,
        tasks=len(tasks),
        source=len(source),
        graded=len(verdicts),
        empty=sum(each.empty for each in graded),
        missing=tuple(name for name in tasks if name not in verdicts and name not in faults),
        faults=faults,
        resolved=sum(verdicts.values()),
        wilson=wilson_interval(sum(verdicts.values()), len(without_fault)) if without_fault else None,
        clustered=share(without_fault),
        per_patch=share(with_patch),
    )


def format_grades_table(by_model: Sequence[GradeTotals]) -> str:
    """Format a block of lines per model."""
    lines = []
    for each in by_model:
        count = format_count(each.tasks, "task")
        of_tasks = f"of all {count}" if each.tasks == each.source else f"of the {count} listed"
        of_patches = "of patches, not empty"
        width = max(len(of_tasks), len(of_patches))
        lines += [
            f"{each.model}: {format_count(each.source, 'task')}, {each.graded:,} graded ({each.empty:,} empty), "
            f"{len(each.missing):,} missing, {len(each.faults):,} without a verdict",
            f"  resolved {each.resolved:,}",
            f"  {of_tasks:<{width}}   {each.wilson or 'none'}  (Wilson, tasks taken as independent)",
            f"  {of_tasks:<{width}}   {each.clustered or 'none'}  (clustered by repository, if there are several)",
            f"  {of_patches:<{width}}   {each.per_patch or 'none'}  (clustered)",
        ]
        if each.missing:
            lines += [
                f"  missing, counted as not resolved: {join_first(each.missing, _LISTED)}",
                "  (like the SWE-bench leaderboard; --of listed counts only the tasks that the predictions list)",
            ]
        if each.faults:
            name, reason = next(iter(each.faults.items()))
            lines.append(f"  no verdict, not counted: {join_first(list(each.faults), _LISTED)}; {name}: {reason}")
    return "\n".join(lines)
