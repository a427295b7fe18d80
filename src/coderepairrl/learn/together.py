"""One of several learner processes that share a batch, through accelerate: DDP, FSDP2, DeepSpeed's ZeRO-2 and ZeRO-3.

The losses' denominators are those of the whole batch, so that gradients of processes add up. The frameworks average
gradients instead, so each loss is multiplied by the number of processes.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from torch import Tensor, distributed
from torch.distributed.fsdp import MixedPrecisionPolicy

from coderepairrl.errors import PrerequisiteError
from coderepairrl.learn.parallel import Alone, T
from coderepairrl.learn.policy import Policy
from coderepairrl.learn.settings import LearnSettings

RANK, RANKS, MEETING = "RANK", "WORLD_SIZE", "CRRL_RANKS_FILE"
"""Environment of a learner process that is one of several: its number, how many, and the file over which they meet."""


def join(settings: LearnSettings) -> Together:
    """This process's part. Raises `PrerequisiteError` when DeepSpeed is asked for and missing."""
    return (Zero if settings.strategy in ("zero2", "zero3") else Together)(settings)


class Together(Alone):
    """One of several processes: each has the whole model (DDP), or a part of every layer (FSDP2)."""

    def __init__(self, settings: LearnSettings) -> None:
        super().__init__(settings)
        self.rank, self.ranks = int(os.environ[RANK]), int(os.environ[RANKS])
        if self.device.type == "cuda":
            torch.cuda.set_device(self.rank)
            self.device = torch.device("cuda", self.rank)
        distributed.init_process_group(
            "cuda:nccl,cpu:gloo" if self.device.type == "cuda" else "gloo",
            init_method=f"file://{os.environ[MEETING]}",
            rank=self.rank,
            world_size=self.ranks,
        )

    @property
    def load_device(self) -> torch.device:
        """Where the whole model fits."""
        return self.device if self.settings.strategy == "ddp" else torch.device("cpu")

    def prepare(self, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
        """Take over a policy and the optimiser of its parameters, which change into this process's share."""
        super().prepare(policy, optimizer)
        self._accelerator = Accelerator(cpu=self.device.type == "cpu", **self._plugin(policy))
        policy.module, _ = self._accelerator.prepare(policy.module, optimizer)
        policy.device = self.device

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Around the forward and backward pass of one micro-batch; `last` of an update."""
        # FSDP2 reduces every micro-batch, for it would else hold whole gradients
        wait = self.settings.strategy == "ddp" and not last
        return (
            cast("AbstractContextManager[Any]", self._accelerator.no_sync(self.policy.module))
            if wait
            else nullcontext()
        )

    def gather(self, value: T) -> list[T]:
        """The `value` of each process, by rank."""
        everyone: list[Any] = [None] * self.ranks
        distributed.all_gather_object(everyone, value)
        return everyone

    def _plugin(self, policy: Policy) -> dict[str, Any]:
        if self.settings.strategy == "ddp":
            return {}
        full_bf16 = self.settings.precision == "bf16" and self.settings.lora is None
        mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        return {
            "fsdp_plugin": FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=list(policy.model._no_split_modules or ()),
                reshard_after_forward=True,
                cpu_ram_efficient_loading=False,
                mixed_precision_policy=mixed if full_bf16 else None,
            )
        }


class Zero(Together):
    """One of several processes under DeepSpeed: gradients and optimiser state are shared, with stage 3 weights too."""

    def _plugin(self, policy: Policy) -> dict[str, Any]:
        _need_deepspeed()
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self.settings.max_grad_norm,
            "zero_optimization": {"stage": 3 if self.settings.strategy == "zero3" else 2},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config)}

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of this process's share."""
        self._engine.backward(loss * self.ranks)

    @property
    def _engine(self) -> Any:
        return self.policy.module


def _need_deepspeed() -> None:
    try:
        import deepspeed  # noqa: F401
    except ImportError as error:
        raise PrerequisiteError(
            f"DeepSpeed cannot be used: {error}", fix="pip install 'coderepairrl[deepspeed]', or train.strategy=fsdp2"
        ) from error
