"""Before a run's first step: do its rewards pay for repairs of its tasks, in its sandbox?"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from coderepairrl import rewards
from coderepairrl.config import Config
from coderepairrl.processes.caches import user_cache
from coderepairrl.rewards.verify import Trial, trials
from coderepairrl.rewards.verify import verify as ask
from coderepairrl.stages.parts import placed_agent
from coderepairrl.stages.progress import Progress
from coderepairrl.types import Task

OFF = "off: tasks.verify=false"
NOTHING = "nothing: no reward that measures repair, or no task with a reference"


async def verify(
    config: Config, train_tasks: Sequence[Task], eval_tasks: Mapping[str, Sequence[Task]], progress: Progress
) -> None:
    """Ask, and say what is asked (`tasks.verify`). Raises what `rewards.verify.verify` raises."""
    asked = planned(config, train_tasks, eval_tasks)
    progress.say(f"to verify: {as_planned(config, train_tasks, eval_tasks)}")
    if not asked:
        return
    progress.phase("verify", len(asked))
    agent, backend, _ = placed_agent(config)
    try:
        began = time.monotonic()
        known = await ask(
            asked,
            backend,
            about=(sorted(map(repr, config.sandbox.options.items())), tuple(getattr(agent, "binds", ()))),
            cache=user_cache() / "verified",
            on_trial=lambda trial: progress.advance(),
        )
        progress.say(f"verified in {time.monotonic() - began:.1f} s, {known} of {len(asked)} from an earlier run")
    finally:
        close = getattr(backend, "close", None)
        if close is not None:
            close()


def planned(config: Config, train_tasks: Sequence[Task], eval_tasks: Mapping[str, Sequence[Task]]) -> list[Trial]:
    """What is asked: the paid rewards about training tasks, those of evaluations about the held-out ones."""
    if not config.tasks.verify:
        return []
    evaluates = config.eval.before or config.eval.every or config.eval.after
    held_out = {task.id: task for tasks in eval_tasks.values() for task in tasks} if evaluates else {}
    asked = trials(train_tasks, rewards.make(config.reward), config.run.seed)
    asked += trials(list(held_out.values()), rewards.make(config.eval.reward or config.reward), config.run.seed)
    return list({(trial.task.id, trial.task.split, trial.reward.name): trial for trial in asked}.values())


def as_planned(config: Config, train_tasks: Sequence[Task], eval_tasks: Mapping[str, Sequence[Task]]) -> str:
    """What will be asked, in words."""
    if not config.tasks.verify:
        return OFF
    asked = planned(config, train_tasks, eval_tasks)
    if not asked:
        return NOTHING
    names = ", ".join(dict.fromkeys(trial.reward.name for trial in asked))
    tasks = len({(trial.task.id, trial.task.split) for trial in asked})
    return f"references of {tasks} tasks by {names} (tasks.verify)"
