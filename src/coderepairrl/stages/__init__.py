"""Stages of runs. Start reading at `train`."""

from coderepairrl.processes.signals import Interrupted, until_interrupted
from coderepairrl.stages.command import dry_run, needs, plan, run, summary
from coderepairrl.stages.life_cycle import folder_of, free_folder, load_settings, named, pinned

__all__ = [
    "Interrupted",
    "dry_run",
    "folder_of",
    "free_folder",
    "load_settings",
    "named",
    "needs",
    "pinned",
    "plan",
    "run",
    "summary",
    "until_interrupted",
]
