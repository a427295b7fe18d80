"""Shards of an evaluation, one per process, and their merging into one run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from coderepairrl.errors import UsageError
from coderepairrl.plan.conditions import compare_conditions
from coderepairrl.report.metrics import find_agents_by_kind
from coderepairrl.report.reading import flatten_settings
from coderepairrl.runs import RunFolder, open_run
from coderepairrl.runs.log import add_checksum
from coderepairrl.runs.storage import replace_folder
from coderepairrl.stages.changes import MAY_CHANGE_BY_COMMAND, list_changed_keys
from coderepairrl.stages.results import read_results, write_results
from coderepairrl.types import Episode

T = TypeVar("T")
# keys of run.json, besides the settings
_EQUAL_KEYS = ("policy", "model", "adapter", "rewards", "coderepairrl", "schema")


class Shard(NamedTuple):
    """Every `of`-th task, from the `number`-th (1, 2, ...) on.

    >>> str(Shard(2, 3)), Shard(2, 3).share("abcde")
    ('2/3', 'be')
    """

    number: int = 1
    of: int = 1

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def share(self, everything: Sequence[T]) -> Sequence[T]:
        """Select this shard's items."""
        return everything[self.number - 1 :: self.of]


WHOLE = Shard()


def parse_shard(text: str) -> Shard:
    """Parse ``I/N``. Raises `UsageError`.

    >>> parse_shard("2/3")
    Shard(number=2, of=3)
    """
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise UsageError(f"{text!r} is not a shard", fix="write for example 1/4 to 4/4: four parts")
    return Shard(int(number), int(of))


class _ShardRun(NamedTuple):
    folder: RunFolder
    about: Mapping[str, Any]
    evaluations: Mapping[str, int]
    """Policy version by evaluation."""


def merge_shards(paths: Sequence[Path], target: Path) -> dict[str, Any]:
    """Merge the shards in `paths` into `target`, atomically; return its results, equal to one run's except for times.

    Raises `UsageError` for missing, repeated, unfinished or differing shards, and an existing `target`.
    """
    if target.exists():
        raise UsageError(f"{target} already exists", fix="name a new folder with -o")
    parts = [_read_shard(path) for path in paths]
    for part in parts[1:]:
        _require_same_evaluation(parts[0], part)
    _require_complete(parts)
    with replace_folder(target) as home:
        _write_merged_run(RunFolder(home), target, parts)
    return read_results(RunFolder(target))


def _read_shard(path: Path) -> _ShardRun:
    folder = open_run(path)
    if folder.command() != "eval":
        raise UsageError(f"{path} is not an evaluation", fix="name folders that `crrl eval --shard` made")
    evaluations, session = dict[str, int](), ""
    for record in folder.records():
        if record["type"] == "eval":
            evaluations[record["name"]] = record["version"]
        elif record["type"] in ("start", "end", "stop"):
            session = record["type"]
    if session != "end":
        raise UsageError(f"{path} is not finished", fix=f"crrl eval {shlex.quote(str(path))} --resume")
    return _ShardRun(folder, folder.about(), evaluations)


def _require_same_evaluation(first: _ShardRun, other: _ShardRun) -> None:
    differing = [key for key in _EQUAL_KEYS if first.about.get(key) != other.about.get(key)]
    settings, other_settings = (flatten_settings(part.about["config"]) for part in (first, other))
    differing += list_changed_keys(settings, other_settings, MAY_CHANGE_BY_COMMAND["eval"])
    differing += ["evaluations"] if first.evaluations.keys() != other.evaluations.keys() else []
    # each lists the tasks of all shards, whose order decides what each shard has
    differing += ["tasks"] if [*first.folder.tasks()] != [*other.folder.tasks()] else []
    differing += compare_conditions(*(part.about.get("conditions") or {} for part in (first, other)))
    if differing:
        raise UsageError(
            f"{other.folder.path} and {first.folder.path} are of different evaluations: they differ in"
            f" {', '.join(differing)}",
            fix="measure all shards with the same policy, settings and version, in the same environments",
        )


def _require_complete(parts: Sequence[_ShardRun]) -> None:
    by_shard: dict[Shard, Path] = {}
    for part in parts:
        shard = parse_shard(part.about.get("shard", str(WHOLE)))
        if shard in by_shard:
            raise UsageError(
                f"{by_shard[shard]} and {part.folder.path} are both shard {shard}", fix="leave one of them out"
            )
        by_shard[shard] = part.folder.path
    if len(counts := {shard.of for shard in by_shard}) > 1:
        raise UsageError(
            f"these are not shards of one evaluation: {', '.join(map(str, by_shard))}",
            fix="name those of one: 1/N to N/N",
        )
    [of] = counts
    if missing := [str(Shard(number, of)) for number in range(1, of + 1) if Shard(number, of) not in by_shard]:
        raise UsageError(f"shards are missing: {', '.join(missing)}", fix=f"crrl eval ... --shard {missing[0]}")


def _write_merged_run(folder: RunFolder, target: Path, parts: Sequence[_ShardRun]) -> None:
    about = {key: value for key, value in parts[0].about.items() if key not in ("schema", "argv")}
    about |= {"name": target.name, "shard": str(WHOLE), "merged": [str(part.folder.path) for part in parts]}
    folder.create(parts[0].folder.config.read_text("utf-8"), about)
    tasks = {name: task for part in parts for name, task in part.folder.tasks().items()}
    folder.add_tasks(tasks.values())
    with closing(folder.writer()) as log:
        for record in (record for part in parts for record in part.folder.records() if record["type"] != "eval"):
            log.write(add_checksum(json.dumps(record, separators=(",", ":")).encode()) + b"\n")
        for name, version in parts[0].evaluations.items():
            episodes, rows = _merge_episodes(parts, f"{name}-00000")
            measured_tasks = (tasks[each.task_id] for each in episodes)
            policy, agents = about["policy"], find_agents_by_kind(about["config"], name)
            record = write_results(
                folder, name, 0, version, episodes, measured_tasks, model=policy, agents=agents, computed=rows
            )
            log.append("eval", **record)
        log.append("end", step=0)


def _merge_episodes(parts: Sequence[_ShardRun], stem: str) -> tuple[list[Episode], dict[str, dict[str, float]]]:
    """Episodes in the order of one run, and metrics by id."""
    rows = {name: row for part in parts for name, row in part.folder.attempts(stem).items()}
    episodes = [episode for part in parts for episode in part.folder.episodes(stem)]
    # by length first: after group 999, names are longer
    return sorted(episodes, key=lambda each: (len(each.group), each.group, each.attempt)), rows
