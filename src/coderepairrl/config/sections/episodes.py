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
    """Options of the agent (docs/guides/nano.md, docs/guides/agents.md)."""


class Sandbox(Section):
    """The sandbox of the agent's commands."""

    name: str = "auto"
    """Backend: `bwrap`, `sandlock`, `docker`, `podman` or `module:Class`. `auto` takes bwrap if it works, else
    sandlock. `unsafe-local` isolates nothing, so it is never chosen unnamed."""
    options: dict[str, Any] = {}
    """Limits on memory, processes, files and time, and options of the backend (docs/guides/sandbox.md)."""


class Engine(Section):
    """The inference engine, which samples the policy's tokens."""

    name: str = "tiny"
    """`tiny` (on the CPU), `vllm`, or `module:Class` (docs/guides/engines.md)."""
    options: dict[str, Any] = {}
    """Options of the engine, for example `context` (docs/guides/engines.md)."""
    devices: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """GPUs of the server that `crrl` starts, as indices among those that it sees; empty takes all
    (docs/guides/cluster.md)."""
    share_devices: bool | Literal["turns"] = False
    """Whether engine and learner may use the same GPU. `true`: both stay in its memory, so limit the engine's. `turns`
    (`vllm`, one learner process; not run on a GPU): the engine sleeps while the learner steps, and the learner's state
    is in host memory while the engine samples (docs/guides/cluster.md)."""
    weights: Literal["file", Route] = "file"
    """How full weights reach the engine: as a file, or, for `vllm`, as tensors by `gloo` (host memory of one machine),
    `ipc` (memory of a shared GPU, else of the host) or `nccl` (between GPUs). `file` works everywhere; `ipc` and `nccl`
    have not run on GPUs. Adapters are always files."""
    weights_dir: str = ""
    """Folder for weights on their way to the engine; empty is `/dev/shm`. An engine on another machine needs a folder
    on a shared file system."""


class RayCluster(Section):
    """Episodes on a Ray cluster: actors, each with a gateway, agents and sandboxes (docs/guides/cluster.md)."""

    address: str = "auto"
    """`auto` (the cluster of this machine), `HOST:PORT`, or `local`, which starts one on this machine."""
    episodes: int = Field(default=8, ge=1)
    """Concurrent episodes per actor, which claims one CPU; `rollout.concurrency` decides the number of actors."""


class Rollout(Section):
    """Batches and limits of episodes."""

    executor: Literal["local", "ray"] = "local"
    """Run episodes on this machine, or on a Ray cluster (docs/guides/cluster.md)."""
    ray: RayCluster = RayCluster()
    """The Ray cluster of `executor = "ray"`."""
    tasks_per_step: int = Field(default=4, ge=1)
    """Tasks per step; the default makes 32 episodes, the thesis's batch of an update."""
    group_size: int = Field(default=8, ge=2)
    """Attempts per task, compared with each other; the default is the thesis's."""
    concurrency: int = Field(default=16, ge=1)
    """Episodes at a time; the default is the thesis's."""
    max_staleness: int = Field(default=0, ge=0)
    """Most policy versions by which a sample may be older than the weights that learn from it. 0: engine and learner
    take turns, and all samples are on-policy; above 0 they work at the same time (docs/guides/training.md)."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of training episodes; 1 samples the distribution that is trained."""
    calls: int = Field(default=30, ge=1)
    """Most tool calls of an episode; the default is the thesis's."""
    tokens: int = Field(default=10_240, ge=16)
    """Longest sequence of an episode in tokens, prompt and tool results included; the default is the thesis's."""
    seconds: float = Field(default=60.0, gt=0)
    """Wall time of an episode in seconds, from the opening of its sandbox; the default is the thesis's."""
    turn_tokens: int = Field(default=4_096, ge=1)
    """Most tokens of a reply; the default is the thesis's."""
    side_calls: SideCalls | None = None
    """Which calls outside the agent's main conversation (titles, summaries, sub-agents) are trained: none (`mask`),
    those with tools (`tools`), all (`train`). Unset: as the agent's recipe says (docs/guides/agents.md)."""


class TaskKind(Section):
    """Settings for the tasks whose field `kind` is NAME; unset ones are the run's."""

    agent: Annotated[Agent | None, Short] = None
    """Agent of these tasks."""
    reward: Annotated[dict[str, float], Weights] = {}
    """Rewards of these tasks with their weights; weight 0 measures without paying."""
    calls: int | None = Field(default=None, ge=1)
    """Replaces `rollout.calls`."""
    tokens: int | None = Field(default=None, ge=16)
    """Replaces `rollout.tokens`, which it must not exceed."""
    seconds: float | None = Field(default=None, gt=0)
    """Replaces `rollout.seconds`."""
    turn_tokens: int | None = Field(default=None, ge=1)
    """Replaces `rollout.turn_tokens`."""
    weight: float = Field(default=1.0, gt=0)
    """Factor on the advantages of these tasks, so on their part of the loss; with `train.balance_kinds` their part."""
