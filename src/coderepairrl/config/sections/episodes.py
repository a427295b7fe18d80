"""`[agent]`, `[sandbox]`, `[engine]`, `[rollout]`, `[kinds.NAME]`: how episodes are made."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from coderepairrl.config.sections.base import Section, Short, Weights
from coderepairrl.types import SideCalls

Route = Literal["gloo", "ipc", "nccl"]
"""Transport of whole models to an engine without a file."""


class Agent(Section):
    """The agent that works on tasks."""

    name: str = "nano"
    """An agent of `crrl agents list`, a recipe file, or `module:Class`."""
    options: dict[str, Any] = {}
    """Options of the agent (docs/guides/agents.md)."""


class Sandbox(Section):
    """The sandbox of the agent's commands."""

    name: str = "auto"
    """Backend; `auto` takes bwrap, else sandlock where the kernel allows it. Weaker `unsafe-local` must be named."""
    options: dict[str, Any] = {}
    """Limits of the backend on memory, processes, file size and output."""


class Engine(Section):
    """The inference engine, which samples."""

    name: str = "tiny"
    """`tiny` (embedded, CPU), `vllm`, or `module:Class` (docs/guides/engines.md)."""
    options: dict[str, Any] = {}
    """Options of the engine, for example `lora_rank`."""
    devices: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Indices, among the GPUs that `crrl` sees, for a server that it starts; empty takes all
    (docs/guides/cluster.md)."""
    share_devices: bool | Literal["turns"] = False
    """Let engine and learner share GPUs: with `true` both stay (limit the engine's memory); with `turns` (`vllm`, one
    learner process; not yet run on a GPU) the engine sleeps while the learner steps, whose state is in host memory
    while the engine samples. See docs/guides/cluster.md."""
    weights: Literal["file", Route] = "file"
    """Transport of full weights: files, or for `vllm` tensors by `gloo` (host memory, one machine), `ipc` (memory of a
    shared GPU, else of the host) or `nccl` (between GPUs). `ipc` and `nccl` have not yet run on GPUs; adapters are
    always files."""
    weights_dir: str = ""
    """Folder, shared with the engine, for weights in transit; empty is in memory. An engine on another machine needs a
    shared file system."""


class RayCluster(Section):
    """Episodes on a Ray cluster: actors, each with a gateway, agents and sandboxes (docs/guides/cluster.md)."""

    address: str = "auto"
    """`auto` (this machine's cluster), `HOST:PORT`, or `local`, which starts one on this machine."""
    episodes: int = Field(default=8, ge=1)
    """Concurrent episodes per actor; `rollout.concurrency` decides the number of actors."""


class Rollout(Section):
    """Batches and limits of episodes."""

    executor: Literal["local", "ray"] = "local"
    """Run episodes on this machine, or on a Ray cluster (docs/guides/cluster.md)."""
    ray: RayCluster = RayCluster()

    tasks_per_step: int = Field(default=4, ge=1)
    """Tasks per batch."""
    group_size: int = Field(default=8, ge=2)
    """Attempts per task, which share a baseline; the default is the thesis's."""
    concurrency: int = Field(default=16, ge=1)
    """Concurrent episodes; the default is the thesis's."""
    max_staleness: int = Field(default=0, ge=0)
    """Most policy versions between a training sample and the weights that learn from it. 0 alternates engine and
    learner, more overlaps them (docs/guides/training.md)."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of training episodes; 1 samples the distribution that is trained."""
    calls: int = Field(default=30, ge=1)
    """Tool calls per episode; the default is the thesis's."""
    tokens: int = Field(default=10_240, ge=16)
    """Longest sequence of an episode in tokens, prompt and tool results included; the default is the thesis's."""
    seconds: float = Field(default=60.0, gt=0)
    """Wall time per episode, from when its sandbox is open; the default is the thesis's."""
    turn_tokens: int = Field(default=4_096, ge=1)
    """Tokens per reply; the default is the thesis's."""
    side_calls: SideCalls | None = None
    """Train calls outside the agent's main conversation: none (`mask`), those with tools (`tools`), all (`train`).
    Unset follows the agent's recipe (docs/guides/agents.md)."""


class TaskKind(Section):
    """Settings for tasks of one kind (their field `kind`); unset ones are the run's."""

    agent: Annotated[Agent | None, Short] = None
    """Agent for these tasks."""
    reward: Annotated[dict[str, float], Weights] = {}
    """Rewards of their attempts by weight; 0 measures without paying."""
    calls: int | None = Field(default=None, ge=1)
    """Replaces `rollout.calls`."""
    tokens: int | None = Field(default=None, ge=16)
    """Replaces `rollout.tokens`, which it must not exceed."""
    seconds: float | None = Field(default=None, gt=0)
    """Replaces `rollout.seconds`."""
    turn_tokens: int | None = Field(default=None, ge=1)
    """Replaces `rollout.turn_tokens`."""
    weight: float = Field(default=1.0, gt=0)
    """Factor on their advantages, hence on their part of the loss (`train.balance_kinds`)."""
