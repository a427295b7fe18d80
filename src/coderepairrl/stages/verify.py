"""Before a run's first step: do its rewards pay for repairs of its tasks, in its sandbox?"""

from __future__ import annotations

import time
from collections.abc import Iterable

from coderepairrl.assembly.plan import Plan
from coderepairrl.processes.caches import user_cache
from coderepairrl.rewards.verify import Trial, trials
from coderepairrl.rewards.verify import verify as ask
from coderepairrl.stages.progress import Progress
from coderepairrl.types import Task

OFF = "off: tasks.verify=false"
NOTHING = "nothing: no reward that measures repair, or no task with a reference"


async def verify(plan: Plan, progress: Progress) -> None:
    """Ask, and say what is asked (`tasks.verify`). Raises what `rewards.verify.verify` raises."""
    asked = planned(plan)
    progress.say(f"to verify: {as_planned(plan)}")
    if not asked:
        return
    progress.phase("verify", len(asked))
    began = time.monotonic()
    known = await ask(
        asked,
        plan.place.sandbox,
        about=(
            sorted(map(repr, plan.config.sandbox.options.items())),
            tuple(plan.place.agent.binds),
        ),
        cache=user_cache() / "verified",
        on_trial=lambda trial: progress.advance(),
    )
    progress.say(f"verified in {time.monotonic() - began:.1f} s, {known} of {len(asked)} from an earlier run")


def planned(plan: Plan) -> list[Trial]:
    """What is asked: the paid rewards about training tasks, those of evaluations about the held-out ones."""
    if not plan.config.tasks.verify:
        return []
    when, seed = plan.config.eval, plan.config.run.seed
    evaluates = when.before or when.every or when.after
    held_out = {task.id: task for tasks in plan.eval_tasks.values() for task in tasks} if evaluates else {}
    asked: list[Trial] = []
    for kind, terms in plan.kinds.items():

        def own(tasks: Iterable[Task], kind: str = kind) -> list[Task]:
            return [task for task in tasks if (task.kind if task.kind in plan.kinds else "") == kind]

        asked += trials(own(plan.train_tasks), terms.rewards["train"], seed)
        for name in [*plan.eval_tasks][:1]:  # all evaluations measure the same
            asked += trials(own(held_out.values()), terms.rewards[name], seed)
    return list({(trial.task.id, trial.task.split, trial.reward.name): trial for trial in asked}.values())


def as_planned(plan: Plan) -> str:
    """What will be asked, in words."""
    if not plan.config.tasks.verify:
        return OFF
    asked = planned(plan)
    if not asked:
        return NOTHING
    names = ", ".join(dict.fromkeys(trial.reward.name for trial in asked))
    tasks = len({(trial.task.id, trial.task.split) for trial in asked})
    return f"references of {tasks} tasks by {names} (tasks.verify)"
