"""Settings of the learner, and checks of how rounding and stale weights affect importance ratios."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from coderepairrl import models, tokens
from coderepairrl.config import Config
from coderepairrl.config.schema import Learning
from coderepairrl.engines.vllm.options import is_half
from coderepairrl.errors import ConfigError, UsageError
from coderepairrl.learn import RECIPES, LearnSettings


def make_learn_settings(config: Config) -> LearnSettings:
    """Derive the learner's settings. Raises `ConfigError` for contradictions, and as `find_teacher`."""
    config = resolve_numerics(config)
    values = {name: getattr(config.train, name) for name in (*Learning.model_fields, "mismatch_correction")}
    recipe = RECIPES.get(config.train.algorithm)
    most_tokens = config.rollout.tokens if recipe and recipe.aggregation == "constant" else None
    values["teacher"] = str(find_teacher(config) or "")
    temperature = 1.0 if config.train.algorithm == "sft" else config.rollout.temperature  # SFT does not sample
    values |= {"temperature": temperature, "max_completion_tokens": most_tokens, "seed": config.run.seed}
    values["quantise"] = config.model.quantise
    _check_not_quantised(config)
    return LearnSettings.model_validate(values)


def _check_not_quantised(config: Config) -> None:
    """Raise `UsageError` for a model whose weights are quantised."""
    if config.model.init == "random":
        return
    try:
        folder = models.find_model_folder(config.model.path)
        json.loads((folder / "config.json").read_text("utf-8"))
    except (UsageError, OSError, ValueError):  # a missing model is reported elsewhere
        return
    models.require_plain_weights(folder)


def find_teacher(config: Config) -> Path | None:
    """Find the folder of the teacher model, or None.

    Raises `UsageError` if it is missing, `ConfigError` for contradictory settings.
    """
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
            f"train.teacher={train.teacher} is an adapter of {named_model.folder}, but a teacher must be a full model",
            fix=f"merge it first: crrl export {shlex.quote(train.teacher)} FOLDER",
        )
    return models.find_model_folder(str(named_model.folder), weights=True).resolve()


def check_teacher(config: Config, model: Path) -> None:
    """Raise `ConfigError` if teacher and student have different tokens, and as `find_teacher`."""
    folder = find_teacher(config)
    if folder is not None and tokens.digest_tokenizer(folder) != tokens.digest_tokenizer(model):
        raise ConfigError(
            f"train.teacher={config.train.teacher} and {config.model.path} have different tokenizers or chat templates:"
            " the teacher's distribution would be over other tokens, or for other prompts",
            fix="use a teacher of the same family; if only templates differ, give both the same chat_template.jinja",
        )


def is_engine_half(config: Config) -> bool | None:
    """Whether the engine computes in half precision; None if unknown."""
    from coderepairrl.plan.sizing.architecture import find_published  # sizing imports this module

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
            raw = json.loads((models.find_model_folder(config.model.path) / "config.json").read_text())
            dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
        except (UsageError, OSError, ValueError):  # a missing model is reported elsewhere
            shape = find_published(config.model.path)
            return None if shape is None else shape.half
    return is_half(dtype)


def resolve_numerics(config: Config) -> Config:
    """Replace automatic mismatch correction and relative warmup by fixed values, which a resumed run keeps."""
    train = config.train
    if train.warmup_ratio is not None:
        updates = config.run.steps * train.updates_per_batch * train.minibatches
        warmup = round(train.warmup_ratio * updates)
        changes = {"warmup_ratio": None, "warmup_updates": warmup, "decay_updates": updates - warmup}
        train = train.model_copy(update=changes)
        config = config.model_copy(update={"train": train})
    if train.mismatch_correction != "auto":
        return config
    may_differ = config.rollout.max_staleness or train.precision == "bf16" or is_engine_half(config)
    correction = "token" if train.old_logprobs == "recomputed" and may_differ else "off"
    return config.model_copy(update={"train": train.model_copy(update={"mismatch_correction": correction})})


def check_clip(config: Config) -> None:
    """Raise `ConfigError` if rounding or a single update moves ratios beyond the clip range, and for stale samples
    without a ratio.
    """
    train = config.train
    recipe = RECIPES.get(train.algorithm)
    stale = config.rollout.max_staleness if recipe is not None else 0
    if stale and train.old_logprobs == "recomputed" and train.mismatch_correction == "off":
        raise ConfigError(
            f"rollout.max_staleness={stale} with old_logprobs=recomputed and mismatch_correction=off: samples of older"
            " weights would count as on-policy",
            fix="train.mismatch_correction=token",
        )
    if recipe is None or train.old_logprobs != "recorded":
        return
    if config.rollout.max_staleness and (recipe.ratio != "token" or recipe.objective == "score"):
        problem = (
            "has no ratio to the weights that sampled, so samples of older weights would count as on-policy"
            if recipe.objective == "score"
            else "would clip nearly every sample of older weights, since one update moves a row's ratio by more than"
            " its clip range"
        )
        raise ConfigError(
            f"algorithm={train.algorithm} with old_logprobs=recorded and"
            f" rollout.max_staleness={config.rollout.max_staleness} {problem}",
            fix="train.old_logprobs=recomputed, which corrects for changed weights (train.mismatch_correction)",
        )
    if recipe.ratio == "token":
        return
    rounding = ["train.precision=bf16"] if train.precision == "bf16" else []
    rounding += ["a half-precision engine"] if is_engine_half(config) else []
    if rounding:
        raise ConfigError(
            f"algorithm={train.algorithm} with old_logprobs=recorded and {' and '.join(rounding)}: rounding alone moves"
            " a row's ratio by more than its clip range, so almost half of the rows would have no gradient",
            fix="train.old_logprobs=recomputed, with train.minibatches=2 or more so that clipping has an effect",
        )


def warn_of_default_rate(config: Config) -> str:
    """Warn if all weights of a model are trained at the learning rate that is the default for adapters, else ""."""
    train = config.train
    if train.lora is not None or "lr" in train.model_fields_set or config.model.path.startswith(models.BUILTIN):
        return ""
    return (
        f"train.lr is not set, and its default, {train.lr:g}, is for adapters: with all weights of a published model,"
        " set train.lr=1e-5, or train.lora=true"
    )


def describe_clip(config: Config, learn: LearnSettings) -> str:
    """Describe when the importance ratio is clipped; begins with ``never`` if it is not."""
    if learn.recipe is not None and learn.recipe.objective == "score":
        return f"never: {learn.algorithm} has no ratio"
    if learn.updates > 1:
        return f"from the second of a batch's {learn.updates} updates on"
    hint = "train.minibatches=2 or more gives it an effect"
    if learn.old_logprobs == "recomputed":
        return f"never: with one update per batch and old_logprobs=recomputed every ratio is 1 ({hint})"
    if config.rollout.max_staleness:
        return "if weights have changed since a token was sampled: one update per batch, with the engine's logprobs"
    if learn.precision == "fp32" and is_engine_half(config) is False:
        return f"never: with one update per batch every ratio is 1 up to float32 rounding ({hint})"
    return "if engine and learner differ: one update per batch, with the engine's logprobs"
