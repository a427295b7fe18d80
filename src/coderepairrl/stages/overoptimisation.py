"""Over-optimisation alarm: the reward rises while patches repair less.

Similarity rewards may pay for what tests do not. If tests are measured (`reward.tests=0`), both are compared every
`EVERY` steps over the newer half of all steps, at least `WINDOW`, on tested non-empty attempts. For a measure x at
steps t,

  T = sum over attempts of (t - mean t) (x - mean x)

is the numerator of the least-squares slope, 0 on average if the mean of x is constant; its one-sided p-value is from
the sign-flip test over groups. The alarm needs rising reward *and* falling tests, each with p below `RATE` / looks of
the run: at most about `RATE` false alarms a run (intersection-union test, Bonferroni).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from coderepairrl.rollout.groups import Group
from coderepairrl.stats import sign_flip_test
from coderepairrl.types import Ending

TESTS = "tests"
WINDOW = 20
"""Fewest steps of a look."""
EVERY = 5
"""Steps between looks."""
RATE = 0.05
"""Share of sound runs that raise an alarm."""


@dataclass(frozen=True, slots=True)
class OverOptimisation:
    """Fitted changes of reward and tests from step `first` to `last`."""

    first: int
    last: int
    reward: float
    passed: float
    p: float
    """Larger of both p-values."""

    def __str__(self) -> str:
        return (
            f"over-optimisation? From step {self.first} to {self.last} the reward of non-empty patches rose by "
            f"{self.reward:.3f} while their share that passes tests fell by {-self.passed:.3f} (p {self.p:.2g})"
        )

    def as_json(self) -> dict[str, Any]:
        """Convert to plain data."""
        return {**asdict(self), "text": str(self)}


def list_tested_groups(groups: Iterable[Group]) -> list[dict[str, list[float]]]:
    """Tested groups for a step's record: paid rewards without tests, and test results, of non-empty attempts."""
    tested_groups = []
    for group in groups:
        rewards, passed = [], []
        for episode in group.episodes:
            tests = [score.value for score in episode.scores if score.name == TESTS]
            if tests and episode.patch.strip() and episode.ending is not Ending.VOID:
                rewards.append(sum(s.value * s.weight for s in episode.scores if s.name != TESTS))
                passed.append(tests[0])
        if rewards:
            tested_groups.append({"rewards": rewards, "passed": passed})
    return tested_groups


def check_over_optimisation(steps: Sequence[Mapping[str, Any]], planned: int) -> OverOptimisation | None:
    """Alarm at the newest of `steps` of a run of `planned`, if due."""
    done = steps[-1]["step"] if steps else 0
    if done < WINDOW or done % EVERY:
        return None
    looks = (planned - WINDOW) // EVERY + 1
    window = {record["step"]: record.get("tested", ()) for record in steps[-max(WINDOW, done // 2) :]}
    level = RATE / max(looks, 1)
    fall = fit_trend(window, "passed")
    rise = fit_trend(window, "rewards") if fall.p_fall < level else None
    if rise is None or rise.p_rise >= level:
        return None
    return OverOptimisation(min(window), done, rise.change, fall.change, max(rise.p_rise, fall.p_fall))


@dataclass(frozen=True, slots=True)
class Trend:
    """Fitted change over the window, with one-sided p-values."""

    change: float
    p_rise: float
    p_fall: float


def fit_trend(window: Mapping[int, Sequence[Mapping[str, Sequence[float]]]], measure: str) -> Trend:
    """Trend of ``rewards`` or ``passed`` over the groups of `window`, by step."""
    rows = [
        (step, number, value)
        for step, groups in window.items()
        for number, group in enumerate(groups)
        for value in group[measure]
    ]
    if not rows:
        return Trend(0.0, 1.0, 1.0)
    middle = sum(step for step, _, _ in rows) / len(rows)
    mean = sum(value for _, _, value in rows) / len(rows)
    parts = [(step - middle) * (value - mean) for step, _, value in rows]
    total, spread = sum(parts), sum((step - middle) ** 2 for step, _, _ in rows)
    if not total:
        return Trend(0.0, 1.0, 1.0)
    p = sign_flip_test([0.0] * len(parts), parts, [(step, group) for step, group, _ in rows])
    change = total / spread * (max(window) - min(window))
    return Trend(change, p / 2 if total > 0 else 1.0, p / 2 if total < 0 else 1.0)
