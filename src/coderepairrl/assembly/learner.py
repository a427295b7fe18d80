"""The learner's settings, from a run's."""

from __future__ import annotations

from coderepairrl.assembly.numerics import resolved
from coderepairrl.config import Config
from coderepairrl.learn import LearnSettings, LoraSettings


def settings(config: Config) -> LearnSettings:
    """The learner's settings. Raises `ConfigError` for those that contradict each other."""
    config = resolved(config)
    terms = config.train.model_dump(exclude={"advantage", "denominator", "devices", "patience"})
    constant = config.rollout.tokens if config.train.algorithm == "dr_grpo" else None
    lora = None if config.train.lora is None else LoraSettings(**terms["lora"])
    terms |= {"lora": lora, "seed": config.run.seed}
    return LearnSettings(**terms, temperature=config.rollout.temperature, max_completion_tokens=constant)
