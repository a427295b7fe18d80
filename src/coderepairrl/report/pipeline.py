"""What the stages of a pipeline have cost and brought, read from their run folders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from coderepairrl.errors import UsageError
from coderepairrl.printable import counted, visible
from coderepairrl.processes.meter import Used, total
from coderepairrl.report import plots
from coderepairrl.report.command import write
from coderepairrl.report.comparison import Question, alike
from coderepairrl.report.outcomes import Counts, Outcomes, read_outcomes
from coderepairrl.report.verdict import Result, Table, rate, signed
from coderepairrl.report.view.text import templates
from coderepairrl.runs import RunFolder, logged_episodes, open_run
from coderepairrl.stats import Interval, paired_difference, sign_flip_test
from coderepairrl.stats.clusters import clusters_by
from coderepairrl.stats.intervals import is_share, mean_interval
from coderepairrl.stats.spending import Spent, spent

NAME = "pipeline.json"
METRICS = ("reward", "resolved")
_LOSS = "held_out/loss"


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage as its folder has it."""

    name: str
    kind: str
    policy: str
    """Who acted, or what it began with."""
    about: str
    folder: Path
    done: bool
    used: Used | None
    """None where nothing was measured yet."""
    cost: Spent
    brought: str
    """In words."""
    commit: str
    """Of the code that made it."""


class Change(NamedTuple):
    """A policy's value on held-out tasks, and how it differs from that of the policy before it."""

    policy: str
    metric: str
    tasks: int
    value: Interval
    share: bool
    before: str = ""
    change: Interval | None = None
    p: float | None = None


def is_pipeline(folder: Path) -> bool:
    """Whether `folder` is that of a pipeline."""
    return (folder / NAME).is_file()


def read(folder: Path) -> tuple[str, list[Stage]]:
    """The pipeline's name and its stages. Raises `UsageError` where `folder` is none."""
    try:
        data = json.loads((folder / NAME).read_text("utf-8"))
        return data["name"], [_stage(folder, row) for row in data["stages"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{folder} is no pipeline: {error!r}", fix="crrl pipeline FILE makes one") from error


def _stage(home: Path, row: Mapping[str, str]) -> Stage:
    folder = RunFolder(home / row["name"])
    there = (folder.path / "run.json").is_file() and folder.log.is_file()
    records = list(folder.records()) if there else []
    return Stage(
        name=row["name"],
        kind=row["kind"],
        policy=row["policy"],
        about=row["about"],
        folder=folder.path,
        done=[record["type"] for record in records if record["type"] in ("start", "end")][-1:] == ["end"],
        used=total(records),
        cost=spent(logged_episodes(records)),
        brought=_BROUGHT[row["kind"]](folder) if there else "",
        commit=open_run(folder.path).about().get("commit", "") if there else "",
    )


# -- what a stage brought


def _probed(folder: RunFolder) -> str:
    if not (folder.path / "probe.json").is_file():
        return ""
    found = json.loads((folder.path / "probe.json").read_text("utf-8"))
    rates = [f"solve rate {Interval(**found['solve_rate'])}"] if found["solve_rate"] else []
    return ", ".join(
        ["go" if found["go"] else "no-go", *rates, f"informative groups {Interval(**found['informative'])}"]
    )


def _collected(folder: RunFolder) -> str:
    path = folder.path / "examples.json"
    if not path.is_file():
        return ""
    found = json.loads(path.read_text("utf-8"))
    return f"{found['kept']:,} of {found['attempts']:,} attempts kept"


def _tuned(folder: RunFolder) -> str:
    steps = folder.metrics()
    first = [record["metrics"] for record in folder.records() if record["type"] == "held_out"]
    losses = [float(each[_LOSS]) for each in [*first, *steps] if _LOSS in each]
    return counted(len(steps), "step") + (f", held-out loss {losses[0]:.3f} to {losses[-1]:.3f}" if losses else "")


def _trained(folder: RunFolder) -> str:
    return counted(len(folder.metrics()), "step")


def _evaluated(folder: RunFolder) -> str:
    for record in folder.records():
        if record["type"] == "eval" and record["name"] == "eval":
            found = record["summary"]["outcomes"] | record["summary"]["values"]
            return ", ".join(f"{name} {Interval(**found[name])}" for name in METRICS if name in found)
    return ""


_BROUGHT = {"probe": _probed, "collect": _collected, "sft": _tuned, "rl": _trained, "eval": _evaluated}


# -- one policy after the other


def changes(stages: Sequence[Stage]) -> tuple[list[Change], list[str]]:
    """The evaluated policies in their order, each against the one before, and what is to be noted.

    Policies of which attempts could spend different amounts, or were made at other tasks, are not compared.
    """
    found, notes = list[Change](), list[str]()
    for home in dict.fromkeys(stage.folder.parent for stage in stages if stage.kind == "eval"):
        own = [each for each in stages if each.kind == "eval" and each.folder.parent == home and each.done]
        for metric in METRICS:
            read = [(each.folder.name, _outcomes(each, metric)) for each in own]
            if all(known is None for _, known in read):
                continue
            try:
                same = alike([known for _, known in read if known is not None], Question(common=True))
            except UsageError as error:
                notes.append(f"{home.name}: {metric} is not compared: {error}.")
                continue
            found += _in_turn([name for name, known in read if known is not None], metric, same)
    return found, notes


def _outcomes(stage: Stage, metric: str) -> Outcomes | None:
    try:
        found = read_outcomes(f"{stage.folder}@eval", metric)
    except UsageError:  # the metric was not measured
        return None
    assert not isinstance(found, Counts)  # which a path is not
    return found


def _in_turn(names: Sequence[str], metric: str, policies: Sequence[Outcomes]) -> list[Change]:
    found: list[Change] = []
    last: list[float] = []
    for name, each in zip(names, policies, strict=True):
        tasks = sorted(each.values)
        clusters_of = clusters_by({task: each.repositories.get(task, "") for task in tasks})
        clusters = [clusters_of[task] for task in tasks]
        values = [sum(each.values[task]) / len(each.values[task]) for task in tasks]
        share = is_share([*values, *last])
        change = p = None
        if last:
            change = paired_difference(last, values, clusters, share=share)
            p = sign_flip_test(last, values, clusters)
        before = found[-1].policy if found else ""
        value = mean_interval(values, clusters, share=is_share(values))
        found.append(Change(name, metric, len(tasks), value, share, before, change, p))
        last = values
    return found


# -- for people


def result(folder: Path) -> Result:
    """The tables of the pipeline in `folder`, for `verdict.render`. Raises `UsageError` where it is none."""
    name, stages = read(folder)
    compared, notes = changes(stages)
    tables = [_costs(name, stages), *_qualities(compared)]
    commits = {each.commit for each in stages if each.commit}
    notes += [
        *(["Stages were made by different commits: " + ", ".join(f"{each.name} {each.commit[:12]}" for each in stages
           if each.commit) + "."] if len(commits) > 1 else []),
        *(f"{each.name} is not finished." if each.used else f"{each.name} has not begun." for each in stages
          if not each.done),
        "Tokens of prompts and of replies are those that the engine computed, or a server reported. Brackets are 95 %"
        " intervals of clusters of tasks, changes are paired by task; p is of sign flips of clusters, two-sided.",
    ]  # fmt: skip
    numbers = {
        "pipeline": name,
        "stages": [_numbers(each) for each in stages],
        "policies": [
            {**each._asdict(), "value": each.value._asdict(), "change": each.change and each.change._asdict()}
            for each in compared
        ],
        "notes": notes,
    }
    return Result([sentence(each) for each in compared if each.change], tables, notes, numbers)


def sentence(found: Change) -> str:
    """What may be said of a change."""
    assert found.change is not None
    what = f"{found.policy} - {found.before} = {signed(found.change, found.share)} on {found.metric}"
    if found.change.above(0):
        return f"{found.policy} is above {found.before}: {what}."
    if found.change.below(0):
        return f"{found.policy} is below {found.before}: {what}."
    return f"No difference can be claimed: {what}."


def _costs(name: str, stages: Sequence[Stage]) -> Table:
    rows = [
        (
            each.name,
            each.kind,
            each.policy,
            "-" if each.used is None else f"{each.used.seconds:,.0f}",
            "-" if each.used is None else f"{each.used.cpu_seconds:,.0f}",
            f"{each.cost.prompt_tokens:,}",
            f"{each.cost.sampled_tokens:,}",
            each.brought or "-",
        )
        for each in stages
    ]
    used = [each.used for each in stages if each.used]
    rows.append(
        (
            "all",
            "",
            "",
            f"{sum(each.seconds for each in used):,.0f}",
            f"{sum(each.cpu_seconds for each in used):,.0f}",
            f"{sum(each.cost.prompt_tokens for each in stages):,}",
            f"{sum(each.cost.sampled_tokens for each in stages):,}",
            "",
        )
    )
    heads = ("stage", "kind", "policy", "seconds", "CPU seconds", "prompt tokens", "sampled tokens", "what it brought")
    return Table(f"{name}: stages", heads, rows)


def _qualities(compared: Sequence[Change]) -> list[Table]:
    tables = []
    for metric in dict.fromkeys(each.metric for each in compared):
        rows = [
            (
                each.policy,
                str(each.tasks),
                rate(each.value, each.share),
                each.before or "-",
                signed(each.change, each.share) if each.change else "-",
                "-" if each.p is None else f"{each.p:.3f}",
            )
            for each in compared
            if each.metric == metric
        ]
        tables.append(Table(f"held-out tasks: {metric}", ("policy", "tasks", metric, "against", "change", "p"), rows))
    return tables


def _numbers(stage: Stage) -> dict[str, Any]:
    return {
        "name": stage.name,
        "kind": stage.kind,
        "policy": stage.policy,
        "done": stage.done,
        "used": stage.used and stage.used._asdict(),
        "cost": stage.cost._asdict(),
        "brought": stage.brought,
        "folder": str(stage.folder),
    }


def page(folder: Path) -> str:
    """The same as one page of HTML. Raises `UsageError` where `folder` is no pipeline's."""
    name, _ = read(folder)
    template = templates("coderepairrl.report", visible=lambda value: visible(str(value)))
    return template.get_template("pipeline.html.j2").render(name=name, found=result(folder), style=Markup(plots.STYLE))


def write_page(folder: Path, output: Path | None) -> Path:
    """Write the page to `output`, else to ``report/index.html`` in `folder`. Raises `UsageError`."""
    return write(output or folder / "report" / "index.html", page(folder))
