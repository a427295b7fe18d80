"""Guard against training again on tasks whose trajectories a model has learned."""

from __future__ import annotations

from collections.abc import Iterable

from coderepairrl import models
from coderepairrl.config import Config
from coderepairrl.errors import TaskError
from coderepairrl.plan.tasks import COLLECTED
from coderepairrl.runs.folder import read_learned
from coderepairrl.tasks.select import held_out
from coderepairrl.types import Task


def learned_by(model: str) -> frozenset[str]:
    """Ids of the tasks whose trajectories `model`, or the run it began from, has learned.

    Raises `UsageError` for an unknown model, `RunError` for damage.
    """
    named_model = models.named(model)
    return read_learned(named_model.run or named_model.adapter or named_model.folder)


def check_learned(config: Config, tasks: Iterable[Task]) -> None:
    """Raise `TaskError` if the model has learned trajectories of training `tasks`, unless ``tasks.learned=train``."""
    if config.tasks.learned == "train" or config.model.init == "random":
        return
    learned_ids = learned_by(config.model.path)
    everything = [task.id for task in tasks]
    both = [name for name in everything if name in learned_ids]
    if not both:
        return
    share = config.tasks.holdout if config.tasks.holdout is not None else COLLECTED
    apart = all(held_out(name, share) for name in both) and not all(held_out(name, share) for name in everything)
    raise TaskError(
        f"{config.model.path} was fine-tuned on trajectories of {len(both)} of the {len(everything)} training tasks,"
        f" for example {both[0]}: what it earns there says little of what it learns",
        fix=(f"train on the others: tasks.holdout={share:g}; if " if apart else "train on others; if ")
        + "you mean it, tasks.learned=train",
    )
