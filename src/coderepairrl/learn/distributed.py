"""One of several learner processes that share a batch, and with FSDP2 the model too, through accelerate.

The losses' denominators are those of the whole batch, so that gradients of processes add up. The frameworks average
gradients instead, so each loss is multiplied by the number of processes.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import distributed
from torch.distributed.fsdp import MixedPrecisionPolicy

from coderepairrl.learn.broadcast import broadcast_folder
from coderepairrl.learn.policy import Policy
from coderepairrl.learn.settings import LearnSettings
from coderepairrl.learn.strategy import SingleProcess, T

RANK, RANKS, RENDEZVOUS_FILE = "RANK", "WORLD_SIZE", "CRRL_RANKS_FILE"
"""Environment of one of several learner processes: its number, how many there are, the file of their rendezvous."""
LOCAL_RANK, LOCAL_RANKS, STORE, LISTEN = "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CRRL_STORE", "CRRL_LISTEN"
"""The same on its node; and where there are several nodes, in place of the file, HOST:PORT of the rendezvous, and the
first process's descriptor that listens there."""
_RENDEZVOUS_TIMEOUT = timedelta(seconds=300)


class Distributed(SingleProcess):
    """One of several processes: each has the whole model (DDP), or a part of every layer (FSDP2)."""

    def __init__(self, settings: LearnSettings) -> None:
        super().__init__(settings)
        self.rank, self.ranks = int(os.environ[RANK]), int(os.environ[RANKS])
        local, local_ranks = int(os.environ[LOCAL_RANK]), int(os.environ[LOCAL_RANKS])
        if self.device.type == "cuda":
            torch.cuda.set_device(local)
            self.device = torch.device("cuda", local)
        backend = "cuda:nccl,cpu:gloo" if self.device.type == "cuda" else "gloo"
        self._leaders: distributed.ProcessGroup | None = None
        """The first processes of the nodes, where there are several."""
        if STORE in os.environ:
            store = _store(self.rank, self.ranks)
            distributed.init_process_group(backend, store=store, rank=self.rank, world_size=self.ranks)
            self._leaders = distributed.new_group(list(range(0, self.ranks, local_ranks)), backend="gloo")
        else:
            distributed.init_process_group(
                backend, init_method=f"file://{os.environ[RENDEZVOUS_FILE]}", rank=self.rank, world_size=self.ranks
            )
        self._first_here = self.rank - local

    @property
    def load_device(self) -> torch.device:
        """Where the whole model fits."""
        return self.device if self.settings.strategy in ("ddp", "zero2") else torch.device("cpu")

    def prepare(self, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
        """Take over a policy and the optimiser of its parameters, which change into this process's share."""
        super().prepare(policy, optimizer)
        self._accelerator = Accelerator(**self._options(policy))
        policy.module, _ = self._accelerator.prepare(policy.module, optimizer)
        policy.device = self.device

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Around the forward and backward pass of one micro-batch; `last` of an update."""
        # FSDP2 reduces after every micro-batch, else it would keep whole gradients
        if last or self.settings.strategy != "ddp":
            return nullcontext()
        return cast("AbstractContextManager[Any]", self._accelerator.no_sync(self.policy.module))

    def gather(self, value: T) -> list[T]:
        """The `value` of each process, by rank."""
        everyone: list[Any] = [None] * self.ranks
        distributed.all_gather_object(everyone, value)
        return everyone

    def local_copy(self, folder: Path) -> AbstractContextManager[Path]:
        """Where the files of the first process's `folder` are within: there, or on another node in a copy."""
        if self._leaders is None:
            return nullcontext(folder)
        return broadcast_folder(folder, self._leaders, self.gather, rank=self.rank, leader=self._first_here)

    def _options(self, policy: Policy) -> dict[str, Any]:
        """Arguments for `Accelerator`."""
        cpu = self.device.type == "cpu"
        if self.settings.strategy == "ddp":
            return {"cpu": cpu}
        # weights are gathered in bfloat16, gradients reduced in float32; those below adapters are bfloat16 anyway
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


def _store(rank: int, ranks: int) -> Any:
    """The rendezvous of processes on several nodes."""
    host, _, port = os.environ[STORE].rpartition(":")
    listening = int(os.environ[LISTEN]) if LISTEN in os.environ else None
    return distributed.TCPStore(  # type: ignore[attr-defined]
        host, int(port), ranks, is_master=rank == 0, timeout=_RENDEZVOUS_TIMEOUT, master_listen_fd=listening
    )
