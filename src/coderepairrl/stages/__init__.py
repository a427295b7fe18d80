"""Stages of runs. Start reading at `train`."""

from coderepairrl.processes.signals import Interrupted, until_interrupted
from coderepairrl.stages.changes import with_rewards_of
from coderepairrl.stages.command import folder_of, named, pinned, run, summary
from coderepairrl.stages.preview import dry_run, needs, plan

__all__ = [
    "Interrupted",
    "dry_run",
    "folder_of",
    "named",
    "needs",
    "pinned",
    "plan",
    "run",
    "summary",
    "until_interrupted",
    "with_rewards_of",
]
