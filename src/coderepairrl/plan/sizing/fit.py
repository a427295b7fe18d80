"""Refuse plans that do not fit, and suggest the nearest change that does."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from coderepairrl import engines
from coderepairrl.config import Config, apply_overrides
from coderepairrl.errors import ConfigError
from coderepairrl.learn import LearnSettings
from coderepairrl.plan.sizing.engine import SHARE_NAMES, TENSOR_NAMES, replace_argument
from coderepairrl.plan.sizing.estimate import Estimate, estimate
from coderepairrl.plan.sizing.speed import speed_as_json as speed_shown

_MOST = 3  # changes at once
SettingsOf = Callable[[Config], LearnSettings]


class DoesNotFit(ConfigError):
    """The plan needs more memory than available."""


class Move(NamedTuple):
    """One change, as overrides. At most one of a kind is made."""

    kind: str
    overrides: tuple[str, ...]
    serving: int = 0
    """Further GPUs for the engine."""
    learning: int = 0
    """Further GPUs for the learner."""


def require(config: Config, settings_of: SettingsOf) -> dict[str, Any]:
    """Plan of a run, to print. Raises `DoesNotFit`, with the nearest change that fits, and as `estimate`."""
    plan = estimate(config, settings_of(config))
    if isinstance(plan, str):
        return {"memory": f"not planned: {plan}"}
    if plan.problem:
        change = nearest(plan, settings_of)
        raise DoesNotFit(
            plan.problem,
            fix=f"nearest change that fits: {shlex.join(change)}" if change else "take a smaller model, or larger GPUs",
        )
    return plan.shown() | speed_shown(plan)


def nearest(planned: Estimate, settings_of: SettingsOf) -> tuple[str, ...]:
    """Overrides that make it fit, on the same GPUs if possible, then the fewest and cheapest; else empty."""
    everything = list(_moves(planned))
    same_gpus = [move for move in everything if not move.serving + move.learning]
    for moves in (same_gpus, everything):
        for count in range(1, _MOST + 1):
            for some in combinations(moves, count):
                overrides = _overrides(planned, some)
                if len({move.kind for move in some}) == count and _fits(planned.config, overrides, settings_of):
                    return overrides
    return ()


def _overrides(planned: Estimate, moves: Sequence[Move]) -> tuple[str, ...]:
    """Overrides of all `moves`, with unused GPUs for those that take more."""
    overrides = [part for move in moves for part in move.overrides]
    engine, train = planned.config.engine.devices, planned.config.train.devices
    if any(move.kind == "apart" for move in moves):
        train = tuple(gpu for gpu in train if gpu not in engine)
    free = max((*planned.serving, *planned.learning, *engine), default=-1) + 1
    if engine and (more := sum(move.serving for move in moves)):
        overrides.append(f"engine.devices={json.dumps([*engine, *range(free, free + more)])}")
        free += more
    if planned.config.train.devices and (more := sum(move.learning for move in moves)):
        overrides.append(f"train.devices={json.dumps([*train, *range(free, free + more)])}")
    return tuple(overrides)


def _fits(config: Config, overrides: tuple[str, ...], settings_of: SettingsOf) -> bool:
    try:
        changed = apply_overrides(config, overrides)
        engines.make_engine(changed.engine.name, **changed.engine.options)
        changed_estimate = estimate(changed, settings_of(changed))
    except ConfigError:  # a change that contradicts another setting is none
        return False
    return isinstance(changed_estimate, Estimate) and not changed_estimate.problem


def _moves(planned: Estimate) -> Iterator[Move]:
    """Changes that save memory: first those that cost only time, last shorter episodes."""
    config, train = planned.config, planned.config.train
    length, context = config.rollout.tokens, planned.server.settings.context if planned.server else 0
    if context > length:
        yield Move("context", (f"engine.options.context={length}",))
    if not train.gradient_checkpointing:
        yield Move("checkpointing", ("train.gradient_checkpointing=true",))
    budget = train.micro_tokens
    while budget > length:
        budget = max(length, budget // 2)
        yield Move("budget", (f"train.micro_tokens={budget}",))
    if planned.server:
        now = planned.server.settings.share
        for share in sorted((0.95, *(tenth / 10 for tenth in range(9, 0, -1))), key=lambda share: abs(share - now)):
            yield Move("share", (_args(config, SHARE_NAMES, f"{share:g}"),))
    together = {*planned.serving} & {*planned.learning} and not planned.turns
    if together and train.processes == 1 and config.engine.weights == "file":
        yield Move("turns", ("engine.share_devices=turns",))
    if train.precision == "fp32":
        yield Move("precision", ("train.precision=bf16",))
    if train.processes > 1 and train.strategy != "fsdp2":
        yield Move("strategy", ("train.strategy=fsdp2",))
    if train.optimizer == "adamw":
        yield Move("optimizer", ("train.optimizer=adamw_8bit",))
    if train.lora is None:
        yield Move("lora", ("train.lora=true",))
    if config.model.quantise == "none" and not planned.model.experts:
        yield Move("quantise", ("model.quantise=nf4",))
    if both := set(config.engine.devices) & set(train.devices):
        yield Move("apart", ("engine.share_devices=false",), learning=len(both))
    for processes in (2, 4, 8):
        if processes > train.processes:
            overrides = (f"train.processes={processes}", "train.strategy=fsdp2")
            yield Move("strategy", overrides, learning=processes - train.processes)
    if planned.server:
        for tensor in (2, 4, 8):
            if tensor > planned.server.settings.tensor and planned.model.heads % tensor == 0:
                gpus = tensor * planned.server.settings.gpus // planned.server.settings.tensor
                more = max(0, gpus - len(config.engine.devices or planned.serving))
                yield Move("tensor", (_args(config, TENSOR_NAMES, str(tensor)),), serving=more)
    for shorter in (length // 2, length // 4):
        less = [f"rollout.tokens={shorter}", f"train.micro_tokens={min(shorter, train.micro_tokens)}"]
        if config.rollout.turn_tokens > shorter:
            less.append(f"rollout.turn_tokens={shorter}")
        if planned.server:
            less.append(f"engine.options.context={shorter}")
        yield Move("length", tuple(less))


def _args(config: Config, names: tuple[str, ...], value: str) -> str:
    return f"engine.options.args={json.dumps(replace_argument(config.engine.options.get('args', ()), names, value))}"
