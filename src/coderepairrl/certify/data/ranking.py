"""``crrl data rank``: does a reward rank patches that pass their tests above those that do not, and what do cheap
edits earn?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coderepairrl import rewards, stats
from coderepairrl.certify.data.spoil import spoiled
from coderepairrl.errors import UsageError
from coderepairrl.printable import counted
from coderepairrl.report import plots
from coderepairrl.rewards.parse import MalformedPatch
from coderepairrl.runs import foreign

BASELINE = "patch_similarity"
_KEYS = {"task": str, "reference": str, "patch": str, "resolved": bool}


class Judged(NamedTuple):
    """A patch whose test outcome is known, with the reference of its task."""

    task: str
    reference: bytes
    patch: bytes
    resolved: bool
    language: str = ""


Compare = Callable[[Judged], float]


class RankedReward(NamedTuple):
    """What is found of one reward. `overall` and `within` are AUCs, `gain_*` their differences from the baseline."""

    reward: str
    overall: stats.Interval
    within: stats.Interval
    gain_overall: stats.Interval
    gain_within: stats.Interval
    correlation: float
    cheap: dict[str, float]
    """Mean value by class of spoiled patch (`spoil.spoiled`)."""

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        plain = self._asdict()
        return {key: part._asdict() if isinstance(part, stats.Interval) else part for key, part in plain.items()}


def read(path: Path) -> list[Judged]:
    """Rows of a JSON-lines file: ``task``, ``reference``, ``patch`` (texts), ``resolved``, and maybe ``language``.

    Raises `UsageError` naming the line that is not one.
    """
    found = []
    try:
        text = foreign.text(path)
    except ValueError as error:
        raise UsageError(f"{path}: {error}", fix="name a JSON-lines file of patches with outcomes") from error
    for number, row in foreign.objects(path, text, "write one object a line"):
        if wrong := [key for key, kind in _KEYS.items() if not isinstance(row.get(key), kind)]:
            raise UsageError(
                f"{path}, line {number}: {wrong[0]} is missing or no {_KEYS[wrong[0]].__name__}",
                fix="each row has the texts task, reference and patch, and resolved (true or false)",
            )
        reference, patch = (row[key].encode("utf-8", "surrogatepass") for key in ("reference", "patch"))
        found.append(Judged(row["task"], reference, patch, row["resolved"], str(row.get("language", ""))))
    if len({row.resolved for row in found}) < 2:
        raise UsageError(f"{path}: all patches have one outcome", fix="give resolved and unresolved ones")
    return found


def rank(rows: Sequence[Judged], names: Sequence[str], *, seed: int = 0) -> list[RankedReward]:
    """How each reward of `names` ranks `rows`. Raises `UsageError` for one that does not compare two diffs."""
    outcomes, clusters = [row.resolved for row in rows], [row.task for row in rows]
    base = stats.Ranking([*map(_compare(BASELINE), rows)], outcomes, clusters)
    base_draws = base.draws(seed)
    references = {row.task: row for row in rows}.values()
    found = []
    for name in names:
        compare = _compare(name)
        values = [*map(compare, rows)]
        ranking = stats.Ranking(values, outcomes, clusters)
        overall, within = ranking.draws(seed)
        found.append(
            RankedReward(
                name,
                stats.interval(ranking.overall, overall),
                stats.interval(ranking.within, within),
                stats.interval(ranking.overall - base.overall, overall - base_draws[0]),
                stats.interval(ranking.within - base.within, within - base_draws[1]),
                stats.rank_correlation(values, outcomes),
                _cheap(compare, list(references), seed),
            )
        )
    return found


def _compare(name: str) -> Compare:
    """What reward `name` gives to a patch. As in training, an empty patch and one that is no diff earn 0."""
    reward = rewards.only(name)

    def value(row: Judged) -> float:
        try:
            found = reward.compare(row.reference, row.patch, row.language) if row.patch.strip() else 0.0
        except MalformedPatch:
            return 0.0
        if found is None:
            raise UsageError(f"reward {name} does not compare two diffs", fix="ask of patch_edits, patch_lines, ...")
        return found

    return value


def _cheap(compare: Compare, references: Sequence[Judged], seed: int) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for row in references:
        values.setdefault("reference", []).append(compare(row._replace(patch=row.reference)))
        for name, patch in spoiled(row.reference, seed).items():
            values.setdefault(name, []).append(compare(row._replace(patch=patch)))
    return {name: float(np.mean(each)) for name, each in values.items()}


def figure(ranked: Sequence[RankedReward]) -> str:
    """An SVG of the trade-off: how each reward ranks, against the most that a kind of junk earns on average."""
    panels = []
    overall, within = [each.overall for each in ranked], [each.within for each in ranked]
    for title, aucs in (("AUC overall", overall), ("AUC within a task", within)):
        series = []
        for colour, (found, auc) in enumerate(zip(ranked, aucs, strict=True)):
            dearest = 100 * max(value for name, value in found.cheap.items() if name.startswith("junk"))
            series.append(plots.Series(found.reward, [dearest], [auc.value], colour, low=[auc.low], high=[auc.high]))
        panels.append(plots.Panel(title, series, x_label="junk in place earns, %", include=(0.4, 1.0)))
    return plots.figure(panels, columns=2, standalone=True)


def report(rows: Sequence[Judged], ranked: Sequence[RankedReward]) -> str:
    """Two Markdown tables: how rewards rank, and what cheap edits earn."""
    tasks = {row.task for row in rows}
    mixed = sum(len({row.resolved for row in rows if row.task == task}) == 2 for task in tasks)
    lines = [
        f"{len(rows)} patches, {sum(row.resolved for row in rows)} resolved, "
        f"{counted(len(tasks), 'task')}, {mixed} with both",
        "",
        f"| reward | AUC overall | within a task | gain over `{BASELINE}`, overall | within | rank correlation |",
        "|---|---|---|---|---|---|",
    ]
    for found in ranked:
        gains = ("", "") if found.reward == BASELINE else (found.gain_overall, found.gain_within)
        parts = (found.overall, found.within, *gains, f"{found.correlation:.3f}")
        lines.append(f"| `{found.reward}` | {' | '.join(map(str, parts))} |")
    lines += ["", f"| patch | {' | '.join(f'`{found.reward}`' for found in ranked)} |"]
    lines.append("|---|" + "---|" * len(ranked))
    for name in ranked[0].cheap:
        lines.append(f"| {name} | {' | '.join(f'{found.cheap[name]:.3f}' for found in ranked)} |")
    return "\n".join(lines)
