"""Memory of a vLLM server per GPU, from its options and arguments.

The KV cache gets the server's share of the GPU (``--gpu-memory-utilization``) less weights and work.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from coderepairrl.config.schema import Lora
from coderepairrl.engines.vllm.options import MAX_LORAS, RANKS, SLOTS, half, parse_arguments
from coderepairrl.errors import ConfigError
from coderepairrl.plan.sizing.architecture import Architecture

SHARE = 0.92
"""vLLM 0.32's default of ``--gpu-memory-utilization``."""
BATCHED = 8192
"""vLLM's ``--max-num-batched-tokens`` on a GPU of 70 GB or more; smaller ones have 2,048."""
RESERVE = 2_000_000_000
"""Bytes used besides tensors (context, libraries, captured graphs): an assumption, not a measurement."""
PAGE = 16
"""Tokens per page of the cache, or a divisor of them."""
STATES = 2
"""Pages for a sequence's state with prefix caching, vLLM's default: at the end, and at the end of the last page."""
GROUPED = 1.5
"""Kinds of layers whose numbers differ by less form groups of the larger number."""
KV_BYTES = {"float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Bytes of a number in the cache, by ``--kv-cache-dtype``; ``auto`` has the type of the weights."""

TENSOR_NAMES, SHARE_NAMES = ("--tensor-parallel-size", "-tp"), ("--gpu-memory-utilization",)
_PIPELINE, DATA_NAMES = ("--pipeline-parallel-size", "-pp"), ("--data-parallel-size", "-dp")
_BATCHED, _KV_DTYPE = ("--max-num-batched-tokens",), "--kv-cache-dtype"
_UNITS = {unit: base**power for base, units in ((1000, "kmgt"), (1024, "KMGT")) for power, unit in enumerate(units, 1)}
_QUANTISED = ("--quantization", "-q", "--quantization-config")
_UNKNOWN = (
    *("--cpu-offload-gb", "--offload-backend", "--kv-cache-memory-bytes", "--num-gpu-blocks-override"),
    *("--speculative-config", "-sc", "--spec-method", "--spec-model"),
    *("--decode-context-parallel-size", "-dcp", "--prefill-context-parallel-size", "-pcp"),
    "--kv-cache-dtype-skip-layers",
)


def unknown(args: Sequence[str]) -> str:
    """The first of vLLM's `args` whose memory use is unknown, or "". Raises `ConfigError` for quantised weights.

    >>> unknown(["-tp", "2", "--cpu_offload_gb=4"])
    '--cpu_offload_gb=4'
    """
    first_unknown = ""
    for arg in parse_arguments(args):
        if arg.means(*_QUANTISED):
            raise ConfigError(
                f"engine.options.args has {arg.words[0]}: quantised weights are not those that are trained",
                fix="leave it out; --tensor-parallel-size divides the weights, --kv-cache-dtype fp8 halves the cache",
            )
        is_known_dtype = arg.means(_KV_DTYPE) and arg.value in (*KV_BYTES, "auto")
        if not first_unknown and not is_known_dtype and arg.means(_KV_DTYPE, *_UNKNOWN):
            first_unknown = " ".join(arg.words)
    return first_unknown


def argument(args: Sequence[str], names: tuple[str, ...], default: float) -> float:
    """Number after one of `names` in `args`; the last one counts. Raises `ConfigError`.

    As in vLLM, ``8k`` is 8,000 and ``8K`` 8,192.

    >>> argument(["--a", "1", "--gpu-memory-utilization=0.5"], ("--gpu-memory-utilization",), 0.92)
    0.5
    >>> argument(["--max-num-batched-tokens", "8K"], ("--max-num-batched-tokens",), 2048)
    8192.0
    """
    number = default
    for arg in parse_arguments(args):
        if arg.means(*names):
            unit = _UNITS.get(arg.value[-1:], 1)
            try:
                number = float(arg.value if unit == 1 else arg.value[:-1]) * unit
            except ValueError:
                raise ConfigError(f"engine.options.args: {arg.name} must be a number, not {arg.value!r}") from None
            if not 0 < number < math.inf:
                raise ConfigError(f"engine.options.args: {arg.name} must be positive, not {arg.value}")
    return number


def count(args: Sequence[str], names: tuple[str, ...], default: int) -> int:
    """An `argument` that is a whole number. Raises `ConfigError`."""
    number = argument(args, names, default)
    if number != int(number):
        raise ConfigError(f"engine.options.args: {names[0]} must be a whole number, not {number:g}")
    return int(number)


def with_argument(args: Sequence[str], names: tuple[str, ...], value: str) -> list[str]:
    """`args` with `value` after the first of `names`, replacing earlier values.

    >>> with_argument(["--a", "--b-c=1", "--b_c", "2", "-b", "3"], ("--b-c", "-b"), "4")
    ['--a', '--b-c', '4']
    """
    return [*(word for arg in parse_arguments(args) if not arg.means(*names) for word in arg.words), names[0], value]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings that determine a server's memory."""

    context: int
    slots: int
    share: float
    batched: int
    tensor: int
    pipeline: int
    replicas: int
    size: int
    """Bytes of a weight."""
    kv_size: int
    """Bytes of a number in the cache."""
    adapters: int
    """Adapters at the server at once."""
    rank: int
    targets: tuple[str, ...]

    @classmethod
    def of(cls, options: Mapping[str, Any], model: Architecture, lora: Lora | None, *, small: bool) -> Self:
        """Settings from checked ``engine.options``; `small` GPUs have less than 70 GB. Raises `ConfigError`."""
        args = options.get("args", ())
        rank = options.get("lora_rank", lora.rank if lora else 0)
        dtype = options.get("dtype", "auto")
        size = 2 if (model.half if dtype == "auto" else half(dtype)) else 4
        kv_types = [arg.value for arg in parse_arguments(args) if arg.means(_KV_DTYPE)]
        return cls(
            context=options.get("context") or model.context,
            slots=options.get("slots", SLOTS),
            share=argument(args, SHARE_NAMES, SHARE),
            batched=count(args, _BATCHED, 2048 if small else BATCHED),
            tensor=count(args, TENSOR_NAMES, 1),
            pipeline=count(args, _PIPELINE, 1),
            replicas=count(args, DATA_NAMES, 1),
            size=size,
            kv_size=KV_BYTES.get(kv_types[-1], size) if kv_types else size,
            adapters=options.get("max_loras", MAX_LORAS) if rank else 0,
            rank=min((r for r in RANKS if r >= rank), default=rank) if rank else 0,
            targets=lora.targets if lora else Lora().targets,
        )

    @property
    def gpus(self) -> int:
        """Number of GPUs of the server."""
        return self.tensor * self.pipeline * self.replicas


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes on one GPU."""

    weights: int
    adapters: int
    work: int
    """Work of a step of `EngineSettings.batched` tokens, and the logits of all sequences."""
    kv_token: int
    """Cache of one token, in layers that attend to all tokens."""
    kv_sequence: int
    """Cache of a sequence of any length: its windows, and the states of layers without keys."""
    context: int
    """Tokens of the longest sequence."""

    @property
    def fixed(self) -> int:
        """Everything except the KV cache."""
        return self.weights + self.adapters + self.work + RESERVE

    def cached(self, room: float) -> int:
        """Tokens of full sequences that the cache holds, if the server has `room` bytes."""
        return max(0, int((room - self.fixed) // (self.kv_token + self.kv_sequence / self.context)))


def _adapter(model: Architecture, server: EngineSettings) -> int:
    """Numbers in one adapter.

    vLLM always reserves space for experts, and repeats what has the model's width on every GPU.
    """
    numbers = model.adapters(server.rank, server.targets)
    for layer, count in model.kinds:
        numbers += count * layer.feed.count * server.rank * 3 * (model.hidden * server.tensor + layer.feed.width)
    return numbers


def engine_memory(model: Architecture, server: EngineSettings) -> EngineMemory:
    """Memory of each GPU of the server."""
    size, parts = server.size, server.tensor * server.pipeline
    widest = max(layer.feed.widest // server.tensor + layer.feed.chosen * model.hidden for layer, _ in model.kinds)
    token, sequence = _cache(model, server)
    return EngineMemory(
        weights=model.size(size) // parts,
        adapters=size * server.adapters * _adapter(model, server) // parts if server.rank else 0,
        work=size * server.batched * (widest + 6 * model.hidden) + 12 * server.slots * model.vocabulary,
        kv_token=token // server.pipeline,
        kv_sequence=sequence // server.pipeline,
        context=server.context,
    )


def _cache(model: Architecture, server: EngineSettings) -> tuple[int, int]:
    """Bytes of cache per token and per sequence, as vLLM divides it (v1/core/kv_cache_utils.py).

    Layers of a kind form groups of equal length, the last padded; all pages have the largest size, and a state takes
    whole pages. While it reads a prompt in parts, vLLM holds more of a window than is counted.
    """
    layers = Counter(layer.mixer.held for layer in model.blocks)
    if not any(held.token and not held.window for held in layers):  # windows alone are planned as if there were none
        layers = Counter(layer.mixer.held._replace(window=0) for layer in model.blocks)
    least, most = min(layers.values()), max(layers.values())
    group = most if most < GROUPED * least else least
    widths = {held: server.kv_size * held.token // min(server.tensor, held.parts) for held in layers if held.token}
    states = [
        (server.size * held.inputs + 4 * held.state) // min(server.tensor, held.parts) for held in layers if held.state
    ]
    wide = max(widths.values())
    tokens = PAGE * -(-max([PAGE * wide, *states]) // (PAGE * wide))  # of a page
    per_token, per_sequence = 0, 0
    for held, number in layers.items():
        places = -(-number // group) * group
        if not held.token:
            per_sequence += places * STATES * tokens * wide
        elif held.window:
            per_sequence += places * wide * tokens * (1 + -(-min(held.window, server.context) // tokens))
        else:
            per_token += places * wide
            per_sequence += places * wide * (tokens if states else 0)  # the last page is not full
    return per_token, per_sequence
