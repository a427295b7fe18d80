"""Memory a run needs on each GPU, by arithmetic alone."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from coderepairrl import models
from coderepairrl.config import Config
from coderepairrl.config.schema import Model
from coderepairrl.errors import ConfigError, UsageError
from coderepairrl.learn import LearnSettings
from coderepairrl.plan.sizing import engine as engine_side
from coderepairrl.plan.sizing import learner as learner_side
from coderepairrl.plan.sizing.architecture import MODEL_TYPES, Architecture, find_published
from coderepairrl.plan.sizing.engine import TENSOR_NAMES, EngineMemory, EngineSettings, estimate_engine_memory
from coderepairrl.plan.sizing.learner import LearnerMemory, compute_learner_memory

GB = 1e9
_SMALL_GPU = 70e9  # bytes, below which vLLM takes smaller steps


@dataclass(frozen=True, slots=True)
class PlannedServer:
    """A local server and its GPUs."""

    settings: EngineSettings
    memory: EngineMemory
    gpus: tuple[int, ...]
    room: float | None
    """Bytes that it takes on each GPU; None if their memory is unknown."""

    @property
    def kv_tokens(self) -> int | None:
        """Tokens in the cache of one replica."""
        return None if self.room is None else self.memory.cached_tokens(self.room)


class TurnTransfers(NamedTuple):
    """Bytes moved when engine and learner take turns on a GPU."""

    host: int
    """Most bytes in host memory at once: page-locked copies are kept."""
    step: int
    """Bytes per step, to the host and back; the learner's untrained weights are copied one way only."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A run in numbers. `memory`: bytes of each GPU, None if unknown."""

    config: Config
    settings: LearnSettings
    model: Architecture
    memory: float | None
    learner: LearnerMemory
    """Memory of each learner process."""
    server: PlannedServer | None
    """None if no local server takes GPUs."""

    @property
    def serving(self) -> tuple[int, ...]:
        """Numbers of the server's GPUs."""
        return self.server.gpus if self.server else ()

    @property
    def learning(self) -> tuple[int, ...]:
        """Numbers of the learner's GPUs; empty if torchrun starts it (``train.listen``)."""
        if self.config.train.listen:
            return ()
        return self.config.train.devices or tuple(range(self.config.train.processes))

    @property
    def on_gpus(self) -> bool:
        """Whether the run uses GPUs, as far as is known here."""
        return self.memory is not None or bool(self.config.train.devices or self.server)

    @property
    def learner_needs(self) -> int:
        """Bytes that a learner process takes."""
        return self.learner.peak + learner_side.RESERVE * self.on_gpus

    def needs(self, gpu: int) -> float:
        """Bytes taken of a GPU; when processes take turns, the larger, plus the other's reserve."""
        overhead = learner_side.RESERVE * self.on_gpus
        learner = self.learner_needs if gpu in self.learning else 0
        if self.server is None or gpu not in self.server.gpus:
            return learner
        engine = self.server.room or self.server.memory.fixed
        if learner and self.turns:
            return max(engine + overhead, learner + engine_side.RESERVE)
        return learner + engine

    @property
    def trained(self) -> int:
        """Number of trained parameters."""
        lora, model = self.settings.lora, self.model
        return model.adapters(lora.rank, lora.targets) if lora else model.parameters

    @property
    def turns(self) -> bool:
        """Whether the engine sleeps while the learner steps."""
        return self.config.engine.share_devices == "turns"

    def compute_transfers(self) -> TurnTransfers | None:
        """Bytes moved to host memory and back; None unless engine and learner take turns."""
        if self.server is None or not self.turns:
            return None
        engine, learner = self.server.memory, self.learner
        served = (engine.weights + engine.adapters) * self.server.settings.gpus
        trained = learner.adapters + learner.optimizer
        learned = learner.weights + trained
        return TurnTransfers(served + learned, 2 * served + learned + (trained if self.settings.lora else learned))

    @property
    def problem(self) -> str:
        """Reason why it cannot run, or an empty string."""
        server = self.server
        if server and server.settings.context > self.model.context and not self.model.scaled:
            return (
                f"engine.options.context={server.settings.context:,}, and the positions of {self.config.model.path} "
                f"reach to {self.model.context:,}"
            )
        if self.memory is None:
            return ""
        learner_needs = self.learner.peak + learner_side.RESERVE
        if self.config.train.listen and learner_needs > self.memory:
            return (
                f"each GPU of the learner (train.listen) is assumed to have {self.memory / GB:.1f} GB, and"
                f" {learner_needs / GB:.1f} are needed"
            )
        if server and server.room and (tokens := server.memory.cached_tokens(server.room)) < server.settings.context:
            return (
                f"GPU {server.gpus[0]}: the engine has {server.room / GB:.1f} GB ({server.settings.share:g} of the "
                f"memory) and needs {server.memory.fixed / GB:.1f} beside its cache, in which {tokens:,} tokens then "
                f"fit: less than one sequence of {server.settings.context:,}"
            )
        for gpu in sorted({*self.serving, *self.learning}):
            if (needs := self.needs(gpu)) > self.memory:
                parts = [f"{name} {size / GB:.1f}" for name, size in self._parts(gpu) if size]
                return (
                    f"GPU {gpu} has {self.memory / GB:.1f} GB, and {needs / GB:.1f} are needed: {', '.join(parts)} "
                    f"(the larger of work and logits counts{', and of engine and learner' * self.turns})"
                )
        return ""

    def as_json(self) -> dict[str, Any]:
        """Convert to the output of ``--dry-run``; GB are 10^9 bytes."""
        plan: dict[str, Any] = {"parameters": self.model.parameters, "trained_parameters": self.trained}
        if self.model.has_experts:
            plan["active_parameters"] = self.model.active
        for names, gpu in self._group_gpus():
            sizes = {f"{name}_gb".replace(" ", "_"): round(size / GB, 2) for name, size in self._parts(gpu) if size}
            plan[names] = sizes
            plan[names]["needs_gb"] = round(self.needs(gpu) / GB, 2)
            if self.on_gpus:
                plan[names]["has_gb"] = "unknown" if self.memory is None else round(self.memory / GB, 2)
        if self.config.train.listen:
            plan["each learner GPU"] = {
                f"{name}_gb": round(size / GB, 2) for name, size in self._learner_parts() if size
            }
        if moved := self.compute_transfers():
            plan["turns"] = {
                "host_gb": round(moved.host / GB, 2),
                # torch rounds page-locked blocks up to powers of two (ATen/core/CachingHostAllocator.h)
                "host_at_most_gb": round(2 * moved.host / GB, 2),
                "moved_in_a_step_gb": round(moved.step / GB, 2),
            }
        if self.server and (tokens := self.server.kv_tokens) is not None:
            server = self.server.settings
            plan["kv_tokens"] = tokens * server.replicas
            plan["longest_sequences_at_once"] = server.replicas * min(server.slots, tokens // server.context)
        return plan

    def _parts(self, gpu: int) -> Iterator[tuple[str, float]]:
        if self.server and gpu in self.server.gpus:
            engine = self.server.memory
            yield "engine weights", engine.weights
            yield "engine adapters", engine.adapters
            yield "engine work", engine.activations
            yield "engine reserve", engine_side.RESERVE
            if self.server.room is not None:
                yield "engine KV cache", self.server.room - engine.fixed
        if gpu in self.learning:
            yield from self._learner_parts()

    def _learner_parts(self) -> Iterator[tuple[str, float]]:
        yield from self.learner._asdict().items()
        yield "reserve", learner_side.RESERVE * self.on_gpus

    def _group_gpus(self) -> Iterator[tuple[str, int]]:
        """Groups of GPUs with equal contents, by name, and one GPU of each."""
        groups: dict[tuple[bool, bool], list[int]] = {}
        for gpu in sorted({*self.serving, *self.learning}):
            groups.setdefault((gpu in self.serving, gpu in self.learning), []).append(gpu)
        for (serving, learning), gpus in groups.items():
            users = " and ".join(["engine"] * serving + ["learner"] * learning)
            yield f"{'gpu' if self.on_gpus else 'process'} {', '.join(map(str, gpus))} ({users})", gpus[0]


def estimate_memory(config: Config, settings: LearnSettings) -> Estimate | str:
    """Estimate a run, or say why that is not possible.

    Raises `ConfigError` for impossible settings, `UsageError` for an unknown model.
    """
    options = config.engine.options
    started = config.engine.name == "vllm" and not options.get("url")
    if started and (argument := engine_side.find_unknown_argument(options.get("args", ()))):
        return f"the server's memory with {argument} is not known"
    model = _read_architecture(config.model)
    if model is None:
        kinds = ", ".join(MODEL_TYPES)
        return f"{config.model.path} is not a plain model of {kinds} with all its numbers in config.json"
    memory = config.gpu.memory_gb * GB or _read_gpu_memory()
    teacher = Architecture.read(Path(settings.teacher)) if settings.teacher else None
    learner = compute_learner_memory(
        model, settings, longest=config.rollout.tokens, gpu=memory is not None, teacher=teacher
    )
    server = _plan_server(config, settings, model, memory) if started else None
    return Estimate(config, settings, model, memory, learner, server)


def _plan_server(config: Config, settings: LearnSettings, model: Architecture, memory: float | None) -> PlannedServer:
    server = EngineSettings.from_options(
        config.engine.options, model, settings.lora, small=(memory or _SMALL_GPU) < _SMALL_GPU
    )
    if model.heads % server.tensor:
        raise ConfigError(
            f"engine.options.args: {TENSOR_NAMES[0]} {server.tensor} does not divide the {model.heads} heads of "
            f"{config.model.path}",
            fix=f"take one of {[size for size in range(1, 9) if model.heads % size == 0]}",
        )
    if server.context < config.rollout.tokens:
        raise ConfigError(
            f"engine.options.context={server.context} is less than rollout.tokens={config.rollout.tokens}",
            fix=f"raise engine.options.context to {config.rollout.tokens}, or lower rollout.tokens",
        )
    devices = config.engine.devices
    if devices and len(devices) < server.gpus:
        raise ConfigError(
            f"engine.devices={list(devices)}, and the server's arguments ask for {server.gpus} GPUs",
            fix=f"name {server.gpus} GPUs, or lower --tensor-parallel-size",
        )
    gpus = (devices or tuple(range(server.gpus)))[: server.gpus]
    return PlannedServer(server, estimate_engine_memory(model, server), gpus, memory and server.share * memory)


def _read_architecture(model: Model) -> Architecture | None:
    try:
        architecture = Architecture.read(models.find_model_folder(model.path))
    except UsageError:
        if (architecture := find_published(model.path)) is None:
            raise
    if architecture and model.init == "random":  # random weights are written in float32
        return replace(architecture, half=False)
    return architecture


def estimate_learner_memory(config: Config, settings: LearnSettings, longest: int) -> tuple[float, float] | None:
    """Estimate bytes of a learner process for rows of `longest` tokens, and of its GPU; None if unknown. Raises as
    `estimate_memory`.
    """
    model, memory = _read_architecture(config.model), config.gpu.memory_gb * GB or _read_gpu_memory()
    if model is None or memory is None:
        return None
    teacher = Architecture.read(Path(settings.teacher)) if settings.teacher else None
    needed = compute_learner_memory(model, settings, longest=longest, gpu=True, teacher=teacher)
    return needed.peak + learner_side.RESERVE, memory


def _read_gpu_memory() -> float | None:
    """Bytes of this machine's smallest GPU, by its driver; None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
    printed = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    sizes = [int(line) for line in printed.split() if line.isdigit()]
    return min(sizes) * float(1 << 20) if sizes else None
