"""pass@k and pass^k of several attempts at a task, for one policy or two.

Unbiased for k independent attempts, drawn without replacement from n: pass@k that at least one solves the task (Chen et
al. 2021, "Evaluating Large Language Models Trained on Code"), pass^k that all do (Yao et al. 2024, "tau-bench"). A
policy that merely became surer is ahead only for few attempts (Yue et al. 2025, "Does Reinforcement Learning Really
Incentivize Reasoning Capacity in LLMs Beyond the Base Model?").
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from math import comb
from typing import NamedTuple

from coderepairrl.stats.intervals import Interval, mean_interval, paired_difference

Solved = Mapping[str, Sequence[bool]]


def pass_at_k(attempts: int, solved: int, k: int) -> float:
    """Probability that at least one of `k` attempts solves the task. Raises ValueError for impossible numbers.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 1, 4)
    (0.25, 0.5, 1.0)
    """
    _check(attempts, solved, k)
    return 1 - comb(attempts - solved, k) / comb(attempts, k)


def pass_hat_k(attempts: int, solved: int, k: int) -> float:
    """Probability that all of `k` attempts solve the task. Raises as `pass_at_k`.

    >>> pass_hat_k(4, 3, 1), pass_hat_k(4, 3, 2), pass_hat_k(4, 3, 4)
    (0.75, 0.5, 0.0)
    """
    _check(attempts, solved, k)
    return comb(solved, k) / comb(attempts, k)


def _check(attempts: int, solved: int, k: int) -> None:
    if not 1 <= k <= attempts:
        raise ValueError(f"k is from 1 to the number of attempts: it is {k}, and there are {attempts}")
    if not 0 <= solved <= attempts:
        raise ValueError(f"{solved} of {attempts} attempts cannot have solved it")


def doubling(most: int) -> Sequence[int]:
    """2, 4, 8, ... and `most` itself.

    >>> doubling(1), doubling(2), doubling(6)
    ([], [2], [2, 4, 6])
    """
    doubled = [1 << power for power in range(1, most.bit_length()) if 1 << power < most]
    return [*doubled, most] if most > 1 else []


class CurvePoint(NamedTuple):
    """pass@k (or pass^k) of two policies, with pointwise 95 % intervals."""

    k: int
    before: Interval
    after: Interval
    change: Interval


def per_task(solved: Solved, k: int, estimate: Callable[[int, int, int], float] = pass_at_k) -> dict[str, float]:
    """Apply `estimate` to each task. Raises ValueError below `k` attempts.

    >>> per_task({"a": [True, False], "b": [False, False]}, 1)
    {'a': 0.5, 'b': 0.0}
    """
    if short := next((task for task, attempts in solved.items() if len(attempts) < k), None):
        raise ValueError(f"{short} has {len(solved[short])} attempts, which is too few for k = {k}")
    return {task: estimate(len(attempts), sum(attempts), k) for task, attempts in solved.items()}


def curve(
    solved: Solved,
    clusters: Mapping[str, Hashable],
    ks: Sequence[int],
    estimate: Callable[[int, int, int], float] = pass_at_k,
) -> dict[int, Interval]:
    """Mean over tasks for each of `ks`, with clustered intervals.

    >>> found = curve({"a": [True, False], "b": [False, False], "c": [True, True]}, {"a": 1, "b": 2, "c": 3}, (1, 2))
    >>> print(found[1], found[2])
    0.500 [0.036, 0.964] 0.667 [0.044, 0.989]
    """
    intervals = {}
    for k in ks:
        values = per_task(solved, k, estimate)
        intervals[k] = mean_interval(list(values.values()), [clusters[task] for task in values], share=True)
    return intervals


def curves(
    before: Solved,
    after: Solved,
    clusters: Mapping[str, Hashable],
    ks: Sequence[int],
    estimate: Callable[[int, int, int], float] = pass_at_k,
) -> list[CurvePoint]:
    """Compare two policies at each of `ks`. Raises ValueError for different tasks."""
    if set(before) != set(after):
        raise ValueError("the curves are of different tasks")
    labels = [clusters[task] for task in before]
    points = []
    for k in ks:
        first, last = per_task(before, k, estimate), per_task(after, k, estimate)
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
