"""Select attempts worth learning from, by filters (section ``keep``)."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from coderepairrl.config.schema import Keep
from coderepairrl.errors import UsageError
from coderepairrl.printable import counted

_TURNS = ("language", "repository", "task")  # Fields whose values alternate under `keep.total`.
_WELL_FORMED = "well-formed tool calls"  # Calls have a JSON object as arguments, and name an offered tool.
# Keeps the highest reward among equal patches or conversations of a task.
_DISTINCT = "distinct patches and conversations"
_SHOWN = 8  # Tasks, repositories and languages listed; the others are counted.


@dataclass(frozen=True, slots=True)
class Candidate:
    """Attempt for filters, without conversation.

    >>> Candidate(0, "e", "toy/1", reward=0.5).passed is None
    True
    """

    source: int
    """Number of its source."""
    episode: str
    task: str
    repository: str = ""
    language: str = ""
    ending: str = "done"
    reward: float | None = None
    """None without a verdict, as in `passed`."""
    passed: bool | None = None
    malformed: str = ""
    """Fault of its tool calls."""
    patch: str = ""
    """Digest of the patch's effect; empty without any."""
    conversation: str = ""
    """Digest of its messages."""

    @property
    def key(self) -> tuple[int, str]:
        """Identity of the attempt."""
        return self.source, self.episode


class Step(NamedTuple):
    """Effect of a filter."""

    filter: str
    dropped: int
    left: int


class Selection(NamedTuple):
    """Selected attempts in reproducible order, and filters' effects."""

    kept: tuple[Candidate, ...]
    there: int
    steps: tuple[Step, ...]

    def as_json(self) -> dict[str, Any]:
        """Convert to plain data, with counts by task, repository and language."""
        return {
            "attempts": self.there,
            "kept": len(self.kept),
            "tasks": len({each.task for each in self.kept}),
            "filters": [step._asdict() for step in self.steps],
            **{f"by_{part}": _count_kept(self.kept, part) for part in ("language", "repository", "task")},
        }


Wanted = Callable[[Candidate], bool]
Filter = Callable[[Sequence[Candidate]], Sequence[Candidate]]


def select(candidates: Sequence[Candidate], keep: Keep) -> Selection:
    """Apply `keep`. Raises `UsageError` with the filter that leaves none."""
    left = sorted(candidates, key=lambda each: each.key)
    if not left:
        raise UsageError("no attempt has a verdict to select from", fix="crrl collect makes some")
    steps = []
    for name, filtered in _filters(keep):
        before, left = left, list(filtered(left))
        steps.append(Step(name, len(before) - len(left), len(left)))
        if not left:
            raise UsageError(f"{name} leaves none of {counted(len(before), 'attempt')}", fix=_advice(name, before))
    return Selection(tuple(sorted(left, key=lambda each: each.key)), len(candidates), tuple(steps))


def _filters(keep: Keep) -> list[tuple[str, Filter]]:
    """Active filters, named as on the command line."""

    def enough(one: Candidate) -> bool:
        return keep.above < 0 if one.reward is None else one.reward > keep.above

    choices: list[tuple[bool, str, Wanted]] = [
        (True, f"keep.endings={','.join(keep.endings)}", lambda one: one.ending in keep.endings),
        (True, _WELL_FORMED, lambda one: not one.malformed),
        (True, f"keep.above={keep.above:g}", enough),
        (keep.passed, "keep.passed=true", lambda one: bool(one.passed)),
    ]
    limits: list[tuple[bool, str, Filter]] = [
        (True, _DISTINCT, _distinct),
        (keep.best > 0, f"keep.best={keep.best}", partial(_best, k=keep.best)),
        (keep.total > 0, f"keep.total={keep.total}", lambda some: _in_turn(some, _TURNS)[: keep.total]),
    ]
    each: list[tuple[bool, str, Filter]] = [(on, name, partial(_only, wanted=it)) for on, name, it in choices]
    return [(name, it) for on, name, it in (*each, *limits) if on]


def _only(some: Sequence[Candidate], wanted: Wanted) -> list[Candidate]:
    return [one for one in some if wanted(one)]


def _ranked(some: Sequence[Candidate]) -> list[Candidate]:
    return sorted(some, key=lambda one: float("inf") if one.reward is None else -one.reward)


def _distinct(some: Sequence[Candidate]) -> list[Candidate]:
    seen, chosen = set[tuple[str, str]](), set[tuple[int, str]]()
    for one in _ranked(some):
        marks = {(one.task, mark) for mark in (one.patch, one.conversation) if mark}
        if not marks & seen:
            chosen.add(one.key)
        seen |= marks
    return [one for one in some if one.key in chosen]


def _best(some: Sequence[Candidate], k: int) -> list[Candidate]:
    count_by_task = Counter[str]()
    best = []
    for one in _ranked(some):
        count_by_task[one.task] += 1
        if count_by_task[one.task] <= k:
            best.append(one)
    return sorted(best, key=lambda one: one.key)


def _in_turn(some: Sequence[Candidate], within: Sequence[str]) -> list[Candidate]:
    """Alternate between values of the first field, then of the next: rare values come before frequent ones repeat."""
    if not within:
        return sorted(some, key=lambda one: _drawn(one.task, one.conversation, one.patch))
    queues = [_in_turn(group, within[1:]) for group in _by(some, within[0])]
    queues.sort(key=lambda queue: _drawn(getattr(queue[0], within[0])))
    longest = max(map(len, queues), default=0)
    return [queue[at] for at in range(longest) for queue in queues if at < len(queue)]


def _by(some: Sequence[Candidate], field: str) -> list[list[Candidate]]:
    groups = defaultdict[str, list[Candidate]](list)
    for one in some:
        groups[getattr(one, field)].append(one)
    return [groups[value] for value in sorted(groups)]


def _drawn(*parts: str) -> bytes:
    # A draw by contents alone: the same on every machine.
    return hashlib.blake2b("\0".join(["0", *parts]).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _advice(name: str, before: Sequence[Candidate]) -> str:
    field, _, _ = name.removeprefix("keep.").partition("=")
    if field == "endings":
        endings = ", ".join(
            f"{count} {ending}" for ending, count in Counter(one.ending for one in before).most_common()
        )
        return f"they ended so: {endings}; take others, too: keep.endings=done,limit"
    if field == _WELL_FORMED:
        return f"the first: {before[0].malformed}"
    judged = [one for one in before if one.reward is not None]
    if field == "above" and judged:
        best = max(one.reward for one in judged if one.reward is not None)
        return f"the highest reward is {best:g}: ask for less, or collect more attempts"
    if field == "above":
        return "none of them was judged: keep.above=-1 keeps what is not, crrl grade judges patches"
    if field == "passed" and all(one.passed is None for one in before):
        return "none of them was judged: crrl grade judges patches"
    return "ask for less of it, or collect more attempts"


def _count_kept(kept: Sequence[Candidate], part: str) -> dict[str, int]:
    return dict(sorted(Counter(getattr(one, part) for one in kept).items(), key=lambda pair: (-pair[1], pair[0])))


def format_selection(found: Mapping[str, Any]) -> list[str]:
    """Format `Selection.as_json` as lines."""
    rows = [(f"{found['attempts']:>7}", "", "attempts")]
    rows += [(f"{each['left']:>7}", f"-{each['dropped']}", each["filter"]) for each in found["filters"]]
    lines = [f"{left} {dropped:>7}  {name}".rstrip() for left, dropped, name in rows]
    for part in ("language", "repository", "task"):
        counts = {name: count for name, count in found[f"by_{part}"].items() if name}
        counted_names = [f"{name} {count}" for name, count in list(counts.items())[:_SHOWN]]
        more = [f"{len(counts) - _SHOWN} more"] if len(counts) > _SHOWN else []
        if counts:
            plural = {"repository": "repositories"}.get(part, f"{part}s")
            lines.append(
                f"{len(counts):>7} {plural if len(counts) > 1 else part}: {', '.join([*counted_names, *more])}"
            )
    return lines
