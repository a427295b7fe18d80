"""Probe of each loaded model: does a prefix tree have the hidden states of single rows?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from coderepairrl.errors import UsageError
from coderepairrl.learn.attention import TREE, TreeCache, split_into_chunks
from coderepairrl.learn.pack import MicroBatch, build_prefix_tree, make_scoring_samples, pack_samples

_ORIGINAL_SUFFIX = "original_inv_freq"


def find_dynamic_rope(model: nn.Module) -> Iterator[nn.Module]:
    """Rotary modules with length-dependent frequencies."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", "")
        if any("dynamic" in kind for kind in (kinds.values() if isinstance(kinds, dict) else (str(kinds),))):
            yield module


def reset_dynamic_rope(model: nn.Module) -> None:
    """Reset length-dependent frequencies before each row: transformers keeps the longest row's."""
    for module in find_dynamic_rope(model):
        module.register_forward_pre_hook(_reset_length)


def _reset_length(module: nn.Module, _: Any) -> None:
    length = module.original_max_seq_len
    for name, original in list(module.named_buffers(recurse=False)):
        if name.endswith(_ORIGINAL_SUFFIX):
            prefix = name.removesuffix(_ORIGINAL_SUFFIX)
            setattr(module, f"{prefix}inv_freq", original)
            setattr(module, f"{prefix}max_seq_len_cached", length)


EAGER = "eager"
"""transformers' reference attention: has all that an architecture needs."""
LAYERS = 4
WINDOW = 8
"""Value of `SWITCHES` in the probe, shorter than its longest row."""
SWITCHES = (
    *("sliding_window", "attention_chunk_size", "chunk_size", "mamba_chunk_size", "index_topk"),
    "original_max_position_embeddings",  # which transformers copies into `rope_parameters`
)
"""Settings that are lengths at which the computation changes."""
_CHUNK_TOKENS = 7  # so few that chunks end within spans
_FIX = "use another architecture: docs/reference/models.md has a table of those that were tested."
TOLERANCE = 1e-4  # difference relative to the largest value
FAILURES = (TypeError, ValueError, RuntimeError, LookupError, AttributeError)
"""Errors of a model that fails on an input."""
ROUNDING = 1e-2
"""Differences up to this may be rounding: checked again in float64."""
Way = Literal["trees", "rows"]


class ProbeResult(NamedTuple):
    """Result of the probe."""

    way: Way
    """Prefix trees, or rows one at a time."""
    attention: str
    """Its name in transformers."""
    chunked: bool
    """Whether trees may be split into chunks."""
    notice: str
    """Why not trees, or ""."""


class _HiddenStates(NamedTuple):
    """Hidden states, and the gradient of their weighted sum."""

    hidden_TD: Tensor
    gradient_TD: Tensor
    """Gradient at the embeddings."""


def probe_layers(
    model: PreTrainedModel, hidden: Callable[..., Tensor], head: Callable[[Tensor], Tensor]
) -> ProbeResult:
    """Probe the first layers of `model`; `hidden` gives a micro-batch's hidden states as in training, `head` logits.

    Raises `UsageError` unless the logits are a linear head on the last hidden states.
    """
    device = next(model.parameters()).device
    vocabulary = model.config.get_text_config().vocab_size
    # ids without a pattern; the last two rows branch off the second one, after 4 and 9 tokens
    rows = [[(7 * i * i + 3 * i + n) % vocabulary for i in range(n)] for n in (5, 11, 8)]
    rows += [rows[1][:shared] + rows[2][-4:] for shared in (4, 9)]
    tree_batch = pack_samples(make_scoring_samples(rows)).to(device)
    row_batches = [pack_samples(make_scoring_samples([row])).to(device) for row in rows]
    row_places = build_prefix_tree(rows).where
    with ExitStack() as limits:
        _limit_layers(model.config.get_text_config(), limits)
        _limit_switches(model, limits)
        limits.enter_context(_raise_precision(model))
        model.set_attn_implementation(EAGER)
        ids = [torch.tensor([row], device=device) for row in rows]

        def compute_reference() -> _HiddenStates:
            model.set_attn_implementation(EAGER)
            return _compute_hidden(
                model, lambda at: get_body(model)(input_ids=ids[at], use_cache=False).last_hidden_state[0], row_places
            )

        try:
            with torch.no_grad():
                logits_TV = torch.cat([model(input_ids=row, use_cache=False).logits[0] for row in ids])
            reference = compute_reference()
        except torch.OutOfMemoryError:
            raise
        except FAILURES as failure:
            raise UsageError(
                f"{type(model).__name__} fails on a row of {len(rows[0])} tokens: {type(failure).__name__}: {failure}",
                fix=_FIX,
            ) from failure
        with torch.no_grad():
            error = _largest_difference(head(reference.hidden_TD), logits_TV)
        if not error <= TOLERANCE:
            raise UsageError(
                f"the logits of {type(model).__name__} are not a linear function of its last hidden states (relative"
                f" difference {error:.2g}), which training assumes",
                fix=_FIX,
            )

        def describe_difference(compute: Callable[[], _HiddenStates]) -> str:
            try:
                errors = _compare_hidden(compute(), reference)
                if TOLERANCE < max(errors) <= ROUNDING:
                    implementation = str(model.config._attn_implementation)
                    with _raise_precision(model, torch.float64):
                        exact_reference = compute_reference()
                        set_attention(implementation)
                        errors = _compare_hidden(compute(), exact_reference)
            except torch.OutOfMemoryError:
                raise
            except (UsageError, *FAILURES) as problem:
                return f"{type(problem).__name__}: {problem}"
            if max(errors) <= TOLERANCE:
                return ""
            return "hidden states change by a fraction {:.2g}, gradients by {:.2g}".format(*errors)

        def set_attention(implementation: str) -> bool:
            try:
                model.set_attn_implementation(implementation)
            except ValueError:  # this architecture lacks it
                return False
            return bool(model.config._attn_implementation == implementation)

        set_attention(TREE)
        tree_problem = describe_difference(
            lambda: _compute_hidden(model, lambda _: hidden(tree_batch), row_places, tree=True)
        )
        if not tree_problem:
            return ProbeResult("trees", TREE, chunked=_can_chunk(tree_batch, hidden, reference, row_places), notice="")
        for implementation in (TREE, "sdpa", EAGER):
            if set_attention(implementation) and not describe_difference(
                lambda: _compute_hidden(model, lambda at: hidden(row_batches[at]), row_places)
            ):
                notice = (
                    f"{type(model).__name__} is trained row by row, without sharing prefixes: in a prefix tree its"
                    f" {tree_problem}"
                )
                return ProbeResult("rows", implementation, chunked=False, notice=notice)
    raise UsageError(
        f"{type(model).__name__} gives other hidden states than transformers' own, even row by row: {tree_problem}",
        fix=_FIX,
    )


def get_body(model: PreTrainedModel) -> Any:
    """Model without its head."""
    base: Any = model.base_model
    return base if base is not model else cast(Any, model).model  # Llama 4's `base_model` is itself


def _compute_hidden(
    model: PreTrainedModel, compute: Callable[[int], Tensor], row_places: Sequence[Sequence[int]], *, tree: bool = False
) -> _HiddenStates:
    """Run `compute` for each row, or once for the tree."""
    inputs: list[Tensor] = []

    def capture(_: nn.Module, __: Any, embedded: Tensor) -> Tensor:
        inputs.append(embedded.detach().requires_grad_())
        return inputs[-1]

    hook = model.get_input_embeddings().register_forward_hook(capture)
    try:
        with torch.enable_grad():
            outputs = [compute(at) for at in range(1 if tree else len(row_places))]
            places = torch.tensor([place for row in row_places for place in row], device=outputs[0].device)
            hidden_TD = outputs[0][places] if tree else torch.cat(outputs)
            generator = torch.Generator().manual_seed(0)
            weights_TD = torch.randn(hidden_TD.shape, generator=generator).to(hidden_TD)
            gradients = torch.autograd.grad((hidden_TD * weights_TD).sum(), inputs)
    finally:
        hook.remove()
    if tree:
        return _HiddenStates(hidden_TD.detach(), gradients[0][0])
    gradients_TD = torch.cat([each[0] for each in gradients])
    gradients_TD = gradients_TD.to(torch.promote_types(gradients_TD.dtype, torch.float32))
    gradient_TD = gradients_TD.new_zeros(int(places.max()) + 1, gradients_TD.shape[-1])
    gradient_TD.index_add_(0, places, gradients_TD)
    return _HiddenStates(hidden_TD.detach(), gradient_TD)


def _compare_hidden(ours: _HiddenStates, theirs: _HiddenStates) -> list[float]:
    return [_largest_difference(a, b) for a, b in zip(ours, theirs, strict=True)]


def _largest_difference(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def _can_chunk(
    batch: MicroBatch, hidden: Callable[..., Tensor], reference: _HiddenStates, row_places: Sequence[Sequence[int]]
) -> bool:
    store = TreeCache(len(batch.ids_T))
    try:
        with torch.no_grad():
            parts = [hidden(batch, spans, store) for spans in split_into_chunks(batch.spans, _CHUNK_TOKENS)]
    except UsageError:
        return False
    hidden_TD = torch.cat(parts)[[place for row in row_places for place in row]]
    return _largest_difference(hidden_TD, reference.hidden_TD) <= TOLERANCE


def _limit(owner: Any, name: str, most: int, limits: ExitStack) -> None:
    """Lower a number to `most` until `limits` closes."""
    value = getattr(owner, name)
    limits.callback(setattr, owner, name, value)
    setattr(owner, name, min(value, most))


def _limit_layers(config: PretrainedConfig, limits: ExitStack) -> None:
    """Limit a model to its first layers, with one of each kind."""
    kinds = list(getattr(config, "layer_types", None) or ())
    _limit(config, "num_hidden_layers", max([LAYERS, *(kinds.index(kind) + 1 for kind in kinds)]), limits)


@contextmanager
def _raise_precision(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Hold 16-bit weights in `dtype`, each layer from its first call."""
    # 16-bit rounding may send a token to other experts, and can hide an error such as a lost recurrent state
    originals: list[tuple[Tensor, Tensor]] = []

    def cast_up(tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.is_floating_point() and 2 <= tensor.dtype.itemsize < dtype.itemsize:
                originals.append((tensor, tensor.data))
                tensor.data = tensor.data.to(dtype)

    def cast_layer(layer: nn.Module, _: Any) -> None:
        cast_up(chain(layer.parameters(), layer.buffers()))

    layers = [each for part in get_body(model).children() if isinstance(part, nn.ModuleList) for each in part]
    in_layers = {id(tensor) for layer in layers for tensor in chain(layer.parameters(), layer.buffers())}
    hooks = [layer.register_forward_pre_hook(cast_layer) for layer in layers]
    try:
        cast_up(each for each in chain(model.parameters(), model.buffers()) if id(each) not in in_layers)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for tensor, data in originals:
            tensor.data = data


def _limit_switches(model: PreTrainedModel, limits: ExitStack) -> None:
    # the probe's short rows must be longer than these lengths
    config = model.config.get_text_config()
    rope: Any = getattr(config, "rope_parameters", None) or {}
    rope_by_kind = [rope] if "rope_type" in rope else [each for each in rope.values() if isinstance(each, dict)]
    for each in rope_by_kind:  # one mapping, or one per kind of layer
        if each["rope_type"] == "longrope":
            limits.callback(each.update, original_max_position_embeddings=each["original_max_position_embeddings"])
            each["original_max_position_embeddings"] = WINDOW
    names = [(owner, name) for owner in (config, *model.modules()) for name in SWITCHES]
    for module in find_dynamic_rope(model):
        names += [(module, "original_max_seq_len"), (module.config, "max_position_embeddings")]
    for owner, name in names:
        if type(getattr(owner, name, None)) is int:  # some are lists or booleans
            _limit(owner, name, WINDOW, limits)
