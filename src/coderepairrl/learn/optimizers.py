"""The optimisers of `train.optimizer`, over the trained parameters of a policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from coderepairrl.learn.muon import Muon
from coderepairrl.learn.policy import Policy
from coderepairrl.learn.settings import LearnSettings
from coderepairrl.processes.extras import require_extra


def make_optimizer(policy: Policy, settings: LearnSettings) -> torch.optim.Optimizer:
    """AdamW or Muon with weight decay for matrices, without for norms and biases.

    A group's ``factor`` is that on the learning rate of an update (`LearnSettings.rate`).
    """
    parameters = list(policy.parameters.values())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if settings.optimizer == "muon":
        return Muon(_muon_groups(groups, policy, settings), lr=settings.lr, betas=settings.betas)
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=True)
    require_extra("bitsandbytes", f"train.optimizer={settings.optimizer}")
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(groups, lr=settings.lr, betas=settings.betas)  # type: ignore[no-any-return]


def _muon_groups(groups: Sequence[dict[str, Any]], policy: Policy, settings: LearnSettings) -> Iterator[dict[str, Any]]:
    """`groups`, from which the matrices that Muon moves are taken out: all but embeddings and head, whose rows are
    tokens, and most of them without a gradient at any one step."""
    tables = {id(p) for p in policy.tables}
    for group in groups:
        matrices = [p for p in group["params"] if p.ndim == 2 and id(p) not in tables]
        own = {id(p) for p in matrices}
        others = [p for p in group["params"] if id(p) not in own]
        if matrices:
            yield group | {"params": matrices, "muon": True, "factor": settings.matrix_lr / settings.lr}
        if others:
            yield group | {"params": others, "muon": False}
