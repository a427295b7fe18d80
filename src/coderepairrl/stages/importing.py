"""``crrl tasks import``: trajectories of other programs as training examples (docs/guides/collect.md)."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coderepairrl import config as configs
from coderepairrl import rewards
from coderepairrl.errors import UsageError
from coderepairrl.printable import format_count, join_first
from coderepairrl.report.outcomes import Outcomes, read_outcomes
from coderepairrl.report.trajectories.chats import convert_to_chat_message
from coderepairrl.report.trajectories.others import DamagedItem, LogFilter, Trajectory, read_trajectories
from coderepairrl.report.trajectories.others.trajectory import find_issue
from coderepairrl.rewards import MalformedPatch
from coderepairrl.runs.examples import Example, write_examples
from coderepairrl.tasks import catalog
from coderepairrl.tasks.overlap import find_quoting_texts
from coderepairrl.types import Task

_SHOWN_NAMES = 3


def import_trajectories(
    form: str,
    paths: Sequence[Path],
    output: Path,
    *,
    against: Sequence[str] = (),
    drop: Sequence[str] = (),
    unchecked: bool = False,
    tasks: str = "",
    outcomes: str = "",
    log_filter: LogFilter | None = None,
) -> dict[str, Any]:
    """Write the trajectories in `paths`, of the format `form`, to `output` as examples; return a summary.

    Overlap with evaluation sets in `against` is an error; trajectories that overlap with `drop` are left out. `tasks`
    gives languages, repositories and references (all ``SOURCE [KEY=VALUE]...``); `outcomes` (SWE-bench reports, or an
    outcome file) gives the resolved tasks. Damaged trajectories are left out and listed. Raises `UsageError` if none
    remain, for overlap, and without an evaluation set unless `unchecked`.
    """
    if not (against or drop or unchecked):
        raise UsageError(
            "no evaluation set is named to compare the trajectories with",
            fix="--against 'swe_bench name=verified' refuses overlap, --drop leaves it out, --unchecked skips this",
        )
    known_tasks = _load_tasks(tasks) if tasks else []
    resolved_by_task = _read_resolved(outcomes) if outcomes else {}
    trajectories: list[Trajectory] = []
    damaged: list[DamagedItem] = []
    for path in paths:
        for each in read_trajectories(form, path, log_filter or LogFilter()):
            if isinstance(each, DamagedItem):
                damaged.append(each)
            else:
                trajectories.append(each)
    if not trajectories:
        reason = f"; the first: {damaged[0].where}: {damaged[0].why}" if damaged else ""
        raise UsageError(
            f"there is no trajectory that can be read{reason}",
            fix=f"name files of the format {form}, or their format (crrl tasks import -h)",
        )
    matched = _match_tasks(trajectories, known_tasks)
    for source in against:
        if overlaps := _find_overlaps(trajectories, matched, _load_tasks(source)):
            first = next(iter(overlaps))
            raise UsageError(
                f"{len(overlaps)} of {len(trajectories)} trajectories overlap with {source}: "
                f"{_format_reasons(overlaps.values())}",
                fix=f"do not train on evaluation tasks: --drop {shlex.quote(source)} leaves them out"
                f" (the first: {trajectories[first].id})",
            )
    dropped: dict[int, str] = {}
    for source in drop:
        dropped |= _find_overlaps(trajectories, matched, _load_tasks(source))
    remaining = [(at, each) for at, each in enumerate(trajectories) if at not in dropped]
    if not remaining:
        raise UsageError(f"all {len(trajectories)} trajectories overlap with {', '.join(drop)}", fix="take other tasks")
    examples = [_convert_trajectory(form, at, each, matched.get(at), resolved_by_task) for at, each in remaining]
    if output.exists():
        raise UsageError(f"{output} already exists", fix="name another file with -o")
    rows = write_examples(output, examples)
    return {
        "examples": str(output),
        "rows": rows,
        "tasks": len({each.task_id for each in examples}),
        "passed": sum(each.passed is True for each in examples),
        "judged": sum(each.reward is not None for each in examples),
        "dropped": sorted(dropped.values()),
        "damaged": [each._asdict() for each in damaged],
    }


def _load_tasks(text: str) -> list[Task]:
    name, *options = shlex.split(text)
    return list(catalog.load_source(*catalog.resolve_source(name, configs.parse_options(options, "path"))))


def _read_resolved(source: str) -> Mapping[str, bool]:
    outcomes = read_outcomes(source)
    if not isinstance(outcomes, Outcomes):
        raise UsageError(f"{source} counts tasks, and does not name the resolved ones", fix="name a report with ids")
    return {task: bool(values[0]) for task, values in outcomes.values.items()}


def _match_tasks(trajectories: Sequence[Trajectory], tasks: Iterable[Task]) -> dict[int, Task]:
    """Match trajectories, by index, to tasks: by task id or, without one, by a prompt that they contain."""
    by_id, matched = {task.id: task for task in tasks}, dict[int, Task]()
    for at, each in enumerate(trajectories):
        if each.task in by_id:
            matched[at] = by_id[each.task]
        elif not each.task:
            text = find_issue(each.messages)
            if quoted := [task for task in by_id.values() if task.prompt.strip() and task.prompt.strip() in text]:
                matched[at] = max(quoted, key=lambda task: len(task.prompt))
    return matched


def _find_overlaps(
    trajectories: Sequence[Trajectory], matched: Mapping[int, Task], measured: Sequence[Task]
) -> dict[int, str]:
    """Describe what trajectories share with `measured` tasks, by index of the trajectory."""
    ids = {task.id for task in measured}
    by_commit = {(task.repository, task.workspace.rpartition("@")[2]): task.id for task in measured if task.repository}
    texts = {str(at): each.issue or find_issue(each.messages) for at, each in enumerate(trajectories)}
    by_issue, overlaps = find_quoting_texts(texts, measured), dict[int, str]()
    for at, each in enumerate(trajectories):
        name = matched[at].id if at in matched else each.task
        if name in ids:
            overlaps[at] = f"{name} (the same id)"
        elif each.commit and (each.repository, each.commit) in by_commit:
            overlaps[at] = f"{by_commit[each.repository, each.commit]} (the same repository and commit)"
        elif str(at) in by_issue:
            overlaps[at] = f"{by_issue[str(at)]} (the same issue)"
    return overlaps


def _convert_trajectory(
    form: str, at: int, each: Trajectory, task: Task | None, resolved_by_task: Mapping[str, bool]
) -> Example:
    name = task.id if task else each.task
    passed = each.resolved if each.resolved is not None else resolved_by_task.get(name)
    reward = each.reward
    if reward is None and passed is not None:
        reward = float(passed)
    if reward is None and task is not None and task.reference.strip():
        reward = _compute_similarity(task.reference, each.patch.encode("utf-8", "surrogateescape"))
    messages = (
        {key: value for key, value in convert_to_chat_message(message).items() if value is not None}
        for message in each.messages
    )
    return Example(
        id=f"{form}-{at:06d}",
        episode=f"{form}-{at:06d}",
        task_id=name or each.id,
        repository=(task.repository if task else "") or each.repository,
        language=task.language if task else "",
        kind=task.kind if task else "",
        source=each.id,
        agent=each.agent,
        policy=each.model,
        reward=reward,
        passed=passed,
        messages=tuple(messages),
        tools=each.tools,
    )


def _compute_similarity(reference: bytes, patch: bytes) -> float:
    try:
        return rewards.make_reward("patch_edits").compare(reference, patch) or 0.0
    except MalformedPatch:
        return 0.0


def _format_reasons(reasons: Iterable[str]) -> str:
    distinct = list(dict.fromkeys(reasons))
    return join_first(distinct, _SHOWN_NAMES) + (" tasks" if len(distinct) > _SHOWN_NAMES else "")


def format_import(summary: Mapping[str, Any]) -> str:
    """Format the summary of an import."""
    lines = [
        f"examples: {summary['examples']}, {format_count(summary['rows'], 'row')} of"
        f" {format_count(summary['tasks'], 'task')}; {summary['judged']} judged, {summary['passed']} passed"
    ]
    if summary["dropped"]:
        lines.append(f"left out, since they overlap: {len(summary['dropped'])}: {_format_reasons(summary['dropped'])}")
    if damaged := summary["damaged"]:
        lines.append(f"left out, since they cannot be read: {len(damaged)}")
        lines += [
            f"  {reason}: {count}"
            for reason, count in Counter(each["why"] for each in damaged).most_common(_SHOWN_NAMES)
        ]
        lines.append(f"  the first: {damaged[0]['where']}")
    return "\n".join(lines)
