"""A batch of rows in, new weights out: the optimiser step, on one process.

Everything here is deterministic: the same samples in the same order give the same bits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from coderepairrl.errors import UsageError
from coderepairrl.learn.losses import LOSSES, Scale, Trained
from coderepairrl.learn.metrics import Metrics
from coderepairrl.learn.pack import MicroBatch, micro_batches, scored
from coderepairrl.learn.policy import WEIGHTS, Policy
from coderepairrl.learn.settings import LearnSettings
from coderepairrl.runs.storage import recover, replace_file, replace_folder
from coderepairrl.types import Sample

_OPTIMIZER = "optimizer.safetensors"
_COUNTERS = "learner.json"
_SCHEMA = 1


class Trainer:
    """The policy, its optimiser, and the reference policy if the KL term needs one.

    `version` counts the batches trained on: weights of version 0 are those that were loaded. `updates` counts
    optimiser updates, which are `LearnSettings.updates_per_batch` times as many.
    """

    def __init__(self, model: Path, settings: LearnSettings) -> None:
        """Load `model`. Raises `UsageError` when it cannot be trained."""
        self.settings = settings
        self.policy = Policy.load(model)
        self.reference: Policy | None = None
        if settings.beta > 0:
            self.reference = Policy.load(model)
            self.reference.model.requires_grad_(False)
        self.version = 0
        self.updates = 0
        self.optimizer = _adamw(self.policy, settings)

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Train on one batch and return its metrics (`Metrics`).

        Raises ValueError for an empty batch or a malformed row, and RuntimeError when the gradient is not finite;
        the weights of the last complete update then stand, and so does `version`.
        """
        if not samples:
            raise ValueError("an empty batch: every group was flat or void")
        settings = self.settings
        batches = micro_batches(samples, settings.micro_tokens)
        low, high = settings.clip
        episodes = len({sample.episode_id for sample in samples})
        scale = Scale(episodes, low, high, settings.beta, settings.max_completion_tokens or 1)
        metrics = Metrics(samples, self.version)
        inputs = [self._reference_logprobs(batch) for batch in batches]
        old: list[Tensor] = []
        for update in range(settings.updates_per_batch):
            for at, (batch, ref_N) in enumerate(zip(batches, inputs, strict=True)):
                logp_N = self.policy.logprobs(batch, settings.temperature)
                if update == 0:  # no update yet: these are the logprobs of the weights before the batch
                    old.append(batch.recorded_N if settings.old_logprobs == "recorded" else logp_N.detach())
                    metrics.before(batch, logp_N.detach())
                trained = _trained(batch, logp_N, old[at], ref_N)
                loss = LOSSES[settings.algorithm](trained, scale)
                loss.value.backward()  # type: ignore[no-untyped-call]
                metrics.add(loss)
            metrics.update(*self._update())
        self.version += 1
        return metrics.summary()

    @torch.no_grad()
    def logprobs(self, rows: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        """Logprob of each token but the first, per row: what the engine exam compares."""
        result: list[list[float]] = []
        for batch in micro_batches(scored(rows), self.settings.micro_tokens):
            logp_N = self.policy.logprobs(batch, temperature)
            result += [part.tolist() for part in torch.split(logp_N, [n - 1 for n in batch.lengths])]
        return result

    def publish(self, folder: Path) -> tuple[Path, int, str]:
        """Write the weights to ``folder/v<version>.safetensors``, whole or not at all.

        Returns path, version and the file's SHA-256 in hexadecimal. Older files are the caller's to delete.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"v{self.version:06d}.safetensors"
        with replace_file(path) as temporary:
            safetensors.torch.save_file(self.policy.state(), temporary, metadata={"format": "pt"})
            with temporary.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        return path, self.version, digest

    def save(self, folder: Path) -> None:
        """An exact checkpoint, loadable as a Hugging Face model too; on disk before it takes its name."""
        with replace_folder(folder) as temporary:
            self.policy.save(temporary)
            moments = {
                f"{key}.{name}": value
                for name, parameter in self.policy.model.named_parameters()
                for key, value in self.optimizer.state.get(parameter, {}).items()
            }
            safetensors.torch.save_file(moments, temporary / _OPTIMIZER)
            counters = {"schema": _SCHEMA, "version": self.version, "updates": self.updates}
            (temporary / _COUNTERS).write_text(json.dumps(counters) + "\n")

    def restore(self, folder: Path) -> None:
        """Continue from `save`, bit for bit. The reference policy stays the model the trainer was started with.

        Raises `UsageError`, with nothing changed, when `folder` holds no checkpoint of this model.
        """
        recover(folder)
        try:
            counters = json.loads((folder / _COUNTERS).read_text())
            moments = safetensors.torch.load_file(folder / _OPTIMIZER)
            version, updates, schema = counters["version"], counters["updates"], counters["schema"]
            if schema != _SCHEMA:
                raise UsageError(f"{folder} is a checkpoint of schema {schema}; this version reads {_SCHEMA}")
            self.policy.load_state(folder / WEIGHTS)
        except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
            raise UsageError(f"{folder} is not a whole checkpoint: {error}") from error
        self.version, self.updates = version, updates
        self.optimizer.state.clear()
        for name, parameter in self.policy.model.named_parameters():
            keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}.{name}" in moments]
            if keys:
                self.optimizer.state[parameter] = {key: moments[f"{key}.{name}"] for key in keys}

    @torch.no_grad()
    def _reference_logprobs(self, batch: MicroBatch) -> Tensor | None:
        return None if self.reference is None else self.reference.logprobs(batch, self.settings.temperature)

    def _update(self) -> tuple[float, float]:
        """One optimiser update from the accumulated gradient; returns its norm before clipping, and the rate."""
        warmup = self.settings.warmup_updates
        rate = self.settings.lr * min(1.0, (self.updates + 1) / (warmup + 1))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        try:
            norm = torch.nn.utils.clip_grad_norm_(
                self.policy.model.parameters(), self.settings.max_grad_norm, error_if_nonfinite=True
            )
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad()
        self.updates += 1
        return norm.item(), rate


def _adamw(policy: Policy, settings: LearnSettings) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms and biases alone."""
    parameters = list(policy.model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=settings.lr, betas=settings.betas, fused=True)


def _trained(batch: MicroBatch, logp_N: Tensor, old_N: Tensor, ref_N: Tensor | None) -> Trained:
    return Trained(logp_N, old_N, ref_N, batch.row_N, batch.advantage_R, batch.weight_R, batch.count_R)
