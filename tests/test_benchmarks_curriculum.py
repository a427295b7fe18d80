"""What a curriculum took until it was where another one ended."""

from __future__ import annotations

import math

import pytest

from benchmarks.curriculum import Point, cost


def test_the_cost_of_a_reward_lies_between_evaluations() -> None:
    curve = [
        Point(4 * at, 100 * at, 1000 * at, {"a": mean, "b": mean}) for at, mean in enumerate((0.2, 0.3, 0.25, 0.7))
    ]
    assert cost(curve, 0.1) == (0, 0), "it was there from the first"
    assert cost(curve, 0.25) == pytest.approx((50, 500))
    assert cost(curve, 0.3) == pytest.approx((100, 1000)), "where it is first"
    assert cost(curve, 0.475) == pytest.approx((250, 2500))
    assert cost(curve, 0.71) == (math.inf, math.inf)
