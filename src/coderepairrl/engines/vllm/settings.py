"""What servers that share a run's requests must have in common, as they report it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from coderepairrl.engines.vllm.options import enough
from coderepairrl.engines.vllm.server import Refused, VllmServer
from coderepairrl.errors import ConfigError, PrerequisiteError

_OF_MODEL = {
    "max_model_len": "--max-model-len",
    "dtype": "--dtype",
    "quantization": "--quantization",
    "logprobs_mode": "--logprobs-mode",
    "generation_config": "--generation-config",
    "hf_overrides": "--hf-overrides",
}
"""Fields of vLLM's configuration, and the arguments that set them: logprobs and limits depend on these."""
_ROUTE = "/server_info"


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """One server's."""

    where: str
    shared: Mapping[str, Any]
    """What must be the same at every server, by what sets it."""
    rank: int
    """Largest rank of an adapter; 0 without adapters."""
    adapters: int = 0
    """How many there may be at once."""

    @classmethod
    async def of(cls, server: VllmServer, seconds: float) -> ServerSettings:
        """As `server` reports them (vLLM 0.32, in development mode). Raises `PrerequisiteError`, `EngineFault`."""
        try:
            version = json.loads(await server.call("GET", "/version", seconds=seconds))["version"]
            said = await server.call("GET", _ROUTE, seconds=seconds, query={"config_format": "json"})
            config = json.loads(said)["vllm_config"]
            model, lora = config["model_config"], config["lora_config"] or {}
            shared = {
                "its version of vLLM": version,
                "--model": PurePath(model["model"]).name,  # a node may have a copy of its own
                **{argument: model[name] for name, argument in _OF_MODEL.items()},
                "--kv-cache-dtype": config["cache_config"]["cache_dtype"],
            }
            return cls(server.where, shared, lora.get("max_lora_rank", 0), lora.get("max_loras", 0))
        except (Refused, ValueError, LookupError, TypeError, AttributeError) as error:
            raise PrerequisiteError(
                f"{server.where} does not say how it was started: {_ROUTE}: {error!r}",
                fix="start it with VLLM_SERVER_DEV_MODE=1 (docs/guides/engines.md), or join it alone",
            ) from None

    def check(self, first: ServerSettings, *, rank: int) -> None:
        """Raise `ConfigError` where a setting differs from the `first` server's, or there is no room for adapters of
        this `rank` (0: none are sent)."""
        for name, value in self.shared.items():
            if value != first.shared[name]:
                raise ConfigError(
                    f"the servers differ in {name}: {self.where} has {value}, and {first.where} {first.shared[name]}",
                    fix="install the same vLLM at each" if " " in name else f"start all with the same {name}",
                )
        if self.rank < rank:
            raise ConfigError(
                f"adapters of rank {rank}, and {self.where} takes them up to rank {self.rank}",
                fix=f"start it with --enable-lora --max-lora-rank {enough(rank)}, or set engine.options.lora_rank=0 to"
                " send merged weights",
            )

    def check_lora_slots(self, rank: int) -> None:
        """Raise `ConfigError` where several runs cannot have adapters of this `rank` at the server, an old and a new
        one each."""
        if self.rank < rank or self.adapters < 2:
            raise ConfigError(
                f"adapters of rank {rank}, and {self.where} takes {self.adapters} up to rank {self.rank}",
                fix=f"start it with --enable-lora --max-lora-rank {enough(rank)} and --max-loras, two for each run",
            )
