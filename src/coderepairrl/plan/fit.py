"""What cannot fit is refused, with the nearest change that would: the cheapest of the fewest that are tried."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any, NamedTuple

from coderepairrl.config import Config, override
from coderepairrl.errors import ConfigError
from coderepairrl.learn import LearnSettings
from coderepairrl.plan.engine import SHARE_NAMES, TENSOR_NAMES, with_argument
from coderepairrl.plan.estimate import Estimate, estimate

SettingsOf = Callable[[Config], LearnSettings]
_MOST = 3  # changes at once


class DoesNotFit(ConfigError):
    """The plan needs more memory than there is."""


class Move(NamedTuple):
    """Overrides that are one change. Of a kind, only one is made."""

    kind: str
    overrides: tuple[str, ...]
    more: bool = False
    """Whether it takes more GPUs."""


def require(config: Config, settings_of: SettingsOf) -> dict[str, Any]:
    """The plan of a run, as it is printed.

    Raises `DoesNotFit` when it needs more memory than there is, with the nearest change that fits, and what `estimate`
    raises.
    """
    found = estimate(config, settings_of(config))
    if isinstance(found, str):
        return {"memory": f"not planned: {found}"}
    if found.problem:
        change = nearest(found, settings_of)
        raise DoesNotFit(
            found.problem,
            fix=f"nearest change that fits: {shlex.join(change)}" if change else "take a smaller model, or larger GPUs",
        )
    return found.shown()


def nearest(given: Estimate, settings_of: SettingsOf) -> tuple[str, ...]:
    """The overrides with which it fits: on these GPUs if that can be, then with as few changes as possible, and of
    those the cheapest; none if nothing does."""
    everything = list(_moves(given))
    here = [move for move in everything if not move.more]
    for moves in (here, everything):
        for count in range(1, _MOST + 1):
            for some in combinations(moves, count):
                overrides = tuple(part for move in some for part in move.overrides)
                if len({move.kind for move in some}) == count and _fits(given.config, overrides, settings_of):
                    return overrides
    return ()


def _fits(config: Config, overrides: tuple[str, ...], settings_of: SettingsOf) -> bool:
    try:
        changed = override(config, overrides)
        found = estimate(changed, settings_of(changed))
    except ConfigError:  # a change that contradicts another setting is none
        return False
    return isinstance(found, Estimate) and not found.problem


def _moves(given: Estimate) -> Iterator[Move]:
    """Changes that need less memory, those first that cost nothing but time, and shorter episodes last."""
    config, train = given.config, given.config.train
    length, context = config.rollout.tokens, given.server.context if given.server else 0
    if context > length:
        yield Move("context", (f"engine.options.context={length}",))
    if not train.gradient_checkpointing:
        yield Move("checkpointing", ("train.gradient_checkpointing=true",))
    budget = train.micro_tokens
    while budget > length:
        budget = max(length, budget // 2)
        yield Move("budget", (f"train.micro_tokens={budget}",))
    if given.server:
        shares = [hundredth / 100 for hundredth in range(95, 5, -5)]
        for share in sorted(shares, key=lambda share: abs(share - given.server.share)):  # type: ignore[union-attr]
            yield Move("share", (_args(config, SHARE_NAMES[0], f"{share:g}"),))
    if train.precision == "fp32":
        yield Move("precision", ("train.precision=bf16",))
    if train.processes > 1 and train.strategy != "fsdp2":
        yield Move("strategy", ("train.strategy=fsdp2",))
    if train.lora is None:
        yield Move("lora", ("train.lora=true",))
    free = max((*given.serving, *given.learning)) + 1
    for processes in (2, 4, 8):
        if processes > train.processes:
            more = [f"train.processes={processes}", "train.strategy=fsdp2"]
            if train.devices:
                added = range(free, free + processes - train.processes)
                more.append(f"train.devices={json.dumps([*train.devices, *added])}")
            yield Move("strategy", tuple(more), more=True)
    if given.server:
        for tensor in (2, 4, 8):
            if tensor > given.server.tensor and given.model.kv_heads % tensor == 0:
                more = [_args(config, TENSOR_NAMES[0], str(tensor))]
                if config.engine.devices:
                    added = range(free, free + tensor * given.server.gpus // given.server.tensor - len(given.serving))
                    more.append(f"engine.devices={json.dumps([*config.engine.devices, *added])}")
                yield Move("tensor", tuple(more), more=True)
    for shorter in (length // 2, length // 4):
        overrides = [f"rollout.tokens={shorter}", f"train.micro_tokens={min(shorter, train.micro_tokens)}"]
        if config.rollout.turn_tokens > shorter:
            overrides.append(f"rollout.turn_tokens={shorter}")
        if given.server:
            overrides.append(f"engine.options.context={shorter}")
        yield Move("length", tuple(overrides))


def _args(config: Config, name: str, value: str) -> str:
    words = [str(word) for word in config.engine.options.get("args", ())]
    return f"engine.options.args={json.dumps(with_argument(words, name, value))}"
