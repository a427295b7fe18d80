"""The learner's settings, from a run's."""

from __future__ import annotations

from coderepairrl.assembly.numerics import resolved
from coderepairrl.config import Config
from coderepairrl.config.schema import Learning
from coderepairrl.learn import LearnSettings


def settings(config: Config) -> LearnSettings:
    """The learner's settings. Raises `ConfigError` for those that contradict each other."""
    config = resolved(config)
    terms = {name: getattr(config.train, name) for name in (*Learning.model_fields, "mismatch_correction")}
    constant = config.rollout.tokens if config.train.algorithm == "dr_grpo" else None
    terms |= {"temperature": config.rollout.temperature, "max_completion_tokens": constant, "seed": config.run.seed}
    return LearnSettings.model_validate(terms)
