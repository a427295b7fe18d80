"""Implementation of `crrl compare`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from coderepairrl.errors import UsageError
from coderepairrl.report import published
from coderepairrl.report.analysis import as_json
from coderepairrl.report.comparison import (
    Comparison,
    Question,
    Unpaired,
    compare,
    compare_counts,
    counted_only,
    notes,
    plan,
    settings_that_differ,
)
from coderepairrl.report.outcomes import RESOLVED, Counts, Outcomes, read_outcomes
from coderepairrl.report.verdict import Result, Table, result
from coderepairrl.stats.power import ALPHA, POWER


@dataclass(frozen=True, slots=True)
class Arguments:
    """Command-line arguments; margins and effects of shares in hundredths."""

    policies: Sequence[str]
    metric: str = RESOLVED
    common: bool = False
    other_conditions: bool = False
    cluster: str = "repository"
    margin: float | None = None
    pass_at: str = ""
    plan: float | None = None
    discordance: float | None = None
    power: float = POWER
    tasks: Path | None = None
    published: bool = False
    pairs: bool = False


def answer(given: Arguments) -> Result:
    """Run the command. Raises `UsageError` for inadmissible comparisons."""
    if not given.published:
        return _answer(given)
    listed, lines = _published(), list(published.table().values())
    measured = _answer(given) if given.policies or given.plan is not None else Result([], [], [], {})
    numbers = {**measured.numbers, "published": [as_json(asdict(each)) for each in lines]}
    return Result(
        measured.verdicts, [*measured.tables, listed], [*dict.fromkeys([*measured.notes, _OF_OTHERS])], numbers
    )


_OF_OTHERS = (
    "Published numbers were not run here, and compare neither with each other nor with ours: scaffolds, limits, "
    "sampling and dates differ. Intervals are Wilson's, as if of one attempt at each of independent tasks."
)


def _published() -> Table:
    heads = ("name", "system", "scaffold", "benchmark", "value", "what it is", "source")
    rows = [
        (
            f"{published.PREFIX}{each.name}",
            each.system,
            each.scaffold,
            f"{each.benchmark}, n = {each.tasks}",
            str(each.interval) if each.interval else f"similarity {each.similarity}, interval unknown",
            each.how,
            each.source,
        )
        for each in published.table().values()
    ]
    return Table(published.MARK, heads, rows)


def _answer(given: Arguments) -> Result:
    if not ALPHA < given.power < 1:
        raise UsageError(f"a power of {given.power:g} is none", fix="it is above 0.05 and below 1: --power 0.8")
    if given.plan is not None and not 0 < given.plan <= 100:
        raise UsageError(f"{given.plan:g} points cannot be planned for", fix="more than 0 and at most 100: --plan 3")
    if given.discordance is not None and given.plan is None:
        raise UsageError("--discordance is of a plan", fix="say how many points are to be shown: --plan 3")
    if given.cluster not in ("repository", "task"):
        raise UsageError(f"no clusters are called {given.cluster!r}", fix="--cluster repository, or --cluster task")
    if given.tasks is not None and given.metric != RESOLVED:
        raise UsageError(
            f"--tasks says which tasks are unresolved, and nothing of {given.metric!r}", fix="leave out --tasks"
        )
    comparisons: list[Comparison | Unpaired] = []
    settings, remarks = {}, list[str]()
    if len(given.policies) == 1 or (not given.policies and (given.plan is None or given.discordance is None)):
        raise UsageError(
            "a comparison takes two policies",
            fix="crrl compare A B; without any a plan takes a discordance: crrl compare --plan 3 --discordance 0.13",
        )
    if given.policies:
        read = [read_outcomes(source, given.metric, given.tasks) for source in given.policies]
        outcomes = [each for each in read if isinstance(each, Outcomes)]
        if len(outcomes) == len(read):
            compared = compare(outcomes, _question(given, outcomes))
            comparisons += compared
            settings, remarks = settings_that_differ(outcomes), notes(outcomes, compared)
        else:
            comparisons += _counts(given, read)
            remarks += [_OF_OTHERS] if any(each.startswith(published.PREFIX) for each in given.policies) else []
    planned = None
    if given.plan is not None:
        first = comparisons[0] if comparisons else None
        if given.discordance is None and not isinstance(first, Comparison):
            raise UsageError("counts do not say how often policies differ", fix="assume it: --discordance 0.13")
        by = first if isinstance(first, Comparison) and given.discordance is None else float(given.discordance or 0)
        planned = plan(given.plan / 100, by, given.power)
    return result(comparisons, planned, settings, remarks)


def _question(given: Arguments, outcomes: Sequence[Outcomes]) -> Question:
    margin = given.margin
    if margin is not None:
        if margin <= 0:
            raise UsageError(f"a margin of {margin:g} is none", fix="two policies within 3 points: --margin 3")
        margin /= (
            100 if all(0 <= v <= 1 for each in outcomes for attempts in each.values.values() for v in attempts) else 1
        )
    try:
        ks = [int(k) for k in given.pass_at.split(",") if k.strip()]
    except ValueError:
        raise UsageError(f"--pass-at {given.pass_at} is no list of numbers", fix="--pass-at 1,2,4,8") from None
    return Question(given.common, given.other_conditions, given.cluster == "task", margin, ks, given.power, given.pairs)


def _counts(given: Arguments, read: Sequence[Outcomes | Counts]) -> list[Unpaired]:
    if given.metric != RESOLVED or given.margin is not None or given.pass_at or given.pairs:
        raise UsageError(
            "a count says how many tasks are resolved, and nothing else",
            fix="leave out --metric, --margin, --pass-at and --all-pairs, or name what says which tasks are",
        )
    first, *further = (each if isinstance(each, Counts) else counted_only(each) for each in read)
    return [compare_counts(first, other, given.power) for other in further]
