"""Starts, resumes, plans and stops a run."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from coderepairrl import engines, models, rewards, sandbox
from coderepairrl.assembly.devices import VISIBLE, check_named, split
from coderepairrl.assembly.numerics import check_clip, clip, resolved
from coderepairrl.assembly.sizing import DoesNotFit, require
from coderepairrl.config import Config, run_of, to_toml
from coderepairrl.errors import CodeRepairError, ConfigError, PrerequisiteError, RunError, UsageError
from coderepairrl.learn import require_packages
from coderepairrl.learn.account import run_account
from coderepairrl.processes.signals import Interrupted, stoppable
from coderepairrl.runs import RunFolder
from coderepairrl.runs.storage import damage, difference, digests
from coderepairrl.stages.changes import Change, changes_at_resume, check_resumed
from coderepairrl.stages.history import History, read_history
from coderepairrl.stages.parts import Parts, assemble, check, limits
from coderepairrl.stages.policy import settings
from coderepairrl.stages.progress import Progress
from coderepairrl.stages.train import evaluation_due, train
from coderepairrl.stages.verify import as_planned, verify
from coderepairrl.types import Episode

_ENOUGH_DISK = 64 << 20
T = TypeVar("T")


def folder_of(config: Config) -> RunFolder:
    """Where the run lives."""
    return RunFolder(Path(config.run.dir) / config.run.name)


def named(source: str, config: Config) -> RunFolder:
    """The run that ``--resume`` is about: the folder that `source` names, of which `config` was loaded, else the one
    that `config` names. What a folder was called where it was made, or copied from, does not count.

    Raises `ConfigError` where a setting names another folder than `source` does.
    """
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
) -> dict[str, Any]:
    """Train as `config` says and return the summary that ``--json`` prints. It lives in `folder`, else in the one that
    `config` names. `show` says what is printed of an episode beside the progress, if anything.

    Raises `Interrupted` after one of `signals.STOPPING`, and otherwise what stopped the run; the log is complete
    either way, and ``resume`` continues it.
    """
    config = resolved(config)
    folder = folder or folder_of(config)
    if not resume:
        check_clip(config)
    # a mistake must not cost a run folder; it may take minutes, and has nothing to bring in order
    found = check(config)
    if lacking := missing(config):
        raise lacking
    with stoppable() as received:
        try:
            if resume:
                check_resumed(folder, config)
            else:
                folder.require_free()  # before the minutes that references may take
            _check_disk(folder)
            doubt = _what_may_not_fit(config)
            with Progress(config.run.steps, quiet=quiet, show=show) as progress:
                await verify(config, *found, progress)
                progress.phase("start")
                if resume:
                    await _check_model(folder, config)
                else:
                    began = models.files(_model(config, folder)) if config.model.init == "weights" else ()
                    _create(folder, config, await _until_called_off(digests, began))
                progress.say(f"run folder {folder.path}")
                if doubt:
                    progress.say(doubt)
                async with assemble(config, folder, progress) as parts:
                    history = read_history(folder)
                    changes = changes_at_resume(folder, history, config) if resume else []  # the run is locked
                    folder.write_config(to_toml(config))  # what --resume will go on with
                    await _until_stopped(parts, history, changes, received)
            return summary(folder)
        except asyncio.CancelledError:
            if not received:
                raise
            fix = f"crrl train {folder.path} --resume" if resume else "start it again"
            raise Interrupted(f"{received[0]}: stopped before its first step", fix=fix) from None


def _model(config: Config, folder: RunFolder) -> Path:
    """Where the initial policy comes from, or random weights that were drawn for it lie."""
    drawn = folder.path / "model"
    return drawn if config.model.init == "random" and drawn.is_dir() else models.folder(config.model.path)


async def _check_model(folder: RunFolder, config: Config) -> None:
    """Raise `UsageError` where the model that the run began from is another one by now: it is known by a path alone."""
    path = _model(config, folder)
    known = folder.about().get("model", {})  # not of runs of older versions
    found = damage(path) if path.parent == folder.path else await _until_called_off(difference, path, known)
    if found:
        raise UsageError(
            f"the run began from another model than there is in {path}: {found}",
            fix="restore that file, or put the model back in its place; the changed model is another run's",
        )


async def _until_called_off(work: Callable[..., T], *arguments: Any) -> T:
    """`work` in a thread, which it is told to leave when this is cancelled: large files take their time."""
    stop = threading.Event()
    try:
        return await asyncio.to_thread(work, *arguments, stopped=stop.is_set)
    finally:
        stop.set()


def _create(folder: RunFolder, config: Config, model: Mapping[str, str]) -> None:
    about = {
        "name": config.run.name,
        "seed": config.run.seed,
        "rewards": rewards.versions(config.reward, config.eval.reward or {}),
        "config": config.model_dump(mode="json"),
        "model": model,
    }
    folder.create(to_toml(config), about, engines.make(config.engine.name, **config.engine.options).versions())


async def _until_stopped(parts: Parts, history: History, changes: Sequence[Change], received: Sequence[str]) -> None:
    try:
        acts = clip(parts.config, settings(parts.config))
        names = {"sandbox": parts.rollout.kinds[""].sandbox.name, "engine": parts.engine.name}
        parts.log.append("start", step=history.step, **names, clip=acts)
        if acts.startswith("never"):
            parts.progress.say(f"the ratio's clip never acts{acts.removeprefix('never')}")
        for change in changes:
            parts.log.append("change", **change._asdict())
            parts.progress.say(f"changed: {change}")
            history.changes.append(change._asdict())
        await train(parts, history)
        parts.log.append("end", step=history.step)
    except asyncio.CancelledError:
        if not received:
            raise
        parts.log.append("stop", step=history.step, reason=received[0])
        raise Interrupted(
            f"{received[0]}: stopped after step {history.step}", fix=f"crrl train {parts.folder.path} --resume"
        ) from None
    except CodeRepairError as error:
        with contextlib.suppress(RunError):  # the log may be what failed: then it ends without
            parts.log.append("stop", step=history.step, reason=str(error).partition("\n")[0])
        raise


def summary(folder: RunFolder) -> dict[str, Any]:
    """What a run has come to: steps, evaluations, the account of every sampled token."""
    history = read_history(folder)
    account = run_account(folder.records())
    return {
        "run": str(folder.path),
        "steps": history.step,
        "version": history.steps[-1]["version"] if history.steps else 0,
        "metrics": history.steps[-1]["metrics"] if history.steps else {},
        "evaluations": _by_name(history),
        "account": {**asdict(account), "balanced": account.balanced},
    }


def _by_name(history: History) -> dict[str, dict[int, Any]]:
    found: dict[str, dict[int, Any]] = {}
    for (name, step), record in history.evaluations.items():
        found.setdefault(name, {})[step] = record["summary"]
    return found


def plan(config: Config, folder: RunFolder | None = None) -> dict[str, Any]:
    """What `run` would do, checked as far as it can be without starting anything (``--dry-run``)."""
    check_clip(config)
    learn = settings(config)
    train_tasks, eval_tasks = check(config)
    rollout, steps = config.rollout, config.run.steps
    per_step = rollout.tasks_per_step * rollout.group_size
    times = sum(evaluation_due(config, step) for step in range(steps + 1))
    each = config.eval.each
    return {
        "run": str((folder or folder_of(config)).path),
        "model": str(models.folder(config.model.path)),
        "sandbox": sandbox.choose(config.sandbox.name).name,
        "engine": config.engine.name,
        "devices": {name: env.get(VISIBLE, "all") for name, env in split(config)._asdict().items()},
        "tasks": {"train": len(train_tasks), "held_out": {name: len(tasks) for name, tasks in eval_tasks.items()}},
        "verify": as_planned(config, train_tasks, eval_tasks),
        "steps": steps,
        "episodes_per_step": per_step,
        "training_episodes": per_step * steps,
        "epochs": round(rollout.tasks_per_step * steps / len(train_tasks), 2),
        "evaluations": times * sum(bool(tasks) for tasks in eval_tasks.values()),
        "evaluation_episodes": times * sum(len(tasks) * each[name].attempts for name, tasks in eval_tasks.items()),
        "limits": asdict(limits(config)),
        "clip": clip(config, learn),
        "learner": asdict(learn),
    }


def needs(config: Config) -> dict[str, Any]:
    """What `run` needs of each GPU and about how long a step takes, which asks for no model, task or GPU to be here.

    Raises `plan.DoesNotFit`, with the nearest change that fits, and `ConfigError`.
    """
    check_named(config)
    return require(config, settings)


def missing(config: Config) -> PrerequisiteError | None:
    """What this machine lacks for engine or learner of `run`, which would raise it; a plan can be made without."""
    try:
        engines.make(config.engine.name, **config.engine.options).require()
        require_packages(settings(config))
    except PrerequisiteError as error:
        return error
    return None


def _what_may_not_fit(config: Config) -> str:
    """A doubt, for an estimate that may be wrong stops no run; empty if there is none."""
    try:
        require(config, settings)
    except DoesNotFit as error:
        return f"this may not fit: {error}; {error.fix}"
    return ""


def _check_disk(folder: RunFolder) -> None:
    there = next(path for path in (folder.path.absolute(), *folder.path.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    if free < _ENOUGH_DISK:
        raise UsageError(f"{folder.path}: only {free >> 20} MiB are free", fix="free some space, or set run.dir")
