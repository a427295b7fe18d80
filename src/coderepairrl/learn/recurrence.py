"""Recurrent layers over a prefix tree: convolution and state continue from the parent's.

`install_tree_functions` replaces functions in an architecture's module, such as ``causal_conv1d_fn``. Covers Gated
DeltaNet (Qwen3-Next, Qwen3.5, OLMo Hybrid), Kimi Delta Attention, Mamba-2, and short convolutions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar, Token
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from coderepairrl.errors import UsageError
from coderepairrl.learn.attention import Span

Function = Callable[..., Any]
CONVOLUTION = "causal_conv1d_fn"
"""``(1, channels, T)`` in and out; its ``weight`` is ``(channels, width)``."""


class ScanArguments(NamedTuple):
    """Names of arguments: the first state, and whether to return the last."""

    state: str
    last: str
    returns_pair: bool
    """Returns a pair without `last`, too."""


SCANS = {
    "torch_chunk_gated_delta_rule": ScanArguments("initial_state", "output_final_state", returns_pair=True),
    "chunk_kimi_delta_attention": ScanArguments("initial_state", "output_final_state", returns_pair=True),
    "mamba2_chunk_scan": ScanArguments("initial_states", "return_final_states", returns_pair=False),
}
States = dict[int | None, Tensor | None]
"""State after each part, by its end; None before the root."""
_PACKING_ARGUMENTS = ("cu_seqlens", "cu_seq_lens_q", "seq_idx")
"""Arguments that separate packed rows, wrong for a part of a tree."""
_spans: ContextVar[tuple[Span, ...]] = ContextVar("spans", default=())  # of the layer being computed


def install_tree_functions(model: nn.Module) -> None:
    """Prepare the recurrent layers of `model`, if any."""
    has_recurrence = False
    for name in {type(module).__module__ for module in model.modules()}:
        module = sys.modules[name]
        for function in (CONVOLUTION, *SCANS):
            original = getattr(module, function, None)
            if original is None:
                continue
            has_recurrence = True
            if not hasattr(original, "original"):  # not replaced yet
                replacement = (
                    _make_tree_convolution(original)
                    if function == CONVOLUTION
                    else _make_tree_scan(original, SCANS[function])
                )
                replacement.original = original  # type: ignore[attr-defined]
                setattr(module, function, replacement)
    if has_recurrence:
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):  # its hooks also run when it is recomputed
                _pass_spans(layer)


class TreePart(NamedTuple):
    """Consecutive tokens; only the last may branch.

    >>> list(split_tree([Span(0, 3, ()), Span(3, 5, ((0, 2),))]))
    [TreePart(start=0, stop=2, parent=None), TreePart(start=2, stop=3, parent=2), TreePart(start=3, stop=5, parent=2)]
    """

    start: int
    stop: int
    parent: int | None
    """End of the parent; None at the root."""


def split_tree(spans: Sequence[Span]) -> Iterator[TreePart]:
    """Parts of a tree, parents first."""
    ends = {span.before[-1][1] for span in spans if span.before}
    for span in spans:
        parent, start = span.before[-1][1] if span.before else None, span.start
        for stop in [*sorted(end for end in ends if span.start < end < span.stop), span.stop]:
            yield TreePart(start, stop, parent)
            parent = start = stop


def _pass_spans(layer: nn.Module) -> None:
    # not every layer passes its option `spans` on to the functions
    reset_tokens: list[Token[tuple[Span, ...]]] = []

    def before(_: nn.Module, __: Any, options: dict[str, Any]) -> None:
        if options.get("store") is not None:
            raise UsageError("a tree with recurrent layers is not computed in chunks")
        reset_tokens.append(_spans.set(tuple(options.get("spans") or ())))

    def after(*_: Any) -> None:
        if reset_tokens:  # not where `before` raised
            _spans.reset(reset_tokens.pop())

    layer.register_forward_pre_hook(before, with_kwargs=True)
    layer.register_forward_hook(after, always_call=True)


def _make_tree_convolution(original: Function) -> Function:
    @wraps(original)
    def branched(inputs: Tensor, weight: Tensor, *arguments: Any, **options: Any) -> Tensor:
        spans = _spans.get()
        if len(spans) <= 1:  # one row
            return original(inputs, weight, *arguments, **options)  # type: ignore[no-any-return]
        options = _remove_packing(options)
        outputs = []
        for span in spans:
            ancestors = _list_last_ancestors(span, weight.shape[-1] - 1)
            span_inputs = inputs[:, :, span.start : span.stop]
            if ancestors:
                span_inputs = torch.cat([inputs[:, :, ancestors], span_inputs], 2)
            outputs.append(original(span_inputs, weight, *arguments, **options)[:, :, len(ancestors) :])
        return torch.cat(outputs, 2)

    return branched


def _list_last_ancestors(span: Span, count: int) -> list[int]:
    return [at for start, stop in span.before for at in range(start, stop)][-count:]


def _make_tree_scan(original: Function, names: ScanArguments) -> Function:
    @wraps(original)
    def branched(*arguments: Any, **options: Any) -> Any:
        spans = _spans.get()
        if len(spans) <= 1:  # one row
            return original(*arguments, **options)
        if options.get(names.last) or options.get(names.state) is not None:
            raise UsageError("a prefix tree is computed without a cache")
        tokens = spans[-1].stop

        def slice_part(value: Any, part: TreePart) -> Any:
            # parameters have fewer dimensions than values per token
            is_per_token = isinstance(value, Tensor) and value.ndim > 2 and value.shape[1] == tokens
            return value[:, part.start : part.stop] if is_per_token else value

        outputs, states = [], States({None: None})
        for part in split_tree(spans):
            part_options = {name: slice_part(value, part) for name, value in _remove_packing(options).items()}
            part_options |= {names.state: states[part.parent], names.last: True}
            output, states[part.stop] = original(*(slice_part(value, part) for value in arguments), **part_options)
            outputs.append(output)
        joined = torch.cat(outputs, 1)
        return (joined, None) if names.returns_pair else joined

    return branched


def _remove_packing(options: dict[str, Any]) -> dict[str, Any]:
    return {name: None if name in _PACKING_ARGUMENTS else value for name, value in options.items()}
