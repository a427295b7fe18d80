"""Memory of a learner process in bytes, by the tensors that its passes hold (`coderepairrl.learn`).

Counted per packed token and layer. Attention is computed in tiles, so nothing grows with the square of the length.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from coderepairrl.learn.settings import BUCKET, MAX_LOGITS, NF4_BLOCK, LearnSettings
from coderepairrl.plan.sizing.architecture import Architecture, targeted_layers
from coderepairrl.plan.sizing.parts import Layer, LayerPart

RESERVE = 2_000_000_000
"""Bytes of a GPU process besides tensors (context, libraries, fragments): an assumption, not a measurement."""
PROCESSORS = 132
"""Multiprocessors of an H100, over which FlashAttention's backward pass spreads heads; few GPUs have more."""
GATHERED_LAYERS = 3
"""Layers with gathered weights at once: the one at work, the next, and a buffer."""
MOMENTS_PER_SCALE = 256
"""8-bit moments that share a float32 scale (bitsandbytes); those of small tensors are float32."""
NF4 = 0.5 + 4 / NF4_BLOCK
"""Bytes of a quantised weight with its share of a scale."""


class LearnerMemory(NamedTuple):
    """Bytes on one device in the steady state, in the backward pass of a micro-batch."""

    weights: int
    """The model, or this process's share; includes a reference model, a teacher, and ZeRO's copy of trained weights."""
    adapters: int
    gradients: int
    """Gradients of the trained weights in float32, and the buckets that reduce them (DDP)."""
    optimizer: int
    """Two moments of AdamW, in float32 or in 8 bits."""
    gathered: int
    """Shares of other processes: temporary weights, gradients in transit."""
    activations: int
    """Numbers that the forward pass keeps for the backward pass."""
    work: int
    """Further needs of a layer's backward pass, with checkpointing including recomputed activations."""
    logits: int
    """Chunk of logits with its gradient, freed before the layers' backward pass: the larger of it and `work` counts."""

    @property
    def static(self) -> int:
        """Bytes held between two steps."""
        return self.weights + self.adapters + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """The most bytes of tensors at once."""
        return self.static + self.gathered + self.activations + max(self.work, self.logits)


def compute_learner_memory(
    model: Architecture,
    settings: LearnSettings,
    *,
    longest: int,
    trained: int = 0,
    gpu: bool = False,
    teacher: Architecture | None = None,
) -> LearnerMemory:
    """Compute the most memory that one learner process holds.

    `longest`: tokens of the longest row, which is never divided; `trained`: trained tokens of a micro-batch (0: all).
    """
    lora, half = settings.lora, settings.precision == "bf16"
    divides_weights = settings.strategy in ("fsdp2", "zero3")
    is_zero = settings.strategy.startswith("zero")
    ranks = settings.processes if settings.strategy != "ddp" else 1
    tokens = max(settings.micro_tokens, longest)
    trained_count = model.adapters(lora.rank, lora.targets) if lora else model.parameters
    quantised_each = NF4 if settings.quantise == "nf4" else 0.0
    weights = model.count_bytes(2 if lora and half else 4, quantised_each)
    if settings.value_head:  # trained in full, beside adapters as well
        trained_count += model.hidden + 1
        weights += 0 if lora else 4 * (model.hidden + 1)
    weights += 4 * model.parameters if settings.beta > 0 and not lora else 0  # the reference model
    weights += teacher.parameters * (2 if half else 4) if teacher else 0
    zero_copy = 4 * trained_count // ranks if is_zero else 0
    moments = 8 * trained_count
    if settings.optimizer == "adamw_8bit":
        moments = 2 * trained_count + 2 * trained_count // MOMENTS_PER_SCALE * 4
    has_buckets = settings.processes > 1 and settings.strategy == "ddp"
    gathered = 2 * 4 * BUCKET * is_zero
    if divides_weights:
        size = 2 if half and (lora or not is_zero) else 4  # ZeRO gathers weights in the precision they are held in
        gathered += (model.outside_layers + GATHERED_LAYERS * model.largest_layer) * size + (
            0 if lora else 8 * model.largest_layer
        )
    logits = _count_logits_bytes(model, settings, trained or tokens)
    activations, work = _count_activation_bytes(model, settings, longest, tokens, gpu=gpu)
    if settings.value_head or settings.entropy:  # values per token, and the gradient of its state from the head
        activations += (32 + 4 * model.hidden * settings.value_head) * tokens
    if quantised_each:  # one matrix with all its numbers, in the type of the files and in that of the product
        work += (2 if half else 6 if model.half else 4) * model.largest_linear
    if not lora:  # the gradient of a tied head is held until the end
        work += 4 * model.embedding * model.tied
    return LearnerMemory(
        weights=weights // (ranks if divides_weights else 1) + (0 if lora else zero_copy),
        adapters=4 * trained_count // (ranks if divides_weights else 1) + zero_copy if lora else 0,
        gradients=4 * trained_count // ranks + (4 * trained_count if has_buckets else 0),
        optimizer=moments // ranks,
        gathered=gathered,
        activations=activations,
        work=work,
        logits=logits,
    )


def _count_logits_bytes(model: Architecture, settings: LearnSettings, trained: int) -> int:
    """Bytes of a chunk of logits, its gradients, and the head's products.

    An entropy bonus doubles them, in chunks of half the length (`learn.policy`).
    """
    copies = 2 if settings.entropy else 1
    most = max(1, MAX_LOGITS // (model.vocabulary * copies))
    chunk = min(trained, most)
    logits = 4 * chunk * model.vocabulary * copies
    if settings.precision == "bf16":  # the head's weights in float32, or their gradient:
        # with several chunks the current one's, the sum of earlier ones, and their sum
        head_bytes = 4 if settings.lora else 8 if trained <= most else 12
        return max(3 * logits, logits + head_bytes * model.embedding) + 4 * chunk * model.hidden
    if settings.lora:
        return 3 * logits
    return 3 * logits + 8 * model.embedding


def _count_activation_bytes(
    model: Architecture, settings: LearnSettings, longest: int, tokens: int, *, gpu: bool
) -> tuple[int, int]:
    """Bytes that the forward pass of `tokens` keeps, and that a layer's backward pass adds."""
    is_half = settings.lora is not None and settings.precision == "bf16"
    layer_input = model.hidden * (2 if is_half else 4) * tokens
    ends = (12 * model.hidden + 8 * model.head_dim) * tokens  # the last norm, scored states, cosines and sines
    kept, most_recomputed, most_added = 0, 0, 0
    for layer, number in model.layer_counts:
        layer_kept, added = _count_layer_bytes(model.hidden, settings, layer, longest, tokens, gpu=gpu)
        kept += number * layer_kept
        most_added = max(most_added, added)
        # the layer's input is kept once
        most_recomputed = max(most_recomputed, layer_kept + added - (0 if is_half else layer_input))
    if not settings.gradient_checkpointing:
        return kept + ends, most_added
    return model.layers * layer_input + ends, most_recomputed


def _count_layer_bytes(
    hidden: int, settings: LearnSettings, layer: Layer, longest: int, tokens: int, *, gpu: bool
) -> tuple[int, int]:
    """Bytes that a layer keeps of `tokens`, and the most its backward pass adds."""
    lora, half = settings.lora, settings.precision == "bf16"
    size, mixer, feed = 2 if half else 4, layer.mixer, layer.feed
    per_token = 2 * ((4 if lora else 8) * hidden + 4) + sum(
        _count_kept_bytes(hidden, settings, part, gpu=gpu) for part in (mixer, feed)
    )
    # as if the feed-forward part's activations were still held
    mixing = 4 * mixer.queries * math.ceil(PROCESSORS / mixer.heads) if gpu and half else 0
    if 0 < mixer.window < longest:  # blocks of queries with the keys of two windows, masks, gradients of both
        repeated = 2 * mixer.queries - mixer.keys if gpu else mixer.keys
        per_token += size * (2 * repeated + mixer.queries) + (size + 1) * 2 * mixer.window
        mixing = size * (2 * mixer.queries + 4 * (mixer.queries if gpu else mixer.keys))
    trained, fixed = layer.matrices, 4 * feed.count
    if lora:
        names = targeted_layers(lora.targets)
        trained = layer.adapters(lora.rank, names)
        per_token += size * lora.rank * sum(each.name in names for each in layer.linear)
    if half:  # bfloat16 copies of the weights, except the experts'
        fixed += 2 * trained
    feed_size = 4 if feed.count and not lora else size
    feeding = max(feed_size * ((1 + bool(feed.count) + feed.chosen) * hidden + feed.widest), 10 * hidden) * tokens
    if not lora:
        feeding += 4 * max(2 * hidden * feed.width * feed.count, *(linear.size for linear in feed.linear), 0)
    return int(per_token * tokens) + fixed, int(max(feeding, mixing * tokens))


def _count_kept_bytes(hidden: int, settings: LearnSettings, part: LayerPart, *, gpu: bool) -> int:
    """Bytes per token that a part keeps for its backward pass."""
    lora, half = settings.lora, settings.precision == "bf16"
    size = 2 if half else 4
    input_bytes = size * bool(part.linear) if lora else (2 * part.input_matrices if half else 4)
    per_token = input_bytes * hidden + size * part.products + (4 if lora else 8) * part.norms + part.extra
    # trained experts are computed in float32; frozen ones keep no input
    if part.count and not lora:
        per_token += 4 * part.chosen * (part.width + hidden) + (4 - size) * part.products
    # attention's output is kept twice (`learn.attention`); float32 has separate keys for each head
    if gpu:
        per_token += size * part.queries + (0 if half else 8 * (part.queries - part.keys))
    return per_token
