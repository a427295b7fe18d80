"""Overlap of two sets of tasks, to keep evaluation tasks out of training."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from coderepairrl.types import Task

Key = TypeVar("Key")
ALIKE = 0.8
"""Least Jaccard index of near-duplicate issues or patches."""
_WORDS, _SHOWN = 5, 5
_COMMON = 50
"""Most tasks with a sequence that suggests a pair; more common ones (a licence) count only within pairs."""


class Overlap(NamedTuple):
    """Pairs of ids (first set, second set) by shared property, and creation days."""

    counts: tuple[int, int]
    ids: list[str]
    commits: list[tuple[str, str]]
    """Pairs with equal commit, folder or image."""
    places: int
    """Number of shared commits."""
    issues: list[tuple[str, str]]
    patches: list[tuple[str, str]]
    days: tuple[tuple[str, str], tuple[str, str]]
    """First and last day of each set; empty without dates."""
    later: int
    """Tasks of the first set created on or after the second's first day."""

    @property
    def is_disjoint(self) -> bool:
        """Whether the sets are disjoint."""
        return not (self.ids or self.commits or self.issues or self.patches)

    def as_json(self) -> dict[str, Any]:
        """Fields as plain data, and ``clean``."""
        return {**self._asdict(), "clean": self.is_disjoint}


def find_overlap(first: Sequence[Task], second: Sequence[Task]) -> Overlap:
    """Properties shared by `first` and `second`."""
    second_ids = {task.id for task in second}
    days = (_find_date_range(first), _find_date_range(second))
    return Overlap(
        counts=(len(first), len(second)),
        ids=[task.id for task in first if task.id in second_ids],
        commits=_pair_same_workspace(first, second),
        places=len(
            {_workspace_key(task) for task in first if task.workspace} & {_workspace_key(task) for task in second}
        ),
        issues=_pair_near_duplicates(first, second, lambda task: _split_sequences(task.prompt)),
        patches=_pair_near_duplicates(first, second, _list_changed_lines),
        days=days,
        later=sum(bool(task.created and days[1][0]) and task.created >= days[1][0] for task in first),
    )


def find_quoting_texts(texts: Mapping[str, str], tasks: Iterable[Task]) -> dict[str, str]:
    """Names of `texts` that contain at least `ALIKE` of a task's issue, with its id; very short issues are ignored."""
    numbered = enumerate(tasks)  # ids need not be unique
    issues = {(task.id, at): parts for at, task in numbered if len(parts := _split_sequences(task.prompt)) >= _WORDS}
    keys_by_part = _index_parts(issues)
    quoting = {}
    for name, text in texts.items():
        shared = Counter(key for part in _split_sequences(text) for key in keys_by_part.get(part, ()))
        if near := [key for key in sorted(shared) if shared[key] >= ALIKE * len(issues[key])]:
            quoting[name] = near[0][0]
    return quoting


def _index_parts(parts_by_key: Mapping[Key, set[Hashable]]) -> Mapping[Hashable, list[Key]]:
    keys_by_part = defaultdict[Hashable, list[Key]](list)
    for key, parts in parts_by_key.items():
        for part in parts:
            keys_by_part[part].append(key)
    return keys_by_part


def _workspace_key(task: Task) -> Hashable:
    kind, _, where = task.workspace.partition(":")
    return (task.repository or where.rpartition("@")[0], where.rpartition("@")[2]) if kind == "git" else task.workspace


def _split_sequences(text: str) -> set[Hashable]:
    words = re.findall(r"\w+", text.lower())
    sequences: set[Hashable] = {tuple(words[at : at + _WORDS]) for at in range(max(1, len(words) - _WORDS + 1))}
    return sequences - {()}


def _list_changed_lines(task: Task) -> set[Hashable]:
    lines = task.reference.decode("utf-8", "replace").split("\n")
    changed = (line for line in lines if line[:1] in ("+", "-") and not line.startswith(("+++ ", "--- ")))
    return {(line[0], "".join(line[1:].split())) for line in changed if line[1:].strip()}


def _pair_same_workspace(first: Iterable[Task], second: Iterable[Task]) -> list[tuple[str, str]]:
    by_place = defaultdict[Hashable, list[str]](list)
    for task in second:
        by_place[_workspace_key(task)].append(task.id)
    return [(task.id, other) for task in first if task.workspace for other in by_place.get(_workspace_key(task), ())]


def _pair_near_duplicates(
    first: Iterable[Task], second: Iterable[Task], split_task: Callable[[Task], set[Hashable]]
) -> list[tuple[str, str]]:
    others = {task.id: split_task(task) for task in second}
    ids_by_part = _index_parts(others)
    pairs = []
    for task in first:
        parts = split_task(task)
        similar = (ids_by_part.get(part, ()) for part in parts)
        for name in sorted({name for ids in similar if len(ids) <= _COMMON for name in ids}):
            common = len(parts & others[name])
            if common >= ALIKE * (len(parts) + len(others[name]) - common):
                pairs.append((task.id, name))
    return pairs


def _find_date_range(tasks: Iterable[Task]) -> tuple[str, str]:
    days = sorted(task.created for task in tasks if task.created)
    return (days[0], days[-1]) if days else ("", "")


def format_overlap(overlap: Overlap, names: tuple[str, str]) -> str:
    """Format an overlap, with the first `_SHOWN` pairs of each kind."""
    sides = zip(("first", "second"), names, overlap.counts, overlap.days, strict=True)
    lines = [
        f"{side:<6} {name}, {count} tasks, " + (f"{start} to {end}" if start else "without dates")
        for side, name, count, (start, end) in sides
    ]
    for shared, pairs in (
        ("the same id", [(name, name) for name in overlap.ids]),
        (f"the same repository and commit ({overlap.places} commits)", overlap.commits),
        ("a near-duplicate issue", overlap.issues),
        ("a near-duplicate patch", overlap.patches),
    ):
        tasks = len({one for one, _ in pairs})
        lines.append(f"{tasks:>6} of the first have {shared}")
        lines += [f"         {one}" + (f"  {other}" if other != one else "") for one, other in pairs[:_SHOWN]]
        if len(pairs) > _SHOWN:
            lines.append(f"         and {len(pairs) - _SHOWN} more pairs")
    if all(start for start, _ in overlap.days):
        lines.append(f"{overlap.later:>6} of the first were created on or after the first day of the second")
    return "\n".join(lines)
