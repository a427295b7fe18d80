"""Overlap of two sets of tasks, to keep evaluation tasks out of training."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from coderepairrl.types import Task

Key = TypeVar("Key")
MIN_SIMILARITY = 0.8
"""Least Jaccard index of near-duplicates: of issues' word n-grams, of patches' changed lines."""
_NGRAM_WORDS = 5
_MIN_NGRAMS = 5  # issues with fewer are too short to be found in a text
_MAX_SHOWN_PAIRS = 5
_MAX_TASKS = 50
"""N-grams and lines in more tasks, such as a licence's, are ignored in the search for candidates."""


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
        places=len(set(map(_workspace_key, first)) & set(map(_workspace_key, second)) - {""}),
        issues=_pair_near_duplicates(first, second, lambda task: _list_ngrams(task.prompt)),
        patches=_pair_near_duplicates(first, second, _list_changed_lines),
        days=days,
        later=sum(bool(task.created and days[1][0]) and task.created >= days[1][0] for task in first),
    )


def find_quoting_texts(texts: Mapping[str, str], tasks: Iterable[Task]) -> dict[str, str]:
    """Map names of texts quoting an issue (`MIN_SIMILARITY` of its n-grams) to its task's id; ignores short issues."""
    issues = {(task.id, number): _list_ngrams(task.prompt) for number, task in enumerate(tasks)}  # ids may repeat
    issues = {key: ngrams for key, ngrams in issues.items() if len(ngrams) >= _MIN_NGRAMS}
    keys_by_ngram = _index_parts(issues)
    quoting = {}
    for name, text in texts.items():
        shared = Counter(key for ngram in _list_ngrams(text) for key in keys_by_ngram.get(ngram, ()))
        quoted = [key for key in sorted(shared) if shared[key] >= MIN_SIMILARITY * len(issues[key])]
        if quoted:
            quoting[name], _ = quoted[0]
    return quoting


def _index_parts(parts_by_key: Mapping[Key, set[Hashable]]) -> Mapping[Hashable, list[Key]]:
    keys_by_part = defaultdict[Hashable, list[Key]](list)
    for key, parts in parts_by_key.items():
        for part in parts:
            keys_by_part[part].append(key)
    return keys_by_part


def _workspace_key(task: Task) -> Hashable:
    if not task.workspace.startswith("git:"):
        return task.workspace
    url, _, commit = task.workspace.removeprefix("git:").rpartition("@")
    return task.repository or url, commit


def _list_ngrams(text: str) -> set[Hashable]:
    """Word n-grams of `text`; of a shorter text, all words."""
    words = re.findall(r"\w+", text.lower())
    starts = range(max(1, len(words) - _NGRAM_WORDS + 1))
    ngrams: set[Hashable] = {tuple(words[start : start + _NGRAM_WORDS]) for start in starts}
    return ngrams - {()}  # of a text without words


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
        ids_with_part = (ids_by_part.get(part, ()) for part in parts)
        candidates = {other for ids in ids_with_part if len(ids) <= _MAX_TASKS for other in ids}
        for other in sorted(candidates):
            common = len(parts & others[other])
            if common >= MIN_SIMILARITY * (len(parts) + len(others[other]) - common):
                pairs.append((task.id, other))
    return pairs


def _find_date_range(tasks: Iterable[Task]) -> tuple[str, str]:
    days = sorted(task.created for task in tasks if task.created)
    return (days[0], days[-1]) if days else ("", "")


def format_overlap(overlap: Overlap, names: tuple[str, str]) -> str:
    """Format an overlap, with the first `_MAX_SHOWN_PAIRS` pairs of each kind."""
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
        lines += [f"         {one}" + (f"  {other}" if other != one else "") for one, other in pairs[:_MAX_SHOWN_PAIRS]]
        if len(pairs) > _MAX_SHOWN_PAIRS:
            lines.append(f"         and {len(pairs) - _MAX_SHOWN_PAIRS} more pairs")
    if all(start for start, _ in overlap.days):
        lines.append(f"{overlap.later:>6} of the first were created on or after the first day of the second")
    return "\n".join(lines)
