"""Select attempts worth learning from, by filters (section ``keep``)."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from coderepairrl.config.schema import Keep
from coderepairrl.errors import UsageError
from coderepairrl.printable import format_count

_ALTERNATING = ("language", "repository", "task")  # Fields whose values alternate under `keep.total`.
_WELL_FORMED = "well-formed tool calls"  # Arguments are a JSON object, and the tool was offered.
_DISTINCT = "distinct patches and conversations"  # Of equal ones of a task, the highest reward is kept.
_LISTED = 8  # Tasks, repositories and languages that are listed; the others are counted.


@dataclass(frozen=True, slots=True)
class Candidate:
    """Facts about an attempt that filters use.

    >>> Candidate(0, "e", "toy/1", reward=0.5).passed is None
    True
    """

    source: int
    """Index of its run or file."""
    episode: str
    task: str
    repository: str = ""
    language: str = ""
    ending: str = "done"
    reward: float | None = None
    """None if it was not judged; the same for `passed`."""
    passed: bool | None = None
    malformed: str = ""
    """What is wrong with its tool calls, or empty."""
    patch: str = ""
    """Digest of the patch's effect; empty for a patch without effect."""
    conversation: str = ""
    """Digest of its messages."""

    @property
    def key(self) -> tuple[int, str]:
        """Identity of the attempt."""
        return self.source, self.episode


class FilterResult(NamedTuple):
    """Numbers of attempts that a filter dropped and left."""

    filter: str
    dropped: int
    left: int


class Selection(NamedTuple):
    """Selected attempts in reproducible order, and how the filters led to them."""

    kept: tuple[Candidate, ...]
    candidates: int
    """Number of attempts before the filters."""
    steps: tuple[FilterResult, ...]

    def as_json(self) -> dict[str, Any]:
        """Convert to plain data, with counts by task, repository and language."""
        return {
            "attempts": self.candidates,
            "kept": len(self.kept),
            "tasks": len({each.task for each in self.kept}),
            "filters": [step._asdict() for step in self.steps],
            **{f"by_{part}": _count_kept(self.kept, part) for part in _ALTERNATING},
        }


Filter = Callable[[Sequence[Candidate]], Sequence[Candidate]]


def select_candidates(candidates: Sequence[Candidate], keep: Keep) -> Selection:
    """Apply the filters of `keep` in order. Raises `UsageError` that names a filter that leaves no attempt."""
    left = sorted(candidates, key=lambda each: each.key)
    if not left:
        raise UsageError("no attempt has a verdict to select from", fix="crrl collect makes some")
    steps = []
    for name, apply in _active_filters(keep):
        before, left = left, list(apply(left))
        steps.append(FilterResult(name, len(before) - len(left), len(left)))
        if not left:
            raise UsageError(
                f"{name} leaves none of {format_count(len(before), 'attempt')}", fix=_suggest_fix(name, before)
            )
    return Selection(tuple(sorted(left, key=lambda each: each.key)), len(candidates), tuple(steps))


def _active_filters(keep: Keep) -> Iterator[tuple[str, Filter]]:
    """Filters that `keep` switches on, named as on the command line."""

    def has_reward(each: Candidate) -> bool:
        return keep.above < 0 if each.reward is None else each.reward > keep.above

    yield f"keep.endings={','.join(keep.endings)}", lambda some: [each for each in some if each.ending in keep.endings]
    yield _WELL_FORMED, lambda some: [each for each in some if not each.malformed]
    yield f"keep.above={keep.above:g}", lambda some: list(filter(has_reward, some))
    if keep.passed:
        yield "keep.passed=true", lambda some: [each for each in some if each.passed]
    yield _DISTINCT, _drop_duplicates
    if keep.best > 0:
        yield f"keep.best={keep.best}", lambda some: _keep_best(some, keep.best)
    if keep.total > 0:
        yield f"keep.total={keep.total}", lambda some: _alternate(some, _ALTERNATING)[: keep.total]


def _sort_by_reward(attempts: Sequence[Candidate]) -> list[Candidate]:
    return sorted(attempts, key=lambda each: float("inf") if each.reward is None else -each.reward)


def _drop_duplicates(attempts: Sequence[Candidate]) -> list[Candidate]:
    seen, keys = set[tuple[str, str]](), set[tuple[int, str]]()
    for each in _sort_by_reward(attempts):
        digests = {(each.task, digest) for digest in (each.patch, each.conversation) if digest}
        if not digests & seen:
            keys.add(each.key)
        seen |= digests
    return [each for each in attempts if each.key in keys]


def _keep_best(attempts: Sequence[Candidate], k: int) -> list[Candidate]:
    count_by_task = Counter[str]()
    best = []
    for each in _sort_by_reward(attempts):
        count_by_task[each.task] += 1
        if count_by_task[each.task] <= k:
            best.append(each)
    return sorted(best, key=lambda each: each.key)


def _alternate(attempts: Sequence[Candidate], fields: Sequence[str]) -> list[Candidate]:
    """Order attempts round robin over the values of the first field, and within a value over those of the next."""
    if not fields:
        return sorted(attempts, key=lambda each: _draw_order(each.task, each.conversation, each.patch))
    groups = defaultdict[str, list[Candidate]](list)
    for each in attempts:
        groups[getattr(each, fields[0])].append(each)
    queues = [_alternate(group, fields[1:]) for group in groups.values()]
    queues.sort(key=lambda queue: _draw_order(getattr(queue[0], fields[0])))
    longest = max(map(len, queues), default=0)
    return [queue[at] for at in range(longest) for queue in queues if at < len(queue)]


def _draw_order(*parts: str) -> bytes:
    # a random order that depends only on the contents, and so is the same on every machine
    return hashlib.blake2b("\0".join(["0", *parts]).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _suggest_fix(name: str, before: Sequence[Candidate]) -> str:
    field, _, _ = name.removeprefix("keep.").partition("=")
    if field == "endings":
        endings = ", ".join(
            f"{count} {ending}" for ending, count in Counter(each.ending for each in before).most_common()
        )
        return f"their endings: {endings}; accept more of them: keep.endings=done,limit"
    if field == _WELL_FORMED:
        return f"for example: {before[0].malformed}"
    judged = [each for each in before if each.reward is not None]
    if field == "above" and judged:
        best = max(each.reward for each in judged if each.reward is not None)
        return f"the highest reward is {best:g}: lower keep.above, or collect more attempts"
    if field == "above":
        return "none of them was judged: keep.above=-1 keeps attempts without a verdict, crrl grade judges patches"
    if field == "passed" and all(each.passed is None for each in before):
        return "none of them was judged: crrl grade judges patches"
    return "relax this filter, or collect more attempts"


def _count_kept(kept: Sequence[Candidate], part: str) -> dict[str, int]:
    return dict(sorted(Counter(getattr(each, part) for each in kept).items(), key=lambda pair: (-pair[1], pair[0])))


def format_selection(summary: Mapping[str, Any]) -> list[str]:
    """Format `Selection.as_json` as lines."""
    rows = [(f"{summary['attempts']:>7}", "", "attempts")]
    rows += [(f"{each['left']:>7}", f"-{each['dropped']}", each["filter"]) for each in summary["filters"]]
    lines = [f"{left} {dropped:>7}  {name}".rstrip() for left, dropped, name in rows]
    for part in _ALTERNATING:
        names = [f"{name} {count}" for name, count in summary[f"by_{part}"].items() if name]
        more = [f"{len(names) - _LISTED} more"] if len(names) > _LISTED else []
        if names:
            plural = {"repository": "repositories"}.get(part, f"{part}s")
            lines.append(f"{len(names):>7} {plural if names[1:] else part}: {', '.join([*names[:_LISTED], *more])}")
    return lines
