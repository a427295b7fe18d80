"""Sizes of a decoder layer: its token mixer (such as attention), and its feed-forward part.

Sizes that the backward pass needs are fitted to small models, and slightly too large (tests/plan/test_memory.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

CHUNK = 64
"""Tokens of a chunk of Gated DeltaNet (transformers' ``torch_chunk_gated_delta_rule``)."""


class Linear(NamedTuple):
    """A linear layer, with its input and output width."""

    name: str
    rows: int
    columns: int

    @property
    def size(self) -> int:
        """Number of weights."""
        return self.rows * self.columns


class CacheSizes(NamedTuple):
    """Cache of a sequence in a layer, in elements."""

    token: int = 0
    """Elements per token."""
    parts: int = 1
    """Number of GPUs that can divide the cache."""
    inputs: int = 0
    """Elements of the latest tokens, which a convolution reads again."""
    state: int = 0
    """Elements independent of the sequence's length."""


NOTHING = CacheSizes()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPart:
    """Token mixer or feed-forward part; sizes are in elements per token, unless they say otherwise."""

    linear: tuple[Linear, ...] = ()
    input_matrices: int = 0
    """Matrices that multiply the layer's input."""
    unadapted: int = 0
    """Weights of matrices that get no adapters and are never quantised, such as a router's."""
    vectors: int = 0
    """Parameters outside matrices."""
    products: int = 0
    """Elements kept for the backward pass, in the type of matrix products."""
    norms: int = 0
    """Inputs of norms."""
    extra: int = 0
    """Further bytes per token."""
    widest: int = 0
    """Widest activation that GPUs divide among them."""
    queries: int = 0
    keys: int = 0
    """Width of all queries and of all keys of a token in attention."""
    heads: int = 1
    """Heads that GPUs can divide among them."""
    window: int = 0
    """Tokens that attention reaches back; 0: all."""
    head_dim: int = 0
    """Width that position embeddings rotate."""
    cache: CacheSizes = NOTHING
    count: int = 0
    """Number of experts; a token goes through `chosen` of them."""
    chosen: int = 0
    width: int = 0
    """Width of an expert."""
    expert_size: int = 0
    """Weights of an expert."""

    @property
    def quantised(self) -> int:
        """Weights of its quantisable linear layers."""
        return sum(each.size for each in self.linear)

    @property
    def matrices(self) -> int:
        """Weights of its matrices, without experts."""
        return self.quantised + self.unadapted

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.matrices + self.count * self.expert_size + self.vectors

    @property
    def multiplied(self) -> int:
        """Weights that multiply each token."""
        return self.matrices + self.chosen * self.expert_size


class Layer(NamedTuple):
    """A token mixer and a feed-forward part, each after a norm."""

    mixer: LayerPart
    feed: LayerPart

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
        return self.mixer.parameters + self.feed.parameters + 2 * hidden

    def adapters(self, rank: int, targets: frozenset[str]) -> int:
        """Parameters of low-rank adapters on the linear layers `targets`."""
        return rank * sum(each.rows + each.columns for each in self.linear if each.name in targets)


def make_attention(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    norm: bool = False,
    qkv_bias: bool = False,
    o_bias: bool = False,
    gated: bool = False,
    window: int = 0,
) -> LayerPart:
    """Attention to earlier tokens, or to a `window` of them.

    `norm`: queries and keys are normed per head, as in Qwen3. The output may be `gated`, as in Qwen3.5.
    """
    q, k = heads * head_dim, kv_heads * head_dim
    return LayerPart(
        linear=(
            Linear("q_proj", hidden, q * (1 + gated)),
            Linear("k_proj", hidden, k),
            Linear("v_proj", hidden, k),
            Linear("o_proj", q, hidden),
        ),
        input_matrices=3,
        vectors=(q * (1 + gated) + 2 * k) * qkv_bias + hidden * o_bias + 2 * head_dim * norm,
        products=2 * (q + k) + 3 * q * gated,
        norms=(q + k) * norm,
        extra=4 * heads + 4 * (heads + kv_heads) * norm,
        queries=q,
        keys=k,
        heads=heads,
        head_dim=head_dim,
        window=window,
        cache=CacheSizes(2 * k, kv_heads),
    )


def make_delta_net(
    hidden: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, width: int
) -> LayerPart:
    """Gated DeltaNet, as in Qwen3.5.

    The convolution sees `width` tokens. Counts tensors that transformers' functions keep; ``fla`` kernels keep less.
    """
    k, v = key_heads * key_dim, value_heads * value_dim
    state = value_heads * key_dim * value_dim
    return LayerPart(
        linear=(
            Linear("in_proj_qkv", hidden, 2 * k + v),
            Linear("in_proj_z", hidden, v),
            Linear("out_proj", v, hidden),
        ),
        input_matrices=4,
        unadapted=2 * hidden * value_heads,
        vectors=(2 * k + v) * width + 2 * value_heads + value_dim,
        products=4 * k + 4 * v + 5 * value_heads * key_dim + 193 * value_heads,
        extra=28 * v + 28 * value_heads * key_dim + 548 * value_heads + 8 * state // CHUNK,
        heads=key_heads,
        cache=CacheSizes(parts=key_heads, inputs=(width - 1) * (2 * k + v), state=state),
    )


def make_mlp(hidden: int, width: int) -> LayerPart:
    """A gated MLP."""
    return LayerPart(
        linear=(
            Linear("gate_proj", hidden, width),
            Linear("up_proj", hidden, width),
            Linear("down_proj", width, hidden),
        ),
        input_matrices=2,
        products=4 * width,
        widest=2 * width,
    )


def make_experts(
    hidden: int, count: int, chosen: int, width: int, *, shared: int = 0, gated: bool = False
) -> LayerPart:
    """A mixture of experts, optionally with an MLP of width `shared` for every token.

    That MLP may be `gated`, as in Qwen3.5.
    """
    common = make_mlp(hidden, shared) if shared else LayerPart()
    return LayerPart(
        linear=common.linear,
        input_matrices=common.input_matrices + 1 + gated,
        unadapted=hidden * (count + gated),
        products=chosen * (3 * width + hidden) + common.products + hidden * gated,
        extra=40 * chosen + 5 * count + 28,
        widest=2 * chosen * width + common.widest,
        count=count,
        chosen=chosen,
        width=width,
        expert_size=3 * hidden * width,
    )
