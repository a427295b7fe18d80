"""Run of `crrl train`, from its start or resumption to its summary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from coderepairrl.config import Config
from coderepairrl.learn.account import accounts_by_kind
from coderepairrl.learn.stitch import Account
from coderepairrl.plan.learner import settings
from coderepairrl.plan.plan import Plan, resolve
from coderepairrl.plan.sizing import DoesNotFit, require
from coderepairrl.plan.verify import verify
from coderepairrl.processes.meter import Meter
from coderepairrl.runs import RunFolder
from coderepairrl.stages.changes import changes_at_resume, left_out
from coderepairrl.stages.history import read_history
from coderepairrl.stages.life_cycle import (
    begin_run,
    check_folder,
    folder_of,
    interruptible,
    pinned,
    record_session,
    summarise_run,
    write_learned_tasks,
)
from coderepairrl.stages.parts import assemble
from coderepairrl.stages.progress import Progress
from coderepairrl.stages.train import train
from coderepairrl.types import Episode


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
    progress = Progress(config.run.steps, quiet=quiet, show=show)
    with interruptible(folder, progress, again.format(run=folder.path)), progress:
        if not config.reward:
            progress.say(f"reward: {plan.rewards_in_words['train']}")
        await _begin(plan, folder, progress, resume=resume)
        async with assemble(plan, folder, progress) as parts:
            history = read_history(folder)
            changes = []
            if resume:  # the run is locked by now
                changes = changes_at_resume(folder, history, plan.config, plan.reward_versions, plan.too_long)
            names = {"sandbox": plan.place.sandbox.name, "engine": plan.model.engine.name}
            async with record_session(
                parts.log, folder, plan.config, history, progress, meter, changes=changes, **names, clip=plan.clip
            ):
                if plan.clip.startswith("never"):
                    progress.say(f"clipping has no effect{plan.clip.removeprefix('never')}")
                await train(parts, history)
    return summary(folder)


async def _begin(plan: Plan, folder: RunFolder, progress: Progress, *, resume: bool) -> None:
    # The run folder is made only once all is well; what is refused is refused before the minutes of `verify`.
    check_folder(folder, plan, "train", resume=resume)
    doubt = _what_may_not_fit(plan.config)
    await verify(plan, say=progress.say, begin=lambda count: progress.phase("verify", count), advance=progress.advance)
    progress.phase("start")
    await begin_run(folder, plan, progress, {"too_long": left_out(plan.too_long)}, resume=resume)
    write_learned_tasks(folder, plan.config)
    progress.say(f"run folder {folder.path}")
    if doubt:
        progress.say(doubt)


def summary(folder: RunFolder) -> dict[str, Any]:
    """Steps, evaluations, and account of sampled tokens."""
    history = read_history(folder)
    kinds = accounts_by_kind(folder.records())
    balances = {kind: {**asdict(each), "balanced": each.balanced} for kind, each in kinds.items() if any(kinds)}
    account = sum(kinds.values(), Account())
    return {
        **summarise_run(folder, history),
        "version": history.steps[-1]["version"] if history.steps else 0,
        "account": {**asdict(account), "balanced": account.balanced},
        "kinds": balances,
    }


def _what_may_not_fit(config: Config) -> str:
    # An estimate that may be wrong stops no run.
    try:
        require(config, settings)
    except DoesNotFit as error:
        return f"this may not fit: {error}; {error.fix}"
    return ""
