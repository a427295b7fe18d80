"""Learner's settings, and what rounding and older weights do to importance ratios."""

from __future__ import annotations

import json
from pathlib import Path

from coderepairrl import models, tokens
from coderepairrl.config import Config
from coderepairrl.config.schema import Learning
from coderepairrl.engines.vllm.options import half
from coderepairrl.errors import ConfigError, UsageError
from coderepairrl.learn import RECIPES, LearnSettings
from coderepairrl.plan.sizing.architecture import find_published


def learn_settings(config: Config) -> LearnSettings:
    """Learner's settings. Raises `ConfigError` for contradictions, and as `teacher`."""
    config = resolve_numerics(config)
    terms = {name: getattr(config.train, name) for name in (*Learning.model_fields, "mismatch_correction")}
    recipe = RECIPES.get(config.train.algorithm)
    constant = config.rollout.tokens if recipe and recipe.aggregation == "constant" else None
    terms["teacher"] = str(teacher(config) or "")
    temperature = 1.0 if config.train.algorithm == "sft" else config.rollout.temperature  # nothing is sampled
    terms |= {"temperature": temperature, "max_completion_tokens": constant, "seed": config.run.seed}
    terms["quantise"] = config.model.quantise
    _check_plain(config)
    return LearnSettings.model_validate(terms)


def _check_plain(config: Config) -> None:
    """Raise `UsageError` for a model of quantised codes instead of weights."""
    if config.model.init == "random":
        return
    try:
        folder = models.model_folder(config.model.path)
        json.loads((folder / "config.json").read_text("utf-8"))
    except (UsageError, OSError, ValueError):  # which is refused elsewhere, where there must be one
        return
    models.require_plain_weights(folder)


def teacher(config: Config) -> Path | None:
    """Folder of the teacher model, if any. Raises `UsageError` if it is missing, `ConfigError` for contradictory
    settings."""
    train = config.train
    if not train.teacher:
        if train.teacher_weight != type(train).model_fields["teacher_weight"].get_default():
            raise ConfigError(
                f"train.teacher_weight={train.teacher_weight:g} without a teacher", fix="train.teacher=MODEL"
            )
        return None
    named_model = models.resolve_model(train.teacher)
    if named_model.adapter is not None:
        raise ConfigError(
            f"train.teacher={train.teacher} is adapters on {named_model.folder}, and a teacher is a whole model",
            fix=f"merge them first: crrl export {train.teacher} FOLDER",
        )
    return models.model_folder(str(named_model.folder), weights=True).resolve()


def check_teacher(config: Config, model: Path) -> None:
    """Raise `ConfigError` if teacher and student have different tokens; else as `teacher`."""
    folder = teacher(config)
    if folder is not None and tokens.tokenizer_digest(folder) != tokens.tokenizer_digest(model):
        raise ConfigError(
            f"train.teacher={config.train.teacher} has another tokenizer or chat template than {config.model.path}: its"
            " distribution would be over other tokens, or for prompts that it never saw so",
            fix="a teacher of the same family; where only the template differs, give both the same chat_template.jinja",
        )


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
            raw = json.loads((models.model_folder(config.model.path) / "config.json").read_text())
            dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
        except (UsageError, OSError, ValueError):  # which is refused elsewhere, where there must be one
            shape = find_published(config.model.path)
            return None if shape is None else shape.half
    return half(dtype)


def resolve_numerics(config: Config) -> Config:
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
