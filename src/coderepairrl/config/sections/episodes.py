"""`[agent]`, `[sandbox]`, `[engine]`, `[rollout]` and `[kinds.NAME]`: how episodes are made."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from coderepairrl.config.sections.base import Section, Short, Weights
from coderepairrl.types import SideCalls

Route = Literal["gloo", "ipc", "nccl"]
"""How whole models reach an engine that takes them without a file."""


class Agent(Section):
    """Who works on a task."""

    name: str = "nano"
    """An agent of `crrl agents list`, a recipe file, or `module:Class`."""
    options: dict[str, Any] = {}
    """Passed to the agent: see docs/guides/agents.md."""


class Sandbox(Section):
    """Where the agent's commands run."""

    name: str = "auto"
    """`auto`: bwrap where it works, else sandlock where the kernel allows, never anything weaker; `unsafe-local` must
    be asked for by name."""
    options: dict[str, Any] = {}
    """Passed to the sandbox: limits on memory, processes, file size and output."""


class Engine(Section):
    """Who samples."""

    name: str = "tiny"
    """An inference engine: `tiny` (CPU, embedded), `vllm`, or `module:Class` (docs/guides/engines.md)."""
    options: dict[str, Any] = {}
    """Passed to the engine, for example `lora_rank`."""
    devices: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """GPUs that a server of ours sees, counted among those that `crrl` sees; empty is all of them
    (docs/guides/cluster.md)."""
    share_devices: bool | Literal["turns"] = False
    """Let engine and learner have the same GPUs. With `true` neither makes room for the other: limit the engine's
    memory. With `turns` the engine sleeps while the learner steps, and what the learner holds is in the host's memory
    while the engine samples (docs/guides/cluster.md): `vllm` and one learner process. Not yet run on a GPU."""
    weights: Literal["file", Route] = "file"
    """How full weights reach it: as files, or tensor by tensor without one, which only `vllm` takes: `gloo` through the
    host's memory, on one machine; `ipc` through memory that both have open, of the one GPU that they share, or of the
    host where there is none; `nccl` between GPUs. The last two have not yet run on any. Adapters are always files."""
    weights_dir: str = ""
    """A folder that the engine sees too, where weights lie on their way to it; empty is in memory. An engine on another
    machine needs one on a shared file system."""


class RayCluster(Section):
    """Episodes on a Ray cluster: actors, each with a gateway, agents and sandboxes of its own
    (docs/guides/cluster.md)."""

    address: str = "auto"
    """The cluster: `auto` is the one that this machine belongs to, `HOST:PORT` one by name, and `local` starts one on
    this machine alone."""
    episodes: int = Field(default=8, ge=1)
    """Episodes at once of an actor. As many actors are asked for as `rollout.concurrency` takes."""


class Rollout(Section):
    """How episodes are made."""

    executor: Literal["local", "ray"] = "local"
    """Where: on this machine, or on the machines of a Ray cluster (docs/guides/cluster.md)."""
    ray: RayCluster = RayCluster()

    tasks_per_step: int = Field(default=4, ge=1)
    """Tasks in a batch."""
    group_size: int = Field(default=8, ge=2)
    """Attempts at each task, which share a baseline."""
    concurrency: int = Field(default=16, ge=1)
    """Episodes in flight at once."""
    max_staleness: int = Field(default=0, ge=0)
    """By how many policy versions a training sample may be older than the weights that learn from it. 0: engine and
    learner take turns. Above 0 the engine goes on while the learner steps (docs/guides/training.md)."""
    temperature: float = Field(default=1.0, gt=0)
    """Of training samples. Nothing else may shape the distribution that is trained on."""
    calls: int = Field(default=30, ge=1)
    """Tool calls an episode may make."""
    tokens: int = Field(default=10_240, ge=16)
    """Longest sequence of an episode, prompt and tool results included."""
    seconds: float = Field(default=60.0, gt=0)
    """Wall time an episode may take, from when its sandbox is open."""
    turn_tokens: int = Field(default=4_096, ge=1)
    """Tokens of one reply."""
    side_calls: SideCalls | None = None
    """Which calls beside the agent's main conversation are trained: none (`mask`), those that were given tools
    (`tools`), all (`train`). Unset is what the agent's recipe says (docs/guides/agents.md)."""


class TaskKind(Section):
    """What is otherwise for the tasks of one kind (their field `kind`); what is left out is that of the run."""

    agent: Annotated[Agent | None, Short] = None
    """Who works on them."""
    reward: Annotated[dict[str, float], Weights] = {}
    """What their attempts are paid for, and measured by."""
    calls: int | None = Field(default=None, ge=1)
    """As `rollout.calls`."""
    tokens: int | None = Field(default=None, ge=16)
    """As `rollout.tokens`, and no more than these."""
    seconds: float | None = Field(default=None, gt=0)
    """As `rollout.seconds`."""
    turn_tokens: int | None = Field(default=None, ge=1)
    """As `rollout.turn_tokens`."""
    weight: float = Field(default=1.0, gt=0)
    """Factor on its advantages, and so on its part of the loss (`train.balance_kinds`)."""
