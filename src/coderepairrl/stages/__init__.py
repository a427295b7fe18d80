"""Stages of runs. Start reading at `train`."""

from coderepairrl.processes.signals import until_interrupted
from coderepairrl.stages.command import dry_run, needs, preview_run, run_training
from coderepairrl.stages.life_cycle import folder_of, free_folder, load_settings, pinned, resumed_folder

__all__ = [
    "dry_run",
    "folder_of",
    "free_folder",
    "load_settings",
    "needs",
    "pinned",
    "preview_run",
    "resumed_folder",
    "run_training",
    "until_interrupted",
]
