"""Training step: a batch of rows in, new weights out, deterministically."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coderepairrl.config.schema import Route
from coderepairrl.learn import checkpoint, values
from coderepairrl.learn.losses import LOSSES, Correction, Loss, LossScale, TrainedTokens, correct_mismatch
from coderepairrl.learn.metrics import Metrics
from coderepairrl.learn.offload import Offloader
from coderepairrl.learn.pack import (
    MicroBatch,
    count_trained_tokens,
    cut_rows,
    deal_minibatches,
    make_scoring_samples,
    pack_rank_share,
    pack_samples,
)
from coderepairrl.learn.packed import ComparedModel, TokenScores
from coderepairrl.learn.policy import Policy
from coderepairrl.learn.settings import VALUE_CLIP, VALUE_WEIGHT, Form, LearnSettings
from coderepairrl.learn.strategy import SingleProcess
from coderepairrl.processes.installs import require_extra
from coderepairrl.sync import wire
from coderepairrl.sync.weights import CALLED_OFF, OFFER, compute_checksum
from coderepairrl.types import Sample

CHUNKED_TREE_FACTOR = 4
"""Largest tree computed in chunks, in `micro_tokens`: memory holds all its keys and values."""


@dataclass(frozen=True, slots=True)
class _Minibatch:
    """Rows of one update, and this process's micro-batches."""

    samples: Sequence[Sample]
    """Rows of all processes."""
    batches: list[MicroBatch]
    idle: MicroBatch | None
    """Extra micro-batch of weight zero, if another process has more."""
    scale: LossScale
    reference_logprobs: list[Tensor | None] = field(default_factory=list)
    logprobs_before: list[Tensor] = field(default_factory=list)
    """Logprobs before the batch; if ``old_logprobs`` are recorded, only the first minibatch's."""
    targets: list[values.Targets] = field(default_factory=list)
    """Present with a value head."""

    @property
    def computed(self) -> list[MicroBatch]:
        """Micro-batches and the idle one."""
        return [*self.batches, *([self.idle] if self.idle else [])]


class Trainer:
    """Policy, optimiser, reference policy and teacher."""

    def __init__(self, model: Path, settings: LearnSettings) -> None:
        """Load `model`. Raises `UsageError`, `PrerequisiteError`."""
        self.settings = settings
        self.strategy = _make_strategy(settings)
        self.reference: Policy | None = None
        self.policy = Policy.load(model, settings, self.strategy.load_device)
        if settings.beta > 0 and settings.lora is None:
            self.reference = Policy.load(model, settings, self.strategy.load_device)
            self.reference.model.requires_grad_(False)
        self.teacher: Policy | None = None
        if settings.teacher:
            self.teacher = Policy.load(Path(settings.teacher), settings, self.strategy.load_device, frozen=True)
        self.version = 0
        self.updates = 0
        self.optimizer = _make_optimizer(self.policy, settings)
        self.strategy.prepare(self.policy, self.optimizer)
        self._offloader = Offloader(self.strategy.device)
        # processes that compute in different ways would wait for each other forever
        rows_only = any(policy.probe_result.way == "rows" for policy in self._policies)
        by_process = self.strategy.gather((rows_only, self.policy.can_chunk))
        self._rows_only = any(rows for rows, _ in by_process)
        self._all_can_chunk = all(can_chunk for _, can_chunk in by_process)

    def step(self, samples: Sequence[Sample], episodes: int | None = None, tokens: int | None = None) -> dict[str, Any]:
        """Train on one batch and return its `Metrics`.

        The loss is averaged over `episodes` or `tokens`, by default those in rows. A non-finite gradient skips the rest
        of the batch; `version` still counts, so that a replay repeats it. Raises ValueError for an unusable batch.
        """
        self._require_on_device()
        if not samples:
            raise ValueError("an empty batch: every group was flat or void")
        with_rows = len({sample.episode_id for sample in samples})
        episodes = with_rows if episodes is None else episodes
        if episodes < with_rows:
            raise ValueError(f"{with_rows} episodes have rows, and the loss is to be averaged over {episodes}")
        row_tokens = count_trained_tokens(samples)
        tokens_per_flat = (0 if tokens is None else tokens - row_tokens) / max(1, episodes - with_rows)
        if tokens_per_flat < 0:
            raise ValueError(f"{row_tokens} tokens are in rows, and the loss is to be averaged over {tokens}")
        metrics = Metrics(samples, episodes, self.version)
        minibatches = []
        for rows, count in deal_minibatches(samples, episodes, self.settings.minibatches):
            flat = count - len({row.episode_id for row in rows})  # episodes without rows
            weight = count_trained_tokens(rows) + flat * tokens_per_flat
            minibatches.append(self._prepare_minibatch(rows, count, weight, metrics))
        if self.settings.value_head:
            self._score_values(minibatches, metrics)
        elif self.settings.old_logprobs == "recomputed":  # the first minibatch takes those of its own forward pass
            for minibatch in minibatches[1:]:
                self._score_minibatch(minibatch, metrics)
        updates = minibatches * self.settings.updates_per_batch
        for number, minibatch in enumerate(updates):
            self._accumulate(minibatch, metrics, first=number == 0)
            try:
                rate = self.settings.rate(self.updates)
                metrics.record_update(self.strategy.update(rate), rate)
                self.updates += 1
            except FloatingPointError as error:
                metrics.record_skip(len(updates) - number, str(error))
                break
        self.version += 1
        return metrics.summarise(self.strategy.gather(metrics.totals))

    @torch.no_grad()
    def measure(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Metrics of `step` without training. Raises ValueError for an unusable batch."""
        self._require_on_device()
        if not samples:
            raise ValueError("an empty batch")
        metrics = Metrics(samples, 0, self.version)
        minibatch = self._prepare_minibatch(samples, 1, count_trained_tokens(samples), metrics)
        for batch in minibatch.computed:
            scored = self._score_batch(batch)
            if batch is not minibatch.idle:
                metrics.record_logprobs(batch, scored.logp_N)
                metrics.record_loss(self._compute_loss(batch, scored, minibatch.scale), None, scored.likeliest_N)
        return metrics.summarise(self.strategy.gather(metrics.totals))

    @torch.no_grad()
    def logprobs(self, rows: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        """Logprobs of each row's tokens after the first."""
        self._require_on_device()
        result: list[list[float]] = [[] for _ in rows]
        for part in cut_rows(rows, self._micro_tokens):
            logp_N = self.policy.logprobs(pack_samples(make_scoring_samples([rows[at] for at in part])), temperature)
            for at, row_N in zip(part, torch.split(logp_N, [len(rows[at]) - 1 for at in part]), strict=True):
                result[at] = row_N.tolist()
        return result

    def publish(self, folder: Path, form: Form = "model") -> tuple[Path, int, str]:
        """Write the weights; returns path, version and `compute_checksum`."""
        self._require_on_device()
        path = folder / f"v{self.version:06d}"
        with self.strategy.replace_atomically(path) as temporary:
            is_writer = self.strategy.is_writer
            self.strategy.run_or_fail_together(lambda: self.policy.export(temporary, form, is_writer=is_writer))
            digest = compute_checksum(temporary) if is_writer else ""
        return path, self.version, digest

    def offer(self, folder: Path, route: Route) -> tuple[Path, int, str]:
        """List the tensors for `send`; returns path, version and `wire.combine_digests`."""
        path = folder / f"v{self.version:06d}"
        with self.strategy.replace_atomically(path) as temporary:
            described = [wire.DescribedTensor(name, tensor) for name, tensor in self.policy.iter_exported("model")]

            def write() -> None:
                if self.strategy.is_writer:
                    wire.write_offer(temporary / OFFER, route, described, called_off=CALLED_OFF)

            self.strategy.run_or_fail_together(write)
        return path, self.version, wire.combine_digests(described)

    def send(self, offer: Path, version: int, receivers: int, seconds: float) -> str:
        """Send the tensors of `offer` to an engine's workers; returns "" or why it stopped.

        Raises ValueError after a later `step`.
        """
        if version != self.version:
            raise ValueError(f"the weights of version {version} were offered, and the learner is at {self.version}")
        tensors = self.policy.iter_exported("model")
        if not self.strategy.is_writer:
            deque(tensors, maxlen=0)
            return ""
        try:
            wire.send(offer / OFFER, tensors, receivers, seconds)
        except wire.TransferError as error:  # the engine raises its own, if it is alive
            return str(error)
        return ""

    def save(self, folder: Path) -> None:
        """Write an exact checkpoint (`save_checkpoint`)."""
        checkpoint.save_checkpoint(folder, self.policy, self.strategy, self.version, self.updates)

    def restore(self, folder: Path) -> None:
        """Restore a checkpoint bit for bit, except the reference policy. Raises as `restore_checkpoint`."""
        self._require_on_device()
        self.version, self.updates = checkpoint.restore_checkpoint(folder, self.policy, self.strategy)

    def offload(self) -> int:
        """Move everything to host memory, where only `save` works; returns bytes. Single process only."""
        if self.strategy.ranks > 1:
            raise ValueError("several processes share the work: they cannot move it to host memory")
        return self._offloader.offload([policy.module for policy in self._policies], self.optimizer)

    def reload(self) -> int:
        """Undo `offload`; returns bytes."""
        return self._offloader.restore()

    def _require_on_device(self) -> None:
        if self._offloader.is_offloaded:
            raise ValueError("the learner's weights are in host memory: call reload first")

    @property
    def notices(self) -> list[str]:
        """Notices about the computation."""
        return [policy.probe_result.notice for policy in self._policies if policy.probe_result.notice]

    @property
    def _policies(self) -> list[Policy]:
        return [policy for policy in (self.policy, self.reference, self.teacher) if policy is not None]

    @property
    def _micro_tokens(self) -> int:
        # with 1 each row is a micro-batch
        return 1 if self._rows_only else self.settings.micro_tokens

    @property
    def _can_chunk(self) -> bool:
        # not with gradient checkpointing, which would save no further memory, nor if processes share the model, since
        # all must make the same number of passes; chunks give only logprobs
        settings = self.settings
        keeps_activations = settings.strategy == "ddp" and not settings.gradient_checkpointing
        needs_more = settings.algorithm == "sft" or self.teacher is not None or settings.entropy or settings.value_head
        return keeps_activations and not needs_more and self._all_can_chunk

    def _prepare_minibatch(
        self, samples: Sequence[Sample], episodes: int, tokens: float, metrics: Metrics
    ) -> _Minibatch:
        settings, strategy = self.settings, self.strategy
        metrics.count_minibatch(samples)
        tree_tokens = CHUNKED_TREE_FACTOR * settings.micro_tokens if self._can_chunk else 0
        batches, idle = pack_rank_share(
            samples, self._micro_tokens, strategy.rank, strategy.ranks, tree_tokens=tree_tokens
        )
        batches = [batch.to(strategy.device) for batch in batches]
        for batch in batches:
            metrics.count_micro_batch(batch)
        if idle:
            metrics.count_micro_batch(idle, idle=True)
        if settings.algorithm == "sft":
            episodes, tokens = 1, sum(sample.weight * sum(sample.trained) for sample in samples)
        scale = LossScale(
            episodes,
            *settings.clip,
            beta=settings.beta,
            tokens=tokens,
            constant=settings.max_completion_tokens or 1,
            teacher=settings.teacher_weight,
            delta=math.inf if settings.delta is None else settings.delta,
            entropy=settings.entropy,
            value=VALUE_WEIGHT,
            value_clip=VALUE_CLIP,
        )
        minibatch = _Minibatch(samples, batches, idle, scale)
        minibatch.reference_logprobs.extend(self._compute_reference_logprobs(batch) for batch in minibatch.computed)
        return minibatch

    @torch.no_grad()
    def _score_values(self, minibatches: Sequence[_Minibatch], metrics: Metrics) -> None:
        # advantages are whitened over the rows of all processes, so they exchange values
        settings = self.settings
        values_by_minibatch: list[tuple[Sequence[Sample], dict[int, list[float]]]] = []
        for minibatch in minibatches:
            values_of_rank: dict[int, list[float]] = {}
            for batch in minibatch.batches:
                scored = self.policy.score(batch, settings.temperature)
                minibatch.logprobs_before.append(scored.logp_N)
                metrics.record_logprobs(batch, scored.logp_N)
                assert scored.value_N is not None, "the policy has a value head"
                values_of_rank |= values.group_values_by_row(batch, scored.value_N)
            if minibatch.idle is not None:
                self.policy.score(minibatch.idle, settings.temperature)
            values_by_row = {n: row for rank in self.strategy.gather(values_of_rank) for n, row in rank.items()}
            values_by_minibatch.append((minibatch.samples, values_by_row))
        estimates, metrics.explained_variance = values.compute_estimates(
            values_by_minibatch, whiten=settings.baseline == "batch"
        )
        for minibatch, estimate_by_row in zip(minibatches, estimates, strict=True):
            minibatch.targets.extend(values.make_targets(batch, estimate_by_row) for batch in minibatch.batches)

    @torch.no_grad()
    def _score_minibatch(self, minibatch: _Minibatch, metrics: Metrics) -> None:
        for batch in minibatch.computed:
            logp_N = self.policy.logprobs(batch, self.settings.temperature)
            if batch is not minibatch.idle:
                minibatch.logprobs_before.append(logp_N)
                metrics.record_logprobs(batch, logp_N)

    def _accumulate(self, minibatch: _Minibatch, metrics: Metrics, *, first: bool) -> None:
        """Accumulate the gradient; `first`: before any update."""
        settings, strategy, last = self.settings, self.strategy, minibatch.computed[-1]
        for at, batch in enumerate(minibatch.batches):
            with strategy.accumulation_context(last=batch is last):
                scored = self._score_batch(batch)
                if first and not settings.value_head:
                    minibatch.logprobs_before.append(scored.logp_N.detach())
                    metrics.record_logprobs(batch, minibatch.logprobs_before[at])
                old_N = batch.recorded_N if settings.old_logprobs == "recorded" else minibatch.logprobs_before[at]
                is_corrected = settings.mismatch_correction == "token"
                correction = correct_mismatch(old_N, batch.recorded_N) if is_corrected else None
                reference_N = minibatch.reference_logprobs[at]
                targets = minibatch.targets[at] if minibatch.targets else None
                loss = self._compute_loss(batch, scored, minibatch.scale, old_N, reference_N, correction, targets)
                strategy.backward(loss.value)
            metrics.record_loss(loss, correction, scored.likeliest_N)
        if minibatch.idle is not None:
            with strategy.accumulation_context(last=True):
                scored = self._score_batch(minibatch.idle)
                total = scored.logp_N.sum() + (0.0 if scored.value_N is None else scored.value_N.sum())
                strategy.backward(0.0 * total)

    def _compute_loss(
        self,
        batch: MicroBatch,
        scored: TokenScores,
        scale: LossScale,
        old_N: Tensor | None = None,
        reference_N: Tensor | None = None,
        correction: Correction | None = None,
        targets: values.Targets | None = None,
    ) -> Loss:
        trained = TrainedTokens(
            logp_N=scored.logp_N,
            old_N=batch.recorded_N if old_N is None else old_N,
            ref_N=reference_N,
            row_N=batch.row_N,
            advantage_R=batch.advantage_R,
            weight_R=batch.weight_R,
            count_R=batch.count_R,
            correction_N=None if correction is None else correction.weight_N,
            initial_N=scored.divergences.get("initial"),
            teacher_N=scored.divergences.get("teacher"),
            entropy_N=scored.entropy_N,
            value_N=scored.value_N,
            targets=targets,
        )
        return LOSSES[self.settings.algorithm](trained, scale)

    def _score_batch(self, batch: MicroBatch) -> TokenScores:
        # compared models are computed with each pass: distributions over the vocabulary are too large to keep
        settings = self.settings
        is_sft = settings.algorithm == "sft"
        if not is_sft and self.teacher is None and not settings.entropy:
            return self.policy.score(batch, settings.temperature)
        compared: dict[str, ComparedModel] = {}
        if self.teacher is not None:
            compared["teacher"] = self.teacher.compute_compared(batch, reverse=not is_sft)
        if is_sft and settings.beta > 0:
            if self.reference is not None:
                compared["initial"] = self.reference.compute_compared(batch, reverse=False)
            else:
                with self.policy.use_initial_weights():
                    compared["initial"] = ComparedModel(self.policy.compute_states(batch), None, reverse=False)
        return self.policy.score(batch, settings.temperature, compared, with_entropy=settings.entropy > 0)

    @torch.no_grad()
    def _compute_reference_logprobs(self, batch: MicroBatch) -> Tensor | None:
        if self.settings.beta == 0 or self.settings.algorithm == "sft":
            return None
        if self.reference is not None:
            return self.reference.logprobs(batch, self.settings.temperature)
        with self.policy.use_initial_weights():
            return self.policy.logprobs(batch, self.settings.temperature)


def _make_optimizer(policy: Policy, settings: LearnSettings) -> torch.optim.Optimizer:
    # weight decay for matrices, not for norms and biases
    parameters = list(policy.parameters.values())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=True)
    require_extra("bitsandbytes", f"train.optimizer={settings.optimizer}")
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(groups, lr=settings.lr, betas=settings.betas)  # type: ignore[no-any-return]


def _make_strategy(settings: LearnSettings) -> SingleProcess:
    if settings.processes == 1:
        return SingleProcess(settings)
    # imported only if needed: accelerate and DeepSpeed are slow to load
    if settings.strategy in ("zero2", "zero3"):
        from coderepairrl.learn.zero import ZeroProcess

        return ZeroProcess(settings)
    from coderepairrl.learn.distributed import DistributedProcess

    return DistributedProcess(settings)
