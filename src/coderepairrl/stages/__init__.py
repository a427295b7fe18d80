"""Stages of runs. Start reading at `train`."""

from coderepairrl.stages.command import dry_run, needs, run_training
from coderepairrl.stages.life_cycle import folder_of, free_folder, load_settings, pin_models, resumed_folder

__all__ = [
    "dry_run",
    "folder_of",
    "free_folder",
    "load_settings",
    "needs",
    "pin_models",
    "resumed_folder",
    "run_training",
]
