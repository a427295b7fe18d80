"""Muon (Jordan et al., 2024) in float32: torch's own computes in bfloat16, which many CPUs emulate, 50 times slower."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration whose slope at zero is steepest (Jordan et al., 2024)."""
ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal: every matrix moves by its momentum with all singular values near 1."""

    def __init__(self, matrices: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure
        """One update, with Nesterov momentum; the steps of tall matrices are longer, by the root of the ratio."""
        for group in self.param_groups:
            for matrix in group["params"]:
                momentum = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 1 - group["momentum"])
                update = orthogonal(matrix.grad.lerp(momentum, group["momentum"]))
                rows, columns = matrix.shape
                matrix.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """`matrix` (R, C) with its singular values brought to between about 0.7 and 1.2."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonal(matrix.T).T
    a, b, c = COEFFICIENTS
    x: Tensor = matrix / matrix.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x
