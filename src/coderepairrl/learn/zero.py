"""DeepSpeed's ZeRO: processes divide gradients and optimiser state (stage 2), and also weights (stage 3)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import deepspeed
import torch
from accelerate.utils import DeepSpeedPlugin
from deepspeed.utils import (
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn
from torch.nn.functional import pad

from coderepairrl.learn.distributed import DistributedProcess
from coderepairrl.learn.policy import Policy
from coderepairrl.learn.settings import BUCKET, LearnSettings

_MOMENTS = ("exp_avg", "exp_avg_sq")


class ZeroProcess(DistributedProcess):
    """Process with a part of the optimiser state and, in stage 3, of the model."""

    def __init__(self, settings: LearnSettings) -> None:
        super().__init__(settings)
        self._is_stage3 = settings.strategy == "zero3"
        if self.device.type == "cpu":
            # keeps DeepSpeed from looking for compilers to build kernels that a CPU does not use
            deepspeed.ops.__compatible_ops__ = {}

    def prepare(self, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
        """Wrap policy and optimiser."""
        if self._is_stage3:  # parameter by parameter: DeepSpeed itself would first move the whole model to the device
            deepspeed.zero.Init(module=policy.module, config_dict_or_path=self._deepspeed_config())
            for buffer in policy.module.buffers():
                buffer.data = buffer.data.to(self.device)
        super().prepare(policy, optimizer)
        self._engine: Any = policy.module  # DeepSpeed's wrapper of the model

    def accumulation_context(self, last: bool) -> AbstractContextManager[Any]:
        """Context of a micro-batch; with `last`, an update follows."""
        self._engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient."""
        self._engine.backward(loss * self.ranks)

    def update(self, rate: float) -> float:
        """Update; return the gradient norm before clipping.

        Raises FloatingPointError for a non-finite gradient, which DeepSpeed discards.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient is non-finite: its norm is {norm}")
        return norm

    def get_whole_shape(self, parameter: Tensor) -> torch.Size:
        """Shape of the whole parameter."""
        return parameter.ds_shape if self._is_stage3 else parameter.shape  # type: ignore[attr-defined]

    def gather_tensor(self, tensor: Tensor) -> Tensor:
        """Gather a parameter: a collective operation."""
        with deepspeed.zero.GatheredParameters([tensor], enabled=self._is_stage3):
            return tensor.detach().clone() if self._is_stage3 else tensor.detach()

    def set_parameter(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set a parameter to `value`, present in every process."""
        value = value.to(self.device)
        with torch.no_grad(), deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=self._is_stage3):
            parameter.copy_(value)
        if self._is_stage3:
            safe_set_local_fp32_param(parameter, self._take_shard(parameter, value))
        else:
            safe_set_full_fp32_param(parameter, value)

    def iter_moments(self, parameter: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
        """Gathered optimiser state; empty before the first update."""
        states = list(self.optimizer.state.values())
        if states:
            self._link_moments(parameter)
            yield "step", states[0]["step"].clone()
            for key in _MOMENTS:
                yield key, safe_get_full_optimizer_state(parameter, key)

    def set_moments(self, parameter: nn.Parameter, values: Mapping[str, Tensor]) -> None:
        """Replace optimiser state; without values, clear all."""
        if not values:
            self.optimizer.state.clear()
            return
        self._make_state(values["step"])
        self._link_moments(parameter)
        for key in _MOMENTS:
            value = values[key].to(self.device)
            if self._is_stage3:
                safe_set_local_optimizer_state(parameter, self._take_shard(parameter, value), key)
            else:
                safe_set_full_optimizer_state(parameter, value, key)

    def _make_state(self, step: Tensor) -> None:
        # the state that the first update would create
        zero = self._engine.optimizer
        flat = zero.fp32_partitioned_groups_flat if self._is_stage3 else zero.single_partition_of_fp32_groups
        for part in flat:
            state = self.optimizer.state[part] or {key: torch.zeros_like(part) for key in _MOMENTS}
            self.optimizer.state[part] = {**state, "step": step.to(self.device, copy=True)}

    def _link_moments(self, parameter: nn.Parameter) -> None:
        # ZeRO-2 links parameters to their moments once, before the moments exist: link them again
        mapping = None if self._is_stage3 else parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is not None:  # this process holds a part of the parameter
            flat = self._engine.optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
            mapping.set_optim_state_fragment(flat, self.optimizer.state[flat])

    def _take_shard(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        # this process's part of `value`; the last process's is padded with zeros
        part: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
        size = part.numel()
        return pad(value.flatten(), (0, size * self.ranks - value.numel()))[size * self.rank :][:size]

    def _accelerator_options(self, policy: Policy) -> dict[str, Any]:
        # accelerate's option `cpu` is left out, since it would switch DeepSpeed off; DeepSpeed finds the device itself
        return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=self._deepspeed_config())}

    def _deepspeed_config(self) -> dict[str, Any]:
        # no precision is set, so that tensors keep the policy's
        return {
            "train_micro_batch_size_per_gpu": 1,  # required, but without effect: `pack_rank_share` divides the rows
            "gradient_clipping": self.settings.max_grad_norm,
            "zero_optimization": {
                "stage": 3 if self._is_stage3 else 2,
                "reduce_bucket_size": BUCKET,
                "allgather_bucket_size": BUCKET,
                "stage3_param_persistence_threshold": 0,
            },
        }
