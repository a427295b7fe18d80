"""Which GPUs the engine's processes see, and which the learner's: ``engine.devices`` and ``train.devices``.

A number counts among the GPUs that this process sees, so that what a scheduler grants keeps its meaning.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import count, islice, takewhile
from pathlib import Path
from typing import NamedTuple

from coderepairrl.config import Config
from coderepairrl.errors import ConfigError, PrerequisiteError
from coderepairrl.learn import remote
from coderepairrl.protocols import EngineSpec

VISIBLE = "CUDA_VISIBLE_DEVICES"
Environment = dict[str, str]


class Split(NamedTuple):
    """What the children's environment has beside ours."""

    engine: Environment
    learner: Environment


def split(config: Config, serving_takes: bool) -> Split:
    """The children's environment, empty where they see what this process sees; `serving_takes`: the engine starts a
    process of ours that takes GPUs (`EngineSpec.takes_gpus`).

    Raises `PrerequisiteError` where GPUs are named and none is visible, `ConfigError` for a GPU that is not there or
    named twice, for as many learner processes as have no GPU of their own, and for GPUs of both engine and learner
    unless ``engine.share_devices`` is set; `UsageError` for a ``train.listen`` that is no address.
    """
    check_named(config, serving_takes)
    if config.train.listen:
        remote.parse_address(config.train.listen)
    serving, learning = config.engine.devices, config.train.devices
    there = visible()
    chosen = Split(
        _environment("engine.devices", serving, there), _environment("train.devices", learning, there)
    )  # checked before they are compared
    if there and not learning and not config.train.listen and config.train.processes > len(there):
        raise ConfigError(
            f"train.processes={config.train.processes} take a GPU each, and {len(there)} are visible here",
            fix=f"lower train.processes, or learn on the CPU: {VISIBLE}= (empty)",
        )
    _check_apart(config, shared(config, serving_takes))
    return chosen


def serving(config: Config, engine: EngineSpec) -> EngineSpec:
    """`engine` on the GPUs that ``engine.devices`` names, where no learner is started; on all if it names none.

    Raises `PrerequisiteError` where GPUs are named and none is visible, and `ConfigError` for a GPU that is not there
    or named twice, and for an engine that takes none.
    """
    _check_serving(config, engine.takes_gpus)
    found = _environment("engine.devices", config.engine.devices, visible())
    return engine.on_gpus(found[VISIBLE]) if found else engine


def require_secret(config: Config) -> None:
    """Raise `PrerequisiteError` where torchrun's processes could not prove that they belong to this run."""
    if config.train.listen:
        remote.read_secret()


def check_named(config: Config, serving_takes: bool) -> None:
    """Raise `ConfigError` for GPUs that contradict each other or other settings, whichever machine it is."""
    serving, learning = config.engine.devices, config.train.devices
    _check_serving(config, serving_takes)
    if learning and len(learning) != config.train.processes:
        raise ConfigError(
            f"train.devices={list(learning)} for train.processes={config.train.processes}",
            fix=f"each learner process takes one GPU: train.devices={_so_many(config)}",
        )
    _check_once("train.devices", learning)
    _check_apart(config, set(serving) & set(learning))


def _check_serving(config: Config, serving_takes: bool) -> None:
    """Raise `ConfigError` for GPUs of the engine that contradict its other settings."""
    wanted = config.engine.devices
    if wanted and not serving_takes:
        raise ConfigError(
            f"engine.devices={list(wanted)}, and engine {config.engine.name!r} starts no process that takes GPUs",
            fix="engine.devices=[]: tiny computes on the CPU, and a server that is joined by URL has GPUs of its own",
        )
    if VISIBLE in config.engine.options.get("env", {}):
        raise ConfigError(f"{VISIBLE} in engine.options.env", fix="name the engine's GPUs in engine.devices")
    _check_once("engine.devices", wanted)


def _check_once(key: str, wanted: Sequence[int]) -> None:
    if len(set(wanted)) < len(wanted):
        raise ConfigError(f"{key}={list(wanted)} names a GPU twice")


def _check_apart(config: Config, taken: set[int]) -> None:
    if taken and not config.engine.share_devices:
        raise ConfigError(
            f"engine and learner would both take GPU {', '.join(map(str, sorted(taken)))}",
            fix="part them, as with engine.devices=[0] train.devices=[1]; or let them have it by turns:"
            " engine.share_devices=turns; or set engine.share_devices=true and leave the learner room:"
            ' engine.options.args=["--gpu-memory-utilization", "0.4"]',
        )


def have_turns(config: Config) -> bool:
    """Whether the engine sleeps while the learner steps."""
    return config.engine.share_devices == "turns"


def by_turns(config: Config, engine: EngineSpec) -> EngineSpec:
    """`engine`, able to sleep where it has its GPU by turns with the learner.

    Raises `ConfigError` for what cannot make room for the other, and where there is no GPU that both take.
    """
    if not have_turns(config):
        return engine
    if config.train.processes > 1:
        raise ConfigError(
            f"engine.share_devices=turns, and train.processes={config.train.processes}: several processes hold buffers"
            " and communicators on their GPUs that nothing moves away",
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
    able = engine.with_sleep()
    if visible() and not shared(config, engine.takes_gpus):
        raise ConfigError(
            "engine.share_devices=turns, and engine and learner have no GPU in common",
            fix="engine.devices=[0] train.devices=[0], or leave engine.share_devices out",
        )
    return able


def _so_many(config: Config) -> list[int]:
    """The learner's GPUs if there were one for each process."""
    own = config.train.devices
    others = (number for number in count() if number not in (*own, *config.engine.devices))
    return list(islice((*own, *islice(others, config.train.processes)), config.train.processes))


def shared(config: Config, serving_takes: bool) -> set[int]:
    """The GPUs that both a server of ours and the learner take."""
    there = range(len(visible()))
    if not serving_takes or config.train.listen:  # whose learner has GPUs of its own
        return set()
    return set(config.engine.devices or there) & set(config.train.devices or there[: config.train.processes])


def on_one_gpu(config: Config, serving_takes: bool) -> bool:
    """Whether a server of ours has one GPU alone, and the learner's first process has the same."""
    there = tuple(range(len(visible())))
    serving, learning = config.engine.devices or there, config.train.devices or there
    return not config.train.listen and serving_takes and len(serving) == 1 and serving == learning[:1]


def visible() -> list[str]:
    """The GPUs that this process sees, as CUDA names them: those it was given, else all that the machine has."""
    given = os.environ.get(VISIBLE)
    if given is None:
        return [str(number) for number in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]
    return list(takewhile(lambda name: name not in ("", "-1"), (name.strip() for name in given.split(","))))


def _environment(key: str, wanted: Sequence[int], there: Sequence[str]) -> Environment:
    if wanted and not there:
        raise PrerequisiteError(
            f"{key}={list(wanted)}: no GPU is visible here",
            fix="run it on a machine with an NVIDIA GPU; crrl check says what this one has, and crrl hello needs none;"
            f" {key}=[] names no GPU",
        )
    if missing := [number for number in wanted if number >= len(there)]:
        raise ConfigError(
            f"{key}={list(wanted)}: there is no GPU {missing[0]}; {len(there)} are visible here",
            fix=f"they count from 0 among this machine's GPUs, or of {VISIBLE} if that is set; {key}=[] names none",
        )
    return {VISIBLE: ",".join(there[number] for number in wanted)} if wanted else {}
