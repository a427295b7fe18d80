"""Comparisons of policies on the same tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from coderepairrl.errors import UsageError
from coderepairrl.printable import format_count, join_first
from coderepairrl.report.foreign import RESOLVED
from coderepairrl.report.metrics import COUNTS
from coderepairrl.report.outcomes import Outcomes, PublishedCount
from coderepairrl.stats import classification
from coderepairrl.stats.intervals import (
    Interval,
    cluster_tasks,
    estimate_mean,
    sign_flip_test,
    tango_interval,
    wilson_interval,
)
from coderepairrl.stats.measures import Pairs, compare_tasks, is_share_measure, measure_episode
from coderepairrl.stats.outcomes import CurvePoint, compare_curves, is_resolved, list_doublings
from coderepairrl.stats.paired import (
    McNemar,
    adjust_holm,
    bootstrap_difference,
    cohens_d,
    mcnemar_p,
    mcnemar_test,
)
from coderepairrl.stats.power import (
    ALPHA,
    POWER,
    Spread,
    smallest_detectable,
    smallest_detectable_interval,
    spread_of_shares,
)
from coderepairrl.types import Ending, Episode

_ATTEMPT_SECTIONS = frozenset(
    {"policy", "model", "agent", "kinds", "sandbox", "engine", "gateway", "rollout", "eval", "reward", "tasks"}
)
"""Configuration sections that an evaluation depends on."""
_SHOWN_NAMES = 4  # in a message
_FEWEST_CLUSTERS = 6  # fewest clusters for a two-sided p of at most 0.05: sign flips of 5 have a least p of 2 / 2^5


@dataclass(frozen=True, slots=True)
class ComparisonOptions:
    """Options of a comparison."""

    metric: str = RESOLVED
    common: bool = False
    """Compare the common, identical tasks, and leave out the others."""
    other_conditions: bool = False
    """Compare despite different limits or environments."""
    cluster: str = "repository"
    """Resampled unit; with ``task``, intervals hold only for further tasks of these repositories."""
    at_least: float | None = None
    """Gain to be shown; points, for a share."""
    pass_at: str = ""
    """Values of k; empty: 1, 2, 4, ... up to the number of attempts, if several."""
    power: float = POWER
    pairs: bool = False
    """Compare all pairs instead of all with the first."""
    tasks: Path | None = None
    """File of the ids of all tasks."""
    published: bool = False
    """List the published numbers."""


class PartComparison(NamedTuple):
    """Comparison on part of the tasks."""

    name: str
    tasks: int
    early: Interval
    late: Interval
    change: Interval
    p: float
    """Sign flips, corrected for all parts (Holm)."""


class LabelComparison(NamedTuple):
    """Labels given to one kind of tasks."""

    kind: str
    tasks: int
    early: Interval
    """Macro-F1."""
    late: Interval
    change: Interval
    accuracy: Interval


@dataclass(frozen=True, slots=True)
class Comparison:
    """`after` against `before`, on one metric and the same tasks."""

    metric: str
    share: bool  # whether the metric is a share
    before: str
    after: str
    tasks: int
    clusters: int
    unit: str
    attempts: tuple[int, int]
    """Fewest attempts per task, of each."""
    early: Interval
    late: Interval
    change: Interval
    bootstrap: Interval
    d: Interval | None
    """Cohen's d."""
    p: float
    """Sign flips of clusters."""
    adjusted: float
    """`p`, corrected for all `comparisons` (Holm)."""
    comparisons: int
    mcnemar: McNemar | None
    p_tasks: float
    """P-value of sign flips by task, corrected like `adjusted`: it generalises to no other tasks."""
    smallest_shown: Interval | None
    """Smallest difference detectable with `power`."""
    power: float
    spread: Spread | None
    """Discordance, for a share."""
    at_least: float | None = None
    """Gain to be shown; a fraction, for a share."""
    pass_at: Sequence[CurvePoint] = ()
    parts: Sequence[PartComparison] = ()
    labels: Sequence[LabelComparison] = ()

    @property
    def claimed(self) -> bool:
        """Whether interval and test both show a difference."""
        return self.excludes_zero and self.adjusted <= ALPHA

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval excludes 0."""
        return self.change.is_all_above(0) or self.change.is_all_below(0)


@dataclass(frozen=True, slots=True)
class UnpairedComparison:
    """Two published counts on the same tasks, over all possible overlaps of their solved tasks."""

    before: PublishedCount
    after: PublishedCount
    early: Interval
    late: Interval
    change: Interval
    """Interval from the lowest to the highest end over all overlaps."""
    p: tuple[float, float]
    """Exact McNemar, least and greatest."""
    smallest_shown: tuple[float, float] | None
    """Smallest detectable differences for the fewest and most discordant tasks, if both exist."""
    power: float

    @property
    def claimed(self) -> bool:
        """Whether the difference holds for every overlap."""
        return self.p[1] <= ALPHA and (self.change.is_all_above(0) or self.change.is_all_below(0))


def compare_outcomes(policies: Sequence[Outcomes], options: ComparisonOptions) -> list[Comparison]:
    """Compare all policies with the first, or all pairs. Raises `UsageError`."""
    names = [each.name for each in policies]
    policies = [
        replace(each, name=f"{each.name} ({number})") if names.count(each.name) > 1 else each
        for number, each in enumerate(policies, 1)
    ]
    policies = restrict_to_common(policies, options)
    pairs = combinations(policies, 2) if options.pairs else ((policies[0], other) for other in policies[1:])
    values = (value for each in policies for attempts in each.values.values() for value in attempts)
    share = is_share_measure(options.metric, values, COUNTS)  # one unit for all pairs
    comparisons = [_compare_pair(*pair, options, share) for pair in pairs]
    adjusted = adjust_holm([each.p for each in comparisons])
    adjusted_tasks = adjust_holm([each.p_tasks for each in comparisons])
    return [
        replace(each, adjusted=p, p_tasks=p_tasks, comparisons=len(comparisons))
        for each, p, p_tasks in zip(comparisons, adjusted, adjusted_tasks, strict=True)
    ]


def _compare_pair(first: Outcomes, other: Outcomes, options: ComparisonOptions, share: bool) -> Comparison:
    tasks = sorted(first.values)
    sides = [[side.values[task] for task in tasks] for side in (first, other)]
    repositories = {task: first.repositories.get(task) or other.repositories.get(task, "") for task in tasks}
    cluster_of = _cluster_policy_tasks(tasks, repositories, options)
    pairs = _pair_outcomes(first, other, cluster_of, share)
    before, after, clusters = [*pairs.before.values()], [*pairs.after.values()], [*cluster_of.values()]
    several = max(len(values) for side in sides for values in side) > 1
    binary = all(value in (0, 1) for side in sides for values in side for value in values)
    cluster_count = len(set(clusters))
    spread: Spread | None = None
    smallest: Interval | None = None
    if share:
        spread = spread_of_shares(before, after, clusters)
        smallest = _find_smallest_difference(spread, len(tasks), cluster_count, options.power)
    else:
        variance = estimate_mean([late - early for early, late in zip(before, after, strict=True)], clusters).variance
        if cluster_count > 1 and variance > 0:
            smallest = smallest_detectable_interval(variance, cluster_count - 1, power=options.power)
    return Comparison(
        metric=first.metric,
        share=share,
        before=first.name,
        after=other.name,
        tasks=len(tasks),
        clusters=cluster_count,
        unit="tasks" if clusters == tasks else "repositories",
        attempts=tuple(min(map(len, side)) for side in sides),  # type: ignore[arg-type]
        early=pairs.early,
        late=pairs.late,
        change=pairs.change,
        bootstrap=bootstrap_difference(before, after, clusters),
        d=cohens_d(before, after, clusters),
        p=pairs.p,
        adjusted=pairs.p,
        comparisons=1,
        mcnemar=mcnemar_test([v == 1 for v in before], [v == 1 for v in after]) if binary and not several else None,
        p_tasks=sign_flip_test(before, after, tasks),
        smallest_shown=smallest,
        power=options.power,
        spread=spread,
        at_least=None if options.at_least is None else options.at_least / (100 if share else 1),
        pass_at=_compare_pass_curves(first, other, cluster_of, options.pass_at, binary),
        parts=_compare_parts(first, other, repositories, options, share),
        labels=_compare_labels(first, other, options),
    )


def _pair_outcomes(first: Outcomes, other: Outcomes, cluster_of: Mapping[str, str], share: bool) -> Pairs:
    before, after = ({task: fmean(side.values[task]) for task in cluster_of} for side in (first, other))
    return compare_tasks(first.metric, before, after, cluster_of, share=share, counts=COUNTS)


def _cluster_policy_tasks(
    tasks: Sequence[str], repositories: Mapping[str, str], options: ComparisonOptions
) -> dict[str, str]:
    if options.cluster == "task":
        return {task: task for task in tasks}
    return cluster_tasks({task: repositories[task] for task in tasks})


def _compare_labels(first: Outcomes, other: Outcomes, options: ComparisonOptions) -> list[LabelComparison]:
    labels = []
    for kind in first.answers:
        sides = [side.answers.get(kind, ()) for side in (first, other)]
        tasks = first.values.keys() & {each.task for each in sides[0]} & {each.task for each in sides[1]}
        if not tasks:
            continue
        before, after = (
            [
                each._replace(cluster=each.task) if options.cluster == "task" else each
                for each in side
                if each.task in tasks
            ]
            for side in sides
        )
        change = classification.compare_answers(before, after)
        early, late = (classification.classify(side).macro_f1 for side in (before, after))
        labels.append(LabelComparison(kind, len(tasks), early, late, change.macro_f1, change.accuracy))
    return labels


def _compare_parts(
    first: Outcomes, other: Outcomes, repositories: Mapping[str, str], options: ComparisonOptions, share: bool
) -> list[PartComparison]:
    parts = []
    for name, ids in {**other.parts, **first.parts}.items():
        tasks = sorted(ids & first.values.keys())
        if not 0 < len(tasks) < len(first.values):
            continue
        pairs = _pair_outcomes(first, other, _cluster_policy_tasks(tasks, repositories, options), share)
        parts.append(PartComparison(name, pairs.tasks, pairs.early, pairs.late, pairs.change, pairs.p))
    return [part._replace(p=p) for part, p in zip(parts, adjust_holm([part.p for part in parts]), strict=True)]


def _find_smallest_difference(spread: Spread, tasks: int, clusters: int, power: float) -> Interval | None:
    freedom = clusters - 1
    if not freedom or spread.square.low is None or spread.square.high is None:
        return None
    low, value, high = (
        smallest_detectable(tasks, square, power=power, design=spread.design, freedom=freedom)
        for square in (spread.square.low, spread.square.value, spread.square.high)
    )
    if value is None or low is None:
        return None
    if low == high:  # the same at any plausible discordance
        return Interval(value, None, None)
    return Interval(value, low, 1.0 if high is None else high)


def _compare_pass_curves(
    first: Outcomes, other: Outcomes, clusters: Mapping[str, str], pass_at: str, binary: bool
) -> list[CurvePoint]:
    fewest = min(len(values) for side in (first, other) for values in side.values.values())
    try:
        ks = [int(k) for k in pass_at.split(",") if k.strip()]
    except ValueError:
        raise UsageError(f"--pass-at {pass_at} is not a list of numbers", fix="--pass-at 1,2,4,8") from None
    if not ks:
        ks = [1, *list_doublings(fewest)] if binary and fewest > 1 else []
    if not ks:
        return []
    if not binary:
        raise UsageError(f"pass@k needs values of 0 or 1: {first.metric} has others", fix="--metric resolved")
    if max(ks) > fewest or min(ks) < 1:
        raise UsageError(
            f"pass@{max(ks) if max(ks) > fewest else min(ks)} cannot be estimated: a task has "
            + format_count(fewest, "attempt"),
            fix=f"ask for --pass-at up to {fewest}, or evaluate more attempts (eval.attempts)",
        )
    before, after = ({t: [v == 1 for v in values] for t, values in side.values.items()} for side in (first, other))
    return compare_curves(before, after, clusters, sorted(set(ks)))


def list_caveats(policies: Sequence[Outcomes], comparisons: Sequence[Comparison]) -> list[str]:
    """Notes on measurement, and on the limits of the tests used."""
    caveats = []
    if unknown := [each.name for each in policies if each.limits is None or each.tasks is None]:
        caveats.append(f"No record of limits or task contents for {', '.join(unknown)}: both are assumed equal.")
    caveats += list_void_attempts(policies)
    if comparisons and (clusters := min(each.clusters for each in comparisons)) < _FEWEST_CLUSTERS:
        caveats.append(
            f"No permutation test of {format_count(clusters, 'cluster')} has a p-value below 0.05, so no difference can"
            " be claimed."
        )
    return caveats


def list_void_attempts(policies: Iterable[Outcomes]) -> list[str]:
    """A note for each policy with void attempts."""
    return [
        f"{each.name}: {format_count(each.void, 'attempt')} void by an infrastructure fault, not measured."
        for each in policies
        if each.void
    ]


# -- episodes of runs


def measure_outcome(episode: Episode) -> dict[str, float]:
    """Measure an attempt of an evaluation; a void one has only ``errors``."""
    if episode.ending is Ending.VOID:
        return {"errors": True}
    is_completed, verdict = bool(episode.patch.strip()), is_resolved(episode)
    values = {**measure_episode(episode), "errors": False, "completed": is_completed, "empty": not is_completed}
    values["ended by itself"] = episode.ending is Ending.DONE
    if verdict is not None:
        values |= {"resolved": verdict} | ({"resolved per completed": verdict} if is_completed else {})
    return values


def compare_episodes(sides: Mapping[str, Sequence[Episode]], measure: str) -> list[Comparison]:
    """Compare each side with the first on common tasks, as `crrl compare` does; empty without any."""
    policies = []
    for name, episodes in sides.items():
        values: dict[str, tuple[float, ...]] = {}
        for episode in episodes:
            if measure in (measured := measure_outcome(episode)):
                values[episode.task_id] = (*values.get(episode.task_id, ()), measured[measure])
        repositories = {episode.task_id: episode.repository for episode in episodes}
        policies.append(Outcomes(name, measure, values, repositories))
    if not policies or not set.intersection(*(set(policy.values) for policy in policies)):
        return []
    return compare_outcomes(policies, ComparisonOptions(measure, common=True))


# -- what may be compared


def restrict_to_common(policies: Sequence[Outcomes], options: ComparisonOptions) -> list[Outcomes]:
    """Restrict `policies` to the tasks to compare. Raises `UsageError` that lists differences."""
    first = policies[0]
    for other in policies[1:]:
        in_both = first.environments.keys() & other.environments.keys()
        first_digests, other_digests = ({key: each.environments[key] for key in in_both} for each in (first, other))
        for conditions, differ in (
            ("limits", _describe_other_values(first.limits, other.limits)),
            ("environments", _describe_other_values(first_digests, other_digests)),
        ):
            if differ and not options.other_conditions:
                raise UsageError(
                    f"{first.name} and {other.name} had different {conditions}: {join_first(differ, _SHOWN_NAMES)}",
                    fix=f"evaluate both with the same {conditions}, or compare them anyway: --other-conditions",
                )
        if versions := _describe_other_values(first.versions, other.versions):
            raise UsageError(
                f"{first.name} and {other.name} were judged by different versions of a reward:"
                f" {join_first(versions, _SHOWN_NAMES)}",
                fix="evaluate both with the same version of this package",
            )
    digests = first.tasks or {}
    others = [(task, digest) for each in policies[1:] for task, digest in (each.tasks or {}).items()]
    changed = sorted({task for task, digest in others if digests.get(task, digest) != digest})
    common = set.intersection(*(set(each.values) for each in policies)) - set(changed)
    if not options.common:
        lines = []
        if changed:
            lines.append(f"{len(changed)} tasks are not the same in all: {join_first(changed, _SHOWN_NAMES)}")
        measured = {task for each in policies for task in each.values}
        for each in policies:
            if lacking := sorted(measured - set(each.values)):
                reason = each.missing.get(lacking[0], "")
                lines.append(
                    f"{each.name} lacks {format_count(len(lacking), 'task')}: {join_first(lacking, _SHOWN_NAMES)}"
                    + (f" ({reason})" if reason else "")
                )
        if lines:
            raise UsageError(
                "the policies were not measured on the same tasks\n" + "\n".join(lines),
                fix="evaluate all on the same tasks, or "
                + (f"compare the {len(common)} that all have: --common" if common else "name others: they share none"),
            )
    if not common:
        raise UsageError("the policies have no task in common", fix="name evaluations of the same benchmark")
    return [
        replace(each, values={task: values for task, values in each.values.items() if task in common})
        for each in policies
    ]


def _describe_other_values(first: Mapping[str, object] | None, other: Mapping[str, object] | None) -> list[str]:
    """Differing values as ``KEY FIRST against OTHER``; empty if a side is unrecorded."""
    if first is None or other is None:
        return []
    keys = sorted({*first, *other})
    return [f"{key} {first.get(key)} against {other.get(key)}" for key in keys if first.get(key) != other.get(key)]


def find_differing_settings(policies: Sequence[Outcomes]) -> dict[str, list[object]]:
    """Settings that differ: one value per policy."""
    settings = [{**each.settings, **(each.limits or {}), **each.environments} for each in policies]
    recorded = [each for each in settings if each]
    # keys with a space describe sandboxes and environments: "sandbox memory"
    keys = sorted({k for each in recorded for k in each if k.partition(".")[0] in _ATTEMPT_SECTIONS or " " in k})
    return {
        key: [each.get(key) for each in settings]
        for key in keys
        if any(each.get(key) != recorded[0].get(key) for each in recorded)
    }


# -- published counts


def compare_counts(first: PublishedCount, other: PublishedCount, power: float = POWER) -> UnpairedComparison:
    """Compare two counts over all overlaps. Raises `UsageError` for different numbers of tasks."""
    if first.tasks != other.tasks:
        raise UsageError(
            f"{first.name} and {other.name} are not of the same tasks", fix="compare counts of one benchmark"
        )
    tasks = first.tasks
    # an overlap is determined by its discordant tasks: solved by the first alone, and by the other alone
    least, most = max(0, first.solved - other.solved), min(first.solved, tasks - other.solved)
    overlaps = [(lost, lost + other.solved - first.solved) for lost in range(least, most + 1)]
    changes = [tango_interval(lost, gained, tasks) for lost, gained in overlaps]
    p = [mcnemar_p(*overlap)[0] for overlap in overlaps]
    low, high = (
        smallest_detectable(tasks, sum(overlap) / tasks, power=power) for overlap in (overlaps[0], overlaps[-1])
    )
    return UnpairedComparison(
        before=first,
        after=other,
        early=wilson_interval(first.solved, tasks),
        late=wilson_interval(other.solved, tasks),
        change=Interval(
            changes[0].value,
            min(each.low for each in changes if each.low is not None),
            max(each.high for each in changes if each.high is not None),
        ),
        p=(min(p), max(p)),
        smallest_shown=None if low is None or high is None else (low, high),
        power=power,
    )


def convert_to_counts(outcomes: Outcomes) -> PublishedCount:
    """Convert `outcomes` to a count. Raises `UsageError` for several attempts."""
    values = [value for attempts in outcomes.values.values() for value in attempts]
    if len(values) != len(outcomes.values) or any(value not in (0, 1) for value in values):
        raise UsageError(
            f"{outcomes.name} has several attempts per task, or values other than 0 and 1",
            fix="to compare with a count, evaluate with --attempts 1",
        )
    return PublishedCount(outcomes.name, int(sum(values)), len(values))
