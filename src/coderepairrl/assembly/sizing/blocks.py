"""What a decoder's layers are made of: attention and its relatives, each by its own numbers (`feeds` for the rest).

What a block keeps for its backward pass is given in bytes per token, each as a product of a width with what autograd
holds of a number of that width: for all weights and for adapters, in float32 and in bfloat16 (`Mode.of`). They were
fitted to the tensors of small models and are compared with them (tests/assembly/test_memory.py,
test_planned_families.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

PROCESSORS = 132
"""Of an H100, among which FlashAttention's backward pass deals out heads; few GPUs have more."""
Shapes = dict[str, tuple[int, int]]
"""Linear layers by name, ``(in, out)``."""


class Mode(NamedTuple):
    """How a learner computes."""

    half: bool
    """Whether products are in bfloat16."""
    targets: frozenset[str] | None = None
    """Linear layers with adapters, None where all weights are trained."""
    rank: int = 0
    """Of adapters."""
    gpu: bool = False
    row: int = 0
    """Tokens of the longest row."""

    @property
    def lora(self) -> bool:
        """Whether adapters are trained."""
        return self.targets is not None

    @property
    def size(self) -> int:
        """Bytes of a product's number."""
        return 2 if self.half else 4

    def of(self, full: float, lora: float, half_full: float, half_lora: float) -> float:
        """Bytes of a number: in float32 of all weights and of adapters, in bfloat16 of both."""
        return (full, lora, half_full, half_lora)[2 * self.half + self.lora]


class Held(NamedTuple):
    """What a server holds of a sequence in a layer, in numbers."""

    token: int = 0
    """Of each token, or of each of the last `window`."""
    parts: int = 1
    """Among how many GPUs that can be divided."""
    window: int = 0
    inputs: int = 0
    """Of the last tokens, which a convolution needs again."""
    state: int = 0
    """Whatever its length."""


class Block:
    """Of a layer; what is not said is nothing."""

    __slots__ = ()
    shares: int = 1
    """Heads, which GPUs can divide among them."""
    small: int = 0
    """Weights of matrices that get no adapters and are never quantised, such as a router's."""
    others: int = 0
    """Parameters that are in no matrix."""
    held: Held = Held()
    scores: int = 0
    """Multiplications of a token with each that it looks at."""
    window: int = 0
    """Tokens that it looks at, 0 for all."""
    mixing: int = 0
    """Multiplications of a token beside those with weights, in float32."""

    @property
    def linear(self) -> Shapes:
        """Its linear layers."""
        return {}

    @property
    def quantised(self) -> int:
        """Weights of its linear layers."""
        return sum(rows * columns for rows, columns in self.linear.values())

    @property
    def matrices(self) -> int:
        """Weights of all its matrices, but of experts."""
        return self.quantised + self.small

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.matrices + self.others

    @property
    def products(self) -> int:
        """Weights that a token is multiplied by."""
        return self.matrices

    @property
    def widest(self) -> int:
        """Numbers of a token that a server has at once, of those that it divides among GPUs."""
        return 0

    @property
    def read(self) -> tuple[str, ...]:
        """Its linear layers that multiply what it is given."""
        return ()

    def given(self, mode: Mode, width: int, more: int = 0) -> int:
        """Bytes per token of what it is given, where it is kept: once, in bfloat16 once for each matrix that is
        trained, of which `more` are no linear layers."""
        if mode.targets is not None:
            return mode.size * width * bool(mode.targets.intersection(self.read))
        return 2 * width * (len(self.read) + more) if mode.half else 4 * width

    def kept(self, mode: Mode) -> float:
        """Bytes per token for the backward pass, but of adapters."""
        return 0

    def copied(self, mode: Mode) -> int:
        """Bytes for the backward pass, however many tokens there are."""
        return 0

    def passing(self, mode: Mode) -> float:
        """Bytes per token that its own backward pass adds."""
        return 0

    @property
    def gradient(self) -> int:
        """Numbers of the largest gradient of a weight that is on its way."""
        return 0


@dataclass(frozen=True, slots=True)
class Attention(Block):
    """Every token looks at those before it, or at a `window` of them."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    norm: Literal["", "head", "exact", "wide"] = ""
    """How queries and keys are normalised: each head as in Qwen3, the same by weights in float32 as in Qwen3.5 and
    Gemma 3, or all heads together as in OLMo 3."""
    qkv_bias: bool = False
    o_bias: bool = False
    gated: bool = False
    """Whether its output is gated, as in Qwen3.5."""
    window: int = 0
    sinks: bool = False
    """Whether each head may look at nothing, as in gpt-oss."""

    @property
    def shares(self) -> int:  # type: ignore[override]
        """Its heads."""
        return self.heads

    @property
    def queries(self) -> int:
        """Width of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all keys of a token, and of its values."""
        return self.kv_heads * self.head_dim

    @property
    def linear(self) -> Shapes:
        """By name."""
        h, q, k = self.hidden, self.queries, self.keys
        return {"q_proj": (h, q * (1 + self.gated)), "k_proj": (h, k), "v_proj": (h, k), "o_proj": (q, h)}

    @property
    def read(self) -> tuple[str, ...]:
        """All but the last."""
        return ("q_proj", "k_proj", "v_proj")

    @property
    def others(self) -> int:  # type: ignore[override]
        """Of norms, biases and sinks."""
        biases = (self.queries * (1 + self.gated) + 2 * self.keys) * self.qkv_bias + self.hidden * self.o_bias
        norms = self.queries + self.keys if self.norm == "wide" else 2 * self.head_dim * bool(self.norm)
        return norms + biases + self.heads * self.sinks

    @property
    def held(self) -> Held:  # type: ignore[override]
        """Keys and values."""
        return Held(2 * self.keys, self.kv_heads, self.window)

    @property
    def scores(self) -> int:  # type: ignore[override]
        """Of queries with keys, and of weights with values."""
        return 2 * self.queries

    def kept(self, mode: Mode) -> float:
        """Queries, keys, values and output as the kernel and the products before and after want them. On a GPU the
        output is kept twice (`learn.attention`), and in float32 every head gets keys of its own."""
        half = 10 if self.norm == "head" else 12
        q = k = mode.of(16, 12, half, 8) if self.norm else mode.of(8, 8, 4, 4)
        size, windowed = mode.size, bool(self.window) and mode.row > self.window
        scales = {"": 0, "wide": 8}.get(self.norm, 4 * (self.heads + self.kv_heads)) + 4 * self.heads  # and log-sums
        if self.gated:
            q += mode.of(12, 12, 4, 4)
        if self.sinks:  # wider by 8, and the output in its own width once more
            q, scales = q + size, scales + 8 * size * (2 * self.heads + 2 * self.kv_heads)
        kept = self.given(mode, self.hidden) + q * self.queries + k * self.keys + scales
        if windowed:
            return kept + self._windowed(mode)
        if mode.gpu:
            kept += size * self.queries + (0 if mode.half else 8 * (self.queries - self.keys))
        return kept

    def _windowed(self, mode: Mode) -> float:
        """Blocks of queries with the keys of two windows, masks, and each block's output before they are joined."""
        size, wide = mode.size, self.head_dim + 8 * self.sinks
        looked = 2 * self.window - 1 + self.sinks
        keys = self.heads if mode.gpu else self.kv_heads  # on a GPU every head gets its own
        copies = 2 * size * wide * (keys * looked / self.window - self.kv_heads)
        return copies + (size + 0.5) * looked + (0 if self.sinks else size * self.queries)

    def passing(self, mode: Mode) -> float:
        """On a GPU FlashAttention in bfloat16 sums the queries' gradients in one float32 copy for each share of the
        keys, to give the same bits again. Of a window each block's gradient of keys is as long as the row."""
        if self.window and mode.row > self.window:
            return (
                mode.size
                * (self.head_dim + 8 * self.sinks)
                * (2 * self.heads + 4 * (self.heads if mode.gpu else self.kv_heads))
            )
        return 4 * self.queries * -(-PROCESSORS // self.heads) if mode.gpu and mode.half else 0


@dataclass(frozen=True, slots=True)
class Latent(Block):
    """Multi-head latent attention: keys and values of all heads come from one narrow vector, as in DeepSeek-V3."""

    hidden: int
    heads: int
    plain: int
    """Width of a head's keys without positions."""
    turned: int
    """And with positions, which all heads share."""
    value: int
    """Of a head's values."""
    rank: int
    """Of the narrow vector."""
    query_rank: int = 0
    """Of that which queries come from, 0 where they come from the layer's input."""
    bias: bool = False

    @property
    def shares(self) -> int:  # type: ignore[override]
        """Its heads."""
        return self.heads

    @property
    def widest_head(self) -> int:
        """Of keys or values, the wider: the learner's kernels know one width (`learn.attention`)."""
        return max(self.plain + self.turned, self.value)

    @property
    def linear(self) -> Shapes:
        """By name."""
        h, n, q = self.hidden, self.heads, self.heads * (self.plain + self.turned)
        queries = {"q_a_proj": (h, self.query_rank), "q_b_proj": (self.query_rank, q)}
        return (queries if self.query_rank else {"q_proj": (h, q)}) | {
            "kv_a_proj_with_mqa": (h, self.rank + self.turned),
            "kv_b_proj": (self.rank, n * (self.plain + self.value)),
            "o_proj": (n * self.value, h),
        }

    @property
    def read(self) -> tuple[str, ...]:
        """The narrowing ones."""
        return ("q_a_proj" if self.query_rank else "q_proj", "kv_a_proj_with_mqa")

    @property
    def others(self) -> int:  # type: ignore[override]
        """Of norms and biases."""
        biases = self.query_rank + self.rank + self.turned + self.hidden if self.bias else 0
        return self.query_rank + self.rank + biases

    @property
    def held(self) -> Held:  # type: ignore[override]
        """The narrow vector, and the key with positions."""
        return Held(self.rank + self.turned)

    @property
    def scores(self) -> int:  # type: ignore[override]
        """As the learner computes them, of every head's own keys."""
        return self.heads * (self.plain + self.turned + self.value)

    def kept(self, mode: Mode) -> float:
        """Queries, keys, values and output in one width, and the norms of what is narrow."""
        wide, size = self.heads * self.widest_head, mode.size
        narrow = mode.of(12, 4, 8, 4) * (self.rank + self.query_rank) + 4 * (1 + bool(self.query_rank))
        uneven = size * self.heads * self.value * (self.value < self.widest_head)
        if not mode.half and self.value == self.widest_head:  # values are a part of what keys are in, too
            uneven += 4 * self.heads * self.plain
        twice = size * wide * mode.gpu
        return self.given(mode, self.hidden) + narrow + 4 * size * wide + uneven + 4 * self.heads + twice

    def passing(self, mode: Mode) -> float:
        """As of other attention."""
        return 4 * self.heads * self.widest_head * -(-PROCESSORS // self.heads) if mode.gpu and mode.half else 0
