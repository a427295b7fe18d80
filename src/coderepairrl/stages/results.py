"""Results of an evaluation: written to files and the log, read back, and formatted as text."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from coderepairrl import config as configs
from coderepairrl.config import Config
from coderepairrl.errors import replace_crrl
from coderepairrl.printable import format_count, printable
from coderepairrl.processes.meter import ResourceUsage, format_usage, sum_usage
from coderepairrl.report import answers, localisation, metrics
from coderepairrl.report.metrics import PER_PATCH
from coderepairrl.runs import RunFolder, logged_episodes
from coderepairrl.sandbox.contents import read_local_files
from coderepairrl.stages import predictions
from coderepairrl.stats.intervals import Interval
from coderepairrl.stats.measures import Prices, sum_costs, summarise
from coderepairrl.stats.outcomes import estimate_pass_rates
from coderepairrl.types import Episode, Task

_ALL_TASKS = "1/1"  # Shard of an evaluation that is not split.
_OUTCOMES = ("resolved", "completed", "empty", "exact", "resolved_per_patch", "exact_per_patch")


def write_results(
    folder: RunFolder,
    name: str,
    step: int,
    version: int,
    episodes: Sequence[Episode],
    tasks: Iterable[Task],
    *,
    model: str = "",
    agents: Mapping[str, str],
    computed: Mapping[str, metrics.MetricValues] = MappingProxyType({}),
) -> dict[str, Any]:
    """Write the results of evaluation `name` into `folder`; return the record for the log.

    Files: ``episodes/NAME-STEP.jsonl``, and in ``eval/NAME-STEP/`` ``metrics.jsonl``, ``summary.json`` and predictions.
    `model` names the policy in the predictions (default: run and step). `agents` names the agent of each kind of
    task. `computed` has the metrics, by episode id, that need not be measured again.
    """
    stem = f"{name}-{step:05d}"
    tasks_by_id = {task.id: task for task in tasks}
    rows = {**metrics.measure_attempts(_load_attempts(episodes, tasks_by_id, computed)), **computed}
    means, measured = summarise(episodes), metrics.summarise_metrics(episodes, rows)
    outcomes = {each: measured[each] for each in _OUTCOMES if each in measured} | estimate_pass_rates(episodes)
    summary: dict[str, Any] = {"episodes": means.episodes, "tasks": means.tasks, "void": means.void}
    summary |= {"values": _intervals_as_json(means.values), "outcomes": _intervals_as_json(outcomes)}
    other_metrics = {each: value for each, value in measured.items() if each not in {*outcomes, *means.values}}
    summary["metrics"] = _intervals_as_json(other_metrics)
    summary["slices"] = {
        label: {"tasks": len(ids)} | _summarise_headline([each for each in episodes if each.task_id in ids], rows)
        for label, ids in metrics.slice_tasks(episodes, tasks_by_id, agents).items()
    }
    if label_answers := answers.summarise_answers(episodes, tasks_by_id):
        summary["answers"] = label_answers
    folder.write_episodes(stem, episodes)
    folder.write_attempts(
        stem,
        (
            {"id": each.id, "task": each.task_id, "attempt": each.attempt, **rows[each.id]}
            for each in episodes
            if each.id in rows
        ),
    )
    folder.write_evaluation(stem, {"step": step, **summary})
    predictions.write_predictions(folder.path / "eval" / stem, model or f"{folder.path.name}-{step:05d}", episodes)
    return {"name": name, "step": step, "version": version, "summary": summary}


def _load_attempts(
    episodes: Sequence[Episode], tasks: Mapping[str, Task], computed: Mapping[str, object]
) -> Iterator[metrics.AttemptData]:
    # Task by task: patches may change all files of a project, and only one task's files fit in memory.
    by_task: dict[str, list[Episode]] = {}
    for each in episodes:
        if each.id not in computed:
            by_task.setdefault(each.task_id, []).append(each)
    for task_id, task_episodes in by_task.items():
        task, sources = tasks.get(task_id), None
        if task is not None and task.reference.strip():
            paths = localisation.list_python_files(task.reference, *(each.patch for each in task_episodes))
            sources = read_local_files(task.workspace, sorted(paths))
        yield from (metrics.AttemptData(each, task, sources) for each in task_episodes)


def _summarise_headline(episodes: Sequence[Episode], rows: Mapping[str, metrics.MetricValues]) -> dict[str, Any]:
    """Summarise only the metrics in `metrics.HEADLINE`."""
    headline = {
        each.id: {name: v for name, v in rows.get(each.id, {}).items() if name in metrics.HEADLINE} for each in episodes
    }
    return _intervals_as_json(metrics.summarise_metrics(episodes, headline))


def _intervals_as_json(intervals: Mapping[str, Interval]) -> dict[str, Any]:
    return {name: interval._asdict() for name, interval in intervals.items()}


def read_results(folder: RunFolder) -> dict[str, Any]:
    """Read the results of the evaluation in `folder`."""
    about = folder.about()
    cost = sum_costs(logged_episodes(folder.records()))
    prices = about.get("prices")
    money = {"money": cost.money(Prices(*prices))} if prices else {}
    machine = sum_usage(folder.records())
    summaries = {record["name"]: record["summary"] for record in folder.records() if record["type"] == "eval"}
    return {
        "run": str(folder.path),
        "policy": about["policy"],
        "shard": about.get("shard", _ALL_TASKS),
        "agents": {name: _format_agents(about, name) for name in summaries},
        "evaluations": summaries,
        "cost": {**cost._asdict(), **money},
        "machine": machine and machine._asdict(),
        "predictions": [
            str(path) for name in summaries for path in predictions.list_prediction_files(folder.path, name)
        ],
    }


def _format_agents(about: Mapping[str, Any], name: str) -> str:
    """Names of the agents of evaluation `name`; empty for older runs, which did not record them."""
    recorded = ((about.get("conditions") or {}).get(name) or {}).get("agents", ())
    return " and ".join(dict.fromkeys(each["name"] for each in recorded))


def format_results(results: Sequence[Mapping[str, Any]]) -> str:
    """Format the results of each policy."""
    texts = [_format_policy_results(result, configs.load_config(result["run"])) for result in results]
    if len(texts) == 1:
        return texts[0]
    command = f"crrl compare {' '.join(shlex.quote(result['run']) for result in results)}"
    next_commands = format_next_commands({command: "is a policy better than the first?"})
    return "\n\n".join([*texts, "\n".join(next_commands)])


def _format_policy_results(result: Mapping[str, Any], config: Config) -> str:
    lines = [f"{printable(result['policy'])}" + (f", shard {result['shard']}" if result["shard"] != _ALL_TASKS else "")]
    for name, summary in result["evaluations"].items():
        lines += ["", *_format_results_table(name, summary, config, result["agents"][name])]
    if len(set(result["agents"].values())) > 1:
        lines += ["", *_format_by_agent(result)]
    lines += [
        "",
        format_cost(result["cost"]),
        *([f"machine: {format_usage(ResourceUsage(**result['machine']))}"] if result["machine"] else []),
        "95 % intervals, clustered by repository if there are several, else by function",
        f"predictions: {' '.join(result['predictions'])}",
        *_suggest_commands(result, config),
    ]
    return "\n".join(lines)


def format_cost(cost: Mapping[str, Any]) -> str:
    """Format calls, tokens, seconds and money of attempts in one line."""
    money = f", money {cost['money']:.4f}" if "money" in cost else ""
    unreported = ""
    if calls := cost["unreported"]:
        unreported = f" (without {format_count(calls, 'call')}, whose tokens the server does not report)"
    return (
        f"cost: {format_count(cost['calls'], 'call')}, {format_count(cost['prompt_tokens'], 'prompt token')}"
        f" ({cost['cached_tokens']:,} of them cached by a server), "
        f"{format_count(cost['sampled_tokens'], 'sampled token')}"
        f"{unreported}, {cost['attempt_seconds']:,.1f} s of attempts{money}"
    )


def _format_by_agent(result: Mapping[str, Any]) -> list[str]:
    rows = [("evaluation", "agent", "", "")]
    for name, summary in result["evaluations"].items():
        measures = summary["outcomes"] | summary["values"]
        measure = next(each for each in ("resolved", "reward", *measures) if each in measures)
        rows.append((name, result["agents"][name], measure, str(Interval(**measures[measure]))))
    return answers.align_columns(rows, "")


def _format_results_table(name: str, summary: Mapping[str, Any], config: Config, agent: str) -> list[str]:
    evaluation = config.eval.each[name]
    source = evaluation.source or config.tasks.source
    void = f", {summary['void']} void" if summary["void"] else ""
    intervals = {
        measure: Interval(**mean)
        for part in ("outcomes", "values", "metrics")
        for measure, mean in summary[part].items()
    }
    measures = [name for name in intervals if name not in _REPEATED and not name.endswith(PER_PATCH)]
    per_patch = {name: intervals[name + PER_PATCH] for name in measures if name + PER_PATCH in intervals}
    width = max((len(str(intervals[name])) for name in measures), default=0)
    lines = [
        f"{name}: {', '.join(filter(None, (agent, source)))}, {format_count(summary['tasks'], 'task')}"
        f" x {format_count(evaluation.attempts, 'attempt')}{void};"
        f" temperature {evaluation.temperature:g}, top-p {evaluation.top_p:g};"
        f" {config.rollout.calls} calls, {config.rollout.tokens:,} tokens, {config.rollout.seconds:g} s",
        f"  {'':<28} {'all attempts':<{width}}  non-empty patches",
        *(f"  {each:<28} {intervals[each]!s:<{width}}  {per_patch.get(each, '')}".rstrip() for each in measures),
    ]
    headline = next((name for name in ("resolved", "reward") if name in intervals), "")
    lines += answers.format_summary(summary.get("answers", {}))
    return lines + [
        f"  {label + ':':<28} {headline} {Interval(**means[headline])}, {format_count(means['tasks'], 'task')}"
        for label, means in summary.get("slices", {}).items()
        if headline in means
    ]


_REPEATED = {"empty_patches", "turns", "tests"}
"""Measures left out of the table, since another row has them: ``tests`` is `resolved`, or its mean."""


def _suggest_commands(result: Mapping[str, Any], config: Config) -> list[str]:
    run = shlex.quote(result["run"])
    commands = {f"crrl report {run}": "the numbers on one page, every attempt token by token"}
    if result["shard"] != _ALL_TASKS:
        commands["crrl eval --merge SHARD... -o FOLDER"] = "all shards as one run folder"
    else:
        commands[f"crrl compare {run} OTHER_RUN"] = "is another policy better on the same tasks?"
    if len(set(result["agents"].values())) > 1:
        names = " ".join(f"{run}@{name}" for name in result["agents"])
        commands[f"crrl compare {names}"] = "is an agent better than the first?"
    for name, summary in result["evaluations"].items():
        written = predictions.list_prediction_files(Path(result["run"]), name)
        if written and "resolved" not in summary["outcomes"]:
            source = config.eval.each[name].source or config.tasks.source
            command = f"crrl grade {shlex.quote(str(written[0]))} {shlex.quote(source)} [KEY=VALUE]..."
            commands[command] = "which patches pass its tests: docs/guides/grade.md"
    return format_next_commands(commands)


def format_next_commands(purposes: Mapping[str, str]) -> list[str]:
    """Format commands and their purposes."""
    width = max(map(len, map(replace_crrl, purposes)))
    return ["next:", *(f"  {replace_crrl(command):<{width}}  {purpose}" for command, purpose in purposes.items())]
