"""Attempts, episodes and groups: where agent, sandbox, gateway and reward meet."""

from coderepairrl.rollout.attempts import Attempt, attempt
from coderepairrl.rollout.curriculum import Band, Curriculum, EasyFirst, Share, outcomes
from coderepairrl.rollout.episodes import Rollout, Terms, Ticket, derive_seed
from coderepairrl.rollout.groups import Group, Slot, check_health, collect, due, episodes_of, slots
from coderepairrl.rollout.supervise import SupervisedEngine

__all__ = [
    "Attempt",
    "Band",
    "Curriculum",
    "EasyFirst",
    "Group",
    "Rollout",
    "Share",
    "Slot",
    "SupervisedEngine",
    "Terms",
    "Ticket",
    "attempt",
    "check_health",
    "collect",
    "derive_seed",
    "due",
    "episodes_of",
    "outcomes",
    "slots",
]
