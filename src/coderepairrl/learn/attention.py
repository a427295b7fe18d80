"""Causal attention over a packed prefix tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from coderepairrl.errors import UsageError

TREE = "coderepairrl_tree"
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Span(NamedTuple):
    """Consecutive tokens: each attends to `before`, and causally within the span.

    >>> Span(5, 9, ((0, 2), (3, 5))).keys
    ((0, 2), (3, 5), (5, 9))
    """

    start: int
    stop: int
    before: tuple[tuple[int, int], ...]
    """Ancestors as ranges ``(start, stop)``, from the root on."""

    @property
    def keys(self) -> tuple[tuple[int, int], ...]:
        """Ranges of the whole path."""
        return (*self.before, (self.start, self.stop))

    @property
    def depth(self) -> int:
        """Number of ancestor tokens."""
        return sum(stop - start for start, stop in self.before)

    @property
    def length(self) -> int:
        """Number of tokens on the path."""
        return self.depth + self.stop - self.start


def split_into_chunks(spans: Sequence[Span], chunk_tokens: int) -> list[tuple[Span, ...]]:
    """Split spans into chunks of `chunk_tokens` tokens.

    >>> split_into_chunks([Span(0, 3, ()), Span(3, 5, ((0, 2),))], 2)[1]
    (Span(start=2, stop=3, before=((0, 2),)), Span(start=3, stop=4, before=((0, 2),)))
    """
    chunks: list[list[Span]] = [[]]
    room = chunk_tokens
    for span in spans:
        start = span.start
        while start < span.stop:
            if not room:
                chunks.append([])
                room = chunk_tokens
            stop = min(span.stop, start + room)
            earlier = ((span.start, start),) if start > span.start else ()
            chunks[-1].append(Span(start, stop, (*span.before, *earlier)))
            room -= stop - start
            start = stop
    return [tuple(chunk) for chunk in chunks]


@dataclass(slots=True)
class LayerCache:
    """Keys, values and their gradients in one layer, ``(1, heads, T, d)``.

    `out_THd`, `lse_HT`: output and logsumexp of the first `attended` tokens.
    """

    key: Tensor
    value: Tensor
    grad_key: Tensor
    grad_value: Tensor
    out_THd: Tensor
    lse_HT: Tensor
    attended: int = 0


@dataclass(slots=True)
class TreeCache:
    """State of a tree computed chunk by chunk."""

    tokens: int
    layers: dict[int, LayerCache] = field(default_factory=dict)
    centres: dict[int, Tensor] = field(default_factory=dict)
    """Means subtracted from keys, by layer."""

    def put(self, index: int, query: Tensor, key: Tensor, value: Tensor, start: int) -> LayerCache:
        """Store a chunk's keys and values."""
        if index not in self.layers:
            _, heads, _, width = query.shape
            total_dtype = torch.promote_types(key.dtype, torch.float32)
            grad_key, grad_value = (tensor.new_zeros(*tensor.shape[:2], self.tokens, tensor.shape[3], dtype=total_dtype)
                                for tensor in (key, value))  # fmt: skip
            self.layers[index] = LayerCache(
                torch.empty_like(grad_key, dtype=key.dtype),
                torch.empty_like(grad_value, dtype=value.dtype),
                grad_key,
                grad_value,
                query.new_empty(1, self.tokens, heads, width),
                query.new_empty(1, heads, self.tokens, dtype=total_dtype),
            )
        layer = self.layers[index]
        for stored, tensor in ((layer.key, key), (layer.value, value)):
            stored[:, :, start : start + tensor.shape[2]] = tensor.detach()  # else it keeps every chunk's graph
        return layer


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    spans: Sequence[Span] | None = None,
    store: TreeCache | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend: ``(1, heads, T, d)`` in, ``(1, T, heads, d)`` out. Without `spans`: one row.

    `s_aux`: attention sinks, a logit per head. With a `store`, the tokens are a chunk and `spans` index the whole tree.
    Raises `UsageError` for a mask, dropout or soft cap, and for chunks off the CPU or with sliding window or sinks.
    """
    if attention_mask is not None or dropout or softcap is not None:
        raise UsageError("packed training supports causal attention only, without mask, dropout or soft cap")
    spans = spans or (Span(0, query.shape[2], ()),)
    windowed = sliding_window is not None and max(span.length for span in spans) > sliding_window
    if store is not None and (windowed or s_aux is not None or query.device.type != "cpu"):
        raise UsageError("a tree is computed in chunks only on a CPU, without sliding window and sinks")
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    width = value.shape[3]
    device = query.device.type
    has_bias = any(name.endswith("bias") for name, _ in module.named_parameters())
    if device == "cpu" and not windowed and s_aux is None and has_bias:
        # some biases (Qwen2.5) are far larger than the differences between keys, which alone affect softmax
        key = key - _find_key_centre(cast(Any, module), key, store)
    if torch.is_autocast_enabled(device):
        # autocast sees neither the calls in `_TreeAttention` nor a `causal_lower_right`
        query, key, value = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (query, key, value))
    sinks = 0
    if s_aux is not None:
        query, key, value, spans = _add_sink(query, key, value, spans, s_aux / scaling)
        sinks = 1
    widest = max(query.shape[3], value.shape[3])  # kernels need equal widths
    query, key, value = (pad(tensor, (0, widest - tensor.shape[3])) for tensor in (query, key, value))
    if windowed:
        assert sliding_window is not None
        out = _attend_window(query, key, value, spans, scaling, sliding_window, sinks)
    elif device == "cpu":
        layer = None
        if store is not None:
            layer = store.put(cast(Any, module).layer_idx, query, key, value, spans[0].start)
        out = cast(Tensor, cast(Any, _TreeAttention).apply(query, key, value, spans, scaling, layer))
    else:
        out = _attend_gathered(query, key, value, spans, scaling)
    return out[..., :width], None


def _find_key_centre(module: Any, key: Tensor, store: TreeCache | None) -> Tensor:
    # uncentred, logits are so large that float32 rounds attention weights to 1e-4, and differently in the backward
    # pass, which multiplies the error; all chunks of a tree share the first one's mean
    centres = {} if store is None else store.centres
    if (index := getattr(module, "layer_idx", 0)) not in centres:
        centres[index] = key.detach().mean(2, keepdim=True)
    return centres[index]


def _add_sink(
    query: Tensor, key: Tensor, value: Tensor, spans: Sequence[Span], logit_H: Tensor
) -> tuple[Tensor, Tensor, Tensor, list[Span]]:
    # the first of 8 extra dimensions (kernels need multiples of 8) holds the head's logit in queries, 1 in the sink's
    # key, 0 in others
    tokens, heads = key.shape[2], query.shape[1]
    extra = torch.cat([logit_H.view(1, heads, 1, 1), logit_H.new_zeros(1, heads, 1, 7)], 3).to(query)
    query = torch.cat([query, extra.expand(-1, -1, query.shape[2], -1)], 3)
    key, value = pad(key, (0, 8, 0, 1)), pad(value, (0, 0, 0, 1))
    sink_key = key.new_zeros(key.shape[2:])
    sink_key[tokens, -8] = 1
    return query, key + sink_key, value, [span._replace(before=((tokens, tokens + 1), *span.before)) for span in spans]


AttentionInterface.register(TREE, tree_attention)


class _TreeAttention(torch.autograd.Function):
    """CPU attention: causal within a span, full on each range of ancestors, merged by logsumexp."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        spans: Sequence[Span],
        scale: float | None,
        layer: LayerCache | None,
    ) -> Tensor:
        _, heads, tokens, width = query.shape
        offset = spans[0].start
        keys, values = (key, value) if layer is None else (layer.key, layer.value)
        if layer is None:
            out_THd = query.new_empty(1, tokens, heads, width)
            lse_HT = query.new_empty(1, heads, tokens, dtype=torch.promote_types(query.dtype, torch.float32))
        else:
            out_THd, lse_HT = layer.out_THd[:, offset : offset + tokens], layer.lse_HT[:, :, offset : offset + tokens]
        is_computed = layer is not None and layer.attended >= offset + tokens
        for span in () if is_computed else spans:
            query_slice, key_slice = slice(span.start - offset, span.stop - offset), slice(span.start, span.stop)
            query_part = query[:, :, query_slice]
            out, out_lse = _flash(query_part, keys[:, :, key_slice], values[:, :, key_slice], 0.0, True, scale=scale)
            for start, stop in span.before:
                ancestors = slice(start, stop)
                part, part_lse = _flash(
                    query_part, keys[:, :, ancestors], values[:, :, ancestors], 0.0, False, scale=scale
                )
                merged_lse = torch.logaddexp(out_lse, part_lse)
                out = out * (out_lse - merged_lse).exp()[..., None] + part * (part_lse - merged_lse).exp()[..., None]
                out_lse = merged_lse
            out_THd[:, query_slice] = out.transpose(1, 2)
            lse_HT[:, :, query_slice] = out_lse
        ctx.spans, ctx.scale, ctx.layer = spans, scale, layer
        if layer is not None:
            layer.attended = max(layer.attended, offset + tokens)
            out_THd = out_THd.clone()  # not a view: all chunks share the tensor
        ctx.save_for_backward(query, key, value, out_THd, lse_HT)
        return out_THd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_THd: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out_THd, lse_HT = ctx.saved_tensors
        total_dtype = torch.promote_types(query.dtype, torch.float32)  # a prefix adds up the gradients of many rows
        grad_query = torch.zeros_like(query, dtype=total_dtype)
        if ctx.layer is None:
            grad_key, grad_value = (torch.zeros_like(tensor, dtype=total_dtype) for tensor in (key, value))
            layer = LayerCache(key, value, grad_key, grad_value, out_THd, lse_HT)
        else:
            layer = ctx.layer
        offset = ctx.spans[0].start
        for span in ctx.spans:
            query_slice = slice(span.start - offset, span.stop - offset)
            gradient, out = (tensor[:, query_slice].transpose(1, 2) for tensor in (gradient_THd, out_THd))
            for start, stop in span.keys:
                key_slice = slice(start, stop)
                parts = _flash_backward(
                    gradient,
                    query[:, :, query_slice],
                    layer.key[:, :, key_slice],
                    layer.value[:, :, key_slice],
                    out,
                    lse_HT[:, :, query_slice],
                    0.0,
                    start == span.start,
                    scale=ctx.scale,
                )
                sums = (grad_query, query_slice), (layer.grad_key, key_slice), (layer.grad_value, key_slice)
                for (total, where), part in zip(sums, parts, strict=True):
                    total[:, :, where] += part
        # these are complete: chunks go backward from the last, so all descendants have added their share
        chunk_slice = slice(offset, offset + key.shape[2])
        grad_key, grad_value = layer.grad_key[:, :, chunk_slice], layer.grad_value[:, :, chunk_slice]
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None


def _attend_gathered(query: Tensor, key: Tensor, value: Tensor, spans: Sequence[Span], scale: float | None) -> Tensor:
    """Attend on a GPU, to copies of each path's keys."""
    if _needs_repeated_heads(query):
        repeats = query.shape[1] // key.shape[1]
        key, value = (tensor[:, :, None].expand(-1, -1, repeats, -1, -1).flatten(1, 2) for tensor in (key, value))
    parts = []
    for span in spans:
        inputs = query[:, :, span.start : span.stop], key, value, span, scale
        is_root = not span.before
        parts.append(_attend_span(*inputs) if is_root else checkpoint(_attend_span, *inputs, use_reentrant=False))
    return torch.cat(parts, 2).transpose(1, 2).contiguous()


def _needs_repeated_heads(query: Tensor) -> bool:
    # in float32 on a GPU, torch's only kernel for grouped heads needs memory quadratic in a row's length
    is_half = query.dtype != torch.float32 or torch.is_autocast_enabled(query.device.type)
    return query.device.type == "cuda" and not is_half


def _attend_span(query: Tensor, key: Tensor, value: Tensor, span: Span, scale: float | None) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    key, value = (torch.cat([tensor[:, :, start:stop] for start, stop in span.keys], 2) for tensor in (key, value))
    # is_causal would align the first query with the first key
    mask = causal_lower_right(query.shape[2], key.shape[2]) if span.before else None
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def _attend_window(
    query: Tensor, key: Tensor, value: Tensor, spans: Sequence[Span], scale: float | None, window: int, sinks: int = 0
) -> Tensor:
    """Attend to the path's last `window` tokens and the `sinks`, in blocks."""
    parts = []
    for span in spans:
        path_K = torch.cat([torch.arange(start, stop, device=query.device) for start, stop in span.keys])
        for begin in range(span.depth, span.length, window):
            key_begin, end = max(sinks, begin - window + 1), min(begin + window, span.length)
            # a query at position p of the path sees the keys from p - window + 1 to p
            mask = torch.ones(end - begin, end - key_begin, dtype=torch.bool, device=query.device)
            mask = pad(mask.tril(begin - key_begin).triu(begin - key_begin - window + 1), (sinks, 0), value=True)
            k, v = (tensor[:, :, torch.cat([path_K[:sinks], path_K[key_begin:end]])] for tensor in (key, value))
            q = query[:, :, path_K[begin] : path_K[end - 1] + 1]
            parts.append(
                scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
                )
            )
    return torch.cat(parts, 2).transpose(1, 2).contiguous()
