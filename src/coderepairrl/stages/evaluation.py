"""Evaluation without training: any policy, on the held-out tasks of any sources, into a run folder of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from coderepairrl import models
from coderepairrl.assembly.conditions import TRAINING, Difference, conditions, differences
from coderepairrl.assembly.model import LocalModel, Use
from coderepairrl.assembly.plan import AgentPlan, resolve_evaluation
from coderepairrl.assembly.replying import replying
from coderepairrl.config import to_toml
from coderepairrl.errors import UsageError
from coderepairrl.gateway import Gateway
from coderepairrl.processes.scratch import scratch
from coderepairrl.runs import RunFolder, open_run
from coderepairrl.runs.storage import difference, digests
from coderepairrl.stages.history import read_history
from coderepairrl.stages.parts import Bench, make_rollout, until_called_off
from coderepairrl.stages.progress import Progress
from coderepairrl.stages.train import evaluate
from coderepairrl.types import Sampling

USE = Use(
    "crrl eval",
    used=("agent", "sandbox", "engine", "model", "tasks", "reward", "kinds", "rollout", "gateway", "eval", "run"),
    defaults=("run.name=evaluation",),
)


def resolve(model: str, overrides: Sequence[str] = ()) -> AgentPlan:
    """The evaluations of `model` by its settings and `overrides`. Raises what `resolve_evaluation` raises."""
    return resolve_evaluation(model, overrides, USE)


async def measure(plan: AgentPlan, folder: RunFolder, *, resume: bool = False, quiet: bool = False) -> dict[str, Any]:
    """Every evaluation that `plan` names, of its model as it is; their summaries by name.

    There is no learner and no training task. `folder` becomes a run folder without a step, which reports, comparisons
    and ``crrl view`` read as any other; an evaluation that was interrupted goes on with `resume`.

    Raises what `replying` raises, `UsageError` for a folder that is taken or, with `resume`,
    that measured something else, and `HealthGateError` where too many episodes are void.
    """
    config = plan.config
    differing: list[Difference] = []
    if resume:
        await _require_the_same(open_run(folder.path), plan)
    else:
        found = await asyncio.to_thread(conditions, plan)
        differing = differences(found, trained) if (trained := _training_of(plan)) else []
        about = {
            "name": folder.path.name,
            "seed": config.run.seed,
            "policy": plan.model.name,
            "rewards": plan.reward_versions,
            "config": config.model_dump(mode="json"),
            **{part: await until_called_off(digests, models.files(place)) for part, place in _parts(plan).items()},
            "conditions": found,
            "differences": [each._asdict() for each in differing],
        }
        folder.create(to_toml(config), about)
    log = folder.writer()
    try:
        folder.add_tasks(chain(*plan.eval_tasks.values()))
        history = read_history(folder)
        with Progress(0, quiet=quiet) as progress, scratch("evaluation") as home:
            home.chmod(0o711)  # guests run as another user, and the socket is in it
            progress.say(str(plan.place.choice))
            for each in differing:
                (progress.say if each.meant else progress.alarm)(str(each))
            async with (
                replying(plan, folder.logs) as source,
                Gateway(source, sampling=Sampling(), on_turn=log.turn, accept=config.gateway.accept).listening(
                    socket=home / "gateway.sock"
                ) as gateway,
            ):
                bench = Bench(
                    config=config,
                    folder=folder,
                    log=log,
                    eval_tasks=plan.eval_tasks,
                    rollout=make_rollout(plan, gateway, log, progress),
                    progress=progress,
                )
                log.append("start", step=0, sandbox=plan.place.sandbox.name, engine=config.engine.name)
                for name, tasks in plan.eval_tasks.items():
                    if tasks and (name, 0) not in history.evaluations:
                        await evaluate(bench, history, name, 0, 0)
                log.append("end", step=0)
    finally:
        log.close()
    return {name: record["summary"] for (name, _), record in history.evaluations.items()}


def _training_of(plan: AgentPlan) -> dict[str, Any]:
    """The conditions that the policy was trained in, as its run has them; none of one that is no run's, and of one that
    an older version trained."""
    run = models.named(plan.model.name).run if isinstance(plan.model, LocalModel) else None
    found: dict[str, Any] = open_run(run).about().get("conditions", {}).get(TRAINING, {}) if run else {}
    return found


def _parts(plan: AgentPlan) -> dict[str, Path]:
    """The folders of the policy, by what run.json calls the checksums of their files; none of one behind a URL."""
    if not isinstance(plan.model, LocalModel):
        return {}
    places = {"model": plan.model.folder, "adapter": plan.model.adapter}
    return {part: place for part, place in places.items() if place is not None}


async def _require_the_same(folder: RunFolder, plan: AgentPlan) -> None:
    """Raise `UsageError` if what `folder` holds was measured of another policy, or by other settings."""
    about = folder.about()
    config = plan.config.model_dump(mode="json")
    other = ["the policy"] if about["policy"] != plan.model.name else []
    other += [name for name, section in about["config"].items() if section != config.get(name)]
    if other:
        raise UsageError(
            f"{folder.path} cannot be resumed: another evaluation was begun there ({', '.join(other)})",
            fix="name a new folder",
        )
    for part, place in _parts(plan).items():
        known = about.get(part, {})  # not of evaluations by older versions
        if found := await until_called_off(difference, place, known):
            raise UsageError(
                f"{folder.path} cannot be resumed: the {part} in {place} is not the one that was measured: {found}",
                fix="put that file back, or name a new folder",
            )
