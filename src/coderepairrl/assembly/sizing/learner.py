"""Memory of a learner process, in bytes, by what its own forward and backward pass hold (`coderepairrl.learn`).

Counted per packed token and layer, with h hidden, q queries, k keys, f intermediate, r rank: what autograd keeps of a
layer of `learn.policy` (tests compare it with the sizes of the tensors). Attention keeps no square of the length, for
kernels compute it in tiles.
"""

from __future__ import annotations

from typing import NamedTuple

from coderepairrl.assembly.sizing.architecture import Architecture
from coderepairrl.learn.settings import ALIGNED, BUCKET, INT8_BLOCK, LOGITS, NF4_BLOCK, LearnSettings

RESERVE = 2_000_000_000
"""What a GPU process takes beside its tensors (context, libraries, fragments): an assumption, not a measurement."""
ROUND = 3
"""Layers whose gathered weights are there at once: the one at work, the next, and a buffer."""
PROCESSORS = 132
"""Of an H100, among which FlashAttention's backward pass deals out heads; few GPUs have more."""
BLOCK = 256
"""Numbers that share a float32 scale in 8-bit moments (bitsandbytes); those of small tensors are float32."""


CODES = {"nf4": 0.5 + 4 / NF4_BLOCK, "int8": 1 + 1 / INT8_BLOCK}
"""Bytes of a quantised weight with its part of a scale."""


class LearnerMemory(NamedTuple):
    """Bytes on one device in the steady state: gradients and moments exist, a micro-batch is in its backward pass."""

    weights: int
    """The model, or this process's share; a reference model counts, too, a teacher, and ZeRO's own copy of trained
    weights."""
    adapters: int
    gradients: int
    """Those of the trained weights in float32, and the buckets in which processes reduce them (DDP)."""
    optimizer: int
    """Two moments of AdamW, in float32 or in 8 bits; of Muon's matrices one."""
    gathered: int
    """Of other processes' shares: weights that are here for a while, gradients on their way."""
    activations: int
    """What the forward pass keeps for the backward pass."""
    work: int
    """What the backward pass of a layer needs beside; with checkpointing also what the layer computes again."""
    logits: int
    """A chunk of logits with its gradient: it comes before the layers, so the larger of this and `work` counts."""

    @property
    def static(self) -> int:
        """What is there between two steps."""
        return self.weights + self.adapters + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """The most tensors at once."""
        return self.static + self.gathered + self.activations + max(self.work, self.logits)


def learner_memory(
    model: Architecture,
    settings: LearnSettings,
    *,
    longest: int,
    trained: int = 0,
    gpu: bool = False,
    teacher: Architecture | None = None,
) -> LearnerMemory:
    """What one learner process holds at most.

    Args:
        model: the policy's dimensions.
        settings: the learner's.
        longest: tokens of the longest row, which is never divided.
        trained: trained tokens of a micro-batch, all of them if 0.
        gpu: whether it is on one, whose kernels for attention need more.
        teacher: the dimensions of the one whose distribution is learned.
    """
    lora, half = settings.lora, settings.precision == "bf16"
    divided = settings.strategy in ("fsdp2", "zero3")
    zero = settings.strategy.startswith("zero")
    ranks = settings.processes if settings.strategy != "ddp" else 1
    tokens = max(settings.micro_tokens, longest)
    count, values = model.adapters(lora.rank, lora.targets, experts=lora.experts) if lora else model.parameters, 0
    if settings.value_head:  # trained in full, beside adapters as well
        count, values = count + model.hidden + 1, 0 if lora else 4 * (model.hidden + 1)
    codes = model.codes or CODES.get(settings.quantise, 0.0)
    held = values + model.size(2 if lora and half else 4, codes)
    held += 4 * model.parameters if settings.beta > 0 and not lora else 0
    held += teacher.parameters * (2 if half else 4) if teacher else 0
    own = 4 * count // ranks if zero else 0
    buckets = settings.processes > 1 and settings.strategy == "ddp"
    gathered = 2 * 4 * BUCKET * zero
    if divided:
        size = 2 if half and (lora or not zero) else 4  # ZeRO gathers weights in the precision they are held in
        gathered += (model.root + ROUND * model.layer) * size + (0 if lora else 8 * model.layer)
    logits = _logits(model, settings, trained or tokens)
    activations, work = _activations(model, settings, tokens, count, gpu=gpu)
    if settings.value_head or settings.entropy:  # numbers of a token, and the gradient that its state has from the head
        activations += (32 + 4 * model.hidden * settings.value_head) * tokens
    if codes:  # the numbers of one matrix, in the type of the files and in that of the product
        stored = 12 if model.codes else 0  # and what they are unpacked to
        work += (stored + (2 if half else 6 if model.half else 4)) * model.hidden * model.intermediate
    if not lora:  # the gradient of a tied head is there until the end
        work += 4 * model.embedding * model.tied
    return LearnerMemory(
        weights=held // (ranks if divided else 1) + (0 if lora else own),
        adapters=4 * count // (ranks if divided else 1) + own if lora else 0,
        gradients=4 * count // ranks + (4 * count if buckets else 0),
        optimizer=_moments(model, settings, count) // ranks,
        gathered=gathered,
        activations=activations,
        work=work,
        logits=logits,
    )


def _moments(model: Architecture, settings: LearnSettings, count: int) -> int:
    """Of `count` trained numbers, on all ranks together."""
    if settings.optimizer == "adamw_8bit":
        return 2 * count + 2 * count // BLOCK * 4
    if settings.optimizer == "muon":
        return 8 * count - 4 * model.layers * model.matrices
    return 8 * count


def _logits(model: Architecture, settings: LearnSettings, trained: int) -> int:
    """Of a chunk of logits: the log-softmax, its gradient and the logits' own, and what the head's products need. With
    a bonus for entropy as much again, in chunks that are half as long (`learn.policy`)."""
    sides = 2 if settings.entropy else 1
    most = max(1, LOGITS // (model.vocabulary * sides))
    chunk = min(trained, most)
    once = 4 * chunk * model.vocabulary * sides
    if settings.precision == "bf16" and settings.head == "fp32":  # the head's weights in float32, or their gradient:
        # with several chunks this one's, the sum of those before, and both together
        copies = 4 if settings.lora else 8 if trained <= most else 12
        return max(3 * once, once + copies * model.embedding) + 4 * chunk * model.hidden
    if settings.lora:
        return 3 * once
    return 3 * once + (10 if settings.precision == "bf16" else 8) * model.embedding


def _activations(
    model: Architecture, settings: LearnSettings, tokens: int, count: int, *, gpu: bool
) -> tuple[int, int]:
    """What the forward pass of `tokens` keeps, and what the backward pass of a layer adds; `count` weights are trained.

    On a GPU attention's output is kept twice (`learn.attention`), every head gets keys of its own in float32, and in
    bfloat16 FlashAttention sums the queries' gradients in one float32 copy for each share of the keys, to give the same
    bits again.
    """
    lora, half = settings.lora, settings.precision == "bf16"
    more = ((2 if half else 4) * model.queries + (0 if half else 8 * (model.queries - model.keys))) if gpu else 0
    copies = 4 * model.queries * -(-PROCESSORS // model.heads) if gpu and half else 0
    layer = (_kept(model, settings) + more) * tokens
    stream = model.hidden * (2 if lora and half else 4) * tokens
    ends = (12 * model.hidden + 8 * model.head_dim) * tokens  # the last norm, what is scored, cosines and sines
    plain = model.adapters(lora.rank, lora.targets) if lora else model.layers * model.matrices
    casts = 2 * plain if half else 0  # weights in bfloat16, but experts
    casts += model.layers * _copied(model, settings)
    gradient = 2 * model.experts * model.expert if model.experts else model.intermediate
    passing = max(_passing(model, settings), copies) * tokens + (0 if lora else 4 * model.hidden * gradient)
    layer += 4 * model.experts  # where each one's tokens end
    if not settings.gradient_checkpointing:
        return model.layers * layer + ends + casts, passing
    shared = 0 if lora and half else stream  # the layer's input is kept once
    return model.layers * stream + ends, layer - shared + passing + casts // model.layers


def _kept(model: Architecture, settings: LearnSettings) -> int:
    """Bytes per token that a layer keeps for its backward pass."""
    h, q, k, f = model.hidden, model.queries, model.keys, 0 if model.experts else model.intermediate
    norm = model.qk_norm
    more = _kept_by_experts(model, settings) if model.experts else 0
    scales = 4 * (2 + (model.heads + model.kv_heads) * norm) + 4 * model.heads  # of norms; log-sums of attention
    rank = settings.lora.rank * len(model.linear.keys() & set(settings.lora.targets)) if settings.lora else 0
    match settings.precision, settings.lora is not None:
        case "fp32", False:
            kept = 4 * (6 * h + (4 if norm else 2) * q + (4 if norm else 2) * k + 4 * f)
        case "fp32", True:  # frozen weights keep no input; adapters keep theirs
            kept = 4 * (4 * h + (3 if norm else 2) * q + (3 if norm else 2) * k + 4 * f + rank)
        case _, False:  # norms in float32, and an input in bfloat16 for each of five matrices
            kept = 26 * h + (10 if norm else 4) * q + (10 if norm else 4) * k + 8 * f
        case _:
            kept = 12 * h + (8 if norm else 4) * q + (8 if norm else 4) * k + 8 * f + 2 * rank
    return kept + scales + more


def _kept_by_experts(model: Architecture, settings: LearnSettings) -> int:
    """Bytes per token of the experts that it goes through, beside what an MLP of no width keeps: trained ones are
    computed in float32, frozen ones keep no input."""
    h, f, lora, half = model.hidden, model.expert, settings.lora is not None, settings.precision == "bf16"
    size = 2 if half and lora else 4
    each = size * (3 * f + h if lora else 4 * f + 2 * h) + 32 + (2 if half else 4)  # their order, and weights
    if settings.lora and settings.lora.experts:  # inputs of both products, and what is between two matrices
        each += size * (h + f + 2 * _filled(settings.lora.rank))
    return model.chosen * each + 4 * model.experts - (2 if half else 4 * lora) * h


def _filled(rank: int) -> int:
    """That of products in groups."""
    return -(-rank // ALIGNED) * ALIGNED


def _copied(model: Architecture, settings: LearnSettings) -> int:
    """Bytes of a layer's adapters on experts as products take them, where these are not the adapters themselves: in
    bfloat16 both matrices, in float32 the second, whose order is another; the first, too, where it is filled up."""
    if settings.lora is None or not settings.lora.experts:
        return 0
    rank, half = _filled(settings.lora.rank), settings.precision == "bf16"
    first, second = model.hidden + model.expert, 2 * model.expert + model.hidden
    own = half or rank != settings.lora.rank
    return (2 if half else 4) * model.experts * rank * (first * own + second)


def _passing(model: Architecture, settings: LearnSettings) -> int:
    """Bytes per token of gradients on their way through a layer's MLP, where the peak is."""
    h, f = model.hidden, model.intermediate
    if model.experts:
        size, inputs = (2 if settings.precision == "bf16" and settings.lora else 4), 1 + (settings.precision == "fp32")
        return size * (inputs * h + model.chosen * (h + 2 * model.expert))
    if settings.precision == "fp32":
        return 4 * (h + 2 * f)
    return max(2 * h + 4 * f, 10 * h) if settings.lora is None else max(2 * h + 5 * f // 2, 8 * h)
