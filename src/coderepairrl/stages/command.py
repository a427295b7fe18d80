"""Start, resume and stop a run."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coderepairrl import models
from coderepairrl.config import Config, run_of, to_toml
from coderepairrl.errors import CodeRepairError, ConfigError, RunError, UsageError
from coderepairrl.learn.account import accounts_by_kind
from coderepairrl.learn.stitch import Account
from coderepairrl.plan.conditions import TRAINING, conditions, differences
from coderepairrl.plan.learner import settings
from coderepairrl.plan.plan import Plan, resolve
from coderepairrl.plan.sizing import DoesNotFit, require
from coderepairrl.plan.tasks import learned_by
from coderepairrl.plan.verify import verify
from coderepairrl.processes.meter import Meter
from coderepairrl.processes.signals import Interrupted, stoppable
from coderepairrl.runs import RunFolder
from coderepairrl.runs.learned import write_learned
from coderepairrl.runs.storage import damage, difference, digests
from coderepairrl.stages.changes import Change, changes_at_resume, check_resumed, left_out
from coderepairrl.stages.history import History, read_history
from coderepairrl.stages.parts import Parts, assemble, until_called_off
from coderepairrl.stages.progress import Progress
from coderepairrl.stages.trackers import following
from coderepairrl.stages.train import train
from coderepairrl.stages.used import metered
from coderepairrl.types import Episode

_ENOUGH_DISK = 64 << 20


def folder_of(config: Config) -> RunFolder:
    """Run folder of `config`."""
    return RunFolder(Path(config.run.dir) / config.run.name)


def named(source: str, config: Config) -> RunFolder:
    """Run folder for ``--resume``: `source`, else the one in `config`. Raises `ConfigError` if they conflict."""
    if (folder := run_of(source)) is None:
        return folder_of(config)
    if Path(config.run.dir).resolve() != folder.parent.resolve():
        raise ConfigError(
            f"{folder} is to be resumed, and run.dir={config.run.dir} names another place",
            fix="leave run.dir out: a run is continued where it lies",
        )
    return RunFolder(folder)


async def run(
    config: Config,
    *,
    resume: bool = False,
    quiet: bool = False,
    folder: RunFolder | None = None,
    show: Callable[[Episode], str] = lambda episode: "",
    again: str = "crrl train {run} --resume",
) -> dict[str, Any]:
    """Train by `config` in `folder`; return the summary for ``--json``.

    `show` gives further lines for an episode; `again` is the resuming command, ``{run}`` the folder. Raises
    `Interrupted` after one of `signals.STOPPING`, else the error that stopped the run.
    """
    folder, meter = folder or folder_of(config), Meter()
    # a mistake must not cost a run folder; it may take minutes, and has nothing to bring in order
    plan = resolve(pinned(config), resumed=resume)
    plan.require()
    with stoppable() as received:
        try:
            with Progress(config.run.steps, quiet=quiet, show=show) as progress:
                if not config.reward:
                    progress.say(f"reward: {plan.rewards_in_words['train']}")
                await _begin(plan, folder, progress, resume=resume)
                async with assemble(plan, folder, progress) as parts:
                    history = read_history(folder)
                    changes = _changes(plan, folder, history) if resume else []  # the run is locked
                    folder.write_config(to_toml(plan.config))  # what --resume will go on with
                    async with following(folder, config.log, progress.say):
                        resumed_by = again.format(run=folder.path)
                        await _until_stopped(plan, parts, history, changes, received, meter, resumed_by)
            return summary(folder)
        except asyncio.CancelledError:
            if not received:
                raise
            fix = again.format(run=folder.path) if resume or folder.log.exists() else "start it again"
            raise Interrupted(f"{received[0]}: stopped before its first step", fix=fix) from None


async def _begin(plan: Plan, folder: RunFolder, progress: Progress, *, resume: bool) -> None:
    # The run folder is made only once all is well.
    if resume:
        check_resumed(folder, plan.config, plan.reward_versions, plan.too_long)
    else:
        folder.require_free()  # before the minutes that references may take
    _check_disk(folder)
    doubt = _what_may_not_fit(plan.config)
    await verify(plan, say=progress.say, begin=lambda count: progress.phase("verify", count), advance=progress.advance)
    progress.phase("start")
    if resume:
        await _check_model(folder, plan)
    else:
        began = models.files(plan.model.folder) if plan.config.model.init == "weights" else ()
        checksums = await until_called_off(digests, began)
        present = await asyncio.to_thread(conditions, plan)
        differing = differences(present, present[TRAINING], plan.config)
        _create(folder, plan, checksums, {"conditions": present, "differences": [each._asdict() for each in differing]})
        for each in differing:
            (progress.say if each.meant else progress.alarm)(str(each))
    if plan.config.model.init == "weights":  # of a resumed run, too: it may have been killed before
        write_learned(folder.path, learned_by(plan.config.model.path))
    progress.say(f"run folder {folder.path}")
    if doubt:
        progress.say(doubt)


def _changes(plan: Plan, folder: RunFolder, history: History) -> list[Change]:
    return changes_at_resume(folder, history, plan.config, plan.reward_versions, plan.too_long)


def _model(plan: Plan, folder: RunFolder) -> Path:
    """Initial policy's folder, or random or merged weights made for it."""
    prepared = folder.path / "model"
    return prepared if prepared.is_dir() else plan.model.folder


def pinned(config: Config, *, fetches: bool = True) -> Config:
    """Replace runs as model or teacher by their newest checkpoints, and hub names by commits; `fetches` the models."""
    model = config.model.model_copy(update={"path": _newest(config.model.path, fetches)})
    train = config.train.model_copy(update={"teacher": _newest(config.train.teacher, fetches)})
    return config.model_copy(update={"model": model, "train": train})


def _newest(model: str, fetches: bool) -> str:
    if not model or model.startswith("builtin:"):
        return model
    if models.hub.is_name(model):
        return models.hub.fetch(model) if fetches else model
    try:
        checkpoint = models.named(model)
    except UsageError:  # which is reported with all else that is wrong
        return model
    return model if checkpoint.run is None else str(checkpoint.adapter or checkpoint.folder)


async def _check_model(folder: RunFolder, plan: Plan) -> None:
    # A model is known by its path alone.
    path = _model(plan, folder)
    recorded = folder.about().get("model", {})  # not of runs of older versions
    changes = damage(path) if path.parent == folder.path else await until_called_off(difference, path, recorded)
    if changes:
        raise UsageError(
            f"the run began from another model than there is in {path}: {changes}",
            fix="restore that file, or put the model back in its place; the changed model is another run's",
        )


def _create(folder: RunFolder, plan: Plan, model: Mapping[str, str], found: Mapping[str, Any]) -> None:
    record = {
        "name": plan.config.run.name,
        "seed": plan.config.run.seed,
        "rewards": plan.reward_versions,
        "config": plan.config.model_dump(mode="json"),
        "model": model,
        "too_long": left_out(plan.too_long),
        **found,
    }
    folder.create(to_toml(plan.config), record, plan.model.engine.versions())


async def _until_stopped(
    plan: Plan,
    parts: Parts,
    history: History,
    changes: Sequence[Change],
    received: Sequence[str],
    meter: Meter,
    again: str,
) -> None:
    try:
        names = {"sandbox": plan.place.sandbox.name, "engine": plan.model.engine.name}
        parts.log.append("start", step=history.step, **names, clip=plan.clip)
        if plan.clip.startswith("never"):
            parts.progress.say(f"clipping has no effect{plan.clip.removeprefix('never')}")
        for change in changes:
            parts.log.append("change", **change._asdict())
            parts.progress.say(f"changed: {change}")
            history.changes.append(change._asdict())
        async with metered(parts.log, meter):
            await train(parts, history)
        parts.log.append("end", step=history.step)
    except asyncio.CancelledError:
        if not received:
            raise
        parts.log.append("stop", step=history.step, reason=received[0])
        raise Interrupted(f"{received[0]}: stopped after step {history.step}", fix=again) from None
    except CodeRepairError as error:
        with contextlib.suppress(RunError):  # the log may be what failed: then it ends without
            parts.log.append("stop", step=history.step, reason=str(error).partition("\n")[0])
        raise


def summary(folder: RunFolder) -> dict[str, Any]:
    """Steps, evaluations, and account of sampled tokens."""
    history = read_history(folder)
    kinds = accounts_by_kind(folder.records())
    account = sum(kinds.values(), Account())
    return {
        "run": str(folder.path),
        "steps": history.step,
        "version": history.steps[-1]["version"] if history.steps else 0,
        "metrics": history.steps[-1]["metrics"] if history.steps else {},
        "evaluations": _by_name(history),
        "account": {**asdict(account), "balanced": account.balanced},
        "kinds": {
            kind: {**asdict(balance), "balanced": balance.balanced} for kind, balance in kinds.items() if any(kinds)
        },
    }


def _by_name(history: History) -> dict[str, dict[int, Any]]:
    summaries: dict[str, dict[int, Any]] = {}
    for (name, step), record in history.evaluations.items():
        summaries.setdefault(name, {})[step] = record["summary"]
    return summaries


def _what_may_not_fit(config: Config) -> str:
    # An estimate that may be wrong stops no run.
    try:
        require(config, settings)
    except DoesNotFit as error:
        return f"this may not fit: {error}; {error.fix}"
    return ""


def _check_disk(folder: RunFolder) -> None:
    existing = next(path for path in (folder.path.absolute(), *folder.path.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    if free < _ENOUGH_DISK:
        raise UsageError(f"{folder.path}: only {free >> 20} MiB are free", fix="free some space, or set run.dir")
