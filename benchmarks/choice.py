"""How the formula of `patch_edits` was chosen: by cross-validation over issues, among forms that keep its promises.

``python benchmarks/rewards.py --choose`` calls `report`. A form is a nearness N (mean, harmonic mean, or the patch's
own) and a way to join D(A) and D(C), with brackets and quotes in C or without. In each of ten folds, issues left out
by a hash, the form is chosen on the others: of those by which edits on the right lines that repair nothing earn at
most .06 on average and half of the reference at least .35, in each language, the one with the highest sum of AUCs
overall and within an issue. What is left out is valued by the form that the others chose. Only the order within a fold
and issue is touched by that, so that its AUC within issues is an honest one.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from coderepairrl import stats
from coderepairrl.certify.data.ranking import Judged
from coderepairrl.certify.data.spoil import spoiled
from coderepairrl.rewards import edits
from coderepairrl.rewards.beside import beside
from coderepairrl.rewards.changes import Changes, changes, classes_of_code
from coderepairrl.rewards.parse import MalformedPatch, parse

FOLDS, MOST, LEAST = 10, 0.06, 0.35
HALF = "half of the reference"


class Parts(NamedTuple):
    """Of one file: how near the patch's edits are to the oracle's, and the other way; D(A); D(C) with all and core."""

    there: float
    back: float
    added: float
    changed: float
    core: float


Features = tuple[tuple[Parts, ...], int]
"""Of a pair: its shared files, and the number of files that the sum is divided by."""

NEAR: Mapping[str, Callable[[Parts], float]] = {
    "mean": lambda p: (p.there + p.back) / 2,
    "harmonic mean": lambda p: 2 * p.there * p.back / (p.there + p.back) if p.there + p.back else 0.0,
    "the patch's own": lambda p: p.there,
}
JOIN: Mapping[str, Callable[[float, float], float]] = {
    "product": lambda a, c: a * c,
    "root of the product": lambda a, c: math.sqrt(a * c),
    "mean of squares": lambda a, c: (a * a + c * c) / 2,
}
FORMS = [(near, join, core) for near in NEAR for join in JOIN for core in ("core", "all")]
"""The first is the formula of `patch_edits`."""
Form = tuple[str, str, str]


def features(reference: bytes, patch: bytes, language: str) -> Features:
    """What all forms are made of."""
    try:
        wanted, given = parse(reference), parse(patch)
    except MalformedPatch:
        return (), 1
    kept = classes_of_code(wanted, language)
    ours, theirs = (changes(files, kept, language, marked=True) for files in (given, wanted))
    if not ours or not theirs:
        return (), 1
    counted = ours.keys() - beside(given, {file.path for file in wanted})
    shared = sorted((ours.keys() & theirs.keys()) - edits._broken(given, wanted))
    return tuple(_parts(ours[path], theirs[path]) for path in shared), max(len(counted), len(theirs))


def _parts(ours: Changes, oracle: Changes) -> Parts:
    changed = edits._changed(ours), edits._changed(oracle)
    core = edits._core(changed[0]), edits._core(changed[1])
    added = edits.dice(edits._written(ours), edits._written(oracle))
    all_ = edits.dice(*changed)
    return Parts(
        edits._near(ours, oracle), edits._near(oracle, ours), added, all_, edits.dice(*core) if core[1] else all_
    )


def value(found: Features, form: Form) -> float:
    """The reward by `form`."""
    near, join, core = NEAR[form[0]], JOIN[form[1]], form[2]
    files, count = found
    return sum(near(p) * join(p.added, p.core if core == "core" else p.changed) for p in files) / count


class Cheap(NamedTuple):
    """An edit made from the reference of an issue."""

    language: str
    kind: str
    issue: str
    found: Features


def fold(issue: str) -> int:
    """Which of the folds leaves `issue` out."""
    return int(hashlib.sha256(issue.encode()).hexdigest(), 16) % FOLDS


def report(sets: Mapping[str, Sequence[Judged]]) -> None:
    """Print what every fold chooses, and how that ranks what it left out."""
    measured = {
        title: [features(row.reference, row.patch, row.language) for row in rows] for title, rows in sets.items()
    }
    cheap = [edit for rows in sets.values() for edit in _cheap({row.task: row for row in rows}.values())]
    chosen = [best(sets, measured, cheap, out) for out in range(FOLDS)]
    print("\n## The form of patch_edits, by cross-validation over issues\n")
    for form, folds in Counter(chosen).most_common():
        print(f"{folds} of {FOLDS} folds: N {form[0]}, {form[1]}, C {form[2]}")
    whole = best(sets, measured, cheap, None)
    print(f"all issues: N {whole[0]}, {whole[1]}, C {whole[2]}")
    for title, rows in sets.items():
        left_out = [value(found, chosen[fold(row.task)]) for row, found in zip(rows, measured[title], strict=True)]
        ranking = _ranking(rows, left_out)
        overall, within = ranking.draws()
        print(
            f"{title}, left out: overall {stats.interval(ranking.overall, overall)}, "
            f"within {stats.interval(ranking.within, within)}"
        )
    print("\n| form | keeps its promises | " + " | ".join(f"{title}: overall, within" for title in sets) + " |")
    print("|---|---|" + "---|" * len(sets))
    for form in FORMS:
        aucs = [_ranking(rows, [value(each, form) for each in measured[title]]) for title, rows in sets.items()]
        cells = " | ".join(f"{ranking.overall:.3f}, {ranking.within:.3f}" for ranking in aucs)
        print(f"| N {form[0]}, {form[1]}, C {form[2]} | {'yes' if _keeps(cheap, form) else 'no'} | {cells} |")


def best(
    sets: Mapping[str, Sequence[Judged]],
    measured: Mapping[str, Sequence[Features]],
    cheap: Iterable[Cheap],
    out: int | None,
) -> Form:
    """The form that ranks best, of those that keep their promises, without the issues of fold `out`."""
    seen = [edit for edit in cheap if fold(edit.issue) != out]
    forms = [form for form in FORMS if _keeps(seen, form)]
    scores = dict.fromkeys(forms, 0.0)
    for title, rows in sets.items():
        kept = [(row, found) for row, found in zip(rows, measured[title], strict=True) if fold(row.task) != out]
        for form in forms:
            ranking = _ranking([row for row, _ in kept], [value(found, form) for _, found in kept])
            scores[form] += ranking.overall + ranking.within
    return max(scores, key=scores.__getitem__)


def _ranking(rows: Sequence[Judged], values: Sequence[float]) -> stats.Ranking:
    return stats.Ranking(values, [row.resolved for row in rows], [row.task for row in rows])


def _cheap(references: Iterable[Judged]) -> Iterable[Cheap]:
    for row in references:
        for kind, patch in spoiled(row.reference).items():
            if kind.startswith("right lines") or kind == HALF:
                yield Cheap(row.language, kind, row.task, features(row.reference, patch, row.language))


def _keeps(cheap: Iterable[Cheap], form: Form) -> bool:
    values = defaultdict(list)
    for edit in cheap:
        values[edit.language, edit.kind].append(value(edit.found, form))
    return all(fmean(each) >= LEAST if kind == HALF else fmean(each) <= MOST for (_, kind), each in values.items())
