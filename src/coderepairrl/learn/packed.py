"""Forward pass: logprobs, divergences and values of trained tokens.

The output head computes float32 logits, even for bfloat16 models: in bfloat16, a logit of 20 is off by up to 0.06
(arXiv 2506.13585, arXiv 2510.13786).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from coderepairrl.learn import adapters, probe
from coderepairrl.learn.attention import Span, TreeCache, split_into_chunks
from coderepairrl.learn.losses import compute_entropy, kl_divergence
from coderepairrl.learn.pack import MicroBatch
from coderepairrl.learn.probe import get_body
from coderepairrl.learn.settings import MAX_LOGITS
from coderepairrl.learn.values import ValueHead

_SCALES = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
"""Factors on logits by config name, with their exponents."""


def finish_logits(logits: Tensor, config: PretrainedConfig) -> Tensor:
    """Scale (Granite, Cohere, Falcon-H1) or cap (Gemma) logits as `config` says.

    >>> finish_logits(torch.tensor([4.0, -1.0]), PretrainedConfig(logits_scaling=8.0))
    tensor([ 0.5000, -0.1250])
    """
    for name, power in _SCALES.items():
        if (factor := getattr(config, name, None)) not in (None, 1.0):
            logits = logits * factor**power
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = cap * torch.tanh(logits / cap)
    return logits


def upcast_head(head: nn.Module) -> None:
    """Make `head` compute in float32 (`_HeadProduct`), in place."""
    linear = cast(Any, head)

    def forward(hidden_ND: Tensor) -> Tensor:
        logits_NV = cast(Tensor, cast(Any, _HeadProduct).apply(hidden_ND, linear.weight))
        return logits_NV if linear.bias is None else logits_NV + linear.bias.float()

    linear.forward = forward


class _HeadProduct(torch.autograd.Function):
    """``hidden @ weight.T`` and its gradients in float32, saving only inputs."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_ND, weight_VD)
        with _multiply_in_float32(hidden_ND):
            return hidden_ND.float() @ _round_to_bfloat16(weight_VD).T

    @staticmethod
    def backward(ctx: Any, gradient_NV: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden_ND, weight_VD = ctx.saved_tensors
        grad_hidden = grad_weight = None
        with _multiply_in_float32(hidden_ND):
            if ctx.needs_input_grad[0]:
                grad_hidden = (gradient_NV @ _round_to_bfloat16(weight_VD)).to(hidden_ND.dtype)
            if ctx.needs_input_grad[1]:
                grad_weight = (gradient_NV.T @ hidden_ND.float()).to(weight_VD.dtype)
        return grad_hidden, grad_weight


def _round_to_bfloat16(weight_VD: Tensor) -> Tensor:
    # as engines hold it
    return weight_VD.to(torch.bfloat16).float()


@contextmanager
def _multiply_in_float32(hidden_ND: Tensor) -> Iterator[None]:
    """Switch autocast off and TF32 on."""
    # TF32 has all digits of the bfloat16 inputs, and half of bfloat16's speed, where float32 has a sixteenth
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = True
    try:
        with torch.autocast(hidden_ND.device.type, enabled=False):
            yield
    finally:
        matmul.allow_tf32 = before


class ComparedModel(NamedTuple):
    """Another model's states at the trained tokens."""

    hidden_ND: Tensor
    """States (`Policy.compute_states`)."""
    head: Callable[[Tensor], Tensor] | None
    """Output head; None: the policy's, without adapters."""
    reverse: bool
    """KL(policy || other) instead of KL(other || policy)."""


class TokenScores(NamedTuple):
    """Scores of trained tokens."""

    logp_N: Tensor
    likeliest_N: Tensor | None = None
    """1.0 where the token is the likeliest, else 0.0; only with `others`."""
    divergences: Mapping[str, Tensor] = MappingProxyType({})
    """Divergences (N), by model."""
    entropy_N: Tensor | None = None
    """If requested."""
    value_N: Tensor | None = None
    """With a value head."""


class PackedModel(nn.Module):
    """Model that scores packed rows in `forward`, to be wrapped by DDP and the like."""

    def __init__(self, model: PreTrainedModel, *, bf16: bool, values: bool = False) -> None:
        super().__init__()
        self.model: PreTrainedModel = model
        self.bf16 = bf16
        self.value_head = ValueHead(model.config.get_text_config().hidden_size) if values else None
        self.rows_only = False
        """Whether batches must be single rows."""
        probe.reset_dynamic_rope(model)
        if bf16:
            upcast_head(model.get_output_embeddings())  # type: ignore[no-untyped-call]

    def forward(
        self,
        batch: MicroBatch,
        temperature: float = 1.0,
        max_logits: int = MAX_LOGITS,
        others: Mapping[str, ComparedModel] | None = None,
        *,
        with_entropy: bool = False,
        states: bool = False,
    ) -> Tensor | TokenScores:
        """See `Policy.score`, and `Policy.compute_states` (`states`)."""
        with torch.autocast(batch.ids_T.device.type, torch.bfloat16, enabled=self.bf16):
            if batch.chunk_tokens:
                if states or self.value_head is not None or others is not None:
                    raise ValueError("a tree that is computed chunk by chunk has only logprobs")
                weights = next((p for p in self.model.parameters() if p.requires_grad), None)
                return TokenScores(cast(Any, _ChunkedLogprobs).apply(weights, self, batch, temperature, max_logits))
            # not [at_N], whose backward pass adds up repeated positions in any order if there are threads
            hidden_ND = self.hidden(batch).index_select(0, batch.at_N)
            if states:
                return hidden_ND
            if others is not None:
                scored = self._compare_in_parts(
                    hidden_ND, batch.target_N, temperature, max_logits, others, with_entropy
                )
            else:
                scored = TokenScores(self.compute_logprobs(hidden_ND, batch.target_N, temperature, max_logits))
            return scored if self.value_head is None else scored._replace(value_N=self.value_head(hidden_ND))

    def compute_logprobs(self, hidden_ND: Tensor, target_N: Tensor, temperature: float, max_logits: int) -> Tensor:
        """Logprobs (N), at most `max_logits` logits at once."""
        at_once = max(1, max_logits // self.model.config.get_text_config().vocab_size)
        if len(hidden_ND) <= at_once:
            return self._compute_logprobs(hidden_ND, target_N, temperature)
        pairs = zip(torch.split(hidden_ND, at_once), torch.split(target_N, at_once), strict=True)
        return torch.cat(
            [
                cast(Tensor, checkpoint(self._compute_logprobs, hidden, target, temperature, use_reentrant=False))
                for hidden, target in pairs
            ]
        )

    def _compare_in_parts(
        self,
        hidden_ND: Tensor,
        target_N: Tensor,
        temperature: float,
        max_logits: int,
        others: Mapping[str, ComparedModel],
        with_entropy: bool,
    ) -> TokenScores:
        tensors = 1 + len(others) + with_entropy  # of logits, per token
        at_once = max(1, max_logits // (self.model.config.get_text_config().vocab_size * tensors))
        parts: list[TokenScores] = []
        for at in range(0, len(hidden_ND), at_once):
            slice_N = slice(at, at + at_once)
            others_slice = {name: other._replace(hidden_ND=other.hidden_ND[slice_N]) for name, other in others.items()}
            inputs = hidden_ND[slice_N], target_N[slice_N], temperature, others_slice, with_entropy
            fits = len(hidden_ND) <= at_once
            part = self._compare(*inputs) if fits else checkpoint(self._compare, *inputs, use_reentrant=False)
            parts.append(cast(TokenScores, part))
        divergences = {name: torch.cat([part.divergences[name] for part in parts]) for name in others}
        logp_N, likeliest_N, _, entropy_N, _ = zip(*parts, strict=True)
        return TokenScores(
            torch.cat(logp_N), torch.cat(likeliest_N), divergences, torch.cat(entropy_N) if with_entropy else None
        )

    def _compare(
        self,
        hidden_ND: Tensor,
        target_N: Tensor,
        temperature: float,
        others: Mapping[str, ComparedModel],
        with_entropy: bool,
    ) -> TokenScores:
        logits_NV = self.head(hidden_ND) / temperature
        likeliest_N = (logits_NV.argmax(-1) == target_N).float()
        divergences = {}
        for name, other in others.items():
            with torch.no_grad(), adapters.disable_adapters(self.model):
                other_NV = (other.head or self.head)(other.hidden_ND) / temperature
            divergences[name] = (
                kl_divergence(logits_NV, other_NV) if other.reverse else kl_divergence(other_NV, logits_NV)
            )
        entropy_N = compute_entropy(logits_NV) if with_entropy else None
        return TokenScores(-cross_entropy(logits_NV, target_N, reduction="none"), likeliest_N, divergences, entropy_N)

    def hidden(self, batch: MicroBatch, spans: Sequence[Span] = (), store: TreeCache | None = None) -> Tensor:
        """Last hidden states (TD), or those of a chunk's `spans`, with ancestors in `store`."""
        is_tree = len(batch.spans) > 1  # else one row, for which transformers needs no spans
        if is_tree and self.rows_only:
            raise ValueError(f"{type(self.model).__name__} computes one row at a time")
        slice_T = slice(spans[0].start, spans[-1].stop) if spans else slice(None)
        out = get_body(self.model)(
            input_ids=batch.ids_T[None, slice_T],
            position_ids=batch.positions_T[None, slice_T],
            use_cache=False,
            **({"spans": spans or batch.spans, "store": store} if spans or is_tree else {}),
        )
        return cast(Tensor, out.last_hidden_state[0])

    def head(self, hidden_ND: Tensor) -> Tensor:
        """Logits in float32."""
        head = cast(nn.Module, self.model.get_output_embeddings())  # type: ignore[no-untyped-call]
        return finish_logits(cast(Tensor, head(hidden_ND)).float(), self.model.config.get_text_config())

    def _compute_logprobs(self, hidden_ND: Tensor, target_N: Tensor, temperature: float) -> Tensor:
        logits_NV = self.head(hidden_ND)
        if temperature != 1.0:
            logits_NV = logits_NV / temperature
        return -cross_entropy(logits_NV, target_N, reduction="none")


class _ChunkedLogprobs(torch.autograd.Function):
    """Logprobs of a tree; memory holds all keys and values, but only one chunk's activations."""

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor | None, packed: PackedModel, batch: MicroBatch, temperature: float, max_logits: int
    ) -> Tensor:
        store = TreeCache(len(batch.ids_T))
        logp_N = torch.empty(len(batch.at_N), device=batch.ids_T.device)
        for spans in split_into_chunks(batch.spans, batch.chunk_tokens):
            hidden_CD = packed.hidden(batch, spans, store)
            at, index_N = _find_positions(batch, spans)
            logp_N[index_N] = packed.compute_logprobs(hidden_CD[at], batch.target_N[index_N], temperature, max_logits)
        ctx.inputs, ctx.store = (packed, batch, temperature, max_logits), store
        return logp_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_N: Tensor) -> tuple[None, ...]:
        packed, batch, temperature, max_logits = ctx.inputs
        for spans in reversed(split_into_chunks(batch.spans, batch.chunk_tokens)):
            with torch.enable_grad(), torch.autocast(batch.ids_T.device.type, torch.bfloat16, enabled=packed.bf16):
                hidden_CD = packed.hidden(batch, spans, ctx.store)
                at, index_N = _find_positions(batch, spans)
                logp_N = packed.compute_logprobs(hidden_CD[at], batch.target_N[index_N], temperature, max_logits)
            # from the states, too: keys and values have a gradient even in a chunk without trained tokens
            torch.autograd.backward((logp_N, hidden_CD), (gradient_N[index_N], torch.zeros_like(hidden_CD)))
        return (None,) * 5


def _find_positions(batch: MicroBatch, spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """A chunk's trained tokens: places of their predictors in the chunk, and indices in N."""
    index_N = ((batch.at_N >= spans[0].start) & (batch.at_N < spans[-1].stop)).nonzero()[:, 0]
    return batch.at_N[index_N] - spans[0].start, index_N
