"""Learner's settings, derived from a run's."""

from __future__ import annotations

import json
from pathlib import Path

from coderepairrl import models, tokens
from coderepairrl.config import Config
from coderepairrl.config.sections.train import Learning
from coderepairrl.errors import ConfigError, UsageError
from coderepairrl.learn import RECIPES, LearnSettings
from coderepairrl.plan.numerics import resolved


def settings(config: Config) -> LearnSettings:
    """Learner's settings. Raises `ConfigError` for contradictions, and as `teacher`."""
    config = resolved(config)
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
        folder = models.folder(config.model.path)
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
                f"train.teacher_weight={train.teacher_weight:g} without a teacher", fix="set train.teacher"
            )
        return None
    named_model = models.named(train.teacher)
    if named_model.adapter is not None:
        raise ConfigError(
            f"train.teacher={train.teacher} is adapters on {named_model.folder}, and a teacher is a whole model",
            fix=f"merge them first: crrl export {train.teacher} FOLDER",
        )
    return models.folder(str(named_model.folder), weights=True).resolve()


def check_teacher(config: Config, model: Path) -> None:
    """Raise `ConfigError` if teacher and student have different tokens; else as `teacher`."""
    folder = teacher(config)
    if folder is not None and tokens.digest(folder) != tokens.digest(model):
        raise ConfigError(
            f"train.teacher={config.train.teacher} has another tokenizer or chat template than {config.model.path}: its"
            " distribution would be over other tokens, or for prompts that it never saw so",
            fix="a teacher of the same family; where only the template differs, give both the same chat_template.jinja",
        )
