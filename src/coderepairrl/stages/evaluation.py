"""Evaluation of any policy on held-out tasks, or collection of its attempts, into a run folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import Any

from coderepairrl.errors import CodeRepairError, RunError, UsageError, combine_errors
from coderepairrl.plan.model import LocalModel
from coderepairrl.plan.serving import OpenModel, open_model, open_model_group, split_by_engine
from coderepairrl.plan.tasks import collected_share, read_tasks_learned_by_model
from coderepairrl.plan.terms import AgentPlan
from coderepairrl.processes.meter import Meter
from coderepairrl.processes.scratch import scratch
from coderepairrl.processes.signals import run_until_interrupted
from coderepairrl.runs import RunFolder, logged_episodes
from coderepairrl.stages.history import read_history
from coderepairrl.stages.life_cycle import begin_run, check_folder, record_session
from coderepairrl.stages.parts import EvaluationContext, open_rollout
from coderepairrl.stages.progress import Progress
from coderepairrl.stages.results import read_results
from coderepairrl.stages.shards import WHOLE, Shard
from coderepairrl.stages.train import evaluate_policy
from coderepairrl.stages.watch import EvaluationWatch
from coderepairrl.stats.measures import Prices
from coderepairrl.types import Episode, Turn

_UNTRUNCATED = ("eval.top_p=1.0", "eval.top_k=0", "eval.min_p=0.0")
PRESETS = {
    "greedy": ("eval.temperature=0.0", *_UNTRUNCATED),
    "thesis": (
        *("eval.temperature=0.2", *_UNTRUNCATED, "eval.top_p=0.9"),
        *("rollout.calls=30", "rollout.tokens=10240", "rollout.turn_tokens=4096", "rollout.seconds=60"),
    ),
    "long": (
        *("eval.temperature=1.0", *_UNTRUNCATED),
        *("rollout.calls=500", "rollout.tokens=65536", "rollout.turn_tokens=8192", "rollout.seconds=600"),
    ),
}
"""Sampling and limits by name; later settings override earlier ones."""
COLLECTING = ("eval.attempts=4",)
"""Default settings of `crrl collect`."""


def count_attempts(plan: AgentPlan, shard: Shard = WHOLE) -> int:
    """Number of planned attempts."""
    evaluations = plan.config.eval.each
    return sum(len(shard.share(tasks)) * evaluations[name].attempts for name, tasks in plan.eval_tasks.items())


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Evaluations of one policy, or its collection, and their run folder."""

    plan: AgentPlan
    folder: RunFolder
    shard: Shard = WHOLE
    prices: Prices | None = None
    """Prices of a remote policy, for the printed cost."""
    resume: bool = False
    collects: bool = False

    @property
    def command(self) -> str:
        """Subcommand of `crrl`."""
        return "collect" if self.collects else "eval"

    @property
    def is_complete(self) -> bool:
        """Whether all its evaluations have results."""
        records = self.folder.records() if self.folder.log.exists() else ()
        return {each["name"] for each in records if each["type"] == "eval"}.issuperset(self.plan.eval_tasks)


async def evaluate_all(
    planned: Sequence[Evaluation], *, jobs: int = 1, say: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """Run all `planned`, `jobs` at a time; return their results. Raises as `attempt_all`."""
    await attempt_all(planned, jobs=jobs, say=say)
    return [read_results(each.folder) for each in planned]


async def attempt_all(
    planned: Sequence[Evaluation], *, jobs: int = 1, say: Callable[[str], None] = lambda line: None
) -> None:
    """Make the attempts of `planned`, `jobs` at a time; models share engines (`split_by_engine`).

    Raises `Interrupted`, and as `measure_policy`, after all have ended.
    """
    first = planned[0]
    if jobs > 1 and len(planned) == 1:
        raise UsageError("--jobs is for several --policy, but there is only one", fix="leave --jobs out")
    resume_command = f"crrl {first.command} {first.folder.path} --resume"
    if len(planned) > 1:
        resume_command = f"the same command with -o {first.folder.path.parent} --resume"
    if failures := await run_until_interrupted(_attempt_by_engine(planned, jobs, say), fix=resume_command):
        raise combine_errors(failures)


async def _attempt_by_engine(
    planned: Sequence[Evaluation], jobs: int, say: Callable[[str], None]
) -> list[CodeRepairError]:
    plans, failures = [each.plan for each in planned], list[CodeRepairError]()
    log_dir = planned[0].folder.path.parent / ".server"

    async def measure_concurrently(each: Evaluation, opens: OpenModel, slots: asyncio.Semaphore) -> None:
        async with slots:
            try:
                await measure_policy(each, opens=opens, label=each.folder.path.name)
            except (CodeRepairError, OSError) as error:
                named_errors = _prefix_errors(each.folder.path.name, error)
                failures.extend(named_errors)
                for problem in named_errors:  # at once: the other policies may take hours
                    say(f"failed: {problem}")

    for part in split_by_engine(plans, jobs):
        together = [planned[index] for index in part.indices]
        if part.shared:
            engine = together[0].plan.config.engine.name
            say(f"one {engine} engine for {len(together)} policies; its log is in {log_dir}")
        try:
            async with open_model_group(plans, part, log_dir) as opens:
                if part.at_once == 1:
                    for each in together:
                        await measure_policy(each, opens=opens)
                    continue
                slots = asyncio.Semaphore(part.at_once)
                async with asyncio.TaskGroup() as group:
                    for each in together:
                        group.create_task(measure_concurrently(each, opens, slots))
        except CodeRepairError as error:
            failures.append(error)
    return failures


def _prefix_errors(name: str, error: CodeRepairError | OSError) -> list[CodeRepairError]:
    if isinstance(error, OSError):
        return [RunError(f"{name}: {error}", fix="remove the cause, then repeat the command with --resume")]
    return [type(each)(f"{name}: {each}", fix=each.fix) for each in error.problems]


async def measure_policy(
    planned: Evaluation,
    *,
    opens: OpenModel = open_model,
    quiet: bool = False,
    label: str = "",
    follow: Callable[[Turn | Episode], None] = lambda event: None,
) -> dict[str, Any]:
    """Run the evaluations of `planned` into its folder; return summaries by name.

    `follow` gets each turn and episode once logged. `label`, given to concurrent policies, is a prefix of printed
    lines; their machine use is not recorded. Raises like `open_model`, `check_folder` and `begin_run`,
    `HealthGateError` for too many void episodes, `RunError` if a server's model changes.
    """
    plan, folder, shard, config = planned.plan, planned.folder, planned.shard, planned.plan.config
    meter = None if label else Meter()
    for name, tasks in plan.eval_tasks.items():
        if tasks and not shard.share(tasks):
            raise UsageError(f"shard {shard} has none of the {len(tasks)} tasks of {name}", fix="take fewer shards")
    with Progress(0, quiet=quiet, label=label) as progress:
        await _begin_evaluation(planned, progress)
        with closing(folder.writer()) as log:
            folder.add_tasks(chain(*plan.eval_tasks.values()))
            history = read_history(folder)
            before = list(logged_episodes(folder.records())) if planned.resume else []
            progress.say(str(plan.choice))
            for warning in _warn_of_learned_tasks(plan):
                progress.alarm(warning)
            start = {"sandbox": plan.agent_setup.sandbox.name, "engine": config.engine.name}
            stops, at_once = config.run.health.action == "stop", config.rollout.concurrency
            watch = EvaluationWatch(
                count_attempts(plan, shard), at_once, before, planned.prices, progress.say, stops=stops
            )

            def on_episode(episode: Episode) -> None:
                progress.episode(episode)
                watch(episode)
                follow(episode)

            def on_turn(name: str, turn: Turn) -> None:
                log.turn(name, turn)
                follow(turn)

            with scratch("evaluation") as home:
                home.chmod(0o711)  # guests run as another user, and the socket is in it
                async with (
                    opens(plan, folder.logs) as source,
                    open_rollout(
                        plan, source, log, home / "gateway.sock", on_episode, progress.say, on_turn
                    ) as rollout,
                    record_session(log, folder, config, history, progress, meter, start),
                ):
                    context = EvaluationContext(
                        config=config,
                        folder=folder,
                        log=log,
                        eval_tasks=plan.eval_tasks,
                        rollout=rollout,
                        progress=progress,
                        shard=shard,
                        model_name=config.model.path,
                    )
                    for name, tasks in plan.eval_tasks.items():
                        if tasks and (name, 0) not in history.evaluations:
                            await evaluate_policy(context, history, name, step=0, version=0)
    return {name: record["summary"] for (name, _), record in history.evaluations.items()}


async def _begin_evaluation(planned: Evaluation, progress: Progress) -> None:
    plan, folder = planned.plan, planned.folder
    check_folder(folder, plan, planned.command, resume=planned.resume)
    if planned.resume and (begun := folder.about().get("shard", str(WHOLE))) != str(planned.shard):
        raise UsageError(f"{folder.path} has shard {begun}, not {planned.shard}", fix="name a new folder with -o")
    record = {
        "policy": plan.config.model.path,
        "shard": str(planned.shard),
        "prices": planned.prices,
        **({"holdout": collected_share(plan.config)} if planned.collects else {}),
    }
    await begin_run(folder, plan, progress, record, resume=planned.resume)


def _warn_of_learned_tasks(plan: AgentPlan) -> list[str]:
    learned = read_tasks_learned_by_model(plan.config.model.path) if isinstance(plan.model, LocalModel) else frozenset()
    counts = {name: sum(task.id in learned for task in tasks) for name, tasks in plan.eval_tasks.items()}
    return [
        f"the policy was fine-tuned on trajectories of {count} of the {len(plan.eval_tasks[name])} tasks of {name}"
        for name, count in counts.items()
        if count
    ]
