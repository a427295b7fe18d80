"""Outcomes of an evaluation: resolved, completed, exact, pass@k and pass^k, for one policy or two.

Unbiased for k independent attempts, drawn without replacement from n: pass@k that at least one solves the task (Chen et
al. 2021, arXiv 2107.03374), pass^k that all do (Yao et al. 2024, arXiv 2406.12045). A policy that only became more
reliable is ahead for few attempts alone (Yue et al. 2025, arXiv 2504.13837).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from math import comb
from typing import NamedTuple

from coderepairrl.stats.intervals import Interval, cluster_episodes, mean_interval, paired_difference
from coderepairrl.types import Ending, Episode

Solved = Mapping[str, Sequence[bool]]


def pass_at_k(attempts: int, solved: int, k: int) -> float:
    """Probability that at least one of `k` attempts solves the task. Raises ValueError for impossible numbers.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 1, 4)
    (0.25, 0.5, 1.0)
    """
    _check_counts(attempts, solved, k)
    return 1 - comb(attempts - solved, k) / comb(attempts, k)


def pass_hat_k(attempts: int, solved: int, k: int) -> float:
    """Probability that all of `k` attempts solve the task. Raises as `pass_at_k`.

    >>> pass_hat_k(4, 3, 1), pass_hat_k(4, 3, 2), pass_hat_k(4, 3, 4)
    (0.75, 0.5, 0.0)
    """
    _check_counts(attempts, solved, k)
    return comb(solved, k) / comb(attempts, k)


def _check_counts(attempts: int, solved: int, k: int) -> None:
    if not 1 <= k <= attempts:
        raise ValueError(f"k must be from 1 to the number of attempts, {attempts}, not {k}")
    if not 0 <= solved <= attempts:
        raise ValueError(f"{solved} of {attempts} attempts cannot have solved it")


def list_doublings(most: int) -> Sequence[int]:
    """2, 4, 8, ... and `most` itself.

    >>> list_doublings(1), list_doublings(2), list_doublings(6)
    ([], [2], [2, 4, 6])
    """
    return [*(1 << power for power in range(1, (most - 1).bit_length())), most] if most > 1 else []


class CurvePoint(NamedTuple):
    """pass@k of two policies, with pointwise 95 % intervals."""

    k: int
    before: Interval
    after: Interval
    change: Interval


def estimate_per_task(solved: Solved, k: int) -> dict[str, float]:
    """Estimate pass@k of each task. Raises ValueError below `k` attempts.

    >>> estimate_per_task({"a": [True, False], "b": [False, False]}, 1)
    {'a': 0.5, 'b': 0.0}
    """
    if short := next((task for task, attempts in solved.items() if len(attempts) < k), None):
        raise ValueError(f"{short} has {len(solved[short])} attempts, which is too few for k = {k}")
    return {task: pass_at_k(len(attempts), sum(attempts), k) for task, attempts in solved.items()}


def compare_curves(
    before: Solved, after: Solved, clusters: Mapping[str, Hashable], ks: Sequence[int]
) -> list[CurvePoint]:
    """Compare pass@k of two policies at each of `ks`. Raises ValueError for different tasks."""
    if set(before) != set(after):
        raise ValueError("the curves are of different tasks")
    labels = [clusters[task] for task in before]
    points = []
    for k in ks:
        first, last = estimate_per_task(before, k), estimate_per_task(after, k)
        early, late = list(first.values()), [last[task] for task in first]
        points.append(
            CurvePoint(
                k,
                mean_interval(early, labels, share=True),
                mean_interval(late, labels, share=True),
                paired_difference(early, late, labels, share=True),
            )
        )
    return points


def is_resolved(episode: Episode) -> bool | None:
    """Whether the patch passed the task's checks, by every reward that ran them; None if none did.

    >>> from coderepairrl.types import Score
    >>> def scored(*scores: Score) -> Episode: return Episode("", "", "", 0, "", 0, Ending.DONE, scores=scores)
    >>> passed, empty = Score("tests", 1.0, passed=True), Score("tests", 0.0, note="empty patch")
    >>> is_resolved(scored(passed)), is_resolved(scored(empty))
    (True, False)
    >>> is_resolved(scored(Score("tests", 1.0))), is_resolved(scored(Score("hybrid", 0.3, passed=True)))
    (True, True)
    >>> is_resolved(scored(Score("patch_edits", 1.0))) is None
    True
    """
    verdicts = [
        score.value >= 1 if score.passed is None else score.passed
        for score in episode.scores
        if score.passed is not None or score.name == "tests"
    ]
    return all(verdicts) if verdicts else None


def summarise_outcomes(episodes: Iterable[Episode], exact: Collection[str] = ()) -> dict[str, Interval]:
    """Measure shares of all attempts, and (``NAME_per_patch``) of those with a patch, with 95 % clustered intervals.

    ``completed`` is a non-empty patch, ``exact`` one of the ids in `exact`. ``pass@k`` and ``pass^k`` have k of 2, 4,
    ... and the most attempts. Omits void attempts.
    """
    everything = list(episodes)
    cluster_of = cluster_episodes(everything)
    valid = [episode for episode in everything if episode.ending is not Ending.VOID]
    tested = [(episode, verdict) for episode in valid if (verdict := is_resolved(episode)) is not None]
    shares: dict[str, list[tuple[str, float]]] = {
        "resolved": [(each.task_id, float(verdict)) for each, verdict in tested],
        "completed": [(each.task_id, float(bool(each.patch.strip()))) for each in valid],
        "empty": [(each.task_id, float(not each.patch.strip())) for each in valid],
        "exact": [(each.task_id, float(each.id in exact)) for each in valid],
        "resolved_per_patch": [(each.task_id, float(verdict)) for each, verdict in tested if each.patch.strip()],
        "exact_per_patch": [(each.task_id, float(each.id in exact)) for each in valid if each.patch.strip()],
    }
    by_task: dict[str, list[bool]] = {}
    for each, verdict in tested:
        by_task.setdefault(each.task_id, []).append(verdict)
    for k in list_doublings(max(map(len, by_task.values()), default=0)):
        enough = {task: (len(row), sum(row)) for task, row in by_task.items() if len(row) >= k}
        shares[f"pass@{k}"] = [(task, pass_at_k(*counts, k)) for task, counts in enough.items()]
        shares[f"pass^{k}"] = [(task, pass_hat_k(*counts, k)) for task, counts in enough.items()]
    return {
        name: mean_interval([value for _, value in rows], [cluster_of[task] for task, _ in rows], share=True)
        for name, rows in shares.items()
        if rows
    }
