"""Attempts, episodes and groups: where agent, sandbox, gateway and reward meet."""

from coderepairrl.rollout.attempts import Attempt, make_attempt
from coderepairrl.rollout.curriculum import Band, Curriculum, EasyFirst, WeightedTasks, collect_outcomes
from coderepairrl.rollout.episodes import AttemptSettings, Executor, PlannedAttempt, Rollout, derive_seed
from coderepairrl.rollout.group_queue import GroupQueue, StalenessWindow
from coderepairrl.rollout.groups import (
    Group,
    PlannedGroup,
    check_health,
    list_episodes,
    make_group,
    make_groups,
    plan_due_groups,
    plan_groups,
)
from coderepairrl.rollout.local import LocalExecutor
from coderepairrl.rollout.supervise import SupervisedEngine, warm_up

__all__ = [
    "Attempt",
    "AttemptSettings",
    "Band",
    "Curriculum",
    "EasyFirst",
    "Executor",
    "Group",
    "GroupQueue",
    "LocalExecutor",
    "PlannedAttempt",
    "PlannedGroup",
    "Rollout",
    "StalenessWindow",
    "SupervisedEngine",
    "WeightedTasks",
    "check_health",
    "collect_outcomes",
    "derive_seed",
    "list_episodes",
    "make_attempt",
    "make_group",
    "make_groups",
    "plan_due_groups",
    "plan_groups",
    "warm_up",
]
