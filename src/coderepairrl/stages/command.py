"""Starts, resumes, plans and stops a run."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coderepairrl import engines, models
from coderepairrl.assembly.devices import VISIBLE, check_named
from coderepairrl.assembly.learner import settings
from coderepairrl.assembly.plan import Plan, resolve
from coderepairrl.assembly.problems import Problems
from coderepairrl.assembly.prompts import LongestPrompt
from coderepairrl.assembly.sizing import DoesNotFit, require
from coderepairrl.assembly.verify import as_planned, verify
from coderepairrl.config import Config, run_of, to_toml
from coderepairrl.errors import CodeRepairError, ConfigError, RunError, UsageError, several
from coderepairrl.learn.account import accounts_by_kind
from coderepairrl.learn.stitch import Account
from coderepairrl.processes.signals import Interrupted, stoppable
from coderepairrl.rollout import Terms
from coderepairrl.runs import RunFolder
from coderepairrl.runs.storage import damage, difference, digests
from coderepairrl.stages.changes import Change, changes_at_resume, check_resumed
from coderepairrl.stages.history import History, read_history
from coderepairrl.stages.parts import Parts, assemble, until_called_off
from coderepairrl.stages.progress import Progress
from coderepairrl.stages.train import evaluation_due, train
from coderepairrl.types import Episode

_ENOUGH_DISK = 64 << 20


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
    folder = folder or folder_of(config)
    # a mistake must not cost a run folder; it may take minutes, and has nothing to bring in order
    plan = resolve(_pinned(config), resumed=resume)
    plan.require()
    with stoppable() as received:
        try:
            with Progress(config.run.steps, quiet=quiet, show=show) as progress:
                await _begin(plan, folder, progress, resume=resume)
                async with assemble(plan, folder, progress) as parts:
                    history = read_history(folder)
                    changes = _changes(plan, folder, history) if resume else []  # the run is locked
                    folder.write_config(to_toml(plan.config))  # what --resume will go on with
                    await _until_stopped(plan, parts, history, changes, received)
            return summary(folder)
        except asyncio.CancelledError:
            if not received:
                raise
            fix = f"crrl train {folder.path} --resume" if resume else "start it again"
            raise Interrupted(f"{received[0]}: stopped before its first step", fix=fix) from None


async def _begin(plan: Plan, folder: RunFolder, progress: Progress, *, resume: bool) -> None:
    """The run folder, once all is well: begun, or as it was left."""
    if resume:
        check_resumed(folder, plan.config, plan.reward_versions)
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
        _create(folder, plan, await until_called_off(digests, began))
    progress.say(f"run folder {folder.path}")
    if doubt:
        progress.say(doubt)


def _changes(plan: Plan, folder: RunFolder, history: History) -> list[Change]:
    return changes_at_resume(folder, history, plan.config, plan.reward_versions)


def _model(plan: Plan, folder: RunFolder) -> Path:
    """Where the initial policy comes from, or random weights that were drawn for it, or merged ones, lie."""
    own = folder.path / "model"
    return own if own.is_dir() else plan.model.folder


def _pinned(config: Config) -> Config:
    """`config` with the checkpoint that a run as ``model.path`` stands for now: that run may go on."""
    if config.model.path.startswith("builtin:"):
        return config
    try:
        found = models.named(config.model.path)
    except UsageError:  # which is reported with all else that is wrong
        return config
    path = config.model.path if found.run is None else str(found.adapter or found.folder)
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})


async def _check_model(folder: RunFolder, plan: Plan) -> None:
    """Raise `UsageError` where the model that the run began from is another one by now: it is known by a path alone."""
    path = _model(plan, folder)
    known = folder.about().get("model", {})  # not of runs of older versions
    found = damage(path) if path.parent == folder.path else await until_called_off(difference, path, known)
    if found:
        raise UsageError(
            f"the run began from another model than there is in {path}: {found}",
            fix="restore that file, or put the model back in its place; the changed model is another run's",
        )


def _create(folder: RunFolder, plan: Plan, model: Mapping[str, str]) -> None:
    about = {
        "name": plan.config.run.name,
        "seed": plan.config.run.seed,
        "rewards": plan.reward_versions,
        "config": plan.config.model_dump(mode="json"),
        "model": model,
    }
    folder.create(to_toml(plan.config), about, plan.model.engine.versions())


async def _until_stopped(
    plan: Plan, parts: Parts, history: History, changes: Sequence[Change], received: Sequence[str]
) -> None:
    try:
        names = {"sandbox": plan.place.sandbox.name, "engine": plan.model.engine.name}
        parts.log.append("start", step=history.step, **names, clip=plan.clip)
        if plan.clip.startswith("never"):
            parts.progress.say(f"the ratio's clip never acts{plan.clip.removeprefix('never')}")
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
    kinds = accounts_by_kind(folder.records())
    account = sum(kinds.values(), Account())
    return {
        "run": str(folder.path),
        "steps": history.step,
        "version": history.steps[-1]["version"] if history.steps else 0,
        "metrics": history.steps[-1]["metrics"] if history.steps else {},
        "evaluations": _by_name(history),
        "account": {**asdict(account), "balanced": account.balanced},
        "kinds": {kind: {**asdict(own), "balanced": own.balanced} for kind, own in kinds.items()},
    }


def _by_name(history: History) -> dict[str, dict[int, Any]]:
    found: dict[str, dict[int, Any]] = {}
    for (name, step), record in history.evaluations.items():
        found.setdefault(name, {})[step] = record["summary"]
    return found


def dry_run(config: Config, folder: RunFolder | None = None) -> tuple[dict[str, Any], CodeRepairError | None]:
    """What `run` would do, checked as far as it can be without starting anything (``--dry-run``); and what is wrong.

    What is known is given even where the rest is refused.
    """
    shown: dict[str, Any] = {}
    problems = Problems()
    if known := problems.attempt(lambda: needs(config)):
        shown["needs"] = known.value
    if made := problems.attempt(lambda: resolve(config)):
        plan = made.value
        if plan.lacking:
            lacking = several(plan.lacking)
            shown["missing"] = {"what": str(lacking), "fix": lacking.fix}
            problems.add(lacking)
        shown |= as_shown(plan, folder or folder_of(config))
    shown["verdict"] = _verdict(shown, problems.found)
    return shown, several(problems.found) if problems.found else None


def _verdict(shown: Mapping[str, Any], problems: Sequence[CodeRepairError]) -> str:
    """Whether it can be run here, in a sentence, and what ends an episode first as far as that is known."""
    if problems:
        mistakes = "1 mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
        return f"it cannot be run here: {mistakes}"
    memory = any("has_gb" in part for part in shown["needs"].values() if isinstance(part, dict))
    reasons = ["each GPU holds its parts"] if memory else []
    reasons += [f"the longest prompt has {shown['longest_prompt']}"] if shown["longest_prompt"] else []
    if limit := shown["needs"].get("step", {}).get("limit"):
        reasons.append(f"episodes end first by {limit}")
    return f"it fits: {'; '.join(reasons)}" if reasons else "it fits"


def plan(config: Config, folder: RunFolder | None = None) -> dict[str, Any]:
    """What `run` would do, as plain data. Raises what `resolve` raises."""
    return as_shown(resolve(config), folder or folder_of(config))


def as_shown(plan: Plan, folder: RunFolder) -> dict[str, Any]:
    """A plan as ``--dry-run`` prints it."""
    config, held_out = plan.config, plan.eval_tasks
    steps, per_step = config.run.steps, config.rollout.tasks_per_step * config.rollout.group_size
    times = sum(evaluation_due(config, step) for step in range(steps + 1))
    each = config.eval.each
    return {
        "run": str(folder.path),
        "model": str(plan.model.folder),
        "sandbox": plan.place.choice.name,
        "engine": config.engine.name,
        "devices": {name: env.get(VISIBLE, "all") for name, env in plan.devices._asdict().items()},
        "tasks": {"train": len(plan.train_tasks), "held_out": {name: len(tasks) for name, tasks in held_out.items()}},
        "verify": as_planned(plan),
        "steps": steps,
        "episodes_per_step": per_step,
        "training_episodes": per_step * steps,
        "epochs": round(config.rollout.tasks_per_step * steps * _most_often(plan), 2),
        "evaluations": times * sum(bool(tasks) for tasks in held_out.values()),
        "evaluation_episodes": times * sum(len(tasks) * each[name].attempts for name, tasks in held_out.items()),
        "longest_prompt": "" if plan.prompt is None else _prompt_shown(plan.prompt),
        "limits": asdict(plan.limits),
        **(
            {"kinds": {name: _terms_shown(terms) for name, terms in plan.kinds.items() if name}} if config.kinds else {}
        ),
        "clip": plan.clip,
        "learner": plan.learner.model_dump(),
    }


def _prompt_shown(prompt: LongestPrompt) -> str:
    return f"{prompt.tokens:,} of {prompt.most:,} tokens by {prompt.limit} (task {prompt.task})"


def _terms_shown(terms: Terms) -> dict[str, Any]:
    paid = {reward.name: weight for reward, weight in terms.rewards["train"]}
    return {"agent": terms.agent.name, "limits": asdict(terms.limits), "reward": paid}


def _most_often(plan: Plan) -> float:
    """How often a task comes, for each one of all that are trained on, in the source whose tasks come most often."""
    whole = sum(source.weight for source in plan.sources)
    return max(source.weight / whole / len(source.tasks) for source in plan.sources)


def needs(config: Config) -> dict[str, Any]:
    """What `run` needs of each GPU and about how long a step takes, which asks for no model, task or GPU to be here.

    Raises `sizing.DoesNotFit`, with the nearest change that fits, and `ConfigError`.
    """
    check_named(config, engines.make(config.engine.name, **config.engine.options).takes_gpus)
    return require(config, settings)


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
