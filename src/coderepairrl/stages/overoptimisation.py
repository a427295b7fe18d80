"""The over-optimisation alarm: is the paid reward rising while patches repair less?

A policy may find what a similarity reward pays for and tests do not (docs/guides/rewards.md). So where tests are
measured (`reward.tests=0`, or `reward.sampled_tests=0` for a quarter of the groups) the two are compared along the run.

At every `EVERY`-th step the newer half of all steps, but at least `WINDOW`, is looked at, and in it the tested attempts
that are not empty (a rising mean may come from fewer empty patches alone). For a measure x, reward or tests passed, of
attempts with steps t,

    T = sum over attempts of (t - mean t) (x - mean x)

is the numerator of the least-squares slope; it is 0 on average where the mean of x does not change, however many
attempts each step has. Its one-sided p-value is that of the sign-flip test over groups of attempts. There is an alarm
where the reward rises *and* tests passed fall, each with p below `RATE` / looks that the run has: if either does not
happen, the chance that a run raises a false alarm is at most about `RATE` (an intersection-union test and Bonferroni).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from coderepairrl.rollout import Group
from coderepairrl.stats import sign_flip_test
from coderepairrl.types import Ending

TESTS = "tests"
WINDOW = 20
"""Steps that are looked at, at least."""
EVERY = 5
"""Steps between looks."""
RATE = 0.05
"""Of runs without over-optimisation, those that raise an alarm."""


@dataclass(frozen=True, slots=True)
class Tested:
    """A group of attempts that was tested: those with a patch, the paid reward of each besides tests, its tests."""

    rewards: tuple[float, ...]
    passed: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Alarm:
    """Reward rose and tests passed fell from step `first` to step `last`: changes over these, as fitted."""

    first: int
    last: int
    reward: float
    passed: float
    p: float
    """The larger of both p-values, before it is compared with `RATE` / looks."""

    def __str__(self) -> str:
        return (
            f"over-optimisation? From step {self.first} to {self.last} the reward of non-empty patches rose by "
            f"{self.reward:.3f} while their share that passes tests fell by {-self.passed:.3f} (p {self.p:.2g})"
        )

    def as_json(self) -> dict[str, Any]:
        """As plain data, for the step's record."""
        return {**asdict(self), "text": str(self)}


def tested(groups: Iterable[Group]) -> list[dict[str, list[float]]]:
    """What a step's record keeps of the groups that were tested."""
    kept = []
    for group in groups:
        rewards, passed = [], []
        for episode in group.episodes:
            tests = [score.value for score in episode.scores if score.name == TESTS]
            if tests and episode.patch.strip() and episode.ending is not Ending.VOID:
                rewards.append(sum(s.value * s.weight for s in episode.scores if s.name != TESTS))
                passed.append(tests[0])
        if rewards:
            kept.append({"rewards": rewards, "passed": passed})
    return kept


def alarm(steps: Sequence[Mapping[str, Any]], planned: int) -> Alarm | None:
    """What the newest of `steps` (records of a run of `planned`) gives reason for, if it is a step of a look."""
    done = steps[-1]["step"] if steps else 0
    if done < WINDOW or done % EVERY:
        return None
    looks = (planned - WINDOW) // EVERY + 1
    window = {
        record["step"]: [Tested(tuple(group["rewards"]), tuple(group["passed"])) for group in record.get("tested", ())]
        for record in steps[-max(WINDOW, done // 2) :]
    }
    level = RATE / max(looks, 1)
    fall = trend(window, "passed")
    rise = trend(window, "rewards") if fall.p_fall < level else None
    if rise is None or rise.p_rise >= level:
        return None
    return Alarm(min(window), done, rise.change, fall.change, max(rise.p_rise, fall.p_fall))


@dataclass(frozen=True, slots=True)
class Trend:
    """Of one measure: its fitted change over the window, and the one-sided p-values."""

    change: float
    p_rise: float
    p_fall: float


def trend(window: Mapping[int, Sequence[Tested]], measure: str) -> Trend:
    """The trend of ``rewards`` or ``passed`` over the steps of `window`."""
    rows = [
        (step, group, value)
        for step, groups in window.items()
        for group, one in enumerate(groups)
        for value in getattr(one, measure)
    ]
    if not rows:
        return Trend(0.0, 1.0, 1.0)
    middle = sum(step for step, _, _ in rows) / len(rows)
    mean = sum(value for _, _, value in rows) / len(rows)
    parts = [(step - middle) * (value - mean) for step, _, value in rows]
    total, spread = sum(parts), sum((step - middle) ** 2 for step, _, _ in rows)
    if not total:
        return Trend(0.0, 1.0, 1.0)
    both = sign_flip_test([0.0] * len(parts), parts, [(step, group) for step, group, _ in rows])
    change = total / spread * (max(window) - min(window))
    return Trend(change, both / 2 if total > 0 else 1.0, both / 2 if total < 0 else 1.0)
