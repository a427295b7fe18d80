"""One patch out of several attempts: by vote, by each score, at random. A finished evaluation is all that it takes.

A rule that looks at the reference or runs the checks that judge is an oracle: it tells how much a choice could bring,
and no policy could make it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coderepairrl import rewards
from coderepairrl.errors import CodeRepairError, UsageError
from coderepairrl.report.localisation import LARGEST
from coderepairrl.report.outcomes import episodes_of
from coderepairrl.rewards.parse import MalformedPatch
from coderepairrl.rewards.verified import identity
from coderepairrl.stats import Interval, mean_interval, resolved
from coderepairrl.stats.clusters import clusters_by
from coderepairrl.types import Ending, Episode

FIRST, MEAN, MAJORITY, ANY = "first", "mean", "majority", "any"


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a rule comes to with `attempts` at each task."""

    rule: str
    attempts: int
    oracle: bool
    """Whether it looks at what no policy is given."""
    outcomes: Mapping[str, float]
    """Whether the attempt that it chooses resolves the task, by task."""
    share: Interval
    """Their mean, clustered by repository."""


def choose(source: str, attempts: int | None = None) -> list[Chosen]:
    """What each rule comes to with the first `attempts` (else all) at each task of the evaluation `source`
    (``RUN``, ``RUN@NAME``, ``RUN@NAME-STEP``).

    ``first`` is a single attempt and ``mean`` the mean of all: what one comes to without any choice. ``majority`` takes
    the patch that most attempts made (of equal ones the first; empty patches only where there is nothing else), a score
    that was measured the attempt where it is greatest, ``any`` one that resolves. Attempts that are void are passed
    over; a task with fewer than `attempts` others is refused.

    Raises `UsageError`, as for an evaluation whose checks were not run.
    """
    by_task: dict[str, list[Episode]] = {}
    for episode in episodes_of(source):
        own = by_task.setdefault(episode.task_id, [])
        if episode.ending is not Ending.VOID:
            own.append(episode)
    if unjudged := next((task for task, own in by_task.items() for each in own if resolved(each) is None), ""):
        raise UsageError(
            f"{source} does not say whether {unjudged} is resolved: its checks were not run",
            fix="evaluate with a reward that runs them: eval.reward={tests=1.0, patch_edits=0.0}",
        )
    fewest = min(map(len, by_task.values()))
    if attempts is None and fewest == 1:
        raise UsageError(
            f"{source} has one valid attempt at a task, and nothing to choose from", fix="crrl eval ... --attempts 8"
        )
    wanted = fewest if attempts is None else attempts
    if not 1 <= wanted <= fewest:
        raise UsageError(
            f"a task of {source} has {fewest} valid attempts, and {wanted} are asked for",
            fix=f"--attempts up to {fewest}" if fewest else "its attempts were void: evaluate it again",
        )
    tasks = {task: sorted(own, key=lambda each: each.attempt)[:wanted] for task, own in by_task.items()}
    clusters = clusters_by({task: own[0].repository for task, own in tasks.items()})
    names = dict.fromkeys(score.name for own in tasks.values() for each in own for score in each.scores)

    def found(rule: str, oracle: bool, outcomes: Mapping[str, float]) -> Chosen:
        share = mean_interval(list(outcomes.values()), [clusters[task] for task in outcomes], share=True)
        return Chosen(rule, wanted, oracle, outcomes, share)

    rules = [
        found(FIRST, False, {task: _solves(own[0]) for task, own in tasks.items()}),
        found(MEAN, False, {task: math.fsum(map(_solves, own)) / len(own) for task, own in tasks.items()}),
        found(MAJORITY, False, {task: _solves(_majority(own)) for task, own in tasks.items()}),
    ]
    for name in names:
        best = {task: _solves(max(own, key=lambda each: _score(each, name))) for task, own in tasks.items()}
        rules.append(found(name, judged_by_oracle(name), best))
    return [*rules, found(ANY, True, {task: max(map(_solves, own)) for task, own in tasks.items()})]


def judged_by_oracle(reward: str) -> bool:
    """Whether `reward` promises something of the reference, compares with it, or runs the checks that judge. One that
    does not ship is taken to.

    >>> judged_by_oracle("patch_edits"), judged_by_oracle("tests"), judged_by_oracle("mine:Reward")
    (True, True, True)
    """
    if reward not in rewards.SHIPPED:
        return True
    try:
        made = rewards.only(reward)
    except CodeRepairError:  # it needs a package or a model that is not here
        return True
    sample = b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"
    return made.repairs or made.runs_checks or made.takes_verified or made.compare(sample, sample) is not None


def _solves(episode: Episode) -> float:
    return float(bool(resolved(episode)))


def _score(episode: Episode, name: str) -> float:
    """Its score, below all others where it has none."""
    return next((score.value for score in episode.scores if score.name == name), -math.inf)


def _majority(own: Sequence[Episode]) -> Episode:
    made = [_made(each.patch) for each in own]
    votes = Counter(each for each in made if each is not None)
    return max(zip(own, made, strict=True), key=lambda pair: votes[pair[1]] if pair[1] is not None else 0)[0]


def _made(patch: bytes) -> Any:
    """What `patch` makes of the files; None of one that is empty, no diff, or no repair by its length."""
    try:
        return identity(patch) or None if len(patch) <= LARGEST else None
    except MalformedPatch:
        return None


def rows(found: Sequence[Chosen]) -> list[dict[str, Any]]:
    """Outcome rows that `crrl compare FILE@RULE` reads; without ``mean``, which is no choice."""
    return [
        {"instance_id": task, "resolved": bool(value), "model_name_or_path": each.rule}
        for each in found
        if each.rule != MEAN
        for task, value in each.outcomes.items()
    ]


def as_plain(found: Chosen) -> dict[str, Any]:
    """Without the single tasks."""
    return {"rule": found.rule, "attempts": found.attempts, "oracle": found.oracle, "resolved": found.share._asdict()}


def as_text(found: Sequence[Chosen]) -> str:
    """For people."""
    heads = ("chosen by", "resolved", "")
    marks = {True: "oracle: looks at what no policy is given", False: ""}
    lines = [heads, *((each.rule, str(each.share), marks[each.oracle]) for each in found)]
    widths = [max(len(line[at]) for line in lines) for at in range(2)]
    shown = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in lines]
    count = f"{len(found[0].outcomes)} tasks, the first {found[0].attempts} attempts at each; 95 % intervals"
    return "\n".join([f"{count}, tasks of one repository (if there are several) as one observation", *shown])


def path_of(output: Path) -> Path:
    """`output`, if nothing is there. Raises `UsageError`."""
    if output.exists():
        raise UsageError(f"{output} exists already", fix="name another file with -o")
    return output
