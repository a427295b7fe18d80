"""Life cycle of a run of `crrl train`, `sft`, `eval` and `collect`: begin, resume, retry, prune, conclude.

Settings that a resumed run may change are in `stages.changes`, files in `runs`.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeVar

from coderepairrl import config as configs
from coderepairrl import models
from coderepairrl.config import Config
from coderepairrl.errors import CodeRepairError, ConfigError, LearnerFault, RunError, UsageError
from coderepairrl.learn import Learner
from coderepairrl.plan import Plan
from coderepairrl.plan.conditions import TRAINING, describe_conditions, list_differences
from coderepairrl.plan.imitation import ImitationPlan
from coderepairrl.plan.model import LocalModel
from coderepairrl.plan.tasks import read_tasks_learned_by_model
from coderepairrl.plan.terms import AgentPlan
from coderepairrl.processes.meter import Meter
from coderepairrl.processes.signals import Interrupted, cancel_on_signal
from coderepairrl.report.trackers import feed_trackers
from coderepairrl.runs import Log, RunFolder, open_run, write_learned
from coderepairrl.runs.storage import find_changed_file, find_damage, hash_files
from coderepairrl.stages.changes import Change, fill_rewards, list_changes
from coderepairrl.stages.history import History, read_history
from coderepairrl.stages.progress import Progress

T = TypeVar("T")
_MIN_FREE_DISK = 64 << 20  # Bytes; less is a full disk, in which even a log and a tiny checkpoint would fail.
_METER_INTERVAL = 60.0  # Seconds between records of the machine's use.


# -- settings and folder


def load_settings(file: str, overrides: Sequence[str], *, resume: bool = False) -> tuple[Config, RunFolder]:
    """Settings and run folder of `crrl train` and `crrl sft`; with `resume` those of the run that `file` names.

    Raises `ConfigError`, also if ``run.dir`` moves a resumed run.
    """
    config = configs.load_config(file, overrides)
    if not resume:
        return config, locate_run_folder(config)
    folder = find_resumed_folder(file, config)
    return fill_rewards(folder, config), folder


def locate_run_folder(config: Config) -> RunFolder:
    """Run folder of `config`."""
    return RunFolder(Path(config.run.dir) / config.run.name)


def find_resumed_folder(source: str, config: Config) -> RunFolder:
    """Run folder to resume: `source`, else that of `config`. Raises `ConfigError` if they conflict."""
    if (folder := configs.find_run_folder(source)) is None:
        return locate_run_folder(config)
    if Path(config.run.dir).resolve() != folder.parent.resolve():
        raise ConfigError(
            f"cannot resume {folder}: run.dir={config.run.dir} names another folder",
            fix="leave run.dir out: a run continues in its folder",
        )
    return RunFolder(folder)


def find_free_folder(path: Path) -> Path:
    """`path`, or with a number if it is taken: ``NAME-2``, ``NAME-3``, ..."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return next(each for each in chain([path], numbered) if not each.exists())


def pin_models(config: Config, *, fetches: bool = True) -> Config:
    """Replace model and teacher: runs by their newest checkpoints and, with `fetches`, hub names by fetched commits."""
    model = config.model.model_copy(update={"path": _pin_model(config.model.path, fetches)})
    train = config.train.model_copy(update={"teacher": _pin_model(config.train.teacher, fetches)})
    return config.model_copy(update={"model": model, "train": train})


def _pin_model(model: str, fetches: bool) -> str:
    if not model or model.startswith("builtin:"):
        return model
    if models.is_hub_name(model):
        return models.fetch_model(model) if fetches else model
    try:
        checkpoint = models.resolve_model(model)
    except UsageError:  # reported later, with all other mistakes
        return model
    return model if checkpoint.run is None else str(checkpoint.adapter or checkpoint.folder)


# -- create and resume


def require_command(folder: RunFolder, command: str) -> None:
    """Raise `UsageError` unless `folder` holds a run of `crrl` `command`."""
    if (made_by := open_run(folder.path).command()) != command:
        raise UsageError(f"{folder.path} is a run of crrl {made_by}", fix=f"crrl {made_by} {folder.path} --resume")


def check_folder(folder: RunFolder, plan: AgentPlan | ImitationPlan, command: str, *, resume: bool) -> None:
    """Check that `plan` can begin a run in `folder` or, with `resume`, continue the one there.

    Raises `UsageError` for a taken folder, another command's run or a full disk, `ConfigError` for other settings.
    """
    existing = next(path for path in (folder.path.absolute(), *folder.path.absolute().parents) if path.is_dir())
    disk = shutil.disk_usage(existing)
    if not disk.total:  # a virtual file system: /proc, /sys
        raise UsageError(f"{folder.path}: {existing} is not on a disk", fix="set run.dir")
    if disk.free < _MIN_FREE_DISK:
        raise UsageError(f"{folder.path}: only {disk.free >> 20} MiB are free", fix="free some space, or set run.dir")
    if not resume:
        folder.require_free()
        return
    require_command(folder, command)
    too_long = plan.too_long if isinstance(plan, Plan) else ()
    list_changes(folder, read_history(folder), plan.config, _reward_versions(plan), too_long)


def _reward_versions(plan: AgentPlan | ImitationPlan) -> dict[str, int]:
    rollouts = plan.evaluation_plan if isinstance(plan, ImitationPlan) else plan
    return rollouts.reward_versions if rollouts else {}


async def begin_run(
    folder: RunFolder,
    plan: AgentPlan | ImitationPlan,
    progress: Progress,
    record: Mapping[str, Any],
    *,
    resume: bool,
) -> None:
    """Create `folder`, with `record` in run.json, or check that the model of a resumed run is unchanged.

    Prints how evaluations differ from training. Raises `UsageError`, and as `read_tasks_learned_by_model`.
    """
    if resume:
        await _check_model(folder, plan)
        return
    present, training = await asyncio.to_thread(_describe_conditions, plan)
    differing = list_differences(present, training, plan.config if TRAINING in present else None) if training else []
    common = {
        "name": folder.path.name,
        "seed": plan.config.run.seed,
        "config": plan.config.model_dump(mode="json"),
        "rewards": _reward_versions(plan),
        "conditions": present,
        "differences": [each._asdict() for each in differing],
    }
    parts = {
        name: await _run_stoppable(hash_files, models.list_model_files(path))
        for name, path in _model_parts(plan).items()
    }
    versions: Mapping[str, str] = {}
    starts_engine = not isinstance(plan, ImitationPlan) or plan.evaluation_plan is not None
    if isinstance(plan.model, LocalModel) and starts_engine:
        versions = await asyncio.to_thread(plan.model.engine.require, plan.model.needs, connect=True)
    folder.create(configs.to_toml(plan.config), {**common, **parts, **record}, versions)
    for each in differing:
        (progress.say if each.intended else progress.alarm)(str(each))


def _describe_conditions(plan: AgentPlan | ImitationPlan) -> tuple[dict[str, Any], dict[str, Any]]:
    """Conditions of `plan`, and those that its policy is or was trained under."""
    present = describe_conditions(plan) if isinstance(plan, AgentPlan) else {}
    if TRAINING in present:
        return present, present[TRAINING]
    if not isinstance(plan, AgentPlan) or not isinstance(plan.model, LocalModel):
        return present, {}
    run = models.resolve_model(plan.model.name).run
    return present, open_run(run).about().get("conditions", {}).get(TRAINING, {}) if run else {}


def _model_parts(plan: AgentPlan | ImitationPlan) -> dict[str, Path]:
    """Folders of the policy's weights by key in run.json; empty for a URL."""
    trains = isinstance(plan, Plan | ImitationPlan)
    if not isinstance(plan.model, LocalModel) or (trains and plan.config.model.init != "weights"):
        return {}
    parts = {"model": plan.model.folder, "adapter": plan.model.adapter}
    return {name: path for name, path in parts.items() if path is not None}


async def _check_model(folder: RunFolder, plan: AgentPlan | ImitationPlan) -> None:
    # The settings name a model only by its path, where another may lie now.
    prepared = folder.path / "model"  # weights drawn at random, or merged or rounded from the parts below
    about = folder.about()
    for name, path in ({"model": prepared} if prepared.is_dir() else _model_parts(plan)).items():
        if path == prepared:
            changes = find_damage(path)
        else:  # not every kind of run records its model
            changes = await _run_stoppable(find_changed_file, path, about.get(name, {}))
        if changes:
            raise UsageError(
                f"{folder.path} cannot be resumed: it began from another {name} than {path} now holds: {changes}",
                fix="restore that file, or put the model back in its place; a changed model needs a new run",
            )


async def _run_stoppable(work: Callable[..., T], *arguments: Any) -> T:
    """Run `work` in a thread, asking it to stop on cancellation."""
    stop = threading.Event()
    try:
        return await asyncio.to_thread(work, *arguments, stopped=stop.is_set)
    finally:
        stop.set()


def write_learned_tasks(folder: RunFolder, config: Config, tasks: Collection[str] = ()) -> None:
    """Record `tasks`, and those that the initial model learned from, as learned by the policy of the run.

    Resumed runs repeat it: they may have been killed before.
    """
    earlier = read_tasks_learned_by_model(config.model.path) if config.model.init == "weights" else frozenset[str]()
    write_learned(folder.path, earlier | set(tasks))


# -- a session: from a start or a resumption to its end


@contextmanager
def handle_interruption(folder: RunFolder, progress: Progress, resume_command: str) -> Iterator[None]:
    """Cancel on the first of `signals.STOPPING`, and raise `Interrupted`, which suggests `resume_command`."""
    with cancel_on_signal() as received:
        try:
            yield
        except asyncio.CancelledError:
            if not received:
                raise
            step = progress.finished_step
            when = f"after step {step}" if step else "before its first step"
            fix = resume_command if folder.log.exists() else "start it again"
            raise Interrupted(f"{received[0]}: stopped {when}", fix=fix) from None


@asynccontextmanager
async def record_session(
    log: Log,
    folder: RunFolder,
    config: Config,
    history: History,
    progress: Progress,
    meter: Meter | None,
    start: Mapping[str, str],
    changes: Sequence[Change] = (),
) -> AsyncIterator[None]:
    """Log `start`, `changes`, the machine's use by `meter`, and ``end``, or ``stop`` with a reason.

    Feeds the trackers meanwhile.
    """
    folder.write_config(configs.to_toml(config))  # a resumed run continues with changed settings
    async with feed_trackers(folder, config.log, progress.say):
        log.append("start", step=history.step, **start)
        for change in changes:
            log.append("change", **change._asdict())
            progress.say(f"changed: {change}")
            history.changes.append(change._asdict())
        try:
            async with _log_meter(log, meter) if meter else contextlib.nullcontext():
                yield
            log.append("end", step=history.step)
        except (CodeRepairError, asyncio.CancelledError) as error:
            with contextlib.suppress(RunError):  # perhaps the log failed
                log.append("stop", step=history.step, reason=str(error).partition("\n")[0] or "stopped")
            raise


@asynccontextmanager
async def _log_meter(log: Log, meter: Meter) -> AsyncIterator[None]:
    def write() -> None:
        log.append("used", **meter.read()._asdict())

    async def write_repeatedly() -> None:
        while True:
            await asyncio.sleep(_METER_INTERVAL)
            write()

    task = asyncio.create_task(write_repeatedly())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(RunError):  # perhaps the log failed
            write()


# -- the learner: retry, save, prune


async def retry_learner(
    action: Callable[[], Awaitable[T]],
    restore: Callable[[], Awaitable[None]],
    retries: int,
    on_death: Callable[[str], None],
) -> T:
    """Run `action`; restore a learner that dies, at most `retries` times. Raises `LearnerFault`."""
    deaths = 0
    while True:
        try:
            if deaths:  # inside `try`: a learner may die again while it is restored
                await restore()
            return await action()
        except LearnerFault as fault:
            if deaths == retries:
                raise
            deaths += 1
            on_death(f"{fault}; the run starts a new learner")


def is_checkpoint_due(folder: RunFolder, config: Config, step: int) -> bool:
    """Whether the checkpoint after `step` has to be written."""
    due = step % config.run.checkpoint_every == 0 or step == config.run.steps
    return due and step not in folder.list_checkpoints()


def log_step(
    log: Log, history: History, progress: Progress, record: Mapping[str, Any], groups: Iterable[str] = ()
) -> None:
    """Log the `record` of a step that consumed `groups`, which completes it, and print its line."""
    log.append("step", **record)
    log.sync()
    history.add_step(record, groups)
    progress.step(record["step"], record["metrics"])
    if record["skipped"]:
        progress.say(f"step {record['step']} is skipped, and its weights stay as they were: {record['skipped']}")


async def save_checkpoint(learner: Learner, folder: RunFolder, config: Config, step: int) -> Path:
    """Write ``checkpoints/STEP``; delete the oldest beyond `run.keep_checkpoints`."""
    path = folder.checkpoints / f"{step:05d}"
    await learner.save(path)
    folder.prune_checkpoints(config.run.keep_checkpoints)
    return path


# -- conclude


def summarise_run(folder: RunFolder, history: History) -> dict[str, Any]:
    """Steps, last metrics and evaluations of a training, for ``--json``."""
    evaluations: dict[str, dict[int, Any]] = {}
    for (name, step), record in history.evaluations.items():
        evaluations.setdefault(name, {})[step] = record["summary"]
    metrics = history.steps[-1]["metrics"] if history.steps else {}
    return {"run": str(folder.path), "steps": history.step, "metrics": metrics, "evaluations": evaluations}
