"""Supervised fine-tuning on one page: examples -> batches -> updates -> held-out loss -> checkpoints.

A step depends on examples, seed and its number: after a kill, steps since the last checkpoint repeat identically.
"""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from coderepairrl.config import Config
from coderepairrl.errors import RunError, UsageError
from coderepairrl.gateway import PolicySource
from coderepairrl.learn import Form, Learner, TokenAccount
from coderepairrl.plan import imitation
from coderepairrl.plan.imitation import ImitationPlan, resolve_imitation
from coderepairrl.plan.learner import warn_of_default_rate
from coderepairrl.printable import format_count
from coderepairrl.processes.meter import Meter
from coderepairrl.protocols import Engine
from coderepairrl.rollout.supervise import SupervisedEngine
from coderepairrl.runs import Log, RunFolder
from coderepairrl.runs.examples import EXAMPLES_FILE
from coderepairrl.stages import life_cycle
from coderepairrl.stages.hello import compare_first_and_last, format_headline, format_hello, list_next_commands
from coderepairrl.stages.history import History, read_history
from coderepairrl.stages.parts import EvaluationContext, open_rollout, prepare_initial_model, start_learner
from coderepairrl.stages.policy import replayed_steps
from coderepairrl.stages.progress import Progress
from coderepairrl.stages.train import evaluate_policy, is_evaluation_due
from coderepairrl.sync.weights import create_shared_folder
from coderepairrl.types import Sample

LOSS = "held_out/loss"
"""Metric of held-out examples."""
_HELD_OUT_METRICS = ("loss", "nll", "accuracy", "kl", "teacher_kl", "tokens")


@dataclass(slots=True, kw_only=True)
class _SftContext:
    """Running parts of a fine-tuning run."""

    plan: ImitationPlan
    folder: RunFolder
    log: Log
    progress: Progress
    history: History
    model: Path
    outbox: Path
    learner: Learner
    evaluation: EvaluationContext | None
    """None without evaluations, like `engine`."""
    engine: SupervisedEngine | None
    first_metrics: Mapping[str, Any]
    """Metrics of held-out examples before the first step."""
    served_step: int = 0
    """Step of the engine's weights."""
    served_folder: Path | None = None
    """Folder of these weights; None for the initial ones."""


def plan_sft(
    file: str, overrides: Sequence[str] = (), *, resume: bool = False, fetches: bool = True
) -> tuple[ImitationPlan, RunFolder]:
    """Plan `crrl sft FILE OVERRIDES`, and locate its run folder; without `fetches`, no model is downloaded.

    Raises `UsageError` for a `file` of examples, and as `load_settings` and `resolve_imitation`.
    """
    if (Path(file) / EXAMPLES_FILE).is_file():
        raise UsageError(
            f"{file} has examples to learn from, but no settings",
            fix=f"crrl sft sft-tiny data.paths={shlex.quote(str(file))}, or your own config in place of sft-tiny",
        )
    config, folder = life_cycle.load_settings(file, overrides, resume=resume)
    return resolve_imitation(life_cycle.pin_models(config, fetches=fetches)), folder


async def run_sft(
    plan: ImitationPlan, folder: RunFolder, *, resume: bool = False, quiet: bool = False
) -> dict[str, Any]:
    """Train by `plan` in `folder`; return the summary for ``--json``.

    `resume` continues the run. Raises `Interrupted` after one of `signals.STOPPING`, `UsageError` for a folder that is
    taken or holds another run, else the error that stopped the run.
    """
    meter, progress = Meter(), Progress(plan.config.run.steps, quiet=quiet)
    with (
        life_cycle.handle_interruption(folder, progress, f"crrl sft {shlex.quote(str(folder.path))} --resume"),
        progress,
    ):
        life_cycle.check_folder(folder, plan, "sft", resume=resume)
        if resume:
            _check_examples(plan, folder)
        await life_cycle.begin_run(folder, plan, progress, {"data": _summarise_examples(plan)}, resume=resume)
        life_cycle.write_learned_tasks(folder, plan.config, {each.task for each in plan.examples.train})
        _log_plan(plan, folder, progress)
        async with (
            _open_context(plan, folder, progress) as run,
            life_cycle.record_session(
                run.log, folder, plan.config, run.history, progress, meter, {"engine": plan.config.engine.name}
            ),
        ):
            await _restore_run(run)
            await _run_steps(run)
    return summarise_fine_tuning(folder)


def summarise_fine_tuning(folder: RunFolder) -> dict[str, Any]:
    """Summarise steps, last metrics, lowest held-out loss, and evaluations."""
    history = read_history(folder)
    metrics_by_step = {0: _read_first_metrics(folder)} | {record["step"]: record["metrics"] for record in history.steps}
    losses = {step: metrics[LOSS] for step, metrics in metrics_by_step.items() if LOSS in metrics}
    held_out = {}
    if losses:
        best = min(losses, key=lambda step: losses[step])
        held_out = {"best_step": best, "best_loss": losses[best], "last_loss": losses[max(losses)]}
    return {**life_cycle.summarise_run(folder, history), "held_out": held_out}


def format_fine_tuning(folder: RunFolder, config: Config) -> str:
    """Format the losses of a finished run, its evaluations, and what to do next."""
    history = read_history(folder)
    # a skipped step has no loss
    computed = [each for each in history.steps if "learn/loss" in each["metrics"]]
    losses = [f"{each['metrics']['learn/loss']:.4f} in step {each['step']}" for each in computed]
    lines = [f"loss: {losses[0]}, {losses[-1]}"] if losses else ["no step had a finite loss"]
    held_out = summarise_fine_tuning(folder)["held_out"]
    if held_out and LOSS in (first_metrics := _read_first_metrics(folder)):
        lines.append(
            f"held-out loss: {first_metrics[LOSS]:.4f} before, {held_out['last_loss']:.4f} after the last step, "
            f"{held_out['best_loss']:.4f} at best (step {held_out['best_step']})"
        )
    if history.evaluations:
        report = compare_first_and_last(folder, config)
        lines += ["", format_hello(report), "", format_headline(report)]
    else:
        lines.append(f"run folder: {folder.path}")
    run = shlex.quote(str(folder.path))
    next_commands = {
        f"crrl eval FILE --policy {run}": "tests passing on the held-out tasks of a configuration",
        f"crrl train FILE model.path={run}": "reinforcement learning from here, on other tasks",
    }
    return "\n".join([*lines, *list_next_commands(folder.path, next_commands)])


async def _run_steps(run: _SftContext) -> None:
    config, history, examples = run.plan.config, run.history, len(run.plan.examples.train)
    await _evaluate_if_due(run, history.step)
    while history.step < config.run.steps:
        step = history.step + 1
        began = time.monotonic()
        run.progress.report_failures()
        learned = await _learn_step(run, step)
        held_out: dict[str, Any] = {}
        if _is_measurement_due(run.plan, step) and run.plan.examples.held_out:
            held_out = await _measure_held_out(run)
        numbers = {name: value for name, value in learned.items() if name != "skipped_reason"}
        metrics = {
            **{f"learn/{name}": value for name, value in numbers.items()},
            **held_out,
            "epoch": round(imitation.count_seen(config.data, examples, step) / examples, 4),
            "learn_seconds": round(time.monotonic() - began, 3),
        }
        record = {"step": step, "version": run.learner.version, "metrics": metrics}
        record |= {"skipped": learned.get("skipped_reason", ""), "account": asdict(TokenAccount()), "episodes": []}
        life_cycle.log_step(run.log, history, run.progress, record)
        run.folder.add_metrics({"step": step, **metrics})
        await _checkpoint_if_due(run)
        await _evaluate_if_due(run, step)


async def _learn_step(run: _SftContext, step: int) -> dict[str, Any]:
    async def restore() -> None:
        await run.learner.close(restarts=True)
        run.learner = await start_learner(run.plan, run.plan.learner, run.folder, run.model, run.outbox, run.progress)
        await _restore_run(run)

    return await life_cycle.retry_learner(
        lambda: run.learner.step(_select_batch(run.plan, step)),
        restore,
        run.plan.config.run.retries,
        run.progress.alarm,
    )


def _select_batch(plan: ImitationPlan, step: int) -> list[Sample]:
    data, rows = plan.config.data, plan.examples.train
    return [
        row
        for at in imitation.list_step_examples(data, len(rows), plan.config.run.seed, step)
        for row in rows[at].samples
    ]


async def _restore_run(run: _SftContext) -> None:
    """Bring the learner to the history's end; write missing files. Raises `RunError` if replayed steps differ."""
    done, replayed = run.history.step, replayed_steps(run.folder, run.history)
    newest = replayed.start - 1
    if done:
        run.progress.resume(done, replayed)
    if newest:
        await run.learner.restore(run.folder.list_checkpoints()[newest])
    elif not run.first_metrics and run.plan.examples.held_out:
        run.first_metrics = await _measure_held_out(run)
        run.log.append("held_out", step=0, metrics=run.first_metrics)
        run.progress.say(f"held-out loss before the first step: {run.first_metrics[LOSS]:.4f}")
    for record in run.history.steps[newest:]:  # steps are numbered from 1
        learned = await run.learner.step(_select_batch(run.plan, record["step"]))
        for name in ("loss", "grad_norm"):
            if learned.get(name) != record["metrics"].get(f"learn/{name}"):
                raise RunError(
                    f"replaying step {record['step']} of {run.folder.log} gives another {name} than the run had",
                    fix="resume with the library versions in run.json, on the same kind of machine",
                )
    if done:
        run.folder.write_metrics([{"step": entry["step"], **entry["metrics"]} for entry in run.history.steps])
        await _checkpoint_if_due(run)


async def _checkpoint_if_due(run: _SftContext) -> None:
    config, step = run.plan.config, run.history.step
    if life_cycle.is_checkpoint_due(run.folder, config, step):
        path = await life_cycle.save_checkpoint(run.learner, run.folder, config, step)
        run.log.append("checkpoint", step=step, path=path.name)


def _is_measurement_due(plan: ImitationPlan, step: int) -> bool:
    """Whether `step` is the last, or ends an epoch."""
    batch, examples = plan.config.data.batch, len(plan.examples.train)
    return step == plan.config.run.steps or step * batch // examples > (step - 1) * batch // examples


async def _measure_held_out(run: _SftContext) -> dict[str, Any]:
    measured = await run.learner.measure([row for each in run.plan.examples.held_out for row in each.samples])
    return {f"held_out/{name}": measured[name] for name in _HELD_OUT_METRICS if name in measured}


def _read_first_metrics(folder: RunFolder) -> dict[str, Any]:
    return next((record["metrics"] for record in folder.records() if record["type"] == "held_out"), {})


async def _evaluate_if_due(run: _SftContext, step: int) -> None:
    evaluation, engine = run.evaluation, run.engine
    if evaluation is None or engine is None or not is_evaluation_due(run.plan.config, step):
        return
    for name, tasks in evaluation.eval_tasks.items():
        if tasks and (name, step) not in run.history.evaluations:
            if run.served_step != step:
                form: Form = "adapter" if run.plan.model.needs.adapter_rank else "model"
                published = await run.learner.publish(form)
                await engine.load(*published)
                if run.served_folder is not None:
                    shutil.rmtree(run.served_folder, ignore_errors=True)
                run.served_step, run.served_folder = step, published.path
            await evaluate_policy(evaluation, run.history, name, step, run.learner.version)


@asynccontextmanager
async def _open_context(plan: ImitationPlan, folder: RunFolder, progress: Progress) -> AsyncIterator[_SftContext]:
    """Open learner and, for tasks, engine and gateway. Raises `Fault`."""

    async def start_engine() -> Engine:
        return await plan.model.engine.start(model, log_dir=folder.logs, needs=plan.model.needs)

    async with AsyncExitStack() as stack:
        log = folder.writer()
        stack.callback(log.close)
        history = read_history(folder)
        outbox = stack.enter_context(create_shared_folder(folder))
        model = await prepare_initial_model(plan, folder)
        evaluation: EvaluationContext | None = None
        engine: SupervisedEngine | None = None
        if plan.evaluation_plan is not None:
            tasks = plan.evaluation_plan.eval_tasks
            folder.add_tasks(chain(*tasks.values()))
            engine = SupervisedEngine(await start_engine(), start_engine, restarts=plan.config.run.retries)
            stack.push_async_callback(engine.close)
            source, socket = PolicySource(plan.model.codec, engine), outbox / "gateway.sock"
            rollout = await stack.enter_async_context(
                open_rollout(plan.evaluation_plan, source, log, socket, progress.episode, progress.say)
            )
            evaluation = EvaluationContext(
                config=plan.config, folder=folder, log=log, eval_tasks=tasks, rollout=rollout, progress=progress
            )
        run = _SftContext(
            plan=plan,
            folder=folder,
            log=log,
            progress=progress,
            history=history,
            model=model,
            outbox=outbox,
            learner=await start_learner(plan, plan.learner, folder, model, outbox, progress),
            evaluation=evaluation,
            engine=engine,
            first_metrics=_read_first_metrics(folder),
        )
        stack.push_async_callback(lambda: run.learner.close())  # the learner at that time: a dead one is replaced
        for notice in run.learner.notices:
            progress.say(notice)
        yield run


def _summarise_examples(plan: ImitationPlan) -> dict[str, Any]:
    examples = plan.examples
    dropped = {reason: sorted(names) for reason, names in examples.dropped.items()}
    return {**examples.counts(), "files": examples.files, "rendered": examples.rendered, "dropped": dropped}


def _check_examples(plan: ImitationPlan, folder: RunFolder) -> None:
    """Raise `UsageError` if the files of examples have changed."""
    recorded = folder.about()["data"]["files"]
    changed = [path for path, digest in recorded.items() if plan.examples.files.get(path) != digest]
    if changed or len(recorded) != len(plan.examples.files):
        raise UsageError(
            f"{(changed or ['data.paths'])[0]} has other examples than the run began with",
            fix="put the file back, or give the run on the new examples another run.name",
        )


def _log_plan(plan: ImitationPlan, folder: RunFolder, progress: Progress) -> None:
    counts, config = plan.examples.counts(), plan.config
    progress.say(f"run folder {folder.path}")
    progress.say(
        f"{format_count(counts['train'], 'example')} of {format_count(counts['tasks'], 'task')} "
        f"({counts['trained_tokens']:,} of {counts['tokens']:,} tokens are trained), {counts['held_out']:,} held out"
    )
    steps, data = config.run.steps, config.data
    setting = "data.epochs" if data.epochs else "run.steps"
    epochs = data.epochs or steps * data.batch / counts["train"]
    progress.say(
        f"{format_count(steps, 'step')} of {format_count(data.batch, 'example')}, by {setting}:"
        f" each example is seen {epochs:.3g} times"
    )
    for reason, count in plan.examples.rendered.items():
        progress.say(f"{format_count(count, 'example')} {reason}, rendered from their messages by the model's template")
    if plan.examples.dropped:
        progress.say(f"left out: {imitation.format_unfit(plan.examples.dropped)}")
    if plan.memory_warning:
        progress.say(plan.memory_warning)
    if warning := warn_of_default_rate(config):
        progress.say(f"WARNING: {warning}")


def sft_plan_as_json(plan: ImitationPlan, folder: RunFolder) -> dict[str, Any]:
    """Convert a plan for ``--dry-run``."""
    data, steps = plan.config.data, plan.config.run.steps
    measurements = 0
    if plan.examples.held_out:
        measurements = 1 + sum(_is_measurement_due(plan, step) for step in range(1, steps + 1))
    tasks: Mapping[str, Sequence[Any]] = plan.evaluation_plan.eval_tasks if plan.evaluation_plan else {}
    return {
        "run": str(folder.path),
        "model": plan.model.name,
        "data": {
            **plan.examples.counts(),
            "rendered": plan.examples.rendered,
            "dropped": {reason: len(names) for reason, names in plan.examples.dropped.items()},
        },
        "steps": steps,
        "epochs": round(steps * data.batch / len(plan.examples.train), 2) if data.epochs is None else data.epochs,
        "measurements": measurements,
        "evaluations": {name: len(held_out) for name, held_out in tasks.items()},
        "may_not_fit": plan.memory_warning,
        "log": list(plan.config.log),
        "learner": plan.learner.model_dump(),
    }
