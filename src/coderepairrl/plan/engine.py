"""Memory of a vLLM server, per GPU, from the options and arguments it is started with.

It takes a share of each GPU (``--gpu-memory-utilization``) and gives what weights and work leave to the cache of keys
and values: so the question is how many sequences that cache holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from coderepairrl.engines.vllm.options import RANKS
from coderepairrl.errors import ConfigError
from coderepairrl.learn import LoraSettings
from coderepairrl.plan.architecture import Architecture

SHARE = 0.92
"""vLLM 0.32's own ``--gpu-memory-utilization``."""
BATCHED = 8192
"""Its ``--max-num-batched-tokens`` on a GPU of 70 GB or more; smaller ones have 2,048."""
RESERVE = 2_000_000_000
"""What it takes beside its tensors (context, libraries, captured graphs): an assumption, not a measurement."""

TENSOR_NAMES, SHARE_NAMES = ("--tensor-parallel-size", "-tp"), ("--gpu-memory-utilization",)
_PIPELINE, _DATA = ("--pipeline-parallel-size", "-pp"), ("--data-parallel-size", "-dp")
_BATCHED = ("--max-num-batched-tokens",)


def argument(args: Sequence[str], names: tuple[str, ...], default: float) -> float:
    """The number that follows one of `names` in a command line; the last one counts. Raises `ConfigError`.

    >>> argument(["--a", "1", "--gpu-memory-utilization=0.5"], ("--gpu-memory-utilization",), 0.92)
    0.5
    """
    found = default
    for at, word in enumerate(args):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in names:  # vLLM takes both
            value = value if equals else "".join(args[at + 1 : at + 2])
            try:
                found = float(value)
            except ValueError:
                raise ConfigError(f"engine.options.args: {name} wants a number, not {value!r}") from None
            if not 0 < found < math.inf:
                raise ConfigError(f"engine.options.args: {name} must be positive, not {value}")
    return found


def count(args: Sequence[str], names: tuple[str, ...], default: int) -> int:
    """An `argument` that is a whole number. Raises `ConfigError`."""
    found = argument(args, names, default)
    if found != int(found):
        raise ConfigError(f"engine.options.args: {names[0]} must be a whole number, not {found:g}")
    return int(found)


def with_argument(args: Sequence[str], name: str, value: str) -> list[str]:
    """`args` with `value` after `name`, instead of any that was there.

    >>> with_argument(["--a", "--b-c=1", "--b_c", "2"], "--b-c", "3")
    ['--a', '--b-c', '3']
    """
    kept: list[str] = []
    follows = False
    for word in args:
        said, equals, _ = word.partition("=")
        same = said.replace("_", "-") == name
        if not (follows or same):
            kept.append(word)
        follows = not follows and same and not equals
    return [*kept, name, value]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What decides a server's memory."""

    context: int
    slots: int
    share: float
    batched: int
    tensor: int
    pipeline: int
    replicas: int
    half: bool
    adapters: int
    """At the server at once."""
    rank: int
    targets: tuple[str, ...]

    @classmethod
    def of(cls, options: Mapping[str, Any], model: Architecture, lora: LoraSettings | None, *, small: bool) -> Self:
        """From ``engine.options``; `small` GPUs have less than 70 GB. Raises `ConfigError`."""
        args = [str(word) for word in options.get("args", ())]
        rank = _option(options, "lora_rank", lora.rank if lora else 0)
        dtype = str(options.get("dtype", "auto"))
        return cls(
            context=_option(options, "context", model.context),
            slots=_option(options, "slots", 256, least=1),
            share=argument(args, SHARE_NAMES, SHARE),
            batched=count(args, _BATCHED, 2048 if small else BATCHED),
            tensor=count(args, TENSOR_NAMES, 1),
            pipeline=count(args, _PIPELINE, 1),
            replicas=count(args, _DATA, 1),
            half=model.half if dtype == "auto" else dtype.endswith(("16", "half")),
            adapters=_option(options, "max_loras", 2, least=2) if rank else 0,
            rank=min((r for r in RANKS if r >= rank), default=rank) if rank else 0,
            targets=lora.targets if lora else LoraSettings().targets,
        )

    @property
    def gpus(self) -> int:
        """That the server uses."""
        return self.tensor * self.pipeline * self.replicas


def _option(options: Mapping[str, Any], name: str, default: int, *, least: int = 0) -> int:
    value = options.get(name, default)
    if not isinstance(value, int) or value < least:
        raise ConfigError(f"engine.options.{name} must be a whole number of at least {least}, not {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes on one GPU."""

    weights: int
    adapters: int
    work: int
    """Of a step of `EngineSettings.batched` tokens, and the logits of all sequences."""
    kv_token: int
    """Keys and values of one token."""

    @property
    def fixed(self) -> int:
        """All but the cache."""
        return self.weights + self.adapters + self.work + RESERVE

    def cached(self, room: float) -> int:
        """Tokens that the cache holds when the server has `room` bytes."""
        return max(0, int((room - self.fixed) // self.kv_token))


def engine_memory(model: Architecture, server: EngineSettings) -> EngineMemory:
    """What each GPU of the server holds."""
    size, parts = 2 if server.half else 4, server.tensor * server.pipeline
    widest = 2 * model.intermediate // server.tensor + 6 * model.hidden
    return EngineMemory(
        weights=size * model.parameters // parts,
        adapters=size * server.adapters * model.adapters(server.rank, server.targets) // parts if server.rank else 0,
        work=size * server.batched * widest + 12 * server.slots * model.vocabulary,
        kv_token=size * model.kv_width // (min(server.tensor, model.kv_heads) * server.pipeline),
    )
