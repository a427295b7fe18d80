"""The Qwen3 architecture for inference: packed rows of many requests, one preallocated cache.

Logits are those of transformers' `Qwen3ForCausalLM` to 1e-5 in fp32, and *a row's bits do not depend on the rows
beside it*: not on how many requests share the step, not on how a prompt was cut into chunks, not on which prefix came
from the cache. Serial and concurrent output are equal because the arithmetic is, not because ties are rare. Three
habits buy this. MKL is asked for its strict reproducible mode: without it processors with AMX sum in another order
for fewer than 16 rows. Where that mode is not known, it helps that matrix products never have fewer than `MIN_ROWS`
rows, and attention a multiple of it. And a query attends over its own keys, padded (masked) to the next multiple of
`KEYS`, never over its neighbours' length.

MKL promises it of the number of threads, not of rows; it is tested, and holds on x86-64 with AVX-512 and AVX2.
Elsewhere rows may differ in the last bits, and the exam tolerates only ties.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, pad, rms_norm, scaled_dot_product_attention, silu

from coderepairrl.engines.tiny.config import ModelConfig
from coderepairrl.engines.tiny.scheduler import Piece

os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")  # MKL reads it at the first product of a process
MIN_ROWS = 4
KEYS = 64


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Queries, keys and values are one matrix, gate and up another; q and k are interleaved."""

    norm_in: Tensor
    qkv: Tensor
    norm_qk_HD: Tensor
    out: Tensor
    norm_mlp: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """A complete set of fp32 weights, ready to serve."""

    embed_VC: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head_VC: Tensor

    @classmethod
    def build(cls, config: ModelConfig, tensors: dict[str, Tensor]) -> Weights:
        """Arrange a checkpoint's `tensors` (Hugging Face names, already checked) for serving."""

        def get(name: str) -> Tensor:
            return tensors[name].to(torch.float32, copy=True)  # aligned memory of its own

        def interleaved(name: str) -> Tensor:
            # RoPE rotates dimension i with i + D/2. Side by side they are the real and imaginary part of a complex
            # number, and the rotation is one product. Queries and keys move alike, so their dot products stay.
            weight = get(name)
            halves = weight.view(-1, 2, config.head_dim // 2, *weight.shape[1:])
            return halves.transpose(1, 2).reshape(weight.shape)

        def layer(prefix: str) -> LayerWeights:
            attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
            q_norm, k_norm = interleaved(f"{attention}.q_norm.weight"), interleaved(f"{attention}.k_norm.weight")
            return LayerWeights(
                norm_in=get(f"{prefix}.input_layernorm.weight"),
                qkv=torch.cat(
                    [
                        interleaved(f"{attention}.q_proj.weight"),
                        interleaved(f"{attention}.k_proj.weight"),
                        get(f"{attention}.v_proj.weight"),
                    ]
                ),
                norm_qk_HD=torch.stack(
                    [q_norm] * config.num_attention_heads + [k_norm] * config.num_key_value_heads,
                ),
                out=get(f"{attention}.o_proj.weight"),
                norm_mlp=get(f"{prefix}.post_attention_layernorm.weight"),
                gate_up=torch.cat([get(f"{mlp}.gate_proj.weight"), get(f"{mlp}.up_proj.weight")]),
                down=get(f"{mlp}.down_proj.weight"),
            )

        embed = get("model.embed_tokens.weight")
        return cls(
            embed_VC=embed,
            layers=tuple(layer(f"model.layers.{index}") for index in range(config.num_hidden_layers)),
            norm=get("model.norm.weight"),
            head_VC=embed if config.tied else get("lm_head.weight"),
        )


class AttentionBlock(NamedTuple):
    """Queries that attend in one call: `size` rows for each of `slots`, over the first `keys` keys."""

    slots: slice
    rows: slice
    size: int
    keys: int
    mask: Tensor


class TinyModel:
    """A forward pass over a cache of `slots` sequences of at most `context` tokens each."""

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
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
        angles = torch.outer(torch.arange(self.context).float(), 1.0 / config.rope_theta**exponents)
        self._rotation_TR = torch.polar(torch.ones_like(angles), angles)
        self._positions = torch.arange(self.context)

    def copy(self, source: int, target: int, count: int) -> None:
        """Give `target` the first `count` tokens that `source` has in the cache."""
        for cache in self._cache:
            cache[target, :, :count] = cache[source, :, :count]

    def wipe(self, slot: int, count: int) -> None:
        """Zero the first `count` tokens of a slot: what broken weights left there must not poison masked sums."""
        for cache in self._cache:
            cache[slot, :, :count] = 0.0

    @torch.inference_mode()
    def forward(self, weights: Weights, ids: Sequence[int], pieces: Sequence[Piece], wanted: Sequence[int]) -> Tensor:
        """Run `pieces` (their tokens `ids` one after another); logits (W, V) behind the rows `wanted` of `ids`.

        Keys and values of every token land in the cache. A slot appears in one piece at most; `wanted` ascends.
        """
        config, rows = self.config, len(ids)
        eps, dim, queries = config.rms_norm_eps, config.head_dim, config.num_attention_heads
        rotated = queries + config.num_key_value_heads
        blocks = self._blocks(pieces)
        position_N, cell_M = self._places(pieces)
        rotation_N1R = self._rotation_TR[position_N].unsqueeze(1)
        hidden_NC = weights.embed_VC[torch.tensor(ids)]
        for index, layer in enumerate(weights.layers):
            normed_NC = rms_norm(hidden_NC, (config.hidden_size,), layer.norm_in, eps)
            qkv_NHD = product(normed_NC, layer.qkv).view(rows, -1, dim)
            qk_NHD = rms_norm(qkv_NHD[:, :rotated], (dim,), None, eps).mul_(layer.norm_qk_HD)
            pairs_NHR = torch.view_as_complex(qk_NHD.view(rows, rotated, dim // 2, 2))
            qk_NHD = torch.view_as_real(pairs_NHR * rotation_N1R).view(rows, rotated, dim)
            kv_NHD = torch.cat([qk_NHD[:, queries:], qkv_NHD[:, rotated:]], dim=1)
            self._cells[index].index_copy_(0, cell_M, kv_NHD.view(-1, dim))
            query_NHD = qk_NHD[:, :queries]
            if index == len(weights.layers) - 1 and len(wanted) < rows:
                # after the last keys and values only the wanted rows are needed
                if not wanted:
                    return hidden_NC.new_empty(0, config.vocab_size)
                picked = torch.tensor(wanted)
                hidden_NC, query_NHD = hidden_NC[picked], query_NHD[picked]
                blocks = self._blocks(_alone(pieces, wanted))
            hidden_NC = hidden_NC + product(self._attend(index, query_NHD, blocks), layer.out)
            normed_NC = rms_norm(hidden_NC, (config.hidden_size,), layer.norm_mlp, eps)
            gate_NI, up_NI = product(normed_NC, layer.gate_up).chunk(2, dim=-1)
            hidden_NC = hidden_NC + product(silu(gate_NI).mul_(up_NI), layer.down)
        return product(rms_norm(hidden_NC, (config.hidden_size,), weights.norm, eps), weights.head_VC)

    def _places(self, pieces: Sequence[Piece]) -> tuple[Tensor, Tensor]:
        """Position of each row in its sequence, and the cells of its keys and values in the flat cache."""
        position_N = torch.cat([self._positions[piece.start : piece.start + piece.size] for piece in pieces])
        sizes = torch.tensor([piece.size for piece in pieces])
        slot_N = torch.tensor([piece.slot for piece in pieces]).repeat_interleave(sizes)
        heads = 2 * self.config.num_key_value_heads
        cell_NH = (slot_N.unsqueeze(1) * heads + torch.arange(heads)) * self.context + position_N.unsqueeze(1)
        return position_N, cell_NH.view(-1)

    def _blocks(self, pieces: Sequence[Piece]) -> list[AttentionBlock]:
        """Cut pieces where a query's padded number of keys changes; join single tokens of neighbouring slots."""
        blocks: list[AttentionBlock] = []
        row = index = 0
        while index < len(pieces):
            slot, start, count = pieces[index]
            if count > 1:
                for at in _cuts(start, count):
                    keys = _padded(at.start)
                    size = at.stop - at.start
                    mask = self._mask(self._positions[at], keys).repeat_interleave(self._group, 0)
                    mask = pad(mask, (0, 0, 0, -len(mask) % MIN_ROWS))[None, None]
                    blocks.append(AttentionBlock(slice(slot, slot + 1), slice(row, row + size), size, keys, mask))
                    row += size
                index += 1
                continue
            keys, first = _padded(start), index
            while (
                index < len(pieces)
                and pieces[index].size == 1
                and pieces[index].slot == slot + index - first
                and _padded(pieces[index].start) == keys
            ):
                index += 1
            size = index - first
            positions = torch.tensor([piece.start for piece in pieces[first:index]])
            mask = self._mask(positions, keys)[:, None, None]
            blocks.append(AttentionBlock(slice(slot, slot + size), slice(row, row + size), 1, keys, mask))
            row += size
        return blocks

    def _mask(self, positions_P: Tensor, keys: int) -> Tensor:
        """(P, keys): 0 where a query at a position may look, -inf where it may not."""
        hidden = self._positions[:keys] > positions_P.unsqueeze(1)
        return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))

    def _attend(self, index: int, query_NHD: Tensor, blocks: Sequence[AttentionBlock]) -> Tensor:
        """Grouped-query attention of every block over the cache of layer `index`; returns (N, heads * head_dim)."""
        heads, group, dim = self.config.num_key_value_heads, self._group, self.config.head_dim
        keys_SHTD, values_SHTD = self._cache[index].chunk(2, dim=1)
        outputs: list[Tensor] = []
        for slots, rows, count, keys, mask in blocks:
            # the queries that share a key head become rows of one product
            size = count * group
            query = query_NHD[rows].view(-1, count, heads, group, dim).transpose(1, 2).reshape(-1, heads, size, dim)
            if size % MIN_ROWS:
                query = pad(query, (0, 0, 0, -size % MIN_ROWS))
            output = scaled_dot_product_attention(
                query, keys_SHTD[slots, :, :keys], values_SHTD[slots, :, :keys], attn_mask=mask
            )[:, :, :size].reshape(-1, heads, count, group, dim)
            outputs.append(output.transpose(1, 2).reshape(-1, heads * group * dim))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def product(rows_NC: Tensor, weight: Tensor) -> Tensor:
    """`linear`, but a row's bits do not depend on how many rows there are."""
    rows = len(rows_NC)
    if rows >= MIN_ROWS:
        return linear(rows_NC, weight)
    return linear(pad(rows_NC, (0, 0, 0, MIN_ROWS - rows)), weight)[:rows]


def _alone(pieces: Sequence[Piece], wanted: Sequence[int]) -> list[Piece]:
    """The tokens at rows `wanted` of `pieces`, each as a piece of its own.

    >>> _alone([Piece(slot=3, start=10, size=5), Piece(slot=7, start=0, size=1)], [4, 5])
    [Piece(slot=3, start=14, size=1), Piece(slot=7, start=0, size=1)]
    """
    rows = (Piece(piece.slot, piece.start + at, 1) for piece in pieces for at in range(piece.size))
    kept = set(wanted)
    return [piece for row, piece in enumerate(rows) if row in kept]


def _padded(position: int) -> int:
    """How many keys a query at `position` attends over, the masked ones included."""
    return (position // KEYS + 1) * KEYS


def _cuts(start: int, count: int) -> list[slice]:
    """``start : start + count`` cut at the multiples of `KEYS`.

    >>> _cuts(60, 10)
    [slice(60, 64, None), slice(64, 70, None)]
    """
    edges = [start, *range(_padded(start), start + count, KEYS), start + count]
    return [slice(a, b) for a, b in pairwise(edges)]
