"""Training: advantages, stitching, and the learner process. Imports no torch."""

from coderepairrl.learn.advantages import group_advantages
from coderepairrl.learn.algorithms import RECIPES
from coderepairrl.learn.client import (
    Learner,
    check_weights,
    init_random,
    language_model,
    merge_in_child,
    rounded,
    survived,
)
from coderepairrl.learn.remote import format_torchrun
from coderepairrl.learn.settings import Form, LearnSettings, require_packages
from coderepairrl.learn.stitch import Account, Batch, Shaping, advantages, batch, stitch

__all__ = [
    "RECIPES",
    "Account",
    "Batch",
    "Form",
    "LearnSettings",
    "Learner",
    "Shaping",
    "advantages",
    "batch",
    "check_weights",
    "format_torchrun",
    "group_advantages",
    "init_random",
    "language_model",
    "merge_in_child",
    "require_packages",
    "rounded",
    "stitch",
    "survived",
]
