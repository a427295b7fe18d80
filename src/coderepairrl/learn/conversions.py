"""Conversions of model folders."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import safetensors
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from coderepairrl import models
from coderepairrl.config.sections.train import Lora, Precision, Quantise
from coderepairrl.errors import UsageError
from coderepairrl.learn import adapters, shards
from coderepairrl.learn.loading import UNREADABLE, load_model
from coderepairrl.learn.policy import Policy, constants, copy_layout
from coderepairrl.learn.probe import PLAIN
from coderepairrl.learn.settings import LearnSettings
from coderepairrl.runs.storage import write_sums


def init_random(source: Path, target: Path, seed: int) -> None:
    """Write a model with random weights. Raises `UsageError`."""
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True)
    except UNREADABLE as error:
        raise UsageError(f"cannot read the model configuration in {source}: {error}") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation=PLAIN, dtype=torch.float32
        )
    target.mkdir(parents=True, exist_ok=True)
    Policy(model, source).export(target, "model")
    config.architectures = [type(model).__name__]
    config.dtype = torch.float32
    config.save_pretrained(target)
    write_sums(target)


def language_model(source: Path, target: Path) -> None:
    """Write only the language model in `source`. Raises as `load_model`."""
    # a checkpoint of all weights is float32, whatever the config says that it was copied from
    model = load_model(source, torch.float32 if (source / "learner.json").is_file() else "auto")
    target.mkdir(parents=True, exist_ok=True)
    shards.write(
        target, shards.MODEL, shards.published(model, chain(model.named_parameters(), constants(model).items()))
    )
    copy_layout(source, target)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(target)


def rounded(source: Path, target: Path, form: Quantise, precision: Precision) -> None:
    """Write the model with weights rounded to `form`. Raises `UsageError`, `PrerequisiteError`."""
    policy = Policy.load(source, LearnSettings(lora=Lora(), quantise=form, precision=precision))
    target.mkdir(parents=True, exist_ok=True)
    policy.export(target, "model")  # adapters add nothing yet
    copy_layout(source, target)  # numbers are those of its dtype, and are rounded to that when they are quantised again
    (target / models.QUANTISED).write_text(json.dumps({"form": form}) + "\n")
    write_sums(target)


def merge(base: Path, adapter: Path, target: Path, precision: Precision) -> None:
    """Write `base` merged with `adapter`, as the run's engine served it. Raises `UsageError`."""
    policy = _with_adapters(base, adapter, precision)
    target.mkdir(parents=True, exist_ok=True)
    policy.export(target, "model")


def survived(base: Path, adapter: Path, result: Path, precision: Precision) -> float:
    """Share of the adapter's change that survives merging and rounding; 1 is all.

    ``<result - base, delta> / <delta, delta>``, `delta` the adapters' product. Raises `UsageError` when the three do
    not match.
    """
    policy = _with_adapters(base, adapter, precision)
    left = total = 0.0
    try:
        with shards.TensorFiles(result, shards.MODEL) as files:
            deltas = shards.published(policy.model, adapters.deltas(policy.model))
            before = shards.published(policy.model, adapters.below(policy.model))
            for (name, delta), (_, was) in zip(deltas, before, strict=True):
                change = files[name].to(was.device).float() - was.float()
                left += (change * delta).sum(dtype=torch.float64).item()
                total += delta.square().sum(dtype=torch.float64).item()
    except (OSError, KeyError, RuntimeError, safetensors.SafetensorError) as error:
        raise UsageError(f"{result} is not {base} merged with {adapter}: {error}") from error
    return left / total if total else 1.0


def _with_adapters(base: Path, adapter: Path, precision: Precision) -> Policy:
    try:
        lora = adapters.read_config(adapter)
        policy = Policy.load(base, LearnSettings(lora=lora, precision=precision))
        with shards.TensorFiles(adapter, adapters.FILE) as files:
            files.check({policy.file_name(name): value.shape for name, value in policy.parameters.items()})
            for name, parameter in policy.parameters.items():
                parameter.data.copy_(files[policy.file_name(name)])
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise UsageError(f"{adapter} holds no adapters for {base}: {error}") from error
    return policy
