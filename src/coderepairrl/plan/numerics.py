"""Effects of rounding and older weights on importance ratios, known from the configuration."""

from __future__ import annotations

import json

from coderepairrl import models
from coderepairrl.config import Config
from coderepairrl.engines.vllm.options import half
from coderepairrl.errors import ConfigError, UsageError
from coderepairrl.learn import RECIPES, LearnSettings
from coderepairrl.plan.sizing.published import known


def engine_half(config: Config) -> bool | None:
    """Whether the engine computes in half precision; None if unknown."""
    options = config.engine.options
    if config.engine.name == "tiny":
        return False
    if config.engine.name != "vllm" or options.get("url"):
        return None
    dtype = options.get("dtype", "auto")
    if dtype == "auto":  # that of the weights
        if config.model.init == "random":
            return False
        try:
            raw = json.loads((models.folder(config.model.path) / "config.json").read_text())
            dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
        except (UsageError, OSError, ValueError):  # which is refused elsewhere, where there must be one
            shape = known(config.model.path)
            return None if shape is None else shape.half
    return half(dtype)


def resolved(config: Config) -> Config:
    """`config` with concrete mismatch correction and warmup, which a resumed run thus keeps."""
    train = config.train
    if train.warmup_ratio is not None:
        updates = config.run.steps * train.updates_per_batch * train.minibatches
        rise = round(train.warmup_ratio * updates)
        changes = {"warmup_ratio": None, "warmup_updates": rise, "decay_updates": updates - rise}
        train = train.model_copy(update=changes)
        config = config.model_copy(update={"train": train})
    if train.mismatch_correction != "auto":
        return config
    apart = config.rollout.max_staleness or train.precision == "bf16" or engine_half(config)
    kind = "token" if train.old_logprobs == "recomputed" and apart else "off"
    return config.model_copy(update={"train": train.model_copy(update={"mismatch_correction": kind})})


def check_clip(config: Config) -> None:
    """Raise `ConfigError` for a clip narrower than rounding or one update moves a row's ratio, and for stale samples
    without a ratio."""
    train = config.train
    recipe = RECIPES.get(train.algorithm)
    stale = config.rollout.max_staleness if recipe is not None else 0
    if stale and train.old_logprobs == "recomputed" and train.mismatch_correction == "off":
        raise ConfigError(
            f"rollout.max_staleness={stale} with old_logprobs=recomputed and mismatch_correction=off: samples of older"
            " weights would count as the policy's own",
            fix="train.mismatch_correction=token",
        )
    if recipe is None or train.old_logprobs != "recorded":
        return
    if config.rollout.max_staleness and (recipe.ratio != "token" or recipe.objective == "score"):
        problem = (
            "has no ratio to the weights that sampled, so that samples of older ones would count as the policy's own"
            if recipe.objective == "score"
            else "would clip nearly every sample of older weights, since one update moves a row's ratio by more than"
            " its clip range"
        )
        raise ConfigError(
            f"algorithm={train.algorithm} with old_logprobs=recorded and"
            f" rollout.max_staleness={config.rollout.max_staleness} {problem}",
            fix="train.old_logprobs=recomputed, which weights for what has changed since (train.mismatch_correction)",
        )
    if recipe.ratio == "token":
        return
    rounding = ["train.precision=bf16"] if train.precision == "bf16" else []
    rounding += ["a half-precision engine"] if engine_half(config) else []
    if rounding:
        raise ConfigError(
            f"algorithm={train.algorithm} with old_logprobs=recorded and {' and '.join(rounding)}: rounding alone moves"
            " a row's ratio by more than its clip range, so that almost half of the rows would have no gradient",
            fix="train.old_logprobs=recomputed, with train.minibatches=2 or more so that the clip has something to cut",
        )


def clip(config: Config, learn: LearnSettings) -> str:
    """Description of when the importance ratio is clipped; starts with ``never`` if it is not."""
    if learn.recipe is not None and learn.recipe.objective == "score":
        return f"never: {learn.algorithm} has none"
    if learn.updates > 1:
        return f"from the second of a batch's {learn.updates} updates on"
    more = "train.minibatches=2 or more makes it act"
    if learn.old_logprobs == "recomputed":
        return f"never: with one update per batch and old_logprobs=recomputed every ratio is 1 ({more})"
    if config.rollout.max_staleness:
        return "where weights have changed since a token was sampled: one update per batch, with the engine's logprobs"
    if learn.precision == "fp32" and engine_half(config) is False:
        return f"never: with one update per batch every ratio is 1, but for the rounding of float32 ({more})"
    return "where engine and learner differ: one update per batch, with the engine's logprobs"
