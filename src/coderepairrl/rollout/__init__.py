"""Episodes and groups: where agent, sandbox, gateway and reward meet."""

from coderepairrl.rollout.episodes import Rollout, Ticket, derive_seed, how_it_ended, run_agent
from coderepairrl.rollout.groups import Group, check_health, collect, schedule
from coderepairrl.rollout.supervise import SupervisedEngine

__all__ = [
    "Group",
    "Rollout",
    "SupervisedEngine",
    "Ticket",
    "check_health",
    "collect",
    "derive_seed",
    "how_it_ended",
    "run_agent",
    "schedule",
]
