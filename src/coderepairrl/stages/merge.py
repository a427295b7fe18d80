"""Merge shards of an evaluation into one run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from coderepairrl.errors import UsageError
from coderepairrl.plan.conditions import unlike
from coderepairrl.report.metrics import agents_of
from coderepairrl.runs import RunFolder, open_run
from coderepairrl.runs.log import sealed
from coderepairrl.runs.storage import replace_folder
from coderepairrl.stages import shards
from coderepairrl.stages.results import conclude
from coderepairrl.stages.shards import WHOLE, measured_by
from coderepairrl.types import Episode

Keep = Literal["first", "last"]
# Keys of run.json that must agree.
_SAME = ("policy", "model", "adapter", "rewards", "config", "coderepairrl", "schema")


class _Part(NamedTuple):
    folder: RunFolder
    about: Mapping[str, Any]
    evaluations: Mapping[str, int]
    """Policy version by name."""
    groups: frozenset[str]


def merge(paths: Sequence[Path], target: Path, *, keep: Keep | None = None) -> None:
    """Merge the shards `paths` into `target`, whole or not at all.

    Of attempts at the same task those of the `keep` shard count. The result equals one whole run except for times.
    Raises `UsageError` for missing, unfinished or differing shards, a repeated task without `keep`, and an existing
    `target`.
    """
    if target.exists():
        raise UsageError(f"{target} exists already", fix="name a new folder with -o")
    parts = [_read(path) for path in paths]
    for part in parts[1:]:
        _require_alike(parts[0], part)
    _require_all(parts)
    owner = _owners(parts, keep)
    with replace_folder(target) as home:
        _write(RunFolder(home), target, parts, owner)


def _read(path: Path) -> _Part:
    folder = open_run(path)
    about = folder.about()
    if "policy" not in about:
        raise UsageError(f"{path} is no evaluation", fix="name folders that `crrl eval --shard` made")
    evaluations, groups, last = dict[str, int](), set[str](), ""
    for record in folder.records():
        kind = record["type"]
        if kind == "eval":
            evaluations[record["name"]] = record["version"]
        elif kind == "episode":
            groups.add(record["group"])
        elif kind in ("start", "end", "stop"):
            last = kind
    if last != "end":
        raise UsageError(f"{path} is not finished", fix=f"crrl eval {path} --resume")
    return _Part(folder, about, evaluations, frozenset(groups))


def _require_alike(first: _Part, other: _Part) -> None:
    wrong = [key for key in _SAME if _compared(first.about, key) != _compared(other.about, key)]
    wrong += ["evaluations"] if first.evaluations.keys() != other.evaluations.keys() else []
    wrong += unlike(*(part.about.get("conditions") or {} for part in (first, other)))
    if wrong:
        raise UsageError(
            f"{other.folder.path} and {first.folder.path} are of different evaluations: they differ in"
            f" {', '.join(wrong)}",
            fix="measure all shards with the same policy, settings and version, in the same environments",
        )


def _compared(about: Mapping[str, Any], key: str) -> Any:
    return measured_by(about[key]) if key == "config" else about.get(key)


def _require_all(parts: Sequence[_Part]) -> None:
    shard_list = [shards.parse(part.about.get("shard", str(WHOLE))) for part in parts]
    if len({shard.of for shard in shard_list}) > 1:
        raise UsageError(
            f"these are not shards of one evaluation: {', '.join(map(str, shard_list))}", fix="name those of one: I/N"
        )
    of = shard_list[0].of
    if missing := sorted(set(range(1, of + 1)) - {shard.number for shard in shard_list}):
        names = ", ".join(f"{number}/{of}" for number in missing)
        raise UsageError(f"shards are missing: {names}", fix=f"crrl eval ... --shard {missing[0]}/{of}")


def _owners(parts: Sequence[_Part], keep: Keep | None) -> dict[str, int]:
    """Index of the counting part, by group."""
    owner: dict[str, int] = {}
    for at, part in enumerate(parts):
        for group in part.groups:
            if group in owner and keep is None:
                both = parts[owner[group]].folder.path, part.folder.path
                raise UsageError(
                    f"{both[0]} and {both[1]} have attempts at the same task ({group})",
                    fix="say which count: --keep first, or --keep last",
                )
            if keep == "last" or group not in owner:
                owner[group] = at
    return owner


def _write(folder: RunFolder, target: Path, parts: Sequence[_Part], owner: Mapping[str, int]) -> None:
    about = {key: value for key, value in parts[0].about.items() if key not in ("schema", "argv")}
    about |= {"name": target.name, "shard": str(WHOLE), "merged": [str(part.folder.path) for part in parts]}
    folder.create(parts[0].folder.config.read_text("utf-8"), about)
    tasks = {name: task for part in parts for name, task in part.folder.tasks().items()}
    folder.add_tasks(tasks.values())
    log = folder.writer()
    try:
        for at, part in enumerate(parts):
            group_of: dict[str, str] = {}
            for record in part.folder.records():
                if record["type"] == "episode":
                    group_of[record["id"]] = record["group"]
                if _counts(record, group_of, owner, at):
                    log.write(sealed(json.dumps(record, separators=(",", ":")).encode()) + b"\n")
        for name, version in parts[0].evaluations.items():
            episodes, rows = _episodes(parts, name, owner)
            measured_tasks = (tasks[each.task_id] for each in episodes)
            agents = agents_of(about["config"], name)
            record = conclude(
                folder, name, 0, version, episodes, measured_tasks, model=about["policy"], agents=agents, known=rows
            )
            log.append("eval", **record)
        log.append("end", step=0)
    finally:
        log.close()


def _counts(record: Mapping[str, Any], group_of: Mapping[str, str], owner: Mapping[str, int], at: int) -> bool:
    kind: str = record["type"]
    if kind in ("episode", "turn", "verdict"):
        name = record["verdict"]["id"] if kind == "verdict" else record["episode" if kind == "turn" else "id"]
        return owner[group_of[name]] == at
    return kind != "eval"


def _episodes(
    parts: Sequence[_Part], name: str, owner: Mapping[str, int]
) -> tuple[list[Episode], dict[str, dict[str, float]]]:
    """Counting episodes in one run's order, and metrics by id."""
    episodes, rows, place = list[Episode](), dict[str, dict[str, float]](), f"{name}-00000"
    for at, part in enumerate(parts):
        counting = [episode for episode in part.folder.episodes(place) if owner[episode.group] == at]
        measured = part.folder.attempts(place)
        rows |= {each.id: measured[each.id] for each in counting if each.id in measured}
        episodes += counting
    return sorted(episodes, key=lambda each: (each.group, each.attempt)), rows
