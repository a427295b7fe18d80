"""Outcomes of an evaluation: resolved, completed, exact, pass@k."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from coderepairrl.stats.attempts import doubling, pass_at_k, pass_hat_k
from coderepairrl.stats.clusters import clusters_of
from coderepairrl.stats.intervals import Interval, mean_interval
from coderepairrl.types import Ending, Episode


def resolved(episode: Episode) -> bool | None:
    """Whether the patch passed the task's checks, by every reward that ran them; None if none did.

    >>> from coderepairrl.types import Score
    >>> def scored(*scores: Score) -> Episode: return Episode("", "", "", 0, "", 0, Ending.DONE, scores=scores)
    >>> resolved(scored(Score("tests", 1.0, passed=True))), resolved(scored(Score("tests", 0.0, note="empty patch")))
    (True, False)
    >>> resolved(scored(Score("tests", 1.0))), resolved(scored(Score("hybrid", 0.3, passed=True)))
    (True, True)
    >>> resolved(scored(Score("patch_edits", 1.0))) is None
    True
    """
    verdicts = [
        score.value >= 1 if score.passed is None else score.passed
        for score in episode.scores
        if score.passed is not None or score.name == "tests"
    ]
    return all(verdicts) if verdicts else None


def outcomes(episodes: Iterable[Episode], exact: Collection[str] = ()) -> dict[str, Interval]:
    """Shares of all attempts, and (``NAME_per_patch``) of those with a patch, with 95 % clustered intervals.

    ``completed`` is a non-empty patch, ``exact`` one of the ids in `exact`. ``pass@k`` and ``pass^k`` have k of 2, 4,
    ... and the most attempts. Omits void attempts.
    """
    everything = list(episodes)
    cluster_of = clusters_of(everything)
    valid = [episode for episode in everything if episode.ending is not Ending.VOID]
    tested = [(episode, verdict) for episode in valid if (verdict := resolved(episode)) is not None]
    filled = [episode for episode in valid if episode.patch.strip()]
    shares: dict[str, list[tuple[str, float]]] = {
        "resolved": [(each.task_id, float(verdict)) for each, verdict in tested],
        "completed": [(each.task_id, float(bool(each.patch.strip()))) for each in valid],
        "empty": [(each.task_id, float(not each.patch.strip())) for each in valid],
        "exact": [(each.task_id, float(each.id in exact)) for each in valid],
        "resolved_per_patch": [(each.task_id, float(verdict)) for each, verdict in tested if each.patch.strip()],
        "exact_per_patch": [(each.task_id, float(each.id in exact)) for each in filled],
    }
    by_task: dict[str, list[bool]] = {}
    for each, verdict in tested:
        by_task.setdefault(each.task_id, []).append(verdict)
    for k in doubling(max(map(len, by_task.values()), default=0)):
        enough = {task: (len(row), sum(row)) for task, row in by_task.items() if len(row) >= k}
        shares[f"pass@{k}"] = [(task, pass_at_k(*counts, k)) for task, counts in enough.items()]
        shares[f"pass^{k}"] = [(task, pass_hat_k(*counts, k)) for task, counts in enough.items()]
    return {
        name: mean_interval([value for _, value in rows], [cluster_of[task] for task, _ in rows], share=True)
        for name, rows in shares.items()
        if rows
    }
