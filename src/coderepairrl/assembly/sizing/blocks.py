"""What a decoder's layers are made of: attention and its relatives, MLPs and experts, each by its own numbers.

What a block keeps for its backward pass is given in bytes per token, each as a product of a width with what autograd
holds of a number of that width: for all weights and for adapters, in float32 and in bfloat16 (`Mode.of`). They were
fitted to the tensors of small models and are compared with them (tests/assembly/test_memory.py, test_families.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from coderepairrl.learn.settings import ALIGNED

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
    experts: bool = False
    """Whether each expert has some, too."""
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


@dataclass(frozen=True, slots=True)
class Mlp(Block):
    """Gated."""

    hidden: int
    width: int

    @property
    def linear(self) -> Shapes:
        """By name."""
        h, f = self.hidden, self.width
        return {"gate_proj": (h, f), "up_proj": (h, f), "down_proj": (f, h)}

    @property
    def read(self) -> tuple[str, ...]:
        """Two."""
        return ("gate_proj", "up_proj")

    @property
    def widest(self) -> int:
        """Both sides of the product."""
        return 2 * self.width

    def kept(self, mode: Mode) -> float:
        """Two sides, the activation of one, and the product."""
        return self.given(mode, self.hidden) + mode.of(16, 16, 8, 8) * self.width

    def passing(self, mode: Mode) -> float:
        """Gradients of its input and of both sides of the product."""
        h, f = self.hidden, self.width
        if not mode.half:
            return 4 * (h + 2 * f)
        return max(2 * h + 5 * f // 2, 8 * h) if mode.lora else max(2 * h + 4 * f, 10 * h)

    @property
    def gradient(self) -> int:
        """One matrix's."""
        return self.hidden * self.width


@dataclass(frozen=True, slots=True)
class Experts(Block):
    """Each token goes through some of them, and through what all share."""

    hidden: int
    count: int
    chosen: int
    width: int
    shared: int = 0
    """Width of an MLP for all tokens."""
    kind: Literal["", "gated", "grouped", "biased"] = ""
    """Whether what is shared is gated, as in Qwen3.5; groups of experts are chosen first, as in GLM and DeepSeek; or
    everything has biases, as in gpt-oss."""

    @property
    def linear(self) -> Shapes:
        """Experts are none: all of a layer are one tensor."""
        return Mlp(self.hidden, self.shared).linear if self.shared else {}

    @property
    def read(self) -> tuple[str, ...]:
        """Of what is shared."""
        return ("gate_proj", "up_proj") if self.shared else ()

    @property
    def small(self) -> int:  # type: ignore[override]
        """Of what chooses, and of the gate."""
        return self.hidden * (self.count + (self.kind == "gated"))

    @property
    def one(self) -> int:
        """Weights of an expert."""
        return 3 * self.hidden * self.width

    @property
    def others(self) -> int:  # type: ignore[override]
        """Of all experts."""
        biases = self.count * (2 * self.width + self.hidden + 1) if self.kind == "biased" else 0
        return self.count * self.one + biases

    @property
    def products(self) -> int:
        """With the chosen ones' weights."""
        return self.matrices + self.chosen * self.one

    @property
    def widest(self) -> int:
        """Of all that are chosen."""
        return 2 * self.chosen * self.width + 2 * self.shared

    def kept(self, mode: Mode) -> float:
        """Trained ones are computed in float32, frozen ones keep no input."""
        h, f, size = self.hidden, self.width, 2 if mode.half and mode.lora else 4
        steps = 3 * (self.kind == "biased")  # of its activation
        numbers, scores, once = {
            "": (mode.of(36, 36, 34, 34), 4, 0),
            "gated": (mode.of(40, 40, 38, 38), 4, mode.of(8, 8, 6, 6)),
            "grouped": (mode.of(40, 40, 36, 36), mode.of(5, 5, 3, 3), mode.of(28, 28, 26, 26)),
            "biased": (mode.of(48, 40, 44, 36), 0, 0),
        }[self.kind]
        each = size * ((3 + steps) * f + h if mode.lora else (4 + steps) * f + 2 * h) + numbers
        if mode.experts:  # inputs of both products, and what is between two matrices
            each += size * (h + f + 2 * _filled(mode.rank))
        gated = self.kind == "gated"
        around = self.given(mode, h, more=1 + gated) + mode.size * h * gated + mode.of(16, 16, 8, 8) * self.shared
        return self.chosen * each + scores * self.count + once + around

    def copied(self, mode: Mode) -> int:
        """Where each one's tokens end, and adapters as products take them, where these are not the adapters themselves:
        in bfloat16 both matrices, in float32 the second, whose order is another; the first, too, where it is filled
        up."""
        if not mode.experts:
            return 4 * self.count
        rank = _filled(mode.rank)
        first, second = self.hidden + self.width, 2 * self.width + self.hidden
        own = mode.half or rank != mode.rank
        return 4 * self.count + mode.size * self.count * rank * (first * own + second)

    def passing(self, mode: Mode) -> float:
        """Gradients of inputs and products of those that a token goes through."""
        size, inputs = (2 if mode.half and mode.lora else 4), 1 + (not mode.half)
        return size * (inputs * self.hidden + self.chosen * (self.hidden + 2 * self.width))

    @property
    def gradient(self) -> int:
        """All experts' of a layer, as one tensor."""
        return 2 * self.count * self.hidden * self.width


def _filled(rank: int) -> int:
    """That of products in groups."""
    return -(-rank // ALIGNED) * ALIGNED


class Layer(NamedTuple):
    """A mixer of tokens, and what each goes through by itself."""

    mixer: Block
    feed: Block
    norms: int = 2
    """Of the width of the layer's input: before both, or after them as well."""

    def kept(self, mode: Mode, hidden: int) -> float:
        """Bytes per token for the backward pass, but of adapters."""
        return self.norms * (mode.of(8, 4, 8, 4) * hidden + 4) + self.mixer.kept(mode) + self.feed.kept(mode)

    @property
    def linear(self) -> Shapes:
        """Of both."""
        return self.mixer.linear | self.feed.linear

    @property
    def matrices(self) -> int:
        """Weights of both's matrices, but of experts."""
        return self.mixer.matrices + self.feed.matrices

    def adapters(self, rank: int, targets: frozenset[str], *, experts: bool = False) -> int:
        """Parameters of low-rank adapters on linear layers `targets`; with `experts` of those on each expert, whose
        gate and up share the first matrix."""
        numbers = sum(sum(shape) for name, shape in self.linear.items() if name in targets)
        if experts and isinstance(feed := self.feed, Experts):
            numbers += feed.count * (2 * feed.hidden + 3 * feed.width)
        return rank * numbers

    def parameters(self, hidden: int) -> int:
        """All of them."""
        return self.mixer.parameters + self.feed.parameters + self.norms * hidden
