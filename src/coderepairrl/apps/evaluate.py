"""``crrl eval``: evaluations by its arguments, and results as text (docs/guides/evaluate.md)."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coderepairrl import config as configs
from coderepairrl import tasks
from coderepairrl.config import Config
from coderepairrl.config.sections.episodes import Agent
from coderepairrl.errors import CodeRepairError, RunError, Several, UsageError, as_called, several
from coderepairrl.plan.model import name_model
from coderepairrl.plan.replying import Opens, opening, parts
from coderepairrl.plan.tasks import collected_share
from coderepairrl.plan.terms import AgentPlan
from coderepairrl.printable import counted, printable
from coderepairrl.processes.meter import Used, as_words, total
from coderepairrl.processes.signals import until_interrupted
from coderepairrl.registry import nearest, nearest_run
from coderepairrl.report import answers
from coderepairrl.report.metrics import PER_PATCH
from coderepairrl.runs import RunFolder, logged_episodes, open_run
from coderepairrl.stages import evaluation, predictions, shards
from coderepairrl.stages.evaluation import COLLECTING, PRESETS
from coderepairrl.stages.shards import WHOLE, Shard
from coderepairrl.stats import Interval
from coderepairrl.stats.spending import Prices, spent


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation and its run folder."""

    plan: AgentPlan
    folder: RunFolder
    shard: Shard
    prices: Prices | None


def plan(
    what: str,
    given: Sequence[str],
    *,
    policy: str | None = None,
    preset: str | None = None,
    limit: int | None = None,
    attempts: int | None = None,
    agents: Sequence[str] = (),
    output: Path | None = None,
    resume: bool = False,
    shard: str | None = None,
    prices: str | None = None,
    collects: bool = False,
) -> Evaluation:
    """Plan what the arguments of `crrl eval` name; with `collects`, those of `crrl collect`.

    `what` is a TOML file, shipped config or run with the settings, or a task source, whose options are in `given` too.
    Each of `agents` attempts all tasks under the same limits. With `resume`, `what` may be an evaluation's folder.
    Raises as `evaluation.resolve`, and `UsageError` for contradictory arguments.
    """
    extra = [*(PRESETS[_known(preset)] if preset else ()), *given]
    extra += [] if limit is None else [f"eval.tasks={limit}"]
    extra += [] if attempts is None else [f"eval.attempts={attempts}"]
    existing = _evaluation(Path(what)) if resume else None
    if existing is not None:
        if policy is not None or output is not None:
            command = "collect" if collects else "eval"
            raise UsageError(f"{what} has its policy and its place", fix=f"crrl {command} {what} --resume")
        about = existing.about()
        if collects != ("holdout" in about):
            raise UsageError(
                f"{what} is {'an evaluation' if collects else 'a collection'}",
                fix=f"crrl {'eval' if collects else 'collect'} {what} --resume",
            )
        resolved = _resolve(str(existing.config), extra, agents, collects=collects)
        recorded_prices = about.get("prices")
        return Evaluation(
            resolved,
            existing,
            shards.parse(shard or about.get("shard", "1/1")),
            Prices(*recorded_prices) if recorded_prices else None,
        )
    if collects:
        extra = [*COLLECTING, *extra]
    resolved = _plan(what, extra, policy, agents, collects)
    part = shards.parse(shard) if shard else WHOLE
    return Evaluation(resolved, _folder(resolved.config, output, part, resume=resume), part, _prices(prices, resolved))


def plan_each(policies: Sequence[str], what: str, given: Sequence[str], **more: Any) -> list[Evaluation]:
    """Run `plan` for each of `policies`; each run folder is named by its policy.

    Raises as `plan`, and `UsageError` for two policies with one name.
    """
    labels = [_label(policy) for policy in policies]
    if twice := [policy for policy, label in zip(policies, labels, strict=True) if labels.count(label) > 1]:
        raise UsageError(
            f"--policy {' and '.join(twice)} have one name, {_label(twice[0])}", fix="measure each in a call of its own"
        )
    planned = [plan(what, given, policy=policy, **more) for policy in policies]
    home = planned[0].folder.path
    return [replace(each, folder=RunFolder(home / label)) for each, label in zip(planned, labels, strict=True)]


def require_several(jobs: int) -> None:
    """Raise `UsageError` for ``--jobs`` with one policy."""
    if jobs > 1:
        raise UsageError("--jobs is how many of several --policy are measured at a time", fix="leave it out")


def _label(policy: str) -> str:
    """Folder name for `policy`.

    >>> _label("runs/mine"), _label("runs/mine/checkpoints/00010"), _label("builtin:tiny"), _label("https://a.org/v1")
    ('mine', 'mine-00010', 'builtin-tiny', 'a.org-v1')
    """
    parts = [part for part in Path(policy.partition("://")[2] or policy).parts if part != "checkpoints"]
    wide = 2 if "checkpoints" in Path(policy).parts or "://" in policy else 1
    return re.sub(r"[^\w.]+", "-", "-".join(parts[-wide:])).strip("-.") or "policy"


def _resolve(
    model: str,
    given: Sequence[str],
    agents: Sequence[str],
    *,
    settings_of: Path | None = None,
    collects: bool = False,
) -> AgentPlan:
    """Run `evaluation.resolve` with other `agents`; the settings' agent keeps its options."""
    if agents:
        use = evaluation.COLLECT if collects else evaluation.USE
        served = name_model(model, given, use, settings_of)
        agent = served.config.agent if served.can_make("config") else Agent()  # `resolve` reports errors
        given = [*given, *_side_by_side(agents, agent)]
    return evaluation.resolve(model, given, settings_of=settings_of, collects=collects)


def _side_by_side(agents: Sequence[str], there: Agent) -> list[str]:
    """Settings that give each of `agents` an evaluation; the first is called ``eval``.

    >>> _side_by_side(["claude-code", "nano"], Agent(options={"tools": "compact"}))
    ['agent={"name" = "claude-code"}', 'eval.also.nano={agent={"name" = "nano", "options" = {"tools" = "compact"}}}']
    """
    if twice := [name for name in agents if agents.count(name) > 1]:
        raise UsageError(f"--agent {twice[0]} is there twice", fix="--attempts N has it attempt each task N times")
    with_options = {there.name: there.model_dump()} if there.options else {}
    first, *other_agents = [configs.inline(with_options.get(name, {"name": name})) for name in agents]
    labels = [re.sub(r"\W", "_", Path(name.rpartition(":")[2]).stem.lower()) for name in agents[1:]]
    return [
        f"agent={first}",
        *(f"eval.also.{label}={{agent={it}}}" for label, it in zip(labels, other_agents, strict=True)),
    ]


def _known(preset: str) -> str:
    if preset not in PRESETS:
        raise UsageError(f"there is no preset {preset!r}", fix=nearest(preset, PRESETS))
    return preset


def _evaluation(path: Path) -> RunFolder | None:
    return RunFolder(path) if (path / "run.json").is_file() and "policy" in open_run(path).about() else None


def _plan(what: str, given: Sequence[str], policy: str | None, agents: Sequence[str], collects: bool) -> AgentPlan:
    run, file = configs.run_of(what), _file(what)
    if run is None and file is None:
        return _of_source(what, given, policy, agents, collects)
    given = [f"run.name={_named(what, collects)}", *given]
    if policy is None:
        return _resolve(str(file or run), given, agents, collects=collects)
    if policy.endswith(".toml"):
        raise UsageError(
            f"{policy} and {what} both have settings", fix="name the model itself: its folder, its run, or its URL"
        )
    return _resolve(policy, given, agents, settings_of=file or Path(what), collects=collects)


def is_source(what: str) -> bool:
    """Whether `what` names a task source, not a TOML file, shipped config or run."""
    return configs.run_of(what) is None and _file(what) is None


def _file(what: str) -> Path | None:
    if what in configs.shipped():
        return configs.shipped()[what]
    return Path(what).expanduser() if what.endswith(".toml") and configs.run_of(what) is None else None


def _of_source(
    source: str, given: Sequence[str], policy: str | None, agents: Sequence[str], collects: bool
) -> AgentPlan:
    """Plan an evaluation on `source`: replaces the policy's settings of tasks and rewards."""
    if policy is None:
        command = "collect" if collects else "eval"
        raise UsageError("no policy is named", fix=f"crrl {command} {source} --policy RUN|FOLDER|builtin:tiny|URL")
    if source not in tasks.SHIPPED and ":" not in source:
        suggestion = nearest_run(Path(source)) if "/" in source else ""
        raise UsageError(
            f"{source} is no TOML file, shipped config, run or task source",
            fix=suggestion or nearest(source, [*configs.shipped(), *tasks.SHIPPED]),
        )
    settings, options = list[str](), list[str]()
    for each in given:
        (settings if each.partition("=")[0].partition(".")[0].strip() in Config.model_fields else options).append(each)
    chosen = configs.parse_options(options, "path")
    measured = any(each.startswith(("eval.reward", "reward", "kinds")) for each in settings)
    section, split = ("tasks", "train") if collects else ("eval", "test")
    source_settings = (
        *(f"run.name={_named(source, collects)}", "kinds={}", "eval.also={}", "eval.tasks=0", "eval.reward={}"),
        *(["tasks.sources=[]", 'eval.source=""'] if collects else []),
        *([] if measured else ["reward={}"]),  # what is measured follows from the tasks
        *(f"{section}.source={json.dumps(source)}", f'{section}.split="{split}"'),
        *(f"{section}.options.{key}={configs.inline(value)}" for key, value in chosen.items()),
    )
    return _resolve(policy, [*source_settings, *settings], agents, collects=collects)


def _named(what: str, collects: bool = False) -> str:
    """Name of the evaluation of, or collection from, `what`: a path, source or ``module:Class``.

    >>> _named("quixbugs"), _named("runs/mine"), _named("my.sources:Bugs")
    ('eval-quixbugs', 'eval-mine', 'eval-Bugs')
    """
    return f"{'collect' if collects else 'eval'}-{Path(what.rpartition(':')[2]).stem or 'run'}"


def _folder(config: Config, output: Path | None, shard: Shard, *, resume: bool) -> RunFolder:
    """The named folder, else ``RUN.DIR/RUN.NAME``, numbered if taken."""
    if output is not None:
        return RunFolder(output)
    name = config.run.name if shard == WHOLE else f"{config.run.name}-{shard.number}of{shard.of}"
    first = candidate = Path(config.run.dir) / name
    number = 1
    while candidate.exists() and not resume:
        number += 1
        candidate = first.with_name(f"{name}-{number}")
    return RunFolder(candidate)


def _prices(text: str | None, plan: AgentPlan) -> Prices | None:
    if text is None:
        return None
    if plan.config.engine.name != "relay":
        raise UsageError("--prices is for a policy behind a URL", fix="leave it out")
    try:
        prices = Prices(*map(float, text.split(",")))
    except (TypeError, ValueError):
        prices = Prices(-1, -1)
    if not all(price is None or 0 <= price < float("inf") for price in prices):
        raise UsageError(
            f"{text!r} are no prices", fix="per million tokens: --prices PROMPT,REPLY or PROMPT,REPLY,CACHED (0.15,0.6)"
        )
    return prices


async def evaluate(planned: Evaluation, *, resume: bool = False) -> dict[str, Any]:
    """Measure, and return what ``--json`` prints. Raises as `measure`, and `Interrupted`."""
    await until_interrupted(attempt([planned], resume=resume), fix=f"crrl eval {planned.folder.path} --resume")
    return found(planned.folder)


def say_nothing(text: str) -> None:
    """Discard a message."""


async def evaluate_each(
    planned: Sequence[Evaluation], *, resume: bool = False, jobs: int = 1, say: Callable[[str], None] = say_nothing
) -> list[dict[str, Any]]:
    """Run `evaluate` for each of `planned`, `jobs` at a time."""
    again = f"the same command with -o {planned[0].folder.path.parent} --resume"
    await until_interrupted(attempt(planned, resume=resume, jobs=jobs, say=say), fix=again)
    return [found(each.folder) for each in planned]


async def attempt(
    planned: Sequence[Evaluation],
    *,
    resume: bool = False,
    collects: bool = False,
    jobs: int = 1,
    say: Callable[[str], None] = say_nothing,
) -> None:
    """Make the attempts of `planned`, `jobs` at a time; models share engines (`replying.parts`).

    With `resume`, a single evaluation must exist; of several, those that exist continue. Raises as
    `evaluation.measure`, for several after all have ended.
    """
    plans = [each.plan for each in planned]
    log_dir = planned[0].folder.path.parent / ".server"
    failures = list[CodeRepairError]()

    async def make(each: Evaluation, opens: Opens, beside: str = "") -> None:
        await evaluation.measure(
            each.plan,
            each.folder,
            resume=resume and (len(planned) == 1 or (each.folder.path / "run.json").is_file()),
            shard=each.shard,
            prices=each.prices,
            opens=opens,
            beside=beside,
            about={"holdout": collected_share(each.plan.config)} if collects else {},
        )

    async def beside_others(each: Evaluation, opens: Opens, free: asyncio.Semaphore) -> None:
        name = each.folder.path.name
        async with free:
            try:
                await make(each, opens, name)
            except (CodeRepairError, OSError) as error:
                own = _named_errors(name, error)
                failures.extend(own)
                for problem in own:  # the others may take hours
                    say(f"failed: {problem}")

    for part in parts(plans, jobs):
        own = [planned[number] for number in part.numbers]
        if part.shared:
            say(f"one {own[0].plan.config.engine.name} engine for {len(own)} policies; its log is in {log_dir}")
        try:
            async with opening(plans, part, log_dir) as opens:
                if part.at_once == 1:
                    for each in own:
                        await make(each, opens)
                    continue
                free = asyncio.Semaphore(part.at_once)
                async with asyncio.TaskGroup() as group:
                    for each in own:
                        group.create_task(beside_others(each, opens, free))
        except CodeRepairError as error:
            failures.append(error)
    if failures:
        raise several(failures)


def ended(planned: Sequence[Evaluation]) -> list[Evaluation]:
    """Evaluations that have all their results."""

    def whole(each: Evaluation) -> bool:
        measured = {record["name"] for record in each.folder.records() if record["type"] == "eval"}
        return measured.issuperset(each.plan.eval_tasks)

    return [each for each in planned if each.folder.log.exists() and whole(each)]


def _named_errors(name: str, error: CodeRepairError | OSError) -> list[CodeRepairError]:
    if isinstance(error, OSError):
        return [RunError(f"{name}: {error}", fix="mend that, then the same command with --resume")]
    problems = error.problems if isinstance(error, Several) else (error,)
    return [type(each)(f"{name}: {each}", fix=each.fix) for each in problems]


def found(folder: RunFolder) -> dict[str, Any]:
    """Results of the evaluation in `folder`."""
    about = folder.about()
    cost = spent(logged_episodes(folder.records()))
    prices = about.get("prices")
    money = {"money": cost.money(Prices(*prices))} if prices else {}
    used = total(folder.records())
    summaries = {record["name"]: record["summary"] for record in folder.records() if record["type"] == "eval"}
    return {
        "run": str(folder.path),
        "policy": about["policy"],
        "shard": about.get("shard", str(WHOLE)),
        "agents": {name: _agents_of(about, name) for name in summaries},
        "evaluations": summaries,
        "cost": {**cost._asdict(), **money},
        "machine": used and used._asdict(),
        "predictions": [str(path) for name in summaries for path in predictions.files(folder.path, name)],
    }


def _agents_of(about: Mapping[str, Any], name: str) -> str:
    """Agents of the evaluation `name`; older runs did not record them."""
    recorded = ((about.get("conditions") or {}).get(name) or {}).get("agents", ())
    return " and ".join(dict.fromkeys(each["name"] for each in recorded))


def as_text(result: Mapping[str, Any], config: Config) -> str:
    """The result as text: tables, cost, and next commands."""
    lines = [f"{printable(result['policy'])}" + (f", shard {result['shard']}" if result["shard"] != "1/1" else "")]
    for name, summary in result["evaluations"].items():
        lines += ["", *_table(name, summary, config, result["agents"][name])]
    if len(set(result["agents"].values())) > 1:
        lines += ["", *_by_agent(result)]
    cost = result["cost"]
    money = f", money {cost['money']:.4f}" if "money" in cost else ""
    silent = cost["unreported"]
    unreported = f" (without those of {counted(silent, 'call')}, of which the server does not say)" if silent else ""
    lines += [
        "",
        f"cost: {counted(cost['calls'], 'call')}, {counted(cost['prompt_tokens'], 'prompt token')}"
        f" ({cost['cached_tokens']:,} of them cached by a server), {counted(cost['sampled_tokens'], 'sampled token')}"
        f"{unreported},"
        f" {cost['attempt_seconds']:,.1f} s of attempts{money}",
        *([f"machine: {as_words(Used(**result['machine']))}"] if result["machine"] else []),
        "95 % intervals, with tasks of one repository (if there are several) or one function as one observation",
        f"predictions: {' '.join(result['predictions'])}",
        *_next(result, config),
    ]
    return "\n".join(lines)


def each_as_text(results: Sequence[Mapping[str, Any]], planned: Sequence[Evaluation]) -> str:
    """Results of several policies as text."""
    texts = [as_text(result, each.plan.config) for result, each in zip(results, planned, strict=True)]
    if len(texts) == 1:
        return texts[0]
    command = as_called(f"crrl compare {' '.join(shlex.quote(result['run']) for result in results)}")
    return "\n\n".join([*texts, f"next:\n  {command}  is a policy better than the first?"])


def _by_agent(result: Mapping[str, Any]) -> list[str]:
    rows = [("evaluation", "agent", "", "")]
    for name, summary in result["evaluations"].items():
        measures = summary["outcomes"] | summary["values"]
        measure = next(each for each in (*("resolved", "reward"), *measures) if each in measures)
        rows.append((name, result["agents"][name], measure, str(Interval(**measures[measure]))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{word:<{wide}}" for word, wide in zip(row, widths, strict=True)).rstrip() for row in rows]


def _table(name: str, summary: Mapping[str, Any], config: Config, agent: str) -> list[str]:
    evaluation = config.eval.each[name]
    source = evaluation.source or config.tasks.source
    void = f", {summary['void']} void" if summary["void"] else ""
    rows = {  # evaluations of older versions have no metrics
        each: Interval(**mean)
        for part in ("outcomes", "values", "metrics")
        for each, mean in summary.get(part, {}).items()
    }
    measures = [each for each in rows if each not in _REPEATED and not each.endswith(PER_PATCH)]
    per_patch = {each: rows[each + PER_PATCH] for each in measures if each + PER_PATCH in rows}
    wide = max(map(len, map(str, (rows[each] for each in measures))), default=0)
    lines = [
        f"{name}: {', '.join(filter(None, (agent, source)))}, {counted(summary['tasks'], 'task')}"
        f" x {counted(evaluation.attempts, 'attempt')}{void};"
        f" temperature {evaluation.temperature:g}, top-p {evaluation.top_p:g};"
        f" {config.rollout.calls} calls, {config.rollout.tokens:,} tokens, {config.rollout.seconds:g} s",
        f"  {'':<28} {'all attempts':<{wide}}  patches that are not empty",
        *(f"  {each:<28} {rows[each]!s:<{wide}}  {per_patch.get(each, '')}".rstrip() for each in measures),
    ]
    head = next((each for each in ("resolved", "reward") if each in rows), "")
    parts = {part: each for part, each in summary.get("slices", {}).items() if head in each}
    lines += answers.lines(summary.get("answers", {}))
    return lines + [
        f"  {part + ':':<28} {head} {Interval(**each[head])}, {counted(each['tasks'], 'task')}"
        for part, each in parts.items()
    ]


_REPEATED = {"empty_patches", "turns", "tests"}
"""Measures that repeat another of the table; ``tests`` is `resolved`, or its mean."""


def _next(result: Mapping[str, Any], config: Config) -> list[str]:
    run = shlex.quote(result["run"])
    commands = {
        f"crrl report {run}": "the numbers on one page",
        f"crrl view {run}": "every attempt, token by token",
    }
    if result["shard"] != str(WHOLE):
        commands["crrl merge SHARD... -o FOLDER"] = "all shards as one run folder"
    else:
        commands[f"crrl compare {run} OTHER_RUN"] = "is another policy better on the same tasks?"
    if len(set(result["agents"].values())) > 1:
        names = " ".join(f"{run}@{name}" for name in result["agents"])
        commands[f"crrl compare {names}"] = "is an agent better than the first?"
    for name, summary in result["evaluations"].items():
        written = predictions.files(Path(result["run"]), name)
        if written and "resolved" not in summary["outcomes"]:
            source = config.eval.each[name].source or config.tasks.source
            command = f"crrl grade {shlex.quote(str(written[0]))} {shlex.quote(source)} [KEY=VALUE]..."
            commands[command] = "which patches pass its tests: docs/guides/grade.md"
    wide = max(map(len, map(as_called, commands)))
    return ["next:", *(f"  {as_called(command):<{wide}}  {purpose}" for command, purpose in commands.items())]
