"""Output head with float32 logits, even for bfloat16 models.

In bfloat16 a logit of 20 is off by up to 0.06 (arXiv 2506.13585, arXiv 2510.13786).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

_SCALES = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
"""Factors on logits by config name, with their exponents."""


def finished(logits: Tensor, config: PretrainedConfig) -> Tensor:
    """Scale (Granite, Cohere, Falcon-H1) or cap (Gemma) logits as `config` says.

    >>> finished(torch.tensor([4.0, -1.0]), PretrainedConfig(logits_scaling=8.0))
    tensor([ 0.5000, -0.1250])
    """
    for name, power in _SCALES.items():
        if (factor := getattr(config, name, None)) not in (None, 1.0):
            logits = logits * factor**power
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = cap * torch.tanh(logits / cap)
    return logits


def upcast(head: nn.Module) -> None:
    """Replace the forward pass of `head` in place."""
    linear = cast(Any, head)

    def forward(hidden_ND: Tensor) -> Tensor:
        logits_NV = cast(Tensor, cast(Any, _Product).apply(hidden_ND, linear.weight))
        return logits_NV if linear.bias is None else logits_NV + linear.bias.float()

    linear.forward = forward


class _Product(torch.autograd.Function):
    """``hidden @ weight.T`` and its gradients in float32, saving only inputs."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_ND, weight_VD)
        with _float32(hidden_ND):
            return hidden_ND.float() @ _served(weight_VD).T

    @staticmethod
    def backward(ctx: Any, gradient_NV: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden_ND, weight_VD = ctx.saved_tensors
        of_hidden = of_weight = None
        with _float32(hidden_ND):
            if ctx.needs_input_grad[0]:
                of_hidden = (gradient_NV @ _served(weight_VD)).to(hidden_ND.dtype)
            if ctx.needs_input_grad[1]:
                of_weight = (gradient_NV.T @ hidden_ND.float()).to(weight_VD.dtype)
        return of_hidden, of_weight


def _served(weight_VD: Tensor) -> Tensor:
    # rounded to bfloat16, as an engine has them
    return weight_VD.to(torch.bfloat16).float()


@contextmanager
def _float32(beside: Tensor) -> Iterator[None]:
    """Switch autocast off and TF32 on."""
    # TF32 has more digits than bfloat16, so inputs lose none; half the speed of bfloat16, where float32 has a sixteenth
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = True
    try:
        with torch.autocast(beside.device.type, enabled=False):
            yield
    finally:
        matmul.allow_tf32 = before
