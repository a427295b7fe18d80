"""``crrl fix``, ``serve``, ``export``: use of trained and other models."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from coderepairrl.cli.output import (
    Json,
    KeyEnv,
    ModelName,
    Overrides,
    format_nested,
    note,
    note_reading,
    run_interruptible,
    show,
)
from coderepairrl.errors import ExitCode, UsageError
from coderepairrl.printable import format_count


def fix(
    repo: Annotated[Path, typer.Argument(metavar="REPOSITORY", help="a git repository without uncommitted changes")],
    issue: Annotated[Path, typer.Option(help="text file that describes the bug")],
    policy: Annotated[str, typer.Option(help="a run, a TOML file, a model folder, builtin:NAME, or a URL")],
    overrides: Overrides = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="sampling temperature (0: greedy)")] = 0.0,
    model_name: ModelName = "",
    key_env: KeyEnv = None,
    apply: Annotated[bool, typer.Option("--apply", help="apply the patch to the working tree")] = False,
    as_json: Json = False,
) -> None:
    """Let a model repair your repository: progress on stderr, the diff on stdout."""
    note_reading(repo, issue, policy)
    from coderepairrl.plan.model import format_relay_overrides
    from coderepairrl.stages import fix, trace

    repair = fix.plan_repair(repo, issue, policy, [*(overrides or []), *format_relay_overrides(model_name, key_env)])
    patch, facts = run_interruptible(fix.attempt_repair(repair, temperature=temperature, trace=trace.Trace()))
    if not as_json:
        trace.print_bytes(patch, sys.stdout)  # before it is applied: a patch that git refuses is not lost
    applied = False
    try:
        applied = apply and fix.apply_patch(repair.repository, patch)
    finally:
        if as_json:
            show(json.dumps({**facts, "applied": applied}))
    if not patch:
        raise typer.Exit(ExitCode.RUN_FAILED)


def serve(
    policy: Annotated[
        str, typer.Argument(metavar="POLICY", help="a run, a TOML file, a model folder, builtin:NAME, or a URL")
    ],
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="address on which the gateway listens")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port of the gateway (0: any free one)")] = 8000,
    socket: Annotated[Path | None, typer.Option(help="Unix socket of the gateway, for sandboxes")] = None,
    admin: Annotated[Path | None, typer.Option(help="Unix socket of the host's API (default: in a new folder)")] = None,
    admin_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="port of the host's API, with a token, instead of --admin")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--keys-only", help="answer clients without a session key (default: if POLICY is no URL)"),
    ] = None,
    log: Annotated[Path | None, typer.Option(help="new run folder that records every turn")] = None,
    model_name: ModelName = "",
    key_env: KeyEnv = None,
    as_json: Json = False,
) -> None:
    """Serve the gateway for your trainer: sessions for agents, their turns as JSON (docs/guides/serve.md)."""
    note_reading(policy)
    from coderepairrl.plan.model import format_relay_overrides
    from coderepairrl.processes.signals import Interrupted
    from coderepairrl.stages import serve as served

    if admin is not None and admin_port is not None:
        raise UsageError("--admin and --admin-port both say where the host's API listens", fix="leave out one of them")
    plan = served.plan_server(policy, [*(overrides or []), *format_relay_overrides(model_name, key_env)], log=log)

    def ready(where: dict[str, Any]) -> None:
        show(json.dumps(where) if as_json else format_nested(where))

    addresses: dict[str, Any] = {"host": host, "port": port, "socket": socket, "admin": admin, "admin_port": admin_port}
    with suppress(Interrupted):  # a signal ends it normally
        run_interruptible(served.serve_model(plan, **addresses, chat=chat, log=log, ready=ready, say=note))


def export(
    source: Annotated[
        str, typer.Argument(metavar="RUN", help="a run folder; --to model also takes a checkpoint or adapters")
    ],
    target: Annotated[
        Path | None, typer.Argument(metavar="TARGET", help="new folder (--to model, atif) or file (--to parquet)")
    ] = None,
    to: Annotated[
        Literal["model", "bundle", "parquet", "atif", "tensorboard", "trackio", "wandb"],
        typer.Option(
            help="a Hugging Face folder (model); what a release of a run or study needs (bundle); episodes as chats"
            " (parquet) or trajectories (atif); metrics to a tracker"
        ),
    ] = "model",
    precision: Annotated[
        Literal["fp32", "bf16"] | None,
        typer.Option(help="precision of merged weights (default: the run's); bf16 rounds small changes away"),
    ] = None,
) -> None:
    """Export a run's model (adapters merged), episodes, or metrics."""
    from coderepairrl.stages import export as exports

    if precision is not None and to != "model":
        raise UsageError(f"--precision is for --to model, and this is --to {to}", fix="leave out --precision")
    quoted = shlex.quote(source)
    if to == "model":
        folder = _require_target(target, f"crrl export {quoted} FOLDER")
        run_interruptible(exports.export_model(source, folder, precision))
        show(folder)
    elif to == "bundle":
        folder = _require_target(target, f"crrl export {quoted} FOLDER --to bundle")
        note(format_count(exports.export_bundle(Path(source), folder), "run"))
        show(folder)
    elif to in ("parquet", "atif"):
        placeholder = "FILE.parquet" if to == "parquet" else "FOLDER"
        count = exports.export_episodes(
            Path(source), _require_target(target, f"crrl export {quoted} {placeholder} --to {to}"), to
        )
        note(format_count(count, "episode"))
        show(target)
    else:
        if target is not None:
            raise UsageError(f"--to {to} sends metrics and writes no {target}", fix=f"crrl export {quoted} --to {to}")
        show(f"{format_count(exports.export_metrics(Path(source), to), 'record')} sent to {to}")


def _require_target(target: Path | None, fix: str) -> Path:
    if target is None:
        raise UsageError("TARGET is missing: the new folder or file to write", fix=fix)
    return target
