"""Episodes and groups: where agent, sandbox, gateway and reward meet."""

from coderepairrl.rollout.episodes import Rollout, Terms, Ticket, derive_seed, how_it_ended, run_agent
from coderepairrl.rollout.groups import Group, Share, Slot, check_health, collect, due, schedule, slots
from coderepairrl.rollout.supervise import SupervisedEngine

__all__ = [
    "Group",
    "Rollout",
    "Share",
    "Slot",
    "SupervisedEngine",
    "Terms",
    "Ticket",
    "check_health",
    "collect",
    "derive_seed",
    "due",
    "how_it_ended",
    "run_agent",
    "schedule",
    "slots",
]
