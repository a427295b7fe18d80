"""``crrl probe``: would training have anything to learn from?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coderepairrl.cli.output import Format, Json, Overrides, note, run, show


def probe(
    file: Annotated[str, typer.Argument(help="a TOML file, a shipped config, or a run")],
    overrides: Overrides = None,
    policy: Annotated[
        str | None, typer.Option(help="a run, a checkpoint, a model folder, or a URL; else the file's")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="so many training tasks, drawn by run.seed; else 32")] = None,
    attempts: Annotated[int | None, typer.Option(min=2, help="at each task; else rollout.group_size")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="a new run folder")] = Path("runs/probe"),
    resume: Annotated[bool, typer.Option("--resume", help="continue where it stopped")] = False,
    anyway: Annotated[bool, typer.Option("--anyway", help="a no-go is no failure")] = False,
    form: Format = "text",
    as_json: Json = False,
) -> None:
    """Attempt some training tasks as training would: solve rate, informative groups, difficulties, and go or no-go."""
    from coderepairrl.report import verdict
    from coderepairrl.runs import RunFolder
    from coderepairrl.stages import probe as probing

    given = [*(overrides or [])]
    given += [] if limit is None else [f"eval.tasks={limit}"]
    given += [] if attempts is None else [f"eval.attempts={attempts}"]
    plan = probing.resolve(file, given, policy)
    found = run(probing.probe(plan, RunFolder(output), resume=resume))
    show(verdict.render(probing.result(found), "json" if as_json else form))
    note(f"run folder {output}; how hard each task is: {output / probing.DIFFICULTY}")
    if not found.go and not anyway:
        raise probing.refusal(found.reasons, "--anyway takes it for a go")
