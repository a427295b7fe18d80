"""Learner processes that share a batch (DDP) or also the model (FSDP2)."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import distributed
from torch.distributed.fsdp import MixedPrecisionPolicy

from coderepairrl.learn.policy import Policy
from coderepairrl.learn.settings import LearnSettings
from coderepairrl.learn.strategy import SingleProcess, T

RANK, RANKS, RENDEZVOUS_FILE = "RANK", "WORLD_SIZE", "CRRL_RANKS_FILE"
"""Environment variables: rank, number of ranks, file by which they connect."""
LOCAL_RANK = "LOCAL_RANK"
"""Rank on its machine."""


class DistributedProcess(SingleProcess):
    """Process with the whole model (DDP), or a shard of every layer (FSDP2)."""

    def __init__(self, settings: LearnSettings) -> None:
        super().__init__(settings)
        self.rank, self.ranks = int(os.environ[RANK]), int(os.environ[RANKS])
        if self.device.type == "cuda":
            local = int(os.environ[LOCAL_RANK])
            torch.cuda.set_device(local)
            self.device = torch.device("cuda", local)
        if not distributed.is_initialized():  # torchrun's processes connect before the first request
            connect_processes(f"file://{os.environ[RENDEZVOUS_FILE]}")

    @property
    def load_device(self) -> torch.device:
        """Device for loading the whole model."""
        return self.device if self.settings.strategy in ("ddp", "zero2") else torch.device("cpu")

    def prepare(self, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
        """Wrap policy and optimiser."""
        super().prepare(policy, optimizer)
        self._accelerator = Accelerator(**self._accelerator_options(policy))
        policy.module, _ = self._accelerator.prepare(policy.module, optimizer)
        policy.device = self.device

    def accumulation_context(self, last: bool) -> AbstractContextManager[Any]:
        """Context of a micro-batch; with `last`, an update follows."""
        # FSDP2 reduces after every micro-batch, else it would keep whole gradients
        if last or self.settings.strategy != "ddp":
            return nullcontext()
        return cast("AbstractContextManager[Any]", self._accelerator.no_sync(self.policy.module))

    def gather(self, value: T) -> list[T]:
        """Values of all processes, by rank."""
        return gather_values(value)

    def _accelerator_options(self, policy: Policy) -> dict[str, Any]:
        cpu = self.device.type == "cpu"
        if self.settings.strategy == "ddp":
            return {"cpu": cpu}
        # weights are gathered in bfloat16, gradients reduced in float32; base weights of adapters are bfloat16 anyway
        full_bf16 = self.settings.precision == "bf16" and self.settings.lora is None
        mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        return {
            "cpu": cpu,
            "fsdp_plugin": FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=list(policy.model._no_split_modules or ()),
                reshard_after_forward=True,
                cpu_ram_efficient_loading=False,
                mixed_precision_policy=mixed if full_bf16 else None,
            ),
        }


def gather_values(value: T, group: distributed.ProcessGroup | None = None) -> list[T]:
    """Values of all processes of `group`, by rank."""
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value, group=group)
    return values


def connect_processes(where: str) -> None:
    """Connect the processes at `where`: NCCL between GPUs, gloo between CPUs."""
    backend = "cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo"
    rank, ranks = int(os.environ[RANK]), int(os.environ[RANKS])
    distributed.init_process_group(backend, init_method=where, rank=rank, world_size=ranks)
