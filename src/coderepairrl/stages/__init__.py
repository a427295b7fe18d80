"""Stages of runs. Start reading at `train`."""

from coderepairrl.stages.command import compute_needs, dry_run, run_training
from coderepairrl.stages.life_cycle import (
    find_free_folder,
    find_resumed_folder,
    load_settings,
    locate_run_folder,
    pin_models,
)

__all__ = [
    "compute_needs",
    "dry_run",
    "find_free_folder",
    "find_resumed_folder",
    "load_settings",
    "locate_run_folder",
    "pin_models",
    "run_training",
]
