"""Route of full weights to the engine: ``engine.weights``."""

from __future__ import annotations

from coderepairrl.config import Config
from coderepairrl.errors import ConfigError
from coderepairrl.plan import devices
from coderepairrl.protocols import EngineSpec


def check_route(config: Config, engine: EngineSpec) -> None:
    """Raise `ConfigError` for an ``engine.weights`` that cannot work here."""
    route = config.engine.weights
    if route == "file":
        return
    if not engine.capabilities.can_receive:
        raise ConfigError(
            f"engine.weights={route}, and engine {engine.name!r} takes weights as files only",
            fix="leave engine.weights out, or take engine=vllm",
        )
    if config.train.lora is not None and engine.capabilities.adapter_rank:
        raise ConfigError(
            f"engine.weights={route} is for full weights, and adapters are sent, which are small files",
            fix="leave engine.weights out, or set engine.options.lora_rank=0 to send merged weights",
        )
    if route == "nccl" and not devices.visible():
        raise ConfigError(
            "engine.weights=nccl: NCCL works between GPUs, and there is none here",
            fix="engine.weights=file, or gloo, which goes through the host's memory",
        )
    if route == "nccl" and config.engine.share_devices:
        raise ConfigError(
            "engine.weights=nccl with engine.share_devices: NCCL wants a GPU for each process",
            fix="engine.weights=file, or part them with engine.devices and train.devices",
        )
    if route == "ipc" and devices.visible() and not devices.on_one_gpu(config, engine.capabilities.uses_gpus):
        raise ConfigError(
            "engine.weights=ipc: a server of ours must have one GPU, that of the learner's first process",
            fix="engine.weights=file or gloo, or nccl between GPUs; for one GPU: engine.devices=[0] train.devices=[0]"
            " engine.share_devices=true",
        )
