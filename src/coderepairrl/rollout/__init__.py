"""Attempts, episodes and groups: where agent, sandbox, gateway and reward meet."""

from coderepairrl.rollout.attempts import Attempt, make_attempt
from coderepairrl.rollout.curriculum import Band, Curriculum, EasyFirst, Share, collect_outcomes
from coderepairrl.rollout.episodes import Executor, Rollout, Terms, Ticket, derive_seed
from coderepairrl.rollout.group_queue import GroupQueue, StalenessWindow
from coderepairrl.rollout.groups import Group, Slot, check_health, collect, due_slots, episodes_of, make_group, slots
from coderepairrl.rollout.local import LocalExecutor
from coderepairrl.rollout.supervise import SupervisedEngine, warm_up

__all__ = [
    "Attempt",
    "Band",
    "Curriculum",
    "EasyFirst",
    "Executor",
    "Group",
    "GroupQueue",
    "LocalExecutor",
    "Rollout",
    "Share",
    "Slot",
    "StalenessWindow",
    "SupervisedEngine",
    "Terms",
    "Ticket",
    "check_health",
    "collect",
    "collect_outcomes",
    "derive_seed",
    "due_slots",
    "episodes_of",
    "make_attempt",
    "make_group",
    "slots",
    "warm_up",
]
