"""Before a run's first step: do its rewards pay for repairs of its tasks, in the sandboxes of these tasks?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from coderepairrl.assembly.plan import Plan
from coderepairrl.processes.caches import user_cache
from coderepairrl.rewards.verify import Trial, trials
from coderepairrl.rewards.verify import verify as ask
from coderepairrl.types import Task

OFF = "off: tasks.verify=false"
NOTHING = "nothing: no reward that measures repair, or no task with a reference"


async def verify(
    plan: Plan, *, say: Callable[[str], None], begin: Callable[[int], None], advance: Callable[[], None]
) -> None:
    """Ask, and say what is asked (`tasks.verify`). `begin` gets the number of trials, `advance` is called after each.

    Raises what `rewards.verify.verify` raises.
    """
    asked = planned(plan)
    say(f"rewards checked before training: {as_planned(plan)}")
    if not asked:
        return
    count = sum(map(len, asked.values()))
    begin(count)
    began, known = time.monotonic(), 0
    options = sorted(map(repr, plan.config.sandbox.options.items()))
    for kind, some in asked.items():
        terms = plan.kinds[kind]
        known += await ask(
            some,
            terms.sandbox,
            about=(options, tuple(terms.agent.binds)),
            cache=user_cache() / "verified",
            on_trial=lambda trial: advance(),
        )
    say(f"checked in {time.monotonic() - began:.1f} s, {known} of {count} from an earlier run")


def planned(plan: Plan) -> dict[str, list[Trial]]:
    """What is asked, by kind of task, since each kind has a sandbox of its own: the paid rewards about training tasks,
    those of evaluations about the held-out ones."""
    if not plan.config.tasks.verify:
        return {}
    when, seed = plan.config.eval, plan.config.run.seed
    evaluates = when.before or when.every or when.after
    held_out = {task.id: task for tasks in plan.eval_tasks.values() for task in tasks} if evaluates else {}
    asked: dict[str, list[Trial]] = {}
    for kind, terms in plan.kinds.items():

        def own(tasks: Iterable[Task], kind: str = kind) -> list[Task]:
            return [task for task in tasks if (task.kind if task.kind in plan.kinds else "") == kind]

        found = trials(own(plan.train_tasks), terms.rewards["train"], seed)
        for name in [*plan.eval_tasks][:1]:  # all evaluations measure the same
            found += trials(own(held_out.values()), terms.rewards[name], seed)
        if found:
            once = {(trial.task.id, trial.task.split, trial.reward.name): trial for trial in found}
            asked[kind] = list(once.values())
    return asked


def as_planned(plan: Plan) -> str:
    """What will be asked, in words."""
    if not plan.config.tasks.verify:
        return OFF
    asked = [trial for some in planned(plan).values() for trial in some]
    if not asked:
        return NOTHING
    names = ", ".join(dict.fromkeys(trial.reward.name for trial in asked))
    tasks = len({(trial.task.id, trial.task.split) for trial in asked})
    return f"{names} on the reference patches of {tasks} {'task' if tasks == 1 else 'tasks'} (tasks.verify)"
