"""``crrl eval``, ``merge``, ``grade``: measuring policies and patches."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from coderepairrl.cli.output import (
    Agents,
    Json,
    KeyEnv,
    Limit,
    ModelName,
    NewRun,
    Options,
    Policies,
    PoliciesAtOnce,
    PriceList,
    Resume,
    SandboxName,
    SandboxOptions,
    Settings,
    backend,
    note,
    run,
    show,
)
from coderepairrl.errors import CodeRepairError, ExitCode, UsageError
from coderepairrl.printable import counted


def eval(
    what: Annotated[
        str, typer.Argument(help="a TOML file, a shipped config, a run, or a task source; with --resume an evaluation")
    ],
    given: Settings = None,
    policy: Policies = None,
    preset: Annotated[str | None, typer.Option(help="greedy, thesis, or long: docs/guides/evaluate.md")] = None,
    limit: Limit = None,
    attempts: Annotated[int | None, typer.Option(min=1, help="attempts per task, for pass@k")] = None,
    agent: Agents = None,
    output: NewRun = None,
    resume: Resume = False,
    shard: Annotated[str | None, typer.Option(metavar="I/N", help="every N-th task, from the I-th")] = None,
    model_name: ModelName = "",
    key_env: KeyEnv = None,
    prices: PriceList = None,
    jobs: PoliciesAtOnce = 1,
    as_json: Json = False,
) -> None:
    """Measure a policy on a benchmark, without training: a table with intervals, and predictions."""
    from coderepairrl.apps import evaluate as evaluating
    from coderepairrl.plan.model import relayed

    settings = [*(given or []), *relayed(model_name, key_env)]
    more: dict[str, Any] = {"preset": preset, "limit": limit, "attempts": attempts, "agents": agent or []}
    more |= {"output": output, "resume": resume, "shard": shard, "prices": prices}
    if policy and len(policy) > 1:
        several = evaluating.plan_each(policy, what, settings, **more)
        try:
            results = asyncio.run(evaluating.evaluate_each(several, resume=resume, jobs=jobs, say=note))
        except CodeRepairError:
            if not as_json and (finished := evaluating.ended(several)):  # it took hours, perhaps
                show(evaluating.each_as_text([evaluating.found(each.folder) for each in finished], finished))
            raise
        show(json.dumps(results) if as_json else evaluating.each_as_text(results, several))
        return
    evaluating.require_several(jobs)
    planned = evaluating.plan(what, settings, policy=policy[0] if policy else None, **more)
    result = asyncio.run(evaluating.evaluate(planned, resume=resume))
    show(json.dumps(result) if as_json else evaluating.as_text(result, planned.plan.config))


def attempt(
    what: Annotated[str, typer.Argument(help="a task source, a TOML file, a shipped config, or a run")],
    task: Annotated[str, typer.Argument(metavar="ID", help="of one of its tasks: crrl tasks list SOURCE")],
    given: Settings = None,
    policy: Annotated[
        str | None, typer.Option(help="a run, a checkpoint, a model folder, builtin:NAME, or a URL; else the file's")
    ] = None,
    output: NewRun = None,
    as_json: Json = False,
) -> None:
    """Make one attempt at one task, and show prompt, replies, calls and scores as they come; the diff on stdout."""
    note(f"{'reading':<12}{what}, {task}")  # imports take a while, too
    import sys

    from coderepairrl.apps import evaluate as evaluating
    from coderepairrl.stages import attempt as attempting
    from coderepairrl.stages import trace

    is_source = evaluating.is_source(what)
    settings = attempting.settings_of_attempt(what, task, given or [], policy, is_source=is_source)
    plan = evaluating.plan(what, settings, policy=policy, output=output or Path(task)).plan
    trial = attempting.choose_task(plan, what, task, output)
    episode = run(attempting.attempt(trial, trace.Trace(whole=True)))
    if as_json:
        show(json.dumps(attempting.as_json(trial, episode)))
    else:
        trace.print_bytes(episode.patch, sys.stdout)


def merge(
    shards: Annotated[list[Path], typer.Argument(metavar="SHARD...", help="run folders of `crrl eval --shard`")],
    output: Annotated[Path, typer.Option("--output", "-o", help="a new run folder")],
    keep: Annotated[
        Literal["first", "last"] | None, typer.Option(help="shard that counts if two have the same task")
    ] = None,
    as_json: Json = False,
) -> None:
    """Merge the shards of an evaluation into one run folder, equal to that of one process."""
    from coderepairrl import config
    from coderepairrl.apps import evaluate as evaluating
    from coderepairrl.runs import open_run
    from coderepairrl.stages.merge import merge as write

    write(shards, output, keep=keep)
    result = evaluating.found(open_run(output))
    show(json.dumps(result) if as_json else evaluating.as_text(result, config.load(output)))


def grade(
    predictions: Annotated[Path, typer.Argument(help="patches in the format of SWE-bench's harness")],
    source: Annotated[str, typer.Argument(help="their task source, or module:Class; for --harness rows or a dataset")],
    options: Options = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="verdicts as JSON lines (default: next to PREDICTIONS)")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="keep existing verdicts")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="concurrent patches")] = 2,
    of: Annotated[
        Literal["all", "listed"],
        typer.Option(help="denominator: all tasks (without patch: unresolved), or those listed"),
    ] = "all",
    skip_unknown: Annotated[bool, typer.Option("--skip-unknown", help="leave out patches for unknown tasks")] = False,
    sandbox: SandboxName = "auto",
    sandbox_option: SandboxOptions = None,
    harness: Annotated[
        Literal["swebench"] | None, typer.Option(help="judge with the harness in its containers")
    ] = None,
    shard: Annotated[str, typer.Option(metavar="I/N", help="every N-th task, from the I-th")] = "1/1",
    as_json: Json = False,
) -> None:
    """Grade patches of any origin by a benchmark's tests and rules, natively or in its images."""
    from coderepairrl import config
    from coderepairrl.runs import codec
    from coderepairrl.stages import grade as grading
    from coderepairrl.stages import harness as official
    from coderepairrl.stages import predictions as patches
    from coderepairrl.stages import shards
    from coderepairrl.tasks import catalog

    predicted, part = patches.read(predictions), shards.parse(shard)
    target = output or predictions.with_name(f"{codec.stem_of(predictions)}.graded.jsonl")
    source_options = config.parse_options(options or [], "path")
    if harness:
        if sandbox != "auto" or sandbox_option:
            raise UsageError("the harness has containers of its own", fix="leave out --sandbox, or --harness")
        if other := sorted(source_options.keys() - {"split", "seconds"}):
            raise UsageError(f"the harness has no option {other[0]!r}", fix="split=test, seconds=1800")
        inside = official.environment()
        rows = official.rows(inside, source, str(source_options.get("split", "test")))
        tasks, known_patches, unknown = grading.chosen(
            predicted, official.tasks_of(rows), part, skip_unknown=skip_unknown, checks=False
        )
        seconds = int(source_options.get("seconds", official.SECONDS))
        job = official.grade(known_patches, rows, inside, target, resume=resume, jobs=jobs, seconds=seconds, say=note)
    else:
        tasks, known_patches, unknown = grading.chosen(
            predicted, catalog.load(source, source_options), part, skip_unknown=skip_unknown
        )
        place = backend(sandbox, sandbox_option)
        job = grading.grade(known_patches, tasks, place, target, resume=resume, jobs=jobs, say=note)
    verdicts = run(job)
    totals = grading.totals(verdicts, tasks, listed=of == "listed")
    if as_json:
        models = [each.as_json() for each in totals]
        show(json.dumps({"verdicts": str(target), "unknown": unknown, "of": of, "models": models}))
    else:
        left_out = [f"left out, no tasks of {source}: {', '.join(unknown)}"] if unknown else []
        show("\n".join([grading.table(totals), *left_out, f"verdicts: {target}"]))
    if faults := sum(len(each.faults) for each in totals):
        note(f"{counted(faults, 'prediction')} without a verdict: mend the cause, and go on with --resume")
        raise typer.Exit(ExitCode.RUN_FAILED)
