"""Inference of dense Llama-like models: packed rows of many requests, one preallocated cache.

Logits match transformers to 1e-5 in fp32, and *a row's bits do not depend on other rows*, chunks of a prompt, or cached
prefixes, because:

- MKL runs in its strict reproducible mode; otherwise processors with AMX sum in another order below 16 rows.
- If that does not suffice (tested at the start), products are padded to `MIN_ROWS` rows, attention to a multiple of it.
- A query attends over its own keys, padded (masked) to a multiple of `KEYS`.

Models of more than `PACK_BYTES` use oneDNN with prepacked matrices: 1.0 to 2.7 times as fast as MKL for few rows and
matrices larger than the cache. Fewer than `PACKED_ROWS` rows are padded.

Neither library promises this; tests show it on x86-64 with AVX-512 and AVX2. Elsewhere last bits may differ, and
`crrl check` tolerates only ties.

A tensor's name ends with its axes: N rows (tokens), C hidden size, I inner size, O outputs, H heads, G queries per key
head, D head size, R D/2 rotations, T cached positions, K keys, S slots, P pieces, M cache cells, V vocabulary.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, rms_norm
from torch.nn.functional import linear, pad, scaled_dot_product_attention, silu

from coderepairrl.engines.tiny.config import EMBEDDING, HEAD, ModelConfig
from coderepairrl.engines.tiny.scheduler import Piece

os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")  # MKL reads it at the first product of a process
KEYS = 64
"""Queries attend over a multiple of this number of keys."""
PACK_BYTES = 2**25
"""Bytes of weights beyond which a model is packed: about the cache of a processor."""
PACKED_ROWS = 1 if torch.backends.cpu.get_cpu_capability() == "AVX2" else 4
"""Fewest rows with which a packed product has the bits of more rows. With AVX2 one row takes two thirds of the time of
four; on other processors one row is not measured."""


def _find_least_rows() -> int:
    """Return 1 if products of few rows have the same bits as those of many, else 4."""
    generator = torch.Generator().manual_seed(0)
    rows_NC, weight_CC, cached_TC = (torch.randn(size, 64, generator=generator) for size in (32, 64, 5 * KEYS))
    for compute, other in ((linear, weight_CC), (_attend, cached_TC)):
        for size in (1, 3):
            parts = [compute(part, other) for part in torch.split(rows_NC, size)]
            if not torch.equal(torch.cat(parts), compute(rows_NC, other)):
                return 4
    return 1


def _attend(rows_NC: Tensor, cached_TC: Tensor) -> Tensor:
    query, keys = (tensor.view(1, -1, 2, 32).transpose(1, 2) for tensor in (rows_NC, cached_TC))
    return scaled_dot_product_attention(query, keys, keys).transpose(1, 2).reshape(rows_NC.shape)


MIN_ROWS = _find_least_rows()


class Matrix(NamedTuple):
    """Weight and bias of a linear layer."""

    weight_OI: Tensor
    bias_O: Tensor | None
    packed: bool

    @classmethod
    def join(cls, weights: Sequence[Tensor], biases: Sequence[Tensor], *, packed: bool) -> Matrix:
        """Join matrices that multiply the same rows."""
        weight_OI = torch.cat([*weights]) if len(weights) > 1 else weights[0]
        if packed:
            weight_OI = torch.ops.mkldnn._reorder_linear_weight(weight_OI)
        return cls(weight_OI, torch.cat([*biases]) if biases else None, packed)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer, with q, k, v and gate, up joined; q and k are interleaved."""

    norm_in: Tensor
    qkv: Matrix
    norm_qk_HD: Tensor | None
    out: Matrix
    norm_mlp: Tensor
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class Weights:
    """Complete fp32 weights."""

    embed_VC: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Matrix

    @classmethod
    def build(cls, config: ModelConfig, read: Callable[[str], Tensor]) -> Weights:
        """Prepare a checkpoint; `read` returns tensors by Hugging Face's names."""
        size = 4 * sum(math.prod(shape) for shape in config.shapes().values())
        packed = size > PACK_BYTES and torch._C._has_mkldnn

        def get(name: str) -> Tensor:
            return read(name).to(torch.float32, copy=True)  # in aligned memory

        def get_interleaved(name: str) -> Tensor:
            # RoPE rotates dimension i with i + D/2. Side by side they are the real and imaginary part of a complex
            # number, and the rotation is one product. Queries and keys are permuted alike: dot products stay the same.
            weight = get(name)
            halves = weight.view(-1, 2, config.head_dim // 2, *weight.shape[1:])
            return halves.transpose(1, 2).reshape(weight.shape)

        def make_matrix(has_bias: bool, **parts: Callable[[str], Tensor]) -> Matrix:
            biases = [part(f"{name}.bias") for name, part in parts.items()] if has_bias else []
            return Matrix.join([part(f"{name}.weight") for name, part in parts.items()], biases, packed=packed)

        def make_layer(prefix: str) -> LayerWeights:
            q, k, v, out = (f"{prefix}.self_attn.{name}_proj" for name in "qkvo")
            gate, up, down = (f"{prefix}.mlp.{name}_proj" for name in ("gate", "up", "down"))
            norm_qk_HD = None
            if config.norms_queries:
                norms = (get_interleaved(f"{prefix}.self_attn.{name}_norm.weight") for name in "qk")
                counts = (config.num_attention_heads, config.num_key_value_heads)
                norm_qk_HD = torch.cat([norm.expand(count, -1) for norm, count in zip(norms, counts, strict=True)])
            return LayerWeights(
                norm_in=get(f"{prefix}.input_layernorm.weight"),
                qkv=make_matrix(config.attention_bias, **{q: get_interleaved, k: get_interleaved, v: get}),
                norm_qk_HD=norm_qk_HD,
                out=make_matrix(config.out_bias, **{out: get}),
                norm_mlp=get(f"{prefix}.post_attention_layernorm.weight"),
                gate_up=make_matrix(config.mlp_bias, **{gate: get, up: get}),
                down=make_matrix(config.mlp_bias, **{down: get}),
            )

        embed = get(EMBEDDING)
        return cls(
            embed_VC=embed,
            layers=tuple(make_layer(f"model.layers.{index}") for index in range(config.num_hidden_layers)),
            norm=get("model.norm.weight"),
            head=Matrix.join([embed if config.tied else get(HEAD)], [], packed=packed),
        )


class AttentionBlock(NamedTuple):
    """Queries `rows` that attend in one call over the first `keys` keys of `slots`."""

    slots: slice
    rows: slice
    keys: int
    mask: Tensor


class AttentionPlan(NamedTuple):
    """Attention blocks: first `single` ones with one row per slot, then `long` ones of one slot each."""

    single: list[AttentionBlock]
    long: list[AttentionBlock]


class TinyModel:
    """A forward pass over a cache of `slots` sequences of at most `context` tokens."""

    def __init__(self, config: ModelConfig, *, slots: int, context: int) -> None:
        self.config = config
        self.slots = slots
        self.context = -(-context // KEYS) * KEYS
        self._group = config.num_attention_heads // config.num_key_value_heads
        # Zeros, not empty: masked keys have weight 0, and 0 * nan would still be nan. NumPy's, because they cost
        # memory only once they are written to, and because they lie in huge pages.
        shape = (slots, 2 * config.num_key_value_heads, self.context, config.head_dim)
        self._cache = [torch.from_numpy(np.zeros(shape, np.float32)) for _ in range(config.num_hidden_layers)]
        self._cells = [cache.view(-1, config.head_dim) for cache in self._cache]
        angles = torch.outer(torch.arange(self.context).float(), _compute_frequencies(config))
        self._rotation_TR = torch.polar(torch.ones_like(angles), angles)
        self._positions = torch.arange(self.context)

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` cached tokens."""
        for cache in self._cache:
            cache[target, :, :count] = cache[source, :, :count]

    def wipe(self, slot: int, count: int) -> None:
        """Zero the first `count` tokens: NaNs of broken weights would spread through masked keys."""
        for cache in self._cache:
            cache[slot, :, :count] = 0.0

    @torch.inference_mode()
    def forward(
        self, weights: Weights, ids: Sequence[int], pieces: Sequence[Piece], output_rows: Sequence[int]
    ) -> Tensor:
        """Run `pieces`, whose tokens are `ids`; return logits (rows, V) at the rows `output_rows`, which ascend.

        Caches all keys and values. A slot appears in at most one piece.
        """
        config, rows = self.config, len(ids)
        eps, dim, queries = config.rms_norm_eps, config.head_dim, config.num_attention_heads
        rotated = queries + config.num_key_value_heads
        attention = self._plan_attention(pieces)
        position_N, cell_M = self._locate_tokens(pieces)
        rotation_N1R = self._rotation_TR.index_select(0, position_N).unsqueeze(1)
        hidden_NC = weights.embed_VC.index_select(0, torch.tensor(ids))
        for index, layer in enumerate(weights.layers):
            normed_NC = rms_norm(hidden_NC, (config.hidden_size,), layer.norm_in, eps)
            qkv_NHD = multiply_rows(normed_NC, layer.qkv).view(rows, -1, dim)
            qk_NHD = qkv_NHD[:, :rotated]
            if layer.norm_qk_HD is not None:
                qk_NHD = rms_norm(qk_NHD, (dim,), None, eps).mul_(layer.norm_qk_HD)
            pairs_NHR = torch.view_as_complex(qk_NHD.view(rows, rotated, dim // 2, 2))
            qk_NHD = torch.view_as_real(pairs_NHR * rotation_N1R).view(rows, rotated, dim)
            kv_NHD = torch.cat([qk_NHD[:, queries:], qkv_NHD[:, rotated:]], dim=1)
            self._cells[index].index_copy_(0, cell_M, kv_NHD.view(-1, dim))
            query_NHD = qk_NHD[:, :queries]
            if index == len(weights.layers) - 1 and len(output_rows) < rows:
                # after the last keys and values only the output rows are needed
                if not output_rows:
                    return hidden_NC.new_empty(0, config.vocab_size)
                picked = torch.tensor(output_rows)
                hidden_NC, query_NHD = hidden_NC[picked], query_NHD[picked]
                attention = self._plan_attention(_single_tokens(pieces, output_rows))
            hidden_NC = hidden_NC + multiply_rows(self._attend(index, query_NHD, attention), layer.out)
            normed_NC = rms_norm(hidden_NC, (config.hidden_size,), layer.norm_mlp, eps)
            gate_NI, up_NI = multiply_rows(normed_NC, layer.gate_up).chunk(2, dim=-1)
            hidden_NC = hidden_NC + multiply_rows(silu(gate_NI).mul_(up_NI), layer.down)
        return multiply_rows(rms_norm(hidden_NC, (config.hidden_size,), weights.norm, eps), weights.head)

    def _locate_tokens(self, pieces: Sequence[Piece]) -> tuple[Tensor, Tensor]:
        """Position of each token, and the cells of its keys and values in a layer's cache (one per head)."""
        slot_P, start_P, size_P = np.array(pieces).T
        before_P = size_P.cumsum() - size_P
        position_N = (start_P - before_P).repeat(size_P) + np.arange(size_P.sum())
        heads = 2 * self.config.num_key_value_heads
        cell_NH = (slot_P.repeat(size_P)[:, None] * heads + np.arange(heads)) * self.context + position_N[:, None]
        return torch.from_numpy(position_N), torch.from_numpy(cell_NH).view(-1)

    def _plan_attention(self, pieces: Sequence[Piece]) -> AttentionPlan:
        # the leading pieces of one token (`Scheduler.plan`) are joined into blocks
        first_long = next((at for at, piece in enumerate(pieces) if piece.size > 1), len(pieces))
        long: list[AttentionBlock] = []
        row = first_long
        for slot, start, count in pieces[first_long:]:
            for at in _cut_at_keys(start, count):
                keys = _round_up_keys(at.start)
                mask = self._mask(self._positions[at], keys).repeat_interleave(self._group, 0)
                mask = pad(mask, (0, 0, 0, -len(mask) % MIN_ROWS))[None, None]
                end = row + at.stop - at.start
                long.append(AttentionBlock(slice(slot, slot + 1), slice(row, end), keys, mask))
                row = end
        return AttentionPlan(self._plan_singles(pieces[:first_long]), long)

    def _plan_singles(self, pieces: Sequence[Piece]) -> list[AttentionBlock]:
        """Join pieces of one token into blocks of neighbouring slots with equally many keys."""
        blocks: list[AttentionBlock] = []
        if not pieces:
            return blocks
        counts = [_round_up_keys(piece.start) for piece in pieces]
        mask_PT = self._mask(torch.tensor([piece.start for piece in pieces]), max(counts))[:, None, None]
        first = 0
        for row in range(1, len(pieces) + 1):
            slot, keys = pieces[first].slot, counts[first]
            if row < len(pieces) and counts[row] == keys and pieces[row].slot == slot + row - first:
                continue
            rows = slice(first, row)
            blocks.append(AttentionBlock(slice(slot, slot + row - first), rows, keys, mask_PT[rows, :, :, :keys]))
            first = row
        return blocks

    def _mask(self, positions_P: Tensor, keys: int) -> Tensor:
        """Mask (P, K) of queries at `positions_P` over `keys` keys: 0 where they may attend, else -inf."""
        positions_P1, positions_K = positions_P.unsqueeze(1), self._positions[:keys]
        hidden = positions_K > positions_P1
        if self.config.window:
            hidden |= positions_K <= positions_P1 - self.config.window
        return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))

    def _attend(self, index: int, query_NHD: Tensor, attention: AttentionPlan) -> Tensor:
        """Grouped-query attention; returns (N, heads * head_dim)."""
        heads, group, dim = self.config.num_key_value_heads, self._group, self.config.head_dim
        keys_SHTD, values_SHTD = self._cache[index].chunk(2, dim=1)
        outputs: list[Tensor] = []
        # the queries that share a key head become rows of one product
        if attention.single:
            query_NHGD = query_NHD[: attention.single[-1].rows.stop].view(-1, heads, group, dim)
            if group % MIN_ROWS:
                query_NHGD = pad(query_NHGD, (0, 0, 0, -group % MIN_ROWS))
            single_outputs = [
                scaled_dot_product_attention(
                    query_NHGD[rows], keys_SHTD[slots, :, :keys], values_SHTD[slots, :, :keys], attn_mask=mask
                )
                for slots, rows, keys, mask in attention.single
            ]
            outputs.append(torch.cat(single_outputs)[:, :, :group].reshape(-1, heads * group * dim))
        for slots, rows, keys, mask in attention.long:
            query = query_NHD[rows].view(-1, heads, group, dim).transpose(0, 1).reshape(1, heads, -1, dim)
            size = query.shape[2]
            if size % MIN_ROWS:
                query = pad(query, (0, 0, 0, -size % MIN_ROWS))
            output = scaled_dot_product_attention(
                query, keys_SHTD[slots, :, :keys], values_SHTD[slots, :, :keys], attn_mask=mask
            )[0, :, :size].reshape(heads, -1, group, dim)
            outputs.append(output.transpose(0, 1).reshape(-1, heads * group * dim))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def multiply_rows(rows_NC: Tensor, matrix: Matrix) -> Tensor:
    """Apply `linear` with bits that do not depend on the number of rows."""
    rows = rows_NC.shape[0]  # faster than `len`
    weight, bias, packed = matrix
    least = PACKED_ROWS if packed else MIN_ROWS
    if rows < least:
        rows_NC = pad(rows_NC, (0, 0, 0, least - rows))
    if packed:
        product_NC: Tensor = torch.ops.mkldnn._linear_pointwise(rows_NC, weight, bias, "none", [], "")
    else:
        product_NC = linear(rows_NC, weight, bias)
    return product_NC[:rows] if rows < least else product_NC


def _compute_frequencies(config: ModelConfig) -> Tensor:
    """(D / 2,): radians per position, computed as in transformers."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    plain: Tensor = 1.0 / config.rope_theta**exponents
    if not config.rope:
        return plain
    slow = plain / float(config.rope["factor"])
    if config.rope["rope_type"] == "linear":
        return slow
    low, high, trained = (
        float(config.rope[key]) for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    turns = trained * plain / (2 * math.pi)  # full turns over the trained positions
    plain_share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - plain_share) * slow + plain_share * plain


def _single_tokens(pieces: Sequence[Piece], output_rows: Sequence[int]) -> list[Piece]:
    """Turn the tokens at rows `output_rows` into single-token pieces.

    >>> _single_tokens([Piece(slot=3, start=10, size=5), Piece(slot=7, start=0, size=1)], [4, 5])
    [Piece(slot=3, start=14, size=1), Piece(slot=7, start=0, size=1)]
    """
    rows = (Piece(piece.slot, piece.start + at, 1) for piece in pieces for at in range(piece.size))
    kept_rows = set(output_rows)
    return [piece for row, piece in enumerate(rows) if row in kept_rows]


def _round_up_keys(position: int) -> int:
    """Number of keys, including masked ones, for a query at `position`."""
    return (position // KEYS + 1) * KEYS


def _cut_at_keys(start: int, count: int) -> list[slice]:
    """Cut at the multiples of `KEYS`.

    >>> _cut_at_keys(60, 10)
    [slice(60, 64, None), slice(64, 70, None)]
    """
    edges = [start, *range(_round_up_keys(start), start + count, KEYS), start + count]
    return [slice(a, b) for a, b in pairwise(edges)]
