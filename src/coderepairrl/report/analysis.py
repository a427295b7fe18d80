"""Numbers of a run's report, without HTML."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from coderepairrl.learn import TokenAccount
from coderepairrl.processes.meter import sum_usage
from coderepairrl.report.answers import PLAIN
from coderepairrl.report.reading import JudgedEpisode, OutputSample, RunData
from coderepairrl.stats.intervals import Interval, cluster_episodes, slice_episodes
from coderepairrl.stats.measures import COUNTS, Pairs, RewardNotes, pair_measures, summarise
from coderepairrl.types import Ending, Episode

_MAX_COMMANDS, _MAX_TOOLS, _MAX_NOTES = 9, 6, 6  # on a page; a panel has 9 colours
# parts of the wall time of a rollout, and of a run
ROLLOUT = ("generation", "tools", "sandbox", "reward", "waiting")
ACTIVITIES = (*ROLLOUT, "learning", "evaluation", "other")
# keys of `Episode.timings` by activity
_TIMINGS = {"generation": ("generate",), "tools": ("tools",), "sandbox": ("sandbox", "diff"), "reward": ("reward",)}
_READABLE_NAMES = {
    "reward": "reward",
    "reward_std": "reward, standard deviation within groups",
    "tests": "tests passing",
    "empty_patches": "empty patches",
    "tool_success": "tool calls that succeed",
    "limit": "ended by a limit",
    "crash": "agent program crashed",
    "calls": "tool calls",
    "turns": "turns",
    "sampled_tokens": "sampled tokens",
}
# measures that are no rewards or scores, in the order of pages
_OTHER_MEASURES = ("empty_patches", "tool_success", "limit", "crash", "calls", "turns", "sampled_tokens")
_PER_PATCH_SUFFIX = "_per_patch"
LESS_IS_BETTER = frozenset({"empty_patches", "limit", "crash"})

SECONDARY = COUNTS | {"tool_success", "limit", "crash"}
"""Measures of behaviour, not success: left out where room is short."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Finished evaluation: means with 95 % intervals by measure."""

    name: str
    step: int
    episodes: int
    tasks: int
    void: int  # void attempts, which `episodes` leaves out
    values: Mapping[str, Interval]
    answers: Mapping[str, Any] = field(default_factory=dict)
    """Result of `report.answers.summarise_answers`."""


@dataclass(frozen=True, slots=True)
class MeasureChanges:
    """All measures before and after, and their changes task by task."""

    before: str
    after: str
    slice: str  # kind of the compared tasks; empty: all
    clusters: int
    early: Mapping[str, Interval]  # values of `before`
    late: Mapping[str, Interval]  # values of `after`
    changes: Mapping[str, Pairs]


@dataclass(frozen=True, slots=True)
class Report:
    """Contents of a run's page and JSON."""

    name: str
    path: str
    status: str
    notices: Sequence[str]
    planned: int | None  # steps; None for an evaluation
    about: Mapping[str, Any]  # contents of ``run.json``, and ``ran_on``: engine and sandbox
    config: Mapping[str, Any]  # flat: ``train.lr`` and so on
    scores: Sequence[str]
    """Measured rewards, those with a weight first."""
    steps: Sequence[Mapping[str, Any]]
    """Per step: its metrics, and ``tools``, ``calls_by_tool``, ``commands``, ``ledger``, ``engine_busy``."""
    commands: Sequence[str]  # most used in training
    tools: Sequence[str]  # most used in training
    evaluations: Sequence[Evaluation]
    comparisons: Sequence[MeasureChanges]
    repeated: Sequence[MeasureChanges]
    """Rewards of tasks with several groups, first group against last: of all tasks, then by slice."""
    account: Mapping[str, Any]
    """`TokenAccount` as a dict."""
    kinds: Mapping[str, Mapping[str, Any]]  # accounts by kind of task; empty for a single kind
    ledger: Mapping[str, float]
    """Wall seconds by activity."""
    wall_seconds: float
    used: Mapping[str, float] | None
    """Used resources (`processes.meter.ResourceUsage`); None before the first is logged."""
    episodes: Mapping[str, int]
    """``train``, ``eval``, ``void``, ``retried``, ``interrupted``, ``side_calls``, and ``starts`` of the process."""
    endings: Mapping[str, int]
    faults: Mapping[str, int]
    notes: Mapping[str, RewardNotes] = field(default_factory=dict)
    printed: Sequence[OutputSample] = ()
    """Last output lines of attempts without a patch."""
    void: Sequence[OutputSample] = ()
    """Fault messages, retried attempts included."""
    last: Mapping[str, Sequence[Episode]] = field(default_factory=dict, repr=False)
    """Episodes of the last evaluation by name, to compare runs; not in JSON."""
    evaluated: Mapping[str, Mapping[int, Sequence[Episode]]] = field(default_factory=dict, repr=False)
    """Episodes of finished evaluations by name (``eval`` first), then step, without turns and calls; not in JSON."""


def analyse_run(data: RunData) -> Report:
    """Compute a run's report."""
    by_step: dict[int, list[JudgedEpisode]] = defaultdict(list)
    tools, commands = Counter[str](), Counter[str]()
    for name, row in data.judged.items():
        if row.episode.phase == "train":
            # an episode that no step consumed, such as a void one, counts in the step that started it
            by_step[data.rows.consumed.get(name, row.episode.step)].append(row)
            tools.update(row.tools.calls)
            commands.update(row.tools.commands)
    steps = [_summarise_step(record, by_step[record["step"]]) for record in data.rows.steps]
    evaluations, comparisons, evaluated = _summarise_evaluations(data)
    accounts = data.rows.accounts.build_by_kind()
    kinds = {kind or PLAIN: _account_to_dict(account) for kind, account in accounts.items()}
    planned = None if "policy" in data.about else data.config.get("run.steps")  # an evaluation has no steps
    notices = [
        *data.notices,
        *_describe_alarms(data),
        *_describe_changed_settings(data),
        *_describe_missing(data, steps, evaluations, planned),
    ]
    start = data.rows.start
    ran_on = f"engine {start.get('engine', '?')}, sandbox {start.get('sandbox', '?')}" if start else ""
    episodes = [row.episode for row in data.judged.values()]
    used = sum_usage(data.rows.used)
    wall_seconds = used.seconds if used else sum(end - begin for begin, end in data.rows.sessions)
    return Report(
        name=str(data.about.get("name") or data.folder.path.name),
        path=str(data.folder.path),
        status=_describe_status(data),
        notices=notices,
        planned=planned,
        about={**data.about, "ran_on": ran_on},
        config=data.config,
        scores=_order_scores(data),
        steps=steps,
        commands=[name for name, _ in commands.most_common(_MAX_COMMANDS)],
        tools=[name for name, _ in tools.most_common(_MAX_TOOLS)],
        evaluations=evaluations,
        comparisons=comparisons,
        repeated=_compare_repeated(data),
        account=_account_to_dict(sum(accounts.values(), TokenAccount())),
        kinds=kinds if len(accounts) > 1 else {},
        ledger=divide_run_time(data, wall_seconds, (step["ledger"] for step in steps)),
        used=used._asdict() if used else None,
        wall_seconds=wall_seconds,
        episodes={
            "train": sum(each.phase == "train" for each in episodes),
            "eval": sum(each.phase != "train" for each in episodes),
            "void": sum(each.ending is Ending.VOID for each in episodes),
            "retried": sum(tries - 1 for tries in data.rows.tries.values()),
            "interrupted": len(data.rows.by_id) - len(episodes),
            "side_calls": sum(len(each.side) for each in episodes),
            "starts": len(data.rows.sessions),
        },
        endings=Counter(
            str(each.ending) if each.ending is Ending.DONE else f"{each.ending}: {each.reason}"
            for each in episodes
            if each.ending is not Ending.VOID
        ),
        faults=Counter(each.reason or "unknown" for each in episodes if each.ending is Ending.VOID),
        notes={
            name: replace(noted, kinds=noted.kinds[:_MAX_NOTES])
            for name, noted in data.notes.by_reward().items()
            if noted.kinds
        },
        printed=sorted(data.printed.values(), key=lambda each: -each.count)[:_MAX_NOTES],
        void=sorted(data.faults.values(), key=lambda each: -each.count)[:_MAX_NOTES],
        last={name: by_step[max(by_step)] for name, by_step in evaluated.items()},
        evaluated={
            name: {step: [data.judged[each.id].episode for each in by_step[step]] for step in by_step}
            for name, by_step in evaluated.items()
        },
    )


def compare_runs(first: Report, other: Report) -> list[MeasureChanges]:
    """Compare the runs' last evaluations by name, on common tasks."""
    return [
        _compare_evaluations(first.last[name], other.last[name], first.name, other.name)
        for name in first.last
        if name in other.last
    ]


def list_differences(reports: Sequence[Report]) -> dict[str, list[Any]]:
    """Settings, versions and machines that differ: a value per run, None where unset."""
    all_settings = [
        {key: value for key, value in report.config.items() if key not in ("run.name", "run.dir")}
        | {key: report.about.get(key) for key in ("commit", "coderepairrl", "python", "platform", "cpus")}
        | {f"version of {name}": version for name, version in (report.about.get("versions") or {}).items()}
        for report in reports
    ]
    keys = dict.fromkeys(key for settings in all_settings for key in settings)
    rows = {key: [settings.get(key) for settings in all_settings] for key in keys}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}


def _summarise_step(record: Mapping[str, Any], rows: Sequence[JudgedEpisode]) -> dict[str, Any]:
    metrics = record["metrics"]
    valid = [row for row in rows if row.episode.ending is not Ending.VOID]
    calls = sum(sum(row.tools.calls.values()) for row in valid)
    commands: Counter[str] = Counter()
    success_rates: dict[str, list[float]] = defaultdict(list)
    for row in valid:
        commands.update(row.tools.commands)
        for tool in row.tools.calls:
            success_rates[tool].append(row.tools.rate(tool) or 0.0)
    ledger = divide_step_time(metrics, rows)
    seconds = sum(ledger.values())
    busy = covered_seconds(span for row in rows for span in row.busy)
    return {
        "step": record["step"],
        "version": record.get("version"),
        **metrics,
        "episode_tokens": sum(row.tokens for row in valid) / len(valid) if valid else None,
        "tools": {tool: sum(rates) / len(rates) for tool, rates in success_rates.items()},
        "calls_by_tool": {
            tool: sum(row.tools.calls.get(tool, 0) for row in valid) / len(valid) for tool in sorted(success_rates)
        },
        "commands": {name: count / calls for name, count in commands.most_common()},
        "ledger": ledger,
        "engine_busy": min(1.0, busy / seconds) if seconds else None,
    }


def _summarise_evaluations(
    data: RunData,
) -> tuple[list[Evaluation], list[MeasureChanges], dict[str, dict[int, list[Episode]]]]:
    evaluations: list[Evaluation] = []
    finished: dict[str, dict[int, list[Episode]]] = {}
    for name, step in sorted(data.evaluated, key=lambda key: (key[0] != "eval", key[0], key[1])):
        if (name, step) in data.rows.evaluations:
            episodes = list(data.evaluated[name, step].values())
            finished.setdefault(name, {})[step] = episodes
            summary = summarise(episodes)
            values, answers = _sort_by_importance(summary.values), data.rows.evaluations[name, step][1]
            evaluations.append(Evaluation(name, step, summary.episodes, summary.tasks, summary.void, values, answers))
    comparisons: list[MeasureChanges] = []
    for name, by_step in finished.items():
        first_step, last_step = min(by_step), max(by_step)
        if first_step < last_step:
            titles = (f"{name} after step {first_step}", f"{name} after step {last_step}")
            comparisons += compare_slices(by_step[first_step], by_step[last_step], *titles)
    return evaluations, comparisons, finished


def _compare_repeated(data: RunData) -> list[MeasureChanges]:
    """Compare the first and last group of each repeated task."""
    groups_by_task: dict[str, dict[str, list[Episode]]] = {}
    for name in (name for step in data.rows.steps for name in step.get("episodes", ())):
        episode = data.judged[name].episode if name in data.judged else None
        if episode is not None and episode.phase == "train" and episode.ending is not Ending.VOID:
            groups_by_task.setdefault(episode.task_id, {}).setdefault(episode.group, []).append(episode)
    repeated = [list(groups.values()) for groups in groups_by_task.values() if len(groups) > 1]
    if not repeated:
        return []
    early = [episode for groups in repeated for episode in groups[0]]
    late = [episode for groups in repeated for episode in groups[-1]]

    def keep_rewards(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if name not in _OTHER_MEASURES}

    return [
        replace(each, early=keep_rewards(each.early), late=keep_rewards(each.late), changes=keep_rewards(each.changes))
        for each in compare_slices(early, late, "first time", "last time")
    ]


def compare_slices(
    early: Sequence[Episode], late: Sequence[Episode], before: str = "before", after: str = "after"
) -> list[MeasureChanges]:
    """Compare episodes task by task: all of them, then each slice."""
    comparisons = [_compare_evaluations(early, late, before, after)]
    for kind, tasks in slice_episodes(early).items():
        first, last = ([each for each in side if each.task_id in tasks] for side in (early, late))
        comparisons.append(_compare_evaluations(first, last, before, after, kind))
    return comparisons


def _compare_evaluations(
    early: Sequence[Episode], late: Sequence[Episode], before: str, after: str, kind: str = ""
) -> MeasureChanges:
    pairs = pair_measures(early, late)
    # means on common tasks replace those on all, so that their difference is the change
    first = {**summarise(early).values, **{name: each.early for name, each in pairs.items()}}
    last = {**summarise(late).values, **{name: each.late for name, each in pairs.items()}}
    clusters = len(set(cluster_episodes(early).values()))
    return MeasureChanges(
        before, after, kind, clusters, _sort_by_importance(first), _sort_by_importance(last), _sort_by_importance(pairs)
    )


def _sort_by_importance(values: Mapping[str, Any]) -> dict[str, Any]:
    order = ("reward", *sorted(values.keys() - {"reward", *_OTHER_MEASURES}), *_OTHER_MEASURES)
    return {name: values[name] for name in order if name in values}


def _order_scores(data: RunData) -> list[str]:
    names = dict.fromkeys(score.name for row in data.judged.values() for score in row.episode.scores)
    weighted = [
        key.removeprefix("reward.") for key, weight in data.config.items() if key.startswith("reward.") and weight
    ]
    return [name for name in weighted if name in names] + [name for name in names if name not in weighted]


def _account_to_dict(account: TokenAccount) -> dict[str, Any]:
    numbers = {"delivered": account.delivered, "expansion": account.expansion, "balanced": account.is_balanced}
    return asdict(account) | numbers


def _describe_status(data: RunData) -> str:
    last = data.rows.last
    if last["type"] == "stop":
        return f"stopped by {last.get('reason') or 'a signal'}"
    return {"end": "finished", "start": "unfinished", "": "never started"}[last["type"]]


def _describe_alarms(data: RunData) -> list[str]:
    raised: dict[str, list[str]] = {}
    for record in data.rows.steps:
        for alarm in record.get("alarms", ()):
            raised.setdefault(alarm["gate"], []).append(alarm["text"])
    return [
        f"Alarm: {texts[-1]}." + (f" This is the last of {len(texts)} such alarms." if len(texts) > 1 else "")
        for texts in raised.values()
    ]


def _describe_changed_settings(data: RunData) -> list[str]:
    changes = [f"{c['key']} from {c['old']!r} to {c['new']!r} after step {c['step']}" for c in data.rows.changes]
    return [f"Resumed with other settings: {'; '.join(changes)}."] if changes else []


def _describe_missing(
    data: RunData, steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Evaluation], planned: int | None
) -> list[str]:
    notices = []
    is_evaluation = "policy" in data.about  # made by `crrl eval`: no steps, no earlier evaluation
    if not steps and not is_evaluation:
        notices.append("No step is finished yet, so there are no curves.")
    elif planned is not None and len(steps) < planned and not is_evaluation:
        notices.append(f"{len(steps)} of {planned} steps are finished.")
    if not evaluations:
        notices.append("No evaluation on held-out tasks is finished: how the policy generalises is unknown.")
    elif len(evaluations) == 1 and not is_evaluation:
        notices.append("Only one evaluation is finished, so there is no before and after.")
    if data.judged and "tests" not in _order_scores(data):
        notices.append(
            "Tests were never run, so it is unknown whether patches repair anything: a reward can rise while repairs "
            "do not. To measure tests with weight 0: reward.tests=0, or reward.sampled_tests=0 for one group in four."
        )
    if data.rows.last["type"] == "start":
        notices.append("The run has not ended: it is still running, or it was killed and waits for --resume.")
    return notices


def readable_name(measure: str) -> str:
    """Name of a measure on pages.

    >>> readable_name("tests_per_patch"), readable_name("patch_lines")
    ('tests passing, per non-empty patch', 'patch_lines')
    """
    if measure.endswith(_PER_PATCH_SUFFIX):
        return f"{readable_name(measure.removesuffix(_PER_PATCH_SUFFIX))}, per non-empty patch"
    return _READABLE_NAMES.get(measure, measure)


# -- wall time


def divide_step_time(metrics: Mapping[str, float], rows: Sequence[JudgedEpisode]) -> dict[str, float]:
    """Divide a step's wall time by activity.

    Episodes overlap: the rollout's wall time is divided in proportion to their seconds. ``waiting`` is the remainder.
    """
    rollout = metrics.get("rollout_seconds") or 0.0
    timings = [row.episode.timings for row in rows]
    spent = {name: sum(each.get(key, 0.0) for each in timings for key in keys) for name, keys in _TIMINGS.items()}
    total = max(sum(each.get("total", 0.0) for each in timings), sum(spent.values()))
    spent["waiting"] = total - sum(spent.values())
    # without timings, all of it is waiting
    shares = {name: spent[name] / total if total else float(name == "waiting") for name in ROLLOUT}
    return {name: rollout * share for name, share in shares.items()} | {"learning": metrics.get("learn_seconds") or 0.0}


def divide_run_time(data: RunData, wall_seconds: float, steps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Divide the run's wall time by activity.

    ``other`` includes starting, stopping, checkpoints, exports and interrupted work.
    """
    ledger = dict.fromkeys(ACTIVITIES, 0.0)
    for step in steps:
        for name, seconds in step.items():
            ledger[name] += seconds
    ledger["evaluation"] = sum(seconds for seconds, _ in data.rows.evaluations.values())
    ledger["other"] = max(0.0, wall_seconds - sum(ledger.values()))
    return ledger


def covered_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds covered by at least one span.

    >>> covered_seconds([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    seconds, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        seconds += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return seconds
