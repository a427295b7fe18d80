"""Outcomes by task, from run folders, outcome files, harness reports and logs of other programs."""

from __future__ import annotations

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coderepairrl.errors import UsageError
from coderepairrl.printable import format_count
from coderepairrl.registry import suggest_nearest
from coderepairrl.report import foreign, metrics, published
from coderepairrl.report.answers import collect_answers
from coderepairrl.report.foreign import RESOLVED, LogRow
from coderepairrl.report.reading import flatten_settings
from coderepairrl.runs import RunFolder, Tail, codec, open_run
from coderepairrl.stats.classification import LabelAnswer
from coderepairrl.stats.intervals import group_by_value
from coderepairrl.types import Ending, Episode, Task

_LIMITS = ("calls", "tokens", "seconds", "turn_tokens")
_TASK_FIELDS, _POLICY_FIELDS = ("instance_id", "task_id", "id"), ("model_name_or_path", "model", "system")
# lists of task ids in a report of SWE-bench's harness, apart from the resolved ones
_HARNESS_LISTS = (
    *("submitted_ids", "completed_ids", "incomplete_ids", "unresolved_ids", "empty_patch_ids", "error_ids"),
    *("generated", "no_apply"),  # in reports of 2024
)
_COUNTS = re.compile(r"(\d+)/(\d+)")  # SOLVED/TASKS
_INSTANCE = re.compile(r"(?P<owner>.+?)__(?P<name>.+)-\d+")  # OWNER__NAME-NUMBER


@dataclass(frozen=True, slots=True)
class Outcomes:
    """One metric of one policy, by task and attempt."""

    name: str
    metric: str
    values: Mapping[str, tuple[float, ...]]
    """Values of each attempt, by task; tasks without any are in `missing`."""
    repositories: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    void: int = 0
    """Attempts ended by infrastructure faults, not measured."""
    limits: Mapping[str, Any] | None = None
    """Limits of an attempt and its sandbox; None if unrecorded."""
    environments: Mapping[str, str] = field(default_factory=dict)
    """Digests of environments by name, their kinds, and `LogRow.condition`; empty if unrecorded."""
    tasks: Mapping[str, str] | None = None
    """Digests of the tasks' contents; None if unrecorded."""
    versions: Mapping[str, int] | None = None  # versions of the rewards behind the metric; None if unrecorded
    settings: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Tasks by part: ``language go``, ``repository OWNER/NAME``, ..."""
    answers: Mapping[str, Sequence[LabelAnswer]] = field(default_factory=dict)
    """Answers to labelled tasks, by kind."""
    lists_all: bool = True
    """Whether all tasks are listed; some lists hold only resolved ones."""


@dataclass(frozen=True, slots=True)
class PublishedCount:
    """Published number of solved tasks, without ids."""

    name: str
    solved: int
    tasks: int


def read_outcomes(source: str, metric: str = RESOLVED, tasks_file: Path | None = None) -> Outcomes | PublishedCount:
    """Read the outcomes named by `source`.

    ``SOLVED/TASKS``, ``published:NAME``, or a path, with ``@NAME``, ``@STEP`` or ``@NAME-STEP`` for an evaluation in a
    run folder (default: last) or a policy in a file. Commas join attempts. Ids in `tasks_file` without an outcome are
    unresolved. Raises `UsageError`.
    """
    if counts := _COUNTS.fullmatch(source):
        solved, tasks = map(int, counts.groups())
        if not 0 < tasks >= solved:
            raise UsageError(f"{source} is not a number of solved tasks", fix="write SOLVED/TASKS, such as 36/500")
        return PublishedCount(source, solved, tasks)
    if source.startswith(published.PREFIX):
        number = published.find_percentage(source.removeprefix(published.PREFIX))
        return PublishedCount(
            f"{number.name} on {number.benchmark} ({published.MARK})", number.solved or 0, number.tasks
        )
    if not all(part.strip() for part in source.split(",")):
        raise UsageError(f"{source!r} names no policy", fix="name a run folder, or a file of outcomes")
    task_ids = _read_task_ids(tasks_file) if tasks_file else None
    parts = [source] if Path(source.partition("@")[0]).exists() else source.split(",")
    return _join_attempts([_read_outcomes(part.strip(), metric, task_ids) for part in parts])


def _read_outcomes(source: str, metric: str, task_ids: Sequence[str] | None) -> Outcomes:
    path, which = Path(source), ""  # `which`: evaluation of a run, or policy in a file, after the ``@``
    if not path.exists() and "@" in source:
        name, _, which = source.rpartition("@")
        path = Path(name)
    if not path.exists() and path.name.endswith((".json", ".jsonl", ".gz", ".eval")):
        raise UsageError(f"file {path} does not exist", fix="`crrl grade` writes PREDICTIONS.graded.jsonl")
    is_foreign = path.exists() and not (path / "run.json").exists()
    if is_foreign and (rows := foreign.read_log(path)) is not None:
        return _fill_unresolved(_collect_rows(path, rows, which, metric), task_ids)
    if is_foreign and path.is_dir() and (reports := _find_reports(path)):
        return _fill_unresolved(_read_harness_reports(path, reports, which, metric), task_ids)
    if path.is_file():
        return _fill_unresolved(_read_outcome_file(path, which, metric), task_ids)
    return _read_run_outcomes(open_run(path), which, metric)


def _join_attempts(parts: Sequence[Outcomes]) -> Outcomes:
    """Join the attempts of one evaluation. Raises `UsageError` for different tasks or limits."""
    first = parts[0]
    for part in parts[1:]:
        if set(part.values) != set(first.values) or (part.limits, part.tasks) != (first.limits, first.tasks):
            raise UsageError(
                f"{first.name} and {part.name} are not attempts of one evaluation: their tasks or limits differ",
                fix="name evaluations of the same tasks with commas between them",
            )
    values = {task: tuple(v for part in parts for v in part.values[task]) for task in first.values}
    name = ",".join(dict.fromkeys(part.name for part in parts))
    answers = {kind: [each for part in parts for each in part.answers.get(kind, ())] for kind in first.answers}
    return replace(first, name=name, values=values, void=sum(part.void for part in parts), answers=answers)


# -- run folders


def _read_run_outcomes(folder: RunFolder, which: str, metric: str) -> Outcomes:
    name = _choose_evaluation(folder, which)
    episodes, tasks = list(_read_evaluation_episodes(folder, name)), folder.tasks()
    rows = _read_metrics(folder, name, episodes, tasks)
    valid = [episode for episode in episodes if episode.ending is not Ending.VOID]
    measured = dict.fromkeys(name for episode in valid for name in rows[episode.id])
    if metric not in measured:
        reason = ": no checks were run" if metric == RESOLVED else ""
        raise UsageError(
            f"{folder.path} does not measure {metric!r} in {name}{reason}",
            fix=f"--metric: {suggest_nearest(metric, measured)}",
        )
    values: dict[str, list[float]] = {episode.task_id: [] for episode in episodes}
    for episode in valid:
        if metric in rows[episode.id]:
            values[episode.task_id].append(rows[episode.id][metric])
    judges = {"tests", *(score.name for episode in valid for score in episode.scores if score.passed is not None)}
    evaluation, _, step = name.rpartition("-")
    settings = {key: value for key, value in _read_flat_config(folder).items() if not key.startswith("run.")}
    # eval.also.NAME.agent takes the place of the run's agent
    prefix = f"eval.also.{evaluation}."
    if agent := {k.removeprefix(prefix): value for k, value in settings.items() if k.startswith(f"{prefix}agent")}:
        settings = {key: value for key, value in settings.items() if not key.startswith("agent.")}
        settings |= {"agent.name" if key == "agent" else key: value for key, value in agent.items()}
    limits = {key: settings.pop(key) for key in list(settings) if _is_limit(key)}
    limits |= _read_earlier_limits(folder, int(step))
    record = folder.about()
    conditions = (record.get("conditions") or {}).get(evaluation) or {}
    for box in conditions.get("sandboxes", ()):
        limits |= {f"sandbox {key}": value for key, value in box.items() if key != "name"}
    run = str(record.get("name") or folder.path.name)
    return Outcomes(
        name=f"{run}@{which}" if which else run,
        metric=metric,
        values={task: tuple(task_values) for task, task_values in values.items() if task_values},
        repositories={episode.task_id: episode.repository for episode in episodes},
        missing={task: f"no attempt has {metric}" for task, task_values in values.items() if not task_values},
        void=len(episodes) - len(valid),
        limits=limits,
        environments=_describe_environments(conditions.get("environments", ())),
        tasks={task.id: digest_task(task) for task in tasks.values() if task.id in values} or None,
        versions=_select_reward_versions(record.get("rewards") or {}, metric, judges),
        settings=settings | ({"policy": record["policy"]} if record.get("policy") else {}),
        answers=collect_answers(episodes, tasks),
        parts=metrics.slice_tasks(episodes, tasks, metrics.find_agents_by_kind(record.get("config") or {}, evaluation)),
    )


def _read_metrics(
    folder: RunFolder, name: str, episodes: Sequence[Episode], tasks: Mapping[str, Task]
) -> dict[str, metrics.MetricValues]:
    """Metrics by episode id: stored, or computed for older runs."""
    try:
        rows = folder.attempts(name)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{folder.path}/eval/{name}/metrics.jsonl is damaged: {error}",
            fix="delete it: metrics are then computed from the episodes",
        ) from error
    missing = [metrics.AttemptData(each, tasks.get(each.task_id)) for each in episodes if each.id not in rows]
    return {**metrics.measure_attempts(missing), **rows}


def _choose_evaluation(folder: RunFolder, which: str) -> str:
    # `which`: NAME-STEP, NAME (its last), STEP (of ``eval``, if it has one), or empty
    stems = sorted(path.stem for path in (folder.path / "episodes").glob("*.jsonl"))
    steps = {stem: int(step) for stem in stems if (step := stem.rpartition("-")[2]).isdecimal()}
    evaluations = {name: name.rpartition("-")[0] for name in steps if not name.startswith("train-")}
    names = list(evaluations)
    if not names:
        sessions = Tail(folder.log).records("start", "end", "stop") if folder.log.exists() else ()
        is_finished = [record["type"] for record, _ in sessions][-1:] == ["end"]
        resume = "" if is_finished else f"let it finish: crrl {folder.command()} {folder.path} --resume; or "
        raise UsageError(
            f"{folder.path} has no finished evaluation",
            fix=f"{resume}measure its policy: crrl eval SOURCE --policy {folder.path}",
        )
    if not which:
        which = "eval" if "eval" in evaluations.values() else evaluations[names[-1]]
    if which in names:
        return which
    by_name = [name for name in names if evaluations[name] == which]
    by_step = [name for name in names if which.isdigit() and steps[name] == int(which)]
    matches = by_name[-1:] or [name for name in by_step if name.startswith("eval-")] or by_step
    if len(matches) != 1:
        raise UsageError(
            f"{folder.path} has no single evaluation {which!r}",
            fix=f"{folder.path}@NAME: {suggest_nearest(which, names)}",
        )
    return matches[0]


def _read_evaluation_episodes(folder: RunFolder, name: str) -> Iterator[Episode]:
    try:
        yield from folder.episodes(name)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"{folder.path}/episodes/{name}.jsonl is damaged: {error}",
            fix="restore it from a copy; `crrl train RUN --resume` writes what is missing from the log",
        ) from error


def _read_flat_config(folder: RunFolder) -> dict[str, Any]:
    try:
        return flatten_settings(tomllib.loads(folder.config.read_text("utf-8")))
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder.config} cannot be read: {error}", fix="restore it: it holds the limits") from error


def _is_limit(key: str) -> bool:
    section, _, name = key.rpartition(".")
    return name in _LIMITS and (section == "rollout" or section.startswith("kinds."))


def _read_earlier_limits(folder: RunFolder, step: int) -> dict[str, Any]:
    """Limits at `step`, before changes on resume."""
    if not folder.log.is_file():
        return {}
    changes = [change for change, _ in Tail(folder.log).records("change")]
    later = [change for change in changes if change["step"] >= step and _is_limit(change["key"])]
    return {change["key"]: change["old"] for change in reversed(later)}  # the earliest change of a key wins


def _describe_environments(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    digests = {f"environment {each['name']}": str(each["digest"]) for each in records if each.get("digest")}
    kinds = {"kinds of environment": ", ".join(sorted({str(each["kind"]) for each in records}))} if records else {}
    return digests | kinds


def _select_reward_versions(versions: Mapping[str, int], metric: str, judges: Set[str]) -> dict[str, int]:
    """Select the reward versions behind `metric`; the rewards `judges` decide what is resolved."""
    if metric == "reward":
        return dict(versions)
    names = judges if metric == RESOLVED else {metric.removesuffix(metrics.PER_PATCH)}
    return {name: version for name, version in versions.items() if name in names}


def digest_task(task: Task) -> str:
    """Digest of everything an attempt depends on, except local folders."""
    data = {key: getattr(task, key) for key in ("prompt", "reference", "checks", "answer", "workspace", "environment")}
    for key, prefix in (("workspace", "dir:"), ("environment", "venv:")):
        if data[key].startswith(prefix):
            data[key] = prefix
    text = json.dumps({key: codec.dump(value) for key, value in data.items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


# -- files of other programs


def _read_outcome_file(path: Path, which: str, metric: str) -> Outcomes:
    text = foreign.read_text(path)
    try:
        document = codec.parse_foreign_json(text)
    except ValueError as error:  # several lines, or no JSON: `_parse_json_rows` names the line
        if text.split("\n", 1)[0].strip() == "{":
            raise UsageError(f"{path} is not read as JSON: {error}", fix="copy or write it again") from None
        document = None
    has_verdicts = _get_resolved_ids(document) is not None or next(_parse_verdicts(document), None) is not None
    if has_verdicts:
        return _read_harness_reports(path, [path], which, metric)
    rows = [
        LogRow(
            f"{path}:{number}",
            _get_task_id(path, number, row),
            next((str(row[key]) for key in _POLICY_FIELDS if row.get(key)), ""),
            row,
            attempt=row.get("attempt"),
        )
        for number, row in _parse_json_rows(path, text)
    ]
    return _collect_rows(path, rows, which, metric)


def _choose_policy(path: Path, names: Iterable[str], which: str) -> str:
    policies = list(dict.fromkeys(names))
    if which not in policies and (which or len(policies) > 1):
        raise UsageError(
            f"{path} has no policy {which!r}" if which else f"{path} holds {len(policies)} policies",
            fix=f"{path}@POLICY: {suggest_nearest(which, policies)}",
        )
    return which or policies[0]


def _collect_rows(path: Path, rows: Sequence[LogRow], which: str, metric: str) -> Outcomes:
    policy = _choose_policy(path, (row.policy for row in rows), which)
    values: dict[str, dict[int | None, float | None]] = {}
    faults: dict[str, str] = {}
    fields: dict[str, Mapping[str, Any]] = {}  # of the last attempt at each task
    rows = [row for row in rows if row.policy == policy]
    for row in rows:
        attempts = values.setdefault(row.task, {})
        if row.attempt in attempts:
            raise UsageError(
                f"{row.where} repeats {row.task}" + ("" if row.attempt is None else f", attempt {row.attempt}"),
                fix="remove one, or number the attempts in a field `attempt`",
            )
        is_void = bool(row.fault) and metric not in row.scores
        attempts[row.attempt] = None if is_void else _get_metric_value(row, metric)
        faults |= {row.task: row.fault} if is_void else {}
        fields[row.task] = row.scores
    measured = {task: tuple(v for v in each.values() if v is not None) for task, each in values.items()}
    repositories = {
        task: str(row.get("repository") or row.get("repo") or _parse_repository(task)) for task, row in fields.items()
    }
    languages = {task: str(row.get("language") or "") for task, row in fields.items()}
    return Outcomes(
        name=policy or codec.file_stem(path),
        metric=metric,
        values={task: attempts for task, attempts in measured.items() if attempts},
        repositories=repositories,
        missing={task: faults[task] for task, attempts in measured.items() if not attempts},
        void=sum(value is None for attempts in values.values() for value in attempts.values()),
        environments=dict(row.condition for row in rows if row.condition[0]),
        parts=_slice_by_field("language", languages) | _slice_by_field("repository", repositories),
    )


def _parse_json_rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    if not text.strip():
        raise UsageError(f"{path} is empty", fix="name a file with an outcome for each task")
    yield from codec.parse_foreign_lines(
        path, text, 'a line is {"instance_id": "django__django-11001", "resolved": true}'
    )


def _get_task_id(path: Path, number: int, row: Mapping[str, Any]) -> str:
    name = next((row[key] for key in _TASK_FIELDS if row.get(key)), None)
    if not isinstance(name, str):
        raise UsageError(f"{path}:{number} names no task", fix=f"give it one of the fields {', '.join(_TASK_FIELDS)}")
    return name


def _get_metric_value(row: LogRow, metric: str) -> float:
    value = row.scores.get(metric)
    if (
        not isinstance(value, bool | int | float)
        or not math.isfinite(value)
        or (metric == RESOLVED and value not in (0, 1))
    ):
        expected = "true or false" if metric == RESOLVED else "a number"
        others = ", ".join(sorted(k for k, v in row.scores.items() if isinstance(v, int | float) and k != metric))
        raise UsageError(
            f"{row.where} has no {metric!r} that is {expected}: it is {json.dumps(value)[:80]}",
            fix="grade every prediction first, or name another --metric" + (others and f": {others}"),
        )
    return float(value)


def _parse_repository(task: str) -> str:
    """Repository in a SWE-bench id.

    >>> _parse_repository("django__django-11001"), _parse_repository("quixbugs/gcd")
    ('django/django', '')
    """
    match = _INSTANCE.fullmatch(task)
    return f"{match['owner']}/{match['name']}" if match else ""


def _slice_by_field(what: str, values: Mapping[str, str]) -> dict[str, frozenset[str]]:
    return group_by_value({task: value and f"{what} {value}" for task, value in values.items()})


def _find_reports(path: Path) -> list[Path]:
    """Reports in a folder of SWE-bench's harness, or of a system in ``SWE-bench/experiments``."""
    leaderboard = [path / name for name in ("results/results.json", "per_instance_details.json")]
    return [each for each in leaderboard if each.is_file()][:1] or sorted(path.rglob("*.json"))


def _get_system_name(report: Path, path: Path) -> str:
    """Name of the system: that of its folder in the harness or leaderboard, else of `path`."""
    if report.name == "report.json" or report.parts[-2:] == ("results", "results.json"):
        return report.parent.parent.name
    return report.parent.name if report.name == "per_instance_details.json" else path.name.removesuffix(".json")


def _read_harness_reports(path: Path, files: Sequence[Path], which: str, metric: str) -> Outcomes:
    if metric != RESOLVED:
        raise UsageError(f"{path} lists resolved tasks, without {metric!r}", fix="leave out --metric")
    systems: dict[str, dict[str, float]] = {}
    # an instance whose evaluation failed has a log, but no report
    lists_all = all(log.with_name("report.json").exists() for log in path.rglob("run_instance.log"))
    for file in files:
        try:
            data = codec.parse_foreign_json(foreign.read_text(file))
            judged = list(_parse_verdicts(data))
        except ValueError as error:
            raise UsageError(f"{file} is not a report: {error}", fix="name the reports of an evaluation") from None
        lists_only_resolved = _get_resolved_ids(data) and not any(data.get(key) for key in _HARNESS_LISTS)
        lists_all = lists_all and not lists_only_resolved
        for task, value in judged:
            if systems.setdefault(_get_system_name(file, path), {}).setdefault(task, value) != value:
                raise UsageError(
                    f"{file} and another report in {path} disagree on {task}", fix="name the reports of one evaluation"
                )
    if not systems:
        raise UsageError(
            f"{path} has no outcomes", fix="name a run folder, an outcome file, or a log of a program in the guide"
        )
    name = _choose_policy(path, systems, which)
    repositories = {task: _parse_repository(task) for task in systems[name]}
    return Outcomes(
        name=name,
        metric=metric,
        values={task: (value,) for task, value in systems[name].items()},
        repositories=repositories,
        parts=_slice_by_field("repository", repositories),
        lists_all=lists_all,
    )


def _get_resolved_ids(data: Any) -> list[Any] | None:
    # None for a report on single instances
    ids = data.get("resolved_ids", data.get("resolved")) if isinstance(data, dict) else None
    return ids if isinstance(ids, list) else None


def _parse_verdicts(data: Any) -> Iterator[tuple[str, float]]:
    """Tasks in a report, with 0 or 1. Raises `ValueError` for contradictory lists."""
    if not isinstance(data, dict):
        return
    listed = _get_resolved_ids(data)
    if listed is not None:
        lists = {key: data.get(key) or [] for key in (*_HARNESS_LISTS, "no_generation", "no_logs")}
        for key, ids in {"resolved": listed, **lists}.items():
            if not isinstance(ids, list) or not all(isinstance(task, str) for task in ids):
                raise ValueError(f"{key} is not a list of ids")
        solved = dict.fromkeys(listed)
        if both := sorted(solved.keys() & set(lists["unresolved_ids"])):
            raise ValueError(f"{both[0]} is among those resolved and those unresolved")
        tasks = solved | dict.fromkeys(task for ids in lists.values() for task in ids)
        yield from ((task, float(task in solved)) for task in tasks)
        return
    for task, report in data.items():
        if isinstance(report, dict) and isinstance(report.get("resolved"), bool):
            yield task, float(report["resolved"])


def _read_task_ids(path: Path) -> list[str]:
    text = foreign.read_text(path)
    if text.lstrip().startswith("{"):
        return [_get_task_id(path, number, row) for number, row in _parse_json_rows(path, text)]
    return [line.strip() for line in text.splitlines() if line.strip()]


def _fill_unresolved(outcomes: Outcomes, task_ids: Sequence[str] | None) -> Outcomes:
    """Add tasks without a verdict as unresolved, as the harness does."""
    if task_ids is None:
        if not outcomes.lists_all:
            raise UsageError(
                f"{outcomes.name} lists only resolved tasks",
                fix="name a file of all task ids, one a line: --tasks FILE",
            )
        return outcomes
    if other := sorted(set(outcomes.values) - set(task_ids)):
        raise UsageError(
            f"{outcomes.name} has {format_count(len(other), 'task')} that --tasks does not name: {other[0]}",
            fix="name the tasks of the same benchmark and split",
        )
    attempts = max(map(len, outcomes.values.values()), default=1)
    judged = outcomes.values.keys() | outcomes.missing.keys()
    unresolved = {task: (0.0,) * attempts for task in task_ids if task not in judged}
    repositories = {**outcomes.repositories, **{task: _parse_repository(task) for task in unresolved}}
    return replace(
        outcomes,
        values={**outcomes.values, **unresolved},
        repositories=repositories,
        parts=_slice_by_field("repository", repositories),
    )
