"""How often the 95 % intervals contain the true value, in seeded simulations of clustered attempts.

Attempts of a cluster share a probability that is drawn from a beta distribution (a Dirichlet one, for pairs that get
worse, better, or stay) with intra-cluster correlation `icc`. 2,000 simulations estimate a coverage to half a per cent.
`python -m pytest tests/stats/test_coverage.py -s` prints the numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from coderepairrl.stats.intervals import mean_interval
from intervals import is_within

SIMULATIONS = 2_000


def measure_coverage(
    draw: Callable[[], NDArray[np.float64]], labels: NDArray[np.int64], truth: float, *, share: bool = True
) -> float:
    """Share of drawn samples whose interval holds `truth`."""
    clusters = labels.tolist()
    intervals = (mean_interval(draw().tolist(), clusters, share=share) for _ in range(SIMULATIONS))
    held = sum(is_within(truth, each) for each in intervals) / SIMULATIONS
    print(f"{len(set(clusters))} clusters, {len(clusters)} values, truth {truth}: {held:.3f}")
    return held


def draw_chances(rng: np.random.Generator, p: list[float], icc: float, clusters: int) -> NDArray[np.float64]:
    """Probabilities of each outcome, cluster by cluster."""
    if icc == 0:
        return np.tile(p, (clusters, 1))
    return rng.dirichlet(np.maximum(np.array(p) * (1 - icc) / icc, 1e-9), clusters)


@pytest.mark.parametrize(
    ("clusters", "size", "icc", "p", "least"),
    [
        (10, 1, 0.0, 0.1, 0.94),
        (10, 8, 0.3, 0.5, 0.93),
        (20, 4, 0.7, 0.98, 0.93),
        (30, 4, 0.7, 0.05, 0.89),  # the lowest coverage found
        (62, 4, 0.7, 0.1, 0.91),
    ],
)
def test_shares(clusters: int, size: int, icc: float, p: float, least: float) -> None:
    rng = np.random.default_rng(clusters + size)
    labels = np.repeat(np.arange(clusters), size)

    def draw() -> NDArray[np.float64]:
        chance = draw_chances(rng, [p, 1 - p], icc, clusters)[labels, 0]
        return (rng.random(len(labels)) < chance).astype(float)

    assert least <= measure_coverage(draw, labels, p) <= 0.99


@pytest.mark.parametrize("clusters", [5, 20, 62])
def test_similarities(clusters: int) -> None:
    """Shares that are not all or nothing: 40 % are 0, the rest anything, and a cluster has something in common."""
    rng = np.random.default_rng(clusters)
    labels = np.repeat(np.arange(clusters), 2)

    def draw() -> NDArray[np.float64]:
        level = rng.beta(2.0, 2.0, clusters)[labels]  # mean 1/2
        return np.where(rng.random(len(labels)) < 0.4, 0.0, rng.beta(4 * level, 4 * (1 - level)))

    assert 0.93 <= measure_coverage(draw, labels, 0.3) <= 0.98


def test_counts_are_no_shares() -> None:
    """Turns of an episode, whose clusters differ in their mean."""
    rng = np.random.default_rng(9)
    labels = np.repeat(np.arange(20), 4)
    draw = lambda: rng.poisson(rng.gamma(4.0, 2.0, 20)[labels]).astype(float)  # noqa: E731
    assert 0.92 <= measure_coverage(draw, labels, 8.0, share=False) <= 0.97
