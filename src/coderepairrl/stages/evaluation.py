"""Evaluation of any policy on held-out tasks, into a run folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from coderepairrl import models
from coderepairrl.config import to_toml
from coderepairrl.errors import UsageError
from coderepairrl.plan.conditions import TRAINING, Difference, conditions, differences
from coderepairrl.plan.model import LocalModel, Use
from coderepairrl.plan.plan import resolve_evaluation
from coderepairrl.plan.replying import Opens, replying
from coderepairrl.plan.tasks import learned_by
from coderepairrl.plan.terms import AgentPlan
from coderepairrl.processes.meter import Meter
from coderepairrl.processes.scratch import scratch
from coderepairrl.runs import RunFolder, logged_episodes, open_run
from coderepairrl.runs.storage import difference, digests
from coderepairrl.stages.executors import open_rollout
from coderepairrl.stages.history import read_history
from coderepairrl.stages.parts import Bench, until_called_off
from coderepairrl.stages.progress import Progress
from coderepairrl.stages.shards import WHOLE, Shard, measured_by
from coderepairrl.stages.trackers import following
from coderepairrl.stages.train import evaluate
from coderepairrl.stages.used import metered
from coderepairrl.stages.watch import Watch
from coderepairrl.stats.spending import Prices
from coderepairrl.types import Episode, Turn

USE = Use(
    "crrl eval",
    used=(
        "agent",
        "sandbox",
        "engine",
        "model",
        "tasks",
        "reward",
        "kinds",
        "rollout",
        "gateway",
        "eval",
        "run",
        "log",
    ),
    defaults=("run.name=evaluation",),
)
COLLECT = Use("crrl collect", used=(*USE.used, "keep"), defaults=("run.name=collection",))
_PLAIN = ("eval.top_p=1.0", "eval.top_k=0", "eval.min_p=0.0")
PRESETS = {
    "greedy": ("eval.temperature=0.0", *_PLAIN),
    "thesis": (
        *("eval.temperature=0.2", *_PLAIN, "eval.top_p=0.9"),
        *("rollout.calls=30", "rollout.tokens=10240", "rollout.turn_tokens=4096", "rollout.seconds=60"),
    ),
    "long": (
        *("eval.temperature=1.0", *_PLAIN),
        *("rollout.calls=500", "rollout.tokens=65536", "rollout.turn_tokens=8192", "rollout.seconds=600"),
    ),
}
"""Sampling and limits by name."""
COLLECTING = ("eval.attempts=4",)
"""Default settings of `crrl collect`."""


def resolve(
    model: str,
    overrides: Sequence[str] = (),
    *,
    settings_of: Path | None = None,
    collects: bool = False,
) -> AgentPlan:
    """Plan evaluations of `model` by its settings or `settings_of`, and `overrides`.

    Raises like `resolve_evaluation`.
    """
    use = COLLECT if collects else USE
    return resolve_evaluation(model, overrides, use, settings_of=settings_of, collects=collects)


async def measure(
    plan: AgentPlan,
    folder: RunFolder,
    *,
    resume: bool = False,
    shard: Shard = WHOLE,
    prices: Prices | None = None,
    opens: Opens = replying,
    quiet: bool = False,
    beside: str = "",
    about: Mapping[str, Any] = MappingProxyType({}),
    follow: Callable[[Turn | Episode], None] = lambda event: None,
) -> dict[str, Any]:
    """Run the evaluations of `plan` on the tasks of `shard`; return summaries by name.

    `folder` becomes a run folder without steps; `resume` continues it. `prices` are for the printed cost, `about` is
    added to run.json, `follow` gets each turn and episode once logged. Several policies in one process pass a name for
    their lines, and record no machine use. Raises like `replying`, `UsageError` for a taken folder or another
    evaluation, `HealthGateError` for too many void episodes, `RunError` if a server's model changes.
    """
    config, meter = plan.config, Meter()
    differing: list[Difference] = []
    for name, tasks in plan.eval_tasks.items():
        if tasks and not shard.share(tasks):
            raise UsageError(f"of the {len(tasks)} tasks of {name}, shard {shard} has none", fix="take fewer shards")
    if resume:
        await _require_the_same(open_run(folder.path), plan, shard)
    else:
        differing = await _begin(folder, plan, shard, prices, about)
    log = folder.writer()
    try:
        folder.add_tasks(chain(*plan.eval_tasks.values()))
        history = read_history(folder)
        before = list(logged_episodes(folder.records())) if resume else []
        with Progress(0, quiet=quiet, beside=beside) as progress, scratch("evaluation") as home:
            home.chmod(0o711)  # guests run as another user, and the socket is in it
            progress.say(str(plan.place.choice))
            for each in differing:
                (progress.say if each.meant else progress.alarm)(str(each))
            for line in _known(plan):
                progress.alarm(line)
            stops, at_once = config.run.health.action == "stop", config.rollout.concurrency
            watch = Watch(attempts(plan, shard), at_once, before, prices, progress.say, stops=stops)

            def on_episode(episode: Episode) -> None:
                progress.episode(episode)
                watch(episode)
                follow(episode)

            def on_turn(name: str, turn: Turn) -> None:
                log.turn(name, turn)
                follow(turn)

            async with (
                opens(plan, folder.logs) as source,
                open_rollout(plan, source, log, home / "gateway.sock", on_episode, progress.say, on_turn) as rollout,
                following(folder, config.log, progress.say),
            ):
                bench = Bench(
                    config=config,
                    folder=folder,
                    log=log,
                    eval_tasks=plan.eval_tasks,
                    rollout=rollout,
                    progress=progress,
                    shard=shard,
                    model_name=config.model.path,
                )
                log.append("start", step=0, sandbox=plan.place.sandbox.name, engine=config.engine.name)
                async with nullcontext() if beside else metered(log, meter):
                    for name, tasks in plan.eval_tasks.items():
                        if tasks and (name, 0) not in history.evaluations:
                            await evaluate(bench, history, name, 0, 0)
                log.append("end", step=0)
    finally:
        log.close()
    return {name: record["summary"] for (name, _), record in history.evaluations.items()}


async def _begin(
    folder: RunFolder, plan: AgentPlan, shard: Shard, prices: Prices | None, more: Mapping[str, Any]
) -> list[Difference]:
    """Create `folder`; return differences from training conditions."""
    present = await asyncio.to_thread(conditions, plan)
    differing = differences(present, trained) if (trained := _training_of(plan)) else []
    record = {
        "name": folder.path.name,
        "seed": plan.config.run.seed,
        "policy": plan.config.model.path,
        "shard": str(shard),
        "prices": prices,
        "rewards": plan.reward_versions,
        "config": plan.config.model_dump(mode="json"),
        **{part: await until_called_off(digests, models.files(place)) for part, place in _parts(plan).items()},
        "conditions": present,
        "differences": [each._asdict() for each in differing],
        **more,
    }
    folder.create(to_toml(plan.config), record)
    return differing


def _training_of(plan: AgentPlan) -> dict[str, Any]:
    run = models.named(plan.model.name).run if isinstance(plan.model, LocalModel) else None
    trained_under: dict[str, Any] = open_run(run).about().get("conditions", {}).get(TRAINING, {}) if run else {}
    return trained_under


def _known(plan: AgentPlan) -> list[str]:
    learned = learned_by(plan.config.model.path) if isinstance(plan.model, LocalModel) else frozenset()
    counts = {name: sum(task.id in learned for task in tasks) for name, tasks in plan.eval_tasks.items()}
    return [
        f"the policy was fine-tuned on trajectories of {count} of the {len(plan.eval_tasks[name])} tasks of {name}"
        for name, count in counts.items()
        if count
    ]


def attempts(plan: AgentPlan, shard: Shard) -> int:
    """Number of planned attempts."""
    each = plan.config.eval.each
    return sum(len(shard.share(tasks)) * each[name].attempts for name, tasks in plan.eval_tasks.items())


def _parts(plan: AgentPlan) -> dict[str, Path]:
    """Policy's folders by key in run.json; empty behind a URL."""
    if not isinstance(plan.model, LocalModel):
        return {}
    places = {"model": plan.model.folder, "adapter": plan.model.adapter}
    return {part: place for part, place in places.items() if place is not None}


async def _require_the_same(folder: RunFolder, plan: AgentPlan, shard: Shard) -> None:
    record = folder.about()
    if "policy" not in record:
        raise UsageError(f"{folder.path} is no evaluation", fix=f"crrl train {folder.path} --resume goes on with a run")
    before, now = measured_by(record["config"]), measured_by(plan.config.model_dump(mode="json"))
    other = ["the policy"] if record["policy"] != plan.config.model.path else []
    other += [f"shard {record['shard']}"] if record.get("shard", str(WHOLE)) != str(shard) else []
    other += [name for name, section in before.items() if section != now.get(name)]
    if other:
        raise UsageError(
            f"{folder.path} cannot be resumed: another evaluation was begun there ({', '.join(other)})",
            fix="name a new folder",
        )
    for part, place in _parts(plan).items():
        recorded = record.get(part, {})  # not of evaluations by older versions
        if changes := await until_called_off(difference, place, recorded):
            raise UsageError(
                f"{folder.path} cannot be resumed: the {part} in {place} is not the one that was measured: {changes}",
                fix="put that file back, or name a new folder",
            )
