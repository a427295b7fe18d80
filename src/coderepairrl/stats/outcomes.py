"""Outcomes of attempts: whether one is resolved, pass@k and pass^k, for one policy or two.

Unbiased estimates from n attempts, for k drawn without replacement: pass@k, that at least one solves the task (Chen et
al. 2021, arXiv 2107.03374), and pass^k, that all do (Yao et al. 2024, arXiv 2406.12045). A policy that only became more
reliable leads at small k only (Yue et al. 2025, arXiv 2504.13837).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import comb
from typing import NamedTuple

from coderepairrl.stats.intervals import Interval, cluster_episodes, mean_interval, paired_difference
from coderepairrl.types import Ending, Episode

Solved = Mapping[str, Sequence[bool]]
"""Whether each attempt solved its task, by task."""


def pass_at_k(attempts: int, solved: int, k: int) -> float:
    """Probability that at least one of `k` attempts solves the task; `k` is at most `attempts`.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 1, 4)
    (0.25, 0.5, 1.0)
    """
    return 1 - comb(attempts - solved, k) / comb(attempts, k)


def pass_hat_k(attempts: int, solved: int, k: int) -> float:
    """Probability that all of `k` attempts solve the task; `k` is at most `attempts`.

    >>> pass_hat_k(4, 3, 1), pass_hat_k(4, 3, 2), pass_hat_k(4, 3, 4)
    (0.75, 0.5, 0.0)
    """
    return comb(solved, k) / comb(attempts, k)


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


def compare_curves(
    before: Solved, after: Solved, clusters: Mapping[str, Hashable], ks: Sequence[int]
) -> list[CurvePoint]:
    """Compare pass@k of two policies on the same tasks at each of `ks`, with at least k attempts at each task."""
    labels = [clusters[task] for task in before]
    points = []
    for k in ks:
        early, late = ([pass_at_k(len(side[task]), sum(side[task]), k) for task in before] for side in (before, after))
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
    """
    verdicts = [
        score.value >= 1 if score.passed is None else score.passed
        for score in episode.scores
        if score.passed is not None or score.name == "tests"
    ]
    return all(verdicts) if verdicts else None


def estimate_pass_rates(episodes: Iterable[Episode]) -> dict[str, Interval]:
    """Estimate ``pass@k`` and ``pass^k`` of tested tasks, for k = 2, 4, ... and the most attempts.

    Omits void attempts.
    """
    everything = list(episodes)
    cluster_of = cluster_episodes(everything)
    by_task: dict[str, list[bool]] = {}
    for each in everything:
        if each.ending is not Ending.VOID and (verdict := is_resolved(each)) is not None:
            by_task.setdefault(each.task_id, []).append(verdict)
    rates = {}
    for k in list_doublings(max(map(len, by_task.values()), default=0)):
        enough = {task: (len(row), sum(row)) for task, row in by_task.items() if len(row) >= k}
        clusters = [cluster_of[task] for task in enough]
        for name, estimate in ((f"pass@{k}", pass_at_k), (f"pass^{k}", pass_hat_k)):
            rates[name] = mean_interval([estimate(*counts, k) for counts in enough.values()], clusters, share=True)
    return rates
