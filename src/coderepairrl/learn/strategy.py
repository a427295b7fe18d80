"""Division of batch and model among processes (`train.strategy`)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from coderepairrl.learn.policy import Policy
from coderepairrl.learn.settings import LearnSettings
from coderepairrl.runs.storage import replace_folder

T = TypeVar("T")


class SingleProcess:
    """Only process, with the whole model."""

    rank = 0
    ranks = 1

    def __init__(self, settings: LearnSettings) -> None:
        self.settings = settings
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cuda":
            _make_deterministic()

    @property
    def load_device(self) -> torch.device:
        """Device for loading."""
        return self.device

    def prepare(self, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
        """Set the policy and its optimiser."""
        self.policy = policy
        self.optimizer = optimizer
        policy.gather_tensor = self.gather_tensor

    def accumulation_context(self, last: bool) -> AbstractContextManager[Any]:
        """Context of a micro-batch; with `last`, an update follows."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient."""
        # the frameworks average gradients over processes, and denominators are those of the whole batch
        (loss * self.ranks).backward()  # type: ignore[no-untyped-call]

    def update(self, rate: float) -> float:
        """Update; return the gradient norm before clipping.

        Raises FloatingPointError for a non-finite gradient, which is discarded.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        try:
            norm = self.gather_tensor(
                torch.nn.utils.clip_grad_norm_(self.policy.parameters.values(), self.settings.max_grad_norm)
            ).item()
            if not math.isfinite(norm):
                raise FloatingPointError(f"the gradient is non-finite: its norm is {norm}")
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad()
        return norm

    def gather_tensor(self, tensor: Tensor) -> Tensor:
        """Gather a sharded tensor: a collective operation."""
        tensor = tensor.detach()
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def get_whole_shape(self, parameter: Tensor) -> torch.Size:
        """Shape of the whole parameter."""
        return parameter.shape

    def set_parameter(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set a parameter to `value`, present in every process."""
        with torch.no_grad():
            parameter.copy_(_shard_like(parameter, value))

    def iter_moments(self, parameter: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
        """Gathered optimiser state; empty before the first update."""
        for key, value in self.optimizer.state.get(parameter, {}).items():
            tensor = self.gather_tensor(torch.as_tensor(value))
            # 8-bit optimisers share code tables between parameters; safetensors refuses shared memory
            yield key, tensor if tensor.shape == parameter.shape else tensor.clone()

    def set_moments(self, parameter: nn.Parameter, values: Mapping[str, Tensor]) -> None:
        """Replace optimiser state."""
        self.optimizer.state.pop(parameter, None)
        if values:
            self.optimizer.state[parameter] = {key: _shard_like(parameter, value) for key, value in values.items()}
            if self.settings.optimizer == "adamw_8bit":  # its step is a plain int
                self.optimizer.state[parameter]["step"] = int(values["step"])

    def gather(self, value: T) -> list[T]:
        """Values of all processes, by rank."""
        return [value]

    @property
    def is_writer(self) -> bool:
        """Whether this process writes files."""
        return self.rank == 0

    @contextmanager
    def replace_atomically(self, folder: Path) -> Iterator[Path]:
        """`replace_folder` in the writing process."""
        with ExitStack() as files:
            yield self.run_or_fail_together(
                lambda: files.enter_context(replace_folder(folder)) if self.is_writer else folder
            )

    def run_or_fail_together(self, action: Callable[[], Any]) -> Any:
        """Result of `action`; all processes raise OSError if one does."""
        result, failure = None, None
        try:
            result = action()
        except (OSError, safetensors.SafetensorError) as error:
            failure = error
        reasons = self.gather(str(failure) if failure else "")
        if failure:
            raise failure
        if reason := next(filter(None, reasons), ""):
            raise OSError(f"another process could not: {reason}")
        return result


def _make_deterministic() -> None:
    """Make GPU training deterministic: a resumed run repeats steps and compares weights."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by torch for matrix products
    # not with ``warn_only``: then `_flash_attention_backward` is not deterministic; FlashAttention replaces cuDNN's
    # attention, which compiles a plan for each row length
    torch.use_deterministic_algorithms(True)
    # not needed: no code reads uninitialised memory
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _shard_like(parameter: Tensor, value: Tensor) -> Tensor:
    value = value.to(parameter.device, copy=True)
    if isinstance(parameter, DTensor) and value.shape == parameter.shape:
        return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return value
