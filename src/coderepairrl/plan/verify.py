"""Check before training that rewards pay for repairs of the tasks."""

from __future__ import annotations

import time
from collections.abc import Callable

from coderepairrl.plan import Plan
from coderepairrl.plan.terms import group_by_kind
from coderepairrl.processes.caches import user_cache
from coderepairrl.rewards.verify import Trial, trials
from coderepairrl.rewards.verify import verify_rewards as ask

OFF = "off: tasks.verify=false"
NOTHING = "nothing: no reward that measures repair, or no task with a reference"


async def verify_plan(
    plan: Plan, *, say: Callable[[str], None], begin: Callable[[int], None], advance: Callable[[], None]
) -> None:
    """Run and announce the checks of `tasks.verify`.

    `begin` gets the number of trials, `advance` follows each. Raises as `rewards.verify.verify_rewards`.
    """
    trials_by_kind = plan_trials(plan)
    say(f"rewards checked before training: {describe_trials(plan)}")
    if not trials_by_kind:
        return
    count = sum(map(len, trials_by_kind.values()))
    begin(count)
    began, reused = time.monotonic(), 0
    options = sorted(map(repr, plan.config.sandbox.options.items()))
    for kind, some in trials_by_kind.items():
        terms = plan.kinds[kind]
        reused += await ask(
            some,
            terms.sandbox,
            about=(options, tuple(terms.agent.binds)),
            cache=user_cache() / "verified",
            on_trial=lambda trial: advance(),
        )
    say(f"checked in {time.monotonic() - began:.1f} s, {reused} of {count} from an earlier run")


def plan_trials(plan: Plan) -> dict[str, list[Trial]]:
    """Trials by kind of task: of training rewards, and of evaluations'."""
    if not plan.config.tasks.verify:
        return {}
    seed, evaluates = plan.config.run.seed, plan.config.eval.is_due
    held_out = {task.id: task for tasks in plan.eval_tasks.values() for task in tasks} if evaluates else {}
    trained, measured = (group_by_kind(plan.kinds, some) for some in (plan.train_tasks, held_out.values()))
    trials_by_kind: dict[str, list[Trial]] = {}
    for kind, terms in plan.kinds.items():
        kind_trials = trials(trained.get(kind, []), terms.rewards["train"], seed)
        for name in [*plan.eval_tasks][:1]:  # all evaluations measure the same
            kind_trials += trials(measured.get(kind, []), terms.rewards[name], seed)
        if kind_trials:
            once = {(trial.task.id, trial.task.split, trial.reward.name): trial for trial in kind_trials}
            trials_by_kind[kind] = list(once.values())
    return trials_by_kind


def describe_trials(plan: Plan) -> str:
    """Description of the planned checks."""
    if not plan.config.tasks.verify:
        return OFF
    all_trials = [trial for some in plan_trials(plan).values() for trial in some]
    if not all_trials:
        return NOTHING
    names = ", ".join(dict.fromkeys(trial.reward.name for trial in all_trials))
    tasks = len({(trial.task.id, trial.task.split) for trial in all_trials})
    return f"{names} on the reference patches of {tasks} {'task' if tasks == 1 else 'tasks'} (tasks.verify)"
