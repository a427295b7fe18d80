"""GPUs that the engine and the learner see, and the route of weights between them.

Numbers index the visible GPUs, so that a scheduler's allocation is respected.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, count, islice
from typing import NamedTuple

from coderepairrl.config import Config
from coderepairrl.errors import ConfigError, PrerequisiteError
from coderepairrl.learn import remote
from coderepairrl.processes.meter import VISIBLE_GPUS, list_visible_gpus
from coderepairrl.protocols import EngineSpec
from coderepairrl.types import Capabilities

Environment = dict[str, str]


class DeviceSplit(NamedTuple):
    """Environment variables to add for the child processes."""

    engine: Environment
    learner: Environment


def split_devices(config: Config, engine_uses_gpus: bool) -> DeviceSplit:
    """Environment of engine and learner, empty where they see all GPUs.

    `engine_uses_gpus`: a local engine process takes GPUs. Raises `PrerequisiteError` if no GPU is visible,
    `ConfigError` for contradictory GPU settings, and `UsageError` for a malformed ``train.listen``.
    """
    check_gpu_settings(config, engine_uses_gpus)
    if config.train.listen:
        remote.parse_address(config.train.listen)
    engine_gpus, learner_gpus = config.engine.devices, config.train.devices
    visible_gpus = list_visible_gpus()
    chosen = DeviceSplit(
        _device_environment("engine.devices", engine_gpus, visible_gpus),
        _device_environment("train.devices", learner_gpus, visible_gpus),
    )  # checked before they are compared
    if visible_gpus and not learner_gpus and not config.train.listen and config.train.processes > len(visible_gpus):
        raise ConfigError(
            f"train.processes={config.train.processes} take a GPU each, and {len(visible_gpus)} are visible here",
            fix=f"lower train.processes, or learn on the CPU: {VISIBLE_GPUS}= (empty)",
        )
    _check_separate_gpus(config, find_shared_gpus(config, engine_uses_gpus))
    return chosen


def find_engine_gpus(config: Config, engine: Capabilities) -> str | None:
    """GPUs of ``engine.devices`` (None: all), without a learner. Raises as `split_devices`."""
    _check_engine_gpus(config, engine.uses_gpus)
    return _device_environment("engine.devices", config.engine.devices, list_visible_gpus()).get(VISIBLE_GPUS)


def require_secret(config: Config) -> None:
    """Raise `PrerequisiteError` if torchrun's processes lack the secret that authenticates them."""
    if config.train.listen:
        remote.read_secret()


def check_gpu_settings(config: Config, engine_uses_gpus: bool) -> None:
    """Raise `ConfigError` for GPU settings that are contradictory on any machine."""
    engine_gpus, learner_gpus = config.engine.devices, config.train.devices
    _check_engine_gpus(config, engine_uses_gpus)
    if learner_gpus and len(learner_gpus) != config.train.processes:
        raise ConfigError(
            f"train.devices={list(learner_gpus)} for train.processes={config.train.processes}",
            fix=f"each learner process takes one GPU: train.devices={_suggest_learner_gpus(config)}",
        )
    _check_distinct_gpus("train.devices", learner_gpus)
    _check_separate_gpus(config, set(engine_gpus) & set(learner_gpus))


def _check_engine_gpus(config: Config, engine_uses_gpus: bool) -> None:
    numbers = config.engine.devices
    if numbers and not engine_uses_gpus:
        raise ConfigError(
            f"engine.devices={list(numbers)}, and engine {config.engine.name!r} starts no process that takes GPUs",
            fix="engine.devices=[]: tiny computes on the CPU, and a server that is joined by URL has GPUs of its own",
        )
    if VISIBLE_GPUS in config.engine.options.get("env", {}):
        raise ConfigError(f"{VISIBLE_GPUS} in engine.options.env", fix="name the engine's GPUs in engine.devices")
    _check_distinct_gpus("engine.devices", numbers)


def _check_distinct_gpus(key: str, devices: Sequence[int]) -> None:
    if len(set(devices)) < len(devices):
        raise ConfigError(f"{key}={list(devices)} names a GPU twice", fix=f"{key}={sorted({*devices})}")


def _check_separate_gpus(config: Config, taken: set[int]) -> None:
    if taken and not config.engine.share_devices:
        raise ConfigError(
            f"engine and learner would both take GPU {', '.join(map(str, sorted(taken)))}",
            fix="give them different GPUs: engine.devices=[0] train.devices=[1]; or let them take turns:"
            " engine.share_devices=turns; or set engine.share_devices=true and leave the learner room:"
            ' engine.options.args=["--gpu-memory-utilization", "0.4"]',
        )


def has_turns(config: Config) -> bool:
    """Whether the engine sleeps while the learner steps."""
    return config.engine.share_devices == "turns"


def check_turns(config: Config, engine: EngineSpec) -> None:
    """Raise `ConfigError` if engine and learner are to share a GPU by turns, and cannot."""
    if not has_turns(config):
        return
    if config.train.processes > 1:
        raise ConfigError(
            f"engine.share_devices=turns, and train.processes={config.train.processes}: buffers and communicators of"
            " several processes stay on their GPUs",
            fix="train.processes=1, or engine.share_devices=false with GPUs for each",
        )
    if config.train.listen:
        raise ConfigError(
            "engine.share_devices=turns, and the learner of train.listen has GPUs of its own",
            fix="leave engine.share_devices out",
        )
    if config.engine.weights != "file":
        raise ConfigError(
            f"engine.share_devices=turns, and engine.weights={config.engine.weights}: engine and learner are never on"
            " the GPU at once, so that weights pass through the host's memory",
            fix="leave engine.weights out: files are in memory, too",
        )
    check_sleeps(engine)
    if list_visible_gpus() and not find_shared_gpus(config, engine.capabilities.uses_gpus):
        raise ConfigError(
            "engine.share_devices=turns, and engine and learner have no GPU in common",
            fix="engine.devices=[0] train.devices=[0], or leave engine.share_devices out",
        )


def check_sleeps(engine: EngineSpec) -> None:
    """Raise `ConfigError` for ``engine.share_devices=turns`` with an engine that cannot sleep."""
    if not engine.capabilities.can_sleep:
        raise ConfigError(
            f"engine.share_devices=turns, and engine {engine.name!r} cannot sleep with these options",
            fix="engine=vllm, without engine.options.url since others may use that server; or leave"
            " engine.share_devices out: an engine on the CPU takes no GPU",
        )


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
            f"engine.weights={route} is for full weights, and here adapters are sent, which are small files",
            fix="leave engine.weights out, or set engine.options.lora_rank=0 to send merged weights",
        )
    if route == "nccl" and not list_visible_gpus():
        raise ConfigError(
            "engine.weights=nccl: NCCL works between GPUs, and there is none here",
            fix="engine.weights=file, or gloo, which goes through the host's memory",
        )
    if route == "nccl" and config.engine.share_devices:
        raise ConfigError(
            "engine.weights=nccl with engine.share_devices: NCCL wants a GPU for each process",
            fix="engine.weights=file, or different GPUs in engine.devices and train.devices",
        )


def _suggest_learner_gpus(config: Config) -> list[int]:
    """GPUs to suggest for the learner, one per process."""
    configured = config.train.devices
    unused = (number for number in count() if number not in (*configured, *config.engine.devices))
    return list(islice(chain(configured, unused), config.train.processes))


def find_shared_gpus(config: Config, engine_uses_gpus: bool) -> set[int]:
    """GPUs that both a local server and the learner take."""
    gpus = range(len(list_visible_gpus()))
    if not engine_uses_gpus or config.train.listen:  # torchrun's learner has other GPUs
        return set()
    return set(config.engine.devices or gpus) & set(config.train.devices or gpus[: config.train.processes])


def _device_environment(key: str, devices: Sequence[int], visible: Sequence[str]) -> Environment:
    if devices and not visible:
        raise PrerequisiteError(
            f"{key}={list(devices)}: no GPU is visible here",
            fix="run it on a machine with an NVIDIA GPU; crrl check says what this one has, and crrl hello needs none;"
            f" {key}=[] names no GPU",
        )
    if missing := [number for number in devices if number >= len(visible)]:
        raise ConfigError(
            f"{key}={list(devices)}: there is no GPU {missing[0]}; {len(visible)} are visible here",
            fix=f"numbers count from 0 among this machine's GPUs, or those in {VISIBLE_GPUS} if it is set;"
            f" {key}=[] names none",
        )
    return {VISIBLE_GPUS: ",".join(visible[number] for number in devices)} if devices else {}
