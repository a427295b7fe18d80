"""``crrl eval``, ``collect``, ``attempt``, ``grade``: attempts by any policy, and patches of any origin."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Literal

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
    note,
    note_reading,
    run_interruptible,
    select_backend,
    show,
)
from coderepairrl.errors import CodeRepairError, ExitCode, UsageError
from coderepairrl.printable import format_count


def eval(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="task source, TOML file, shipped config or run; with --resume the evaluation, with --merge its shards",
        ),
    ],
    words: Settings = None,
    policy: Policies = None,
    preset: Annotated[str | None, typer.Option(help="greedy, thesis, or long: docs/guides/evaluate.md")] = None,
    limit: Limit = None,
    attempts: Annotated[int | None, typer.Option(min=1, help="attempts per task, for pass@k")] = None,
    agent: Agents = None,
    output: NewRun = None,
    resume: Resume = False,
    shard: Annotated[str | None, typer.Option(metavar="I/N", help="part of the tasks, such as 1/4 to 4/4")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="join parts, made by --shard, in the new run -o")] = False,
    model_name: ModelName = "",
    key_env: KeyEnv = None,
    prices: PriceList = None,
    jobs: PoliciesAtOnce = 1,
    as_json: Json = False,
) -> None:
    """Measure a policy on a benchmark, without training: a table with intervals, and predictions."""
    note_reading(what)
    from coderepairrl.stages import arguments, evaluation, results, shards

    if merge:
        _refuse_options(
            "--merge", policy, preset, limit, attempts, agent, resume, shard, model_name, key_env, prices, jobs > 1
        )
        if output is None:
            raise UsageError("-o FOLDER is missing", fix="crrl eval --merge SHARD... -o FOLDER")
        measured = [shards.merge_shards([Path(each) for each in (what, *(words or []))], output)]
    else:
        settings = [*arguments.preset_settings(preset), *_join_settings(words, limit, attempts, model_name, key_env)]
        planned = arguments.plan_evaluations(
            what, settings, policy or (), agents=agent or (), output=output, resume=resume, shard=shard, prices=prices
        )
        try:
            measured = asyncio.run(evaluation.evaluate_all(planned, jobs=jobs, say=note))
        except CodeRepairError:
            complete = [results.read_results(each.folder) for each in planned if each.is_complete]
            if complete and len(planned) > 1 and not as_json:  # another failed, but these may have taken hours
                show(results.format_results(complete))
            raise
    if as_json:
        show(json.dumps(measured if len(measured) > 1 else measured[0]))
    else:
        show(results.format_results(measured))


def collect(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="task source, TOML file, shipped config or run; with --resume the collection, with --select runs",
        ),
    ],
    words: Settings = None,
    policy: Policies = None,
    attempts: Annotated[int | None, typer.Option(min=1, help="attempts per task (default: 4)")] = None,
    limit: Limit = None,
    agent: Agents = None,
    output: NewRun = None,
    resume: Resume = False,
    select: Annotated[
        bool, typer.Option("--select", help="filter existing attempts by keep.NAME=VALUE; make none")
    ] = False,
    model_name: ModelName = "",
    key_env: KeyEnv = None,
    prices: PriceList = None,
    jobs: PoliciesAtOnce = 1,
    as_json: Json = False,
) -> None:
    """Attempt training tasks set aside by tasks.holdout, with any policy, and keep attempts worth learning from."""
    note_reading(what)
    from coderepairrl.stages import arguments
    from coderepairrl.stages import collect as collecting

    if select:
        _refuse_options("--select", policy, limit, attempts, agent, resume, model_name, key_env, prices, jobs > 1)
        summary = collecting.select_attempts([what, *(words or [])], output)
    else:
        settings = _join_settings(words, limit, attempts, model_name, key_env)
        planned = arguments.plan_evaluations(
            what, settings, policy or (), agents=agent or (), output=output, resume=resume, prices=prices, collects=True
        )
        summary = asyncio.run(collecting.collect_attempts(planned, jobs=jobs, say=note))
    show(json.dumps(summary) if as_json else collecting.format_collection(summary))


def _join_settings(
    words: list[str] | None, limit: int | None, attempts: int | None, model_name: str, key_env: str | None
) -> list[str]:
    from coderepairrl.plan.model import format_relay_overrides

    numbers = {"eval.tasks": limit, "eval.attempts": attempts}
    options = [f"{key}={value}" for key, value in numbers.items() if value is not None]
    return [*(words or []), *format_relay_overrides(model_name, key_env), *options]


def _refuse_options(option: str, *others: object) -> None:
    """Raise `UsageError` if `option`, which makes no attempts, comes with options of attempts."""
    if any(others):
        raise UsageError(f"{option} makes no attempts, so it takes no option but -o and --json", fix="leave them out")


def attempt(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="a task source, a TOML file, a shipped config, or a run")],
    task: Annotated[str, typer.Argument(metavar="ID", help="id of one of its tasks (crrl tasks list SOURCE)")],
    words: Settings = None,
    policy: Annotated[
        str | None,
        typer.Option(help="a run, a checkpoint, a model folder, builtin:NAME, or a URL (default: the file's)"),
    ] = None,
    output: NewRun = None,
    as_json: Json = False,
) -> None:
    """Make one attempt at one task, and show prompt, replies, calls and scores as they come; the diff on stdout."""
    note_reading(what, task)
    import sys

    from coderepairrl.stages import attempt as attempting
    from coderepairrl.stages import trace

    plan = attempting.plan_attempt(what, task, words or [], policy=policy, output=output)
    episode = run_interruptible(attempting.show_attempt(plan, output, trace.Trace(full=True)))
    if as_json:
        show(json.dumps(attempting.attempt_as_json(output, episode)))
    else:
        trace.print_bytes(episode.patch, sys.stdout)


def grade(
    predictions: Annotated[
        Path, typer.Argument(metavar="PREDICTIONS", help="lines of instance_id, model_patch, model_name_or_path")
    ],
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="task source, or module:Class")],
    options: Options = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="verdicts as JSON lines (default: next to PREDICTIONS)")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="keep existing verdicts")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="patches graded at a time")] = 2,
    of: Annotated[
        Literal["all", "listed"],
        typer.Option(help="denominator of shares: all tasks (without patch: unresolved), or those listed"),
    ] = "all",
    skip_unknown: Annotated[bool, typer.Option("--skip-unknown", help="leave out patches for unknown tasks")] = False,
    sandbox: SandboxName = "auto",
    sandbox_option: SandboxOptions = None,
    shard: Annotated[str, typer.Option(metavar="I/N", help="part of the patches, such as 1/4")] = "1/1",
    as_json: Json = False,
) -> None:
    """Grade patches of any origin by a benchmark's tests and rules, natively or in its images."""
    from coderepairrl import config
    from coderepairrl.runs import codec
    from coderepairrl.stages import grade as grading
    from coderepairrl.stages import predictions as patches
    from coderepairrl.stages import shards
    from coderepairrl.tasks import catalog

    predicted, chosen_shard = patches.read_predictions(predictions), shards.parse_shard(shard)
    target = output or predictions.with_name(f"{codec.file_stem(predictions)}.graded.jsonl")
    source_options = config.parse_options(options or [], "path")
    tasks, known_patches, unknown = grading.choose_predictions(
        predicted, catalog.load_source(source, source_options), chosen_shard, skip_unknown=skip_unknown
    )
    backend = select_backend(sandbox, sandbox_option)
    verdicts = run_interruptible(
        grading.grade_predictions(known_patches, tasks, backend, target, resume=resume, jobs=jobs, say=note)
    )
    totals = grading.compute_totals(verdicts, tasks, listed=of == "listed")
    if as_json:
        models = [each.as_json() for each in totals]
        show(json.dumps({"verdicts": str(target), "unknown": unknown, "of": of, "models": models}))
    else:
        left_out = [f"left out, no tasks of {source}: {', '.join(unknown)}"] if unknown else []
        show("\n".join([grading.format_grades_table(totals), *left_out, f"verdicts: {target}"]))
    if faults := sum(len(each.faults) for each in totals):
        note(f"{format_count(faults, 'prediction')} without a verdict: remove the cause, and continue with --resume")
        raise typer.Exit(ExitCode.RUN_FAILED)
