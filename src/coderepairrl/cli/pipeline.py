"""``crrl pipeline``, ``probe``: stages in a chain, and whether training would have anything to learn from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from coderepairrl.cli.output import Format, Json, KeyEnv, ModelName, Overrides, Resume, note, run, show
from coderepairrl.errors import UsageError


def pipeline(
    file: Annotated[str, typer.Argument(help="a TOML file with stages: docs/guides/pipeline.md")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[STAGE.KEY=VALUE]...", help="keys of a stage, and its settings")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="STAGE", help="run this one alone; several times")] = None,
    first: Annotated[str, typer.Option("--from", metavar="STAGE", help="run this one and those after it")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check all stages, and say what each would do")] = False,
    table: Annotated[bool, typer.Option("--table", help="what the stages that are done say; starts nothing")] = False,
    form: Format = "text",
    as_json: Json = False,
) -> None:
    """Stages in a chain (probe, collect, sft, rl, eval): run what is not done yet; what each cost and brought."""
    from coderepairrl.report import verdict
    from coderepairrl.stages import pipeline as pipelines
    from coderepairrl.stages import pipeline_run

    if dry_run and table:
        raise UsageError("these options exclude each other", fix="one of --dry-run, --table")
    if only and first:
        raise UsageError("--only and --from exclude each other", fix="name one of them")
    form = "json" if as_json else form
    planned = pipelines.read(file, overrides or [])
    if not table:
        steps, problem = pipeline_run.check(planned, only or [], first)
        if dry_run:
            data = verdict.Result([], [pipeline_run.plan_table(planned, steps)], [], {})
            shown = json.dumps(pipeline_run.plan_json(steps)) if form == "json" else verdict.render(data, form).strip()
            show(shown)
        if problem is not None:
            raise problem
        if dry_run:
            return
        run(pipeline_run.run(planned, steps, note))
    show(verdict.render(pipeline_run.table(planned), form))
    note(f"crrl report {planned.folder}  the same as a page")


def probe(
    file: Annotated[str, typer.Argument(help="a TOML file, a shipped config, or a run")],
    overrides: Overrides = None,
    policy: Annotated[
        str | None, typer.Option(help="a run, a checkpoint, a model folder, builtin:NAME, or a URL; else the file's")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="so many training tasks, drawn by run.seed; else 32")] = None,
    attempts: Annotated[int | None, typer.Option(min=2, help="at each task; else rollout.group_size")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="a new run folder")] = Path("runs/probe"),
    resume: Resume = False,
    model_name: ModelName = "",
    key_env: KeyEnv = None,
    anyway: Annotated[bool, typer.Option("--anyway", help="a no-go is no failure")] = False,
    form: Format = "text",
    as_json: Json = False,
) -> None:
    """Attempt some training tasks as training would: solve rate, informative groups, difficulties, and go or no-go."""
    from coderepairrl.assembly.model import relayed
    from coderepairrl.report import verdict
    from coderepairrl.runs import RunFolder
    from coderepairrl.stages import probe as probing

    given = [*(overrides or []), *relayed(model_name, key_env)]
    given += [] if limit is None else [f"eval.tasks={limit}"]
    given += [] if attempts is None else [f"eval.attempts={attempts}"]
    plan = probing.resolve(file, given, policy)
    found = run(probing.probe(plan, RunFolder(output), resume=resume))
    show(verdict.render(probing.result(found), "json" if as_json else form))
    note(f"run folder {output}; how hard each task is: {output / probing.DIFFICULTY}")
    if not found.go and not anyway:
        raise probing.refusal(found.reasons, "--anyway takes it for a go")
