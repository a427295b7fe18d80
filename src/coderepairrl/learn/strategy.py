"""What `train.strategy` decides: how a batch and the model are divided among processes.

`SingleProcess` divides nothing; `coderepairrl.learn.distributed` and `coderepairrl.learn.zero` build on it.
"""

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
    """A single process with the whole model."""

    rank = 0
    ranks = 1

    def __init__(self, settings: LearnSettings) -> None:
        self.settings = settings
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cuda":
            _make_deterministic()

    @property
    def load_device(self) -> torch.device:
        """The device that the whole model is loaded to."""
        return self.device

    def prepare(self, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
        """Set the policy and the optimiser of its parameters. Called once."""
        self.policy = policy
        self.optimizer = optimizer
        policy.whole = self.whole

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Context for the forward and backward pass of one micro-batch; `last` for the last one before an update."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of this process's share."""
        (loss * self.ranks).backward()  # type: ignore[no-untyped-call]

    def update(self, rate: float) -> float:
        """One optimiser update from the accumulated gradient; returns its norm before clipping.

        Raises FloatingPointError for a gradient that is not finite, which is discarded.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        try:
            norm = whole(
                torch.nn.utils.clip_grad_norm_(self.policy.parameters.values(), self.settings.max_grad_norm)
            ).item()
            if not math.isfinite(norm):
                raise FloatingPointError(f"the gradient is non-finite: its norm is {norm}")
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad()
        return norm

    def whole(self, parameter: Tensor) -> Tensor:
        """A parameter, gathered from all processes: a collective operation."""
        return whole(parameter)

    def shape(self, parameter: Tensor) -> torch.Size:
        """Shape of the whole parameter."""
        return parameter.shape

    def put(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set a parameter to the whole `value`, which every process has."""
        with torch.no_grad():
            parameter.copy_(_like(parameter, value))

    def moments(self, parameter: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
        """The optimiser's state of a parameter, gathered; empty before the first update."""
        for key, value in self.optimizer.state.get(parameter, {}).items():
            tensor = whole(torch.as_tensor(value))
            # 8-bit optimisers share code tables between parameters; safetensors refuses shared memory
            yield key, tensor if tensor.shape == parameter.shape else tensor.clone()

    def put_moments(self, parameter: nn.Parameter, values: Mapping[str, Tensor]) -> None:
        """Replace the optimiser's state of a parameter; without values there is none."""
        self.optimizer.state.pop(parameter, None)
        if values:
            self.optimizer.state[parameter] = {key: _like(parameter, value) for key, value in values.items()}
            if self.settings.optimizer == "adamw_8bit":  # its step is a plain int
                self.optimizer.state[parameter]["step"] = int(values["step"])

    def gather(self, value: T) -> list[T]:
        """The `value` of each process, by rank."""
        return [value]

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes files."""
        return self.rank == 0

    @contextmanager
    def replaced(self, folder: Path) -> Iterator[Path]:
        """`replace_folder` in the process that writes; if that fails at the start, all processes raise."""
        with ExitStack() as files:
            yield self.agree(lambda: files.enter_context(replace_folder(folder)) if self.first else folder)

    def agree(self, action: Callable[[], Any]) -> Any:
        """The result of `action`; if it cannot read or write in one process, all processes raise.

        A process that failed alone would leave the others waiting for it.
        """
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
    """Make training deterministic on a GPU, too: a resumed run repeats steps and compares the weights.

    Torch raises for operations without a deterministic kernel; a step uses none. Not with ``warn_only``: then
    `_flash_attention_backward` is not deterministic. As a side effect, attention in half precision is FlashAttention
    instead of cuDNN's, which torch prefers on an H100 and which compiles a plan for each row length.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by torch for matrix products
    torch.use_deterministic_algorithms(True)
    # not needed: no code reads uninitialised memory
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def whole(tensor: Tensor) -> Tensor:
    """A tensor, gathered if processes share it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """`value` on the device of `parameter` and, if it has its shape, sharded like it."""
    value = value.to(parameter.device, copy=True)
    if isinstance(parameter, DTensor) and value.shape == parameter.shape:
        return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return value
