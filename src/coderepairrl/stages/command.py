"""Run of `crrl train`, from its start or resumption to its summary, and its preview (``--dry-run``)."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from coderepairrl import engines
from coderepairrl.config import Config
from coderepairrl.errors import CodeRepairError, PrerequisiteError, combine_errors
from coderepairrl.learn.account import count_tokens_by_kind
from coderepairrl.learn.stitch import TokenAccount
from coderepairrl.models import ModelNotFetched, format_download
from coderepairrl.plan import Plan, plan_run
from coderepairrl.plan.conditions import list_time_limit_warnings
from coderepairrl.plan.devices import check_gpu_settings
from coderepairrl.plan.learner import warn_of_default_rate
from coderepairrl.plan.sizing import DoesNotFit, check_memory
from coderepairrl.plan.terms import group_by_kind
from coderepairrl.printable import format_count
from coderepairrl.processes.meter import VISIBLE_GPUS, Meter
from coderepairrl.rewards.verify import Trial, list_trials, verify_rewards
from coderepairrl.runs import RunFolder
from coderepairrl.stages import life_cycle
from coderepairrl.stages.changes import list_changes, summarise_left_out
from coderepairrl.stages.history import read_history
from coderepairrl.stages.parts import open_training
from coderepairrl.stages.progress import Progress
from coderepairrl.stages.train import is_evaluation_due, train
from coderepairrl.types import Episode


async def run_training(
    config: Config,
    *,
    resume: bool = False,
    quiet: bool = False,
    folder: RunFolder | None = None,
    show: Callable[[Episode], str] = lambda episode: "",
    resume_command: str = "crrl train {run} --resume",
) -> dict[str, Any]:
    """Train by `config` in `folder`; return the summary for ``--json``.

    `show` gives further lines for an episode; ``{run}`` in `resume_command` is its folder. Raises
    `Interrupted` after one of `signals.STOPPING`, else the error that stopped the run.
    """
    folder, meter = folder or life_cycle.locate_run_folder(config), Meter()
    # plan before the folder is made, so that a mistake leaves none behind
    plan = plan_run(life_cycle.pin_models(config), resumed=resume)
    plan.require()
    progress = Progress(config.run.steps, quiet=quiet, show=show)
    resume_command = resume_command.format(run=shlex.quote(str(folder.path)))
    with life_cycle.handle_interruption(folder, progress, resume_command), progress:
        if not config.reward:
            progress.say(f"reward: {plan.reward_descriptions['train']}")
        await _begin_training(plan, folder, progress, resume=resume)
        async with open_training(plan, folder, progress) as context:
            history = read_history(folder)
            changes = []
            if resume:  # `check_folder` compared them before the run was locked
                changes = list_changes(folder, history, plan.config, plan.reward_versions, plan.too_long)
            start = {"sandbox": plan.agent_setup.sandbox.name, "engine": plan.model.engine.name, "clip": plan.clip}
            async with life_cycle.record_session(
                context.log, folder, plan.config, history, progress, meter, start, changes
            ):
                if plan.clip.startswith("never"):  # it is "never: REASON"
                    progress.say(f"clipping has no effect{plan.clip.removeprefix('never')}")
                await train(context, history)
    return summarise_training(folder)


async def _begin_training(plan: Plan, folder: RunFolder, progress: Progress, *, resume: bool) -> None:
    # refuse before `verify_plan`, which takes minutes, and create the folder after it
    life_cycle.check_folder(folder, plan, "train", resume=resume)
    needs, doubt = _estimate_fit(plan.config)
    await verify_plan(plan, progress)
    record = {"too_long": summarise_left_out(plan.too_long), "needs": needs}
    await life_cycle.begin_run(folder, plan, progress, record, resume=resume)
    life_cycle.write_learned_tasks(folder, plan.config)
    progress.say(f"run folder {folder.path}")
    if doubt:
        progress.say(doubt)


def summarise_training(folder: RunFolder) -> dict[str, Any]:
    """Summarise steps, evaluations, and the account of sampled tokens."""
    history = read_history(folder)
    accounts = count_tokens_by_kind(folder.records())
    # without kinds of tasks, the only key is ""
    kinds = {kind: {**asdict(each), "balanced": each.is_balanced} for kind, each in accounts.items() if any(accounts)}
    account = sum(accounts.values(), TokenAccount())
    return {
        **life_cycle.summarise_run(folder, history),
        "version": history.steps[-1]["version"] if history.steps else 0,
        "account": {**asdict(account), "balanced": account.is_balanced},
        "kinds": kinds,
    }


def _estimate_fit(config: Config) -> tuple[dict[str, Any], str]:
    """Plan memory and time; a run that does not fit gets a warning, since the estimate may be wrong."""
    try:
        return check_memory(config), ""
    except DoesNotFit as error:
        return {"memory": f"not planned: {error}"}, f"this may not fit: {error}; {error.fix}"


# -- plans and checks before a run


def dry_run(config: Config, folder: RunFolder | None = None) -> tuple[dict[str, Any], CodeRepairError | None]:
    """Preview a run without starting it; return its plan as far as it is known, verdict first, and the problem.

    A model that the run will download is no problem, but what depends on it stays unknown.
    """
    folder = folder or life_cycle.locate_run_folder(config)
    preview: dict[str, Any] = {"verdict": "", "run": str(folder.path)}
    errors: list[CodeRepairError] = []
    try:
        preview["needs"] = compute_needs(config)
    except CodeRepairError as error:
        errors.append(error)
    try:
        plan = plan_run(config)
    except CodeRepairError as error:
        errors.append(error)
    else:
        if plan.missing_prerequisites:
            missing = combine_errors(plan.missing_prerequisites)
            preview["missing"] = {"what": str(missing), "fix": missing.fix}
            errors.append(missing)
        preview |= plan_as_json(plan, folder)
    distinct = combine_errors(errors).problems if errors else ()
    downloads = [each.name for each in distinct if isinstance(each, ModelNotFetched)]
    problems = [each for each in distinct if not isinstance(each, ModelNotFetched)]
    preview["verdict"] = _preview_verdict(preview, problems, downloads)
    return preview, combine_errors(problems) if problems else None


def _preview_verdict(preview: Mapping[str, Any], problems: Sequence[CodeRepairError], downloads: Sequence[str]) -> str:
    """Say whether the run fits here, what it downloads, and what ends episodes first."""
    later = f"the run downloads {' and '.join(downloads)} when it starts" if downloads else ""
    if problems:
        lacking = sum(isinstance(each, PrerequisiteError) for each in problems)
        counts = [format_count(len(problems) - lacking, "mistake")] if len(problems) > lacking else []
        counts += [f"{format_count(lacking, 'thing')} that this machine lacks"] if lacking else []
        return "; ".join(filter(None, [f"it cannot be run here: {' and '.join(counts)}", later]))
    if later:
        return f"no mistake so far; {later}: {format_download(downloads[0])} does it now, so that all can be planned"
    gpu_sizes = [part["has_gb"] for part in preview["needs"].values() if isinstance(part, dict) and "has_gb" in part]
    is_known = all(isinstance(size, int | float) for size in gpu_sizes)
    fits = "it fits" if is_known else "it fits if the GPUs hold their parts, which is not known here (gpu.memory_gb)"
    reasons = ["each GPU holds its parts"] if gpu_sizes and is_known else []
    reasons += [f"the longest prompt has {preview['longest_prompt']}"] if preview["longest_prompt"] else []
    if limit := preview["needs"].get("step", {}).get("limit"):
        reasons.append(f"the first limit to end episodes is {limit}")
    return f"{fits}: {'; '.join(reasons)}" if reasons else fits


def plan_as_json(plan: Plan, folder: RunFolder) -> dict[str, Any]:
    """Convert a plan for ``--dry-run``."""
    config, held_out, prompt = plan.config, plan.eval_tasks, plan.prompt
    kinds = {
        name: {
            "agent": terms.agent.name,
            "limits": asdict(terms.limits),
            "reward": {reward.name: weight for reward, weight in terms.rewards["train"]},
        }
        for name, terms in plan.kinds.items()
        if name
    }
    steps = config.run.steps
    due_evaluations = sum(is_evaluation_due(config, step) for step in range(steps + 1))
    attempts = sum(len(tasks) * config.eval.each[name].attempts for name, tasks in held_out.items())
    warnings = [*filter(None, [warn_of_default_rate(config)]), *list_time_limit_warnings(plan)]
    return {
        "run": str(folder.path),
        **({"warnings": warnings} if warnings else {}),
        "model": str(plan.model.folder),
        "sandbox": plan.choice.name,
        "engine": config.engine.name,
        "devices": {name: env.get(VISIBLE_GPUS, "all") for name, env in plan.devices._asdict().items()},
        "tasks": {"train": len(plan.train_tasks), "held_out": {name: len(tasks) for name, tasks in held_out.items()}},
        **({"left_out_too_long": len(plan.too_long)} if config.tasks.too_long == "drop" else {}),
        "reward": dict(plan.reward_descriptions),
        "verify": describe_trials(plan),
        "steps": steps,
        "episodes_per_step": plan.episodes_per_step,
        "training_episodes": plan.episodes_per_step * steps,
        **({"refilled_at_most": plan.refilled_per_step * steps} if plan.refilled_per_step else {}),
        "epochs": round(plan.curriculum.passes(steps), 2),
        "evaluations": due_evaluations * sum(map(bool, held_out.values())),
        "evaluation_episodes": due_evaluations * attempts,
        "longest_prompt": ""
        if prompt is None
        else f"{prompt.tokens:,} of {prompt.most:,} tokens by {prompt.limit} (task {prompt.task})",
        "limits": asdict(plan.limits),
        **({"kinds": kinds} if config.kinds else {}),
        "clip": plan.clip,
        "log": list(config.log),
        "learner": plan.learner.model_dump(),
    }


def compute_needs(config: Config) -> dict[str, Any]:
    """GPU needs and step time, without model, tasks or GPUs.

    Raises `sizing.DoesNotFit`, with the nearest change that fits, and `ConfigError`.
    """
    check_gpu_settings(config, engines.make_engine(config.engine.name, **config.engine.options).capabilities.uses_gpus)
    return check_memory(config)


async def verify_plan(plan: Plan, progress: Progress) -> None:
    """Run and announce the checks of `tasks.verify`. Raises as `rewards.verify.verify_rewards`."""
    trials_by_kind = plan_trials(plan)
    progress.say(f"rewards checked before training: {describe_trials(plan)}")
    if not trials_by_kind:
        return
    began = time.monotonic()
    for kind, kind_trials in trials_by_kind.items():
        await verify_rewards(kind_trials, plan.kinds[kind].sandbox)
    progress.say(f"checked in {time.monotonic() - began:.1f} s")


def plan_trials(plan: Plan) -> dict[str, list[Trial]]:
    """Plan the trials of training and evaluation rewards, by kind of task."""
    if not plan.config.tasks.verify:
        return {}
    seed, evaluates = plan.config.run.seed, plan.config.eval.is_due
    held_out = {task.id: task for tasks in plan.eval_tasks.values() for task in tasks} if evaluates else {}
    trained, measured = (group_by_kind(plan.kinds, tasks) for tasks in (plan.train_tasks, held_out.values()))
    trials_by_kind: dict[str, list[Trial]] = {}
    for kind, terms in plan.kinds.items():
        kind_trials = list_trials(trained.get(kind, []), terms.rewards["train"], seed)
        for name in [*plan.eval_tasks][:1]:  # all evaluations measure the same
            kind_trials += list_trials(measured.get(kind, []), terms.rewards[name], seed)
        if kind_trials:
            distinct = {(trial.task.id, trial.task.split, trial.reward.name): trial for trial in kind_trials}
            trials_by_kind[kind] = list(distinct.values())
    return trials_by_kind


def describe_trials(plan: Plan) -> str:
    """Describe the planned checks."""
    if not plan.config.tasks.verify:
        return "off: tasks.verify=false"
    all_trials = [trial for kind_trials in plan_trials(plan).values() for trial in kind_trials]
    if not all_trials:
        return "nothing: no reward that measures repair, or no task with a reference"
    names = ", ".join(dict.fromkeys(trial.reward.name for trial in all_trials))
    tasks = len({(trial.task.id, trial.task.split) for trial in all_trials})
    return f"{names} on the reference patches of {format_count(tasks, 'task')} (tasks.verify)"
