"""A decoder's layer in numbers: a mixer of tokens, and a feed-forward part.

What is kept for the backward pass is slightly too large, fitted to small models (tests/plan/test_memory.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

CHUNK = 64
"""Tokens that Gated DeltaNet computes at once (transformers' ``torch_chunk_gated_delta_rule``)."""


class Linear(NamedTuple):
    """A linear layer: numbers in and out."""

    name: str
    rows: int
    columns: int

    @property
    def size(self) -> int:
        """Number of weights."""
        return self.rows * self.columns


class Held(NamedTuple):
    """Numbers that a server holds of a sequence in a layer."""

    token: int = 0
    """Numbers of each token, or of each of the last `window`."""
    parts: int = 1
    """Number of GPUs that can divide it."""
    window: int = 0
    inputs: int = 0
    """Numbers of the last tokens, which a convolution needs again."""
    state: int = 0
    """Numbers independent of the length."""


NOTHING = Held()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of a layer's two parts."""

    linear: tuple[Linear, ...] = ()
    reads: int = 0
    """Matrices that multiply the layer's input."""
    small: int = 0
    """Weights of matrices that get no adapters and are never quantised, such as a router's."""
    others: int = 0
    """Parameters outside matrices."""
    products: int = 0
    """Numbers of a token that its backward pass needs, in the type of products."""
    norms: int = 0
    """Numbers of a token that go through norms."""
    extra: int = 0
    """Further bytes of a token."""
    widest: int = 0
    """Numbers of a token held at once, of those that GPUs divide among them."""
    queries: int = 0
    keys: int = 0
    """Width of all queries and of all keys of a token in attention."""
    shares: int = 1
    """Heads, which GPUs can divide among them."""
    head_dim: int = 0
    """The width that positions rotate."""
    held: Held = NOTHING
    count: int = 0
    """Experts, of which a token goes through `chosen`."""
    chosen: int = 0
    width: int = 0
    """Width of an expert."""
    one: int = 0
    """Weights of an expert."""
    quantised: int = field(init=False)
    """Weights of its linear layers."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "quantised", sum(each.size for each in self.linear))

    @property
    def matrices(self) -> int:
        """Weights of its matrices, without experts."""
        return self.quantised + self.small

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.matrices + self.count * self.one + self.others

    @property
    def multiplied(self) -> int:
        """Weights that multiply each token."""
        return self.matrices + self.chosen * self.one


class Layer(NamedTuple):
    """A token mixer and a feed-forward part."""

    mixer: Part
    feed: Part
    norms: int = 2
    """Norms of the width of the layer's input: before both parts, or after them as well."""

    @property
    def linear(self) -> tuple[Linear, ...]:
        """Linear layers of both parts."""
        return self.mixer.linear + self.feed.linear

    @property
    def matrices(self) -> int:
        """Weights of both parts' matrices, without experts."""
        return self.mixer.matrices + self.feed.matrices

    def parameters(self, hidden: int) -> int:
        """All parameters."""
        return self.mixer.parameters + self.feed.parameters + self.norms * hidden

    def adapters(self, rank: int, targets: frozenset[str]) -> int:
        """Parameters of low-rank adapters on the linear layers `targets`."""
        return rank * sum(each.rows + each.columns for each in self.linear if each.name in targets)


Norm = Literal["", "head", "exact", "wide"]
"""Norm of queries and keys: per head (Qwen3), the same by float32 weights (Qwen3.5, Gemma 3), or all heads together
(OLMo 3)."""


def attention(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    norm: Norm = "",
    qkv_bias: bool = False,
    o_bias: bool = False,
    gated: bool = False,
    window: int = 0,
    sinks: bool = False,
) -> Part:
    """Attention to earlier tokens, or to a `window` of them.

    Its output may be `gated`, as in Qwen3.5; with `sinks` a head may attend to nothing, as in gpt-oss.
    """
    q, k = heads * head_dim, kv_heads * head_dim
    both = q + k if norm else 0
    vectors = (q * (1 + gated) + 2 * k) * qkv_bias + hidden * o_bias + heads * sinks
    return Part(
        linear=(
            Linear("q_proj", hidden, q * (1 + gated)),
            Linear("k_proj", hidden, k),
            Linear("v_proj", hidden, k),
            Linear("o_proj", q, hidden),
        ),
        reads=3,
        others=vectors + (both if norm == "wide" else 2 * head_dim * bool(norm)),
        products=2 * (q + k) + 3 * q * gated + q * sinks,
        norms=both,
        extra=4 * heads + 4 * (heads + kv_heads) * bool(norm) + 64 * (heads + kv_heads) * sinks,
        queries=q,
        keys=k,
        shares=heads,
        head_dim=head_dim,
        held=Held(2 * k, kv_heads, window),
    )


def latent(
    hidden: int, heads: int, plain: int, turned: int, value: int, rank: int, query_rank: int = 0, *, bias: bool = False
) -> Part:
    """Multi-head latent attention (DeepSeek-V3): keys and values come from one vector of `rank` numbers.

    A key has `plain` numbers without positions, and `turned` with, which heads share. Queries may come from a vector of
    `query_rank`.
    """
    n, wide = heads, max(plain + turned, value)
    first = (
        (Linear("q_a_proj", hidden, query_rank), Linear("q_b_proj", query_rank, n * (plain + turned)))
        if query_rank
        else (Linear("q_proj", hidden, n * (plain + turned)),)
    )
    return Part(
        linear=(
            *first,
            Linear("kv_a_proj_with_mqa", hidden, rank + turned),
            Linear("kv_b_proj", rank, n * (plain + value)),
            Linear("o_proj", n * value, hidden),
        ),
        reads=2,
        others=(query_rank + rank) * (1 + bias) + (turned + hidden) * bias,
        products=4 * n * wide + n * (value if value < wide else plain),
        norms=rank + query_rank,
        extra=4 * n,
        queries=n * wide,
        keys=n * wide,
        shares=n,
        held=Held(rank + turned),
    )


def delta(
    hidden: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, width: int, *, joined: bool = False
) -> Part:
    """Gated DeltaNet, as in Qwen3.5, or with one input matrix (`joined`), as in Qwen3-Next.

    The convolution sees `width` tokens. Counts what transformers' functions keep; ``fla`` kernels keep less.
    """
    k, v = key_heads * key_dim, value_heads * value_dim
    apart = (Linear("in_proj_qkv", hidden, 2 * k + v), Linear("in_proj_z", hidden, v))
    state = value_heads * key_dim * value_dim
    return Part(
        linear=(
            *((Linear("in_proj_qkvz", hidden, 2 * k + 2 * v),) if joined else apart),
            Linear("out_proj", v, hidden),
        ),
        reads=2 if joined else 4,
        small=2 * hidden * value_heads,
        others=(2 * k + v) * width + 2 * value_heads + value_dim,
        products=4 * k + 4 * v + 5 * value_heads * key_dim + 193 * value_heads,
        extra=28 * v + 28 * value_heads * key_dim + 548 * value_heads + 8 * state // CHUNK,
        shares=key_heads,
        held=Held(parts=key_heads, inputs=(width - 1) * (2 * k + v), state=state),
    )


def mlp(hidden: int, width: int) -> Part:
    """A gated MLP."""
    return Part(
        linear=(
            Linear("gate_proj", hidden, width),
            Linear("up_proj", hidden, width),
            Linear("down_proj", width, hidden),
        ),
        reads=2,
        products=4 * width,
        widest=2 * width,
    )


def experts(
    hidden: int, count: int, chosen: int, width: int, *, shared: int = 0, gated: bool = False, biased: bool = False
) -> Part:
    """A mixture of experts, optionally with an MLP of width `shared` for every token.

    That MLP may be `gated`, as in Qwen3.5; everything may have biases, as in gpt-oss.
    """
    common = mlp(hidden, shared) if shared else Part()
    return Part(
        linear=common.linear,
        reads=common.reads + 1 + gated,
        small=hidden * (count + gated),
        others=count * (2 * width + hidden + 1) if biased else 0,
        products=chosen * ((6 if biased else 3) * width + hidden) + common.products + hidden * gated,
        extra=(48 if biased else 40) * chosen + 5 * count + 28,
        widest=2 * chosen * width + common.widest,
        count=count,
        chosen=chosen,
        width=width,
        one=3 * hidden * width,
    )
