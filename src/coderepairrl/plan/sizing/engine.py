"""Memory of a vLLM server per GPU, estimated from its options and arguments.

The KV cache gets the server's share of the GPU (``--gpu-memory-utilization``) less weights and activations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from coderepairrl.config.schema import Lora
from coderepairrl.engines.vllm.options import MAX_LORAS, RANKS, SLOTS, is_half, parse_arguments
from coderepairrl.errors import ConfigError
from coderepairrl.plan.sizing.architecture import Architecture

SHARE = 0.92
"""vLLM 0.32's default of ``--gpu-memory-utilization``."""
BATCHED = 8192
"""vLLM's ``--max-num-batched-tokens`` on a GPU of 70 GB or more; smaller ones have 2,048."""
RESERVE = 2_000_000_000
"""Bytes used besides tensors (CUDA context, libraries, captured graphs): an assumption, not a measurement."""
PAGE = 16
"""Tokens per page (vLLM: block) of the cache are a multiple of this."""
STATES = 2
"""Pages of recurrent state per sequence with prefix caching, vLLM's default: after its last token and its last page."""
GROUPED = 1.5
"""Groups have the largest number of layers of a kind if it is less than this many times the smallest."""
KV_BYTES = {"float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Bytes of a number in the cache, by ``--kv-cache-dtype``; ``auto`` is the type of the weights."""

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


def find_unknown_argument(args: Sequence[str]) -> str:
    """Find the first of vLLM's `args` with unknown memory use, or "". Raises `ConfigError` for quantised weights.

    >>> find_unknown_argument(["-tp", "2", "--cpu_offload_gb=4"])
    '--cpu_offload_gb=4'
    """
    first_unknown = ""
    for arg in parse_arguments(args):
        if arg.means(*_QUANTISED):
            raise ConfigError(
                f"engine.options.args has {arg.words[0]}: quantised weights differ from the trained ones",
                fix="leave it out; --tensor-parallel-size divides the weights, --kv-cache-dtype fp8 halves the cache",
            )
        is_known_dtype = arg.means(_KV_DTYPE) and arg.value in (*KV_BYTES, "auto")
        if not first_unknown and not is_known_dtype and arg.means(_KV_DTYPE, *_UNKNOWN):
            first_unknown = " ".join(arg.words)
    return first_unknown


def read_number(args: Sequence[str], names: tuple[str, ...], default: float) -> float:
    """Read the number after one of `names` in `args`; the last one counts. Raises `ConfigError`.

    As in vLLM, ``8k`` is 8,000 and ``8K`` 8,192.

    >>> read_number(["--a", "1", "--gpu-memory-utilization=0.5"], ("--gpu-memory-utilization",), 0.92)
    0.5
    >>> read_number(["--max-num-batched-tokens", "8K"], ("--max-num-batched-tokens",), 2048)
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


def read_whole_number(args: Sequence[str], names: tuple[str, ...], default: int) -> int:
    """Call `read_number` for a whole number. Raises `ConfigError`."""
    number = read_number(args, names, default)
    if number != int(number):
        raise ConfigError(f"engine.options.args: {names[0]} must be a whole number, not {number:g}")
    return int(number)


def replace_argument(args: Sequence[str], names: tuple[str, ...], value: str) -> list[str]:
    """Set an argument of any of `names` to `value`: its other occurrences are removed.

    >>> replace_argument(["--a", "--b-c=1", "--b_c", "2", "-b", "3"], ("--b-c", "-b"), "4")
    ['--a', '--b-c', '4']
    """
    return [*(word for arg in parse_arguments(args) if not arg.means(*names) for word in arg.words), names[0], value]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings that determine a server's memory."""

    context: int
    """Tokens of the longest sequence."""
    slots: int
    """Concurrent sequences."""
    share: float
    """Share of the GPU's memory."""
    batched: int
    """Tokens of an engine step."""
    tensor: int
    """GPUs that split each layer; `pipeline`: stages of layers; `replicas`: data-parallel copies."""
    pipeline: int
    replicas: int
    size: int
    """Bytes of a weight."""
    kv_size: int
    """Bytes of a number in the cache."""
    adapters: int
    """LoRA adapters loaded at a time."""
    rank: int
    targets: tuple[str, ...]

    @classmethod
    def from_options(cls, options: Mapping[str, Any], model: Architecture, lora: Lora | None, *, small: bool) -> Self:
        """Read checked ``engine.options``; `small` GPUs have less than 70 GB. Raises `ConfigError`."""
        args = options.get("args", ())
        rank = options.get("lora_rank", lora.rank if lora else 0)
        dtype = options.get("dtype", "auto")
        size = 2 if (model.half if dtype == "auto" else is_half(dtype)) else 4
        kv_types = [arg.value for arg in parse_arguments(args) if arg.means(_KV_DTYPE)]
        return cls(
            context=options.get("context") or model.context,
            slots=options.get("slots", SLOTS),
            share=read_number(args, SHARE_NAMES, SHARE),
            batched=read_whole_number(args, _BATCHED, 2048 if small else BATCHED),
            tensor=read_whole_number(args, TENSOR_NAMES, 1),
            pipeline=read_whole_number(args, _PIPELINE, 1),
            replicas=read_whole_number(args, DATA_NAMES, 1),
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
    """Bytes used on one GPU."""

    weights: int
    adapters: int
    activations: int
    """Activations of a step of `EngineSettings.batched` tokens, and the logits of all sequences."""
    kv_token: int
    """Cache per token of attention, without regard to sliding windows."""
    kv_sequence: int
    """Cache per sequence whatever its length: states of recurrent layers."""
    context: int
    """Tokens of the longest sequence."""

    @property
    def fixed(self) -> int:
        """Everything except the KV cache."""
        return self.weights + self.adapters + self.activations + RESERVE

    def cached_tokens(self, available: float) -> int:
        """Count tokens that the cache holds in sequences of full length, if the server has `available` bytes."""
        return max(0, int((available - self.fixed) // (self.kv_token + self.kv_sequence / self.context)))


def _adapter_parameters(model: Architecture, server: EngineSettings) -> int:
    """Count the parameters of an adapter in vLLM.

    vLLM reserves space for experts even if they are not adapted, and each GPU has a copy of matrices of the model's
    width.
    """
    parameters = model.adapters(server.rank, server.targets)
    for layer, count in model.layer_counts:
        parameters += count * layer.feed.count * server.rank * 3 * (model.hidden * server.tensor + layer.feed.width)
    return parameters


def estimate_engine_memory(model: Architecture, server: EngineSettings) -> EngineMemory:
    """Estimate the memory of each GPU of the server."""
    size, parts = server.size, server.tensor * server.pipeline
    widest = max(
        layer.feed.widest // server.tensor + layer.feed.chosen * model.hidden for layer, _ in model.layer_counts
    )
    token, sequence = _estimate_cache(model, server)
    return EngineMemory(
        weights=model.count_bytes(size) // parts,
        adapters=size * server.adapters * _adapter_parameters(model, server) // parts if server.rank else 0,
        activations=size * server.batched * (widest + 6 * model.hidden) + 12 * server.slots * model.vocabulary,
        kv_token=token // server.pipeline,
        kv_sequence=sequence // server.pipeline,
        context=server.context,
    )


def _estimate_cache(model: Architecture, server: EngineSettings) -> tuple[int, int]:
    """Estimate bytes of cache per token and per sequence, as vLLM allocates it (v1/core/kv_cache_utils.py).

    vLLM divides the layers of a kind into groups of equal length, padding the last. All pages have the size of the
    largest, and a recurrent state takes whole pages.
    """
    layers = Counter(layer.mixer.cache for layer in model.blocks)
    fewest, most = min(layers.values()), max(layers.values())
    group_size = most if most < GROUPED * fewest else fewest
    widths = {cache: server.kv_size * cache.token // min(server.tensor, cache.parts) for cache in layers if cache.token}
    states = [
        (server.size * cache.inputs + 4 * cache.state) // min(server.tensor, cache.parts)
        for cache in layers
        if cache.state
    ]
    width = max(widths.values())  # bytes of a token in a layer
    smallest_page = PAGE * width
    page_tokens = PAGE * math.ceil(max([smallest_page, *states]) / smallest_page)
    per_token, per_sequence = 0, 0
    for cache, number in layers.items():
        padded = math.ceil(number / group_size) * group_size
        if cache.token:
            per_token += padded * width
            per_sequence += padded * width * (page_tokens if states else 0)  # the last page is not full
        else:
            per_sequence += padded * STATES * page_tokens * width
    return per_token, per_sequence
