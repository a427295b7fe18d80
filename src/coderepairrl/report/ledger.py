"""Wall seconds by activity, per step and run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from coderepairrl.report.reading import Row, RunData

ROLLOUT = ("generation", "tools", "sandbox", "reward", "waiting")
ACTIVITIES = (*ROLLOUT, "learning", "evaluation", "other")
_OF_EPISODE = {"generation": ("generate",), "tools": ("tools",), "sandbox": ("sandbox", "diff"), "reward": ("reward",)}


def step_ledger(metrics: Mapping[str, float], rows: Sequence[Row]) -> dict[str, float]:
    """Wall seconds of a step by activity.

    Since episodes overlap, the rollout's wall time is divided in proportion to their seconds; ``waiting`` is the rest.
    """
    rollout = metrics.get("rollout_seconds") or 0.0
    spent = {name: sum(row.timings.get(key, 0.0) for row in rows for key in keys) for name, keys in _OF_EPISODE.items()}
    total = max(sum(row.timings.get("total", 0.0) for row in rows), sum(spent.values()))
    spent["waiting"] = total - sum(spent.values())
    shares = {name: spent[name] / total if total else float(name == "waiting") for name in ROLLOUT}
    return {name: rollout * share for name, share in shares.items()} | {"learning": metrics.get("learn_seconds") or 0.0}


def run_ledger(data: RunData, steps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Wall seconds of the run by activity.

    ``other`` includes starting, stopping, checkpoints, exports and interrupted work.
    """
    ledger = dict.fromkeys(ACTIVITIES, 0.0)
    for step in steps:
        for name, seconds in step.items():
            ledger[name] += seconds
    ledger["evaluation"] = sum(data.evaluation_seconds.values())
    wall = sum(end - start for start, end in data.sessions)
    ledger["other"] = max(0.0, wall - sum(ledger.values()))
    return ledger


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds covered by at least one span.

    >>> covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    seconds, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        seconds += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return seconds
