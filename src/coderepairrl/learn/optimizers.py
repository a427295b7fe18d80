"""The optimisers of `train.optimizer`, over the trained parameters of a policy."""

from __future__ import annotations

from typing import Any

import torch

from coderepairrl.learn.policy import Policy
from coderepairrl.learn.settings import LearnSettings
from coderepairrl.processes.extras import require_extra


def make_optimizer(policy: Policy, settings: LearnSettings) -> torch.optim.Optimizer:
    """AdamW with weight decay for matrices, without for norms and biases."""
    parameters = list(policy.parameters.values())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=True)
    require_extra("bitsandbytes", f"train.optimizer={settings.optimizer}")
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(groups, lr=settings.lr, betas=settings.betas)  # type: ignore[no-any-return]
