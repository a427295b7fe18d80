"""Nothing is trained on again, or measured, unknowingly, of which a model has learned trajectories."""

from __future__ import annotations

from collections.abc import Iterable

from coderepairrl import models
from coderepairrl.assembly.tasks import COLLECTED
from coderepairrl.config import Config
from coderepairrl.errors import TaskError
from coderepairrl.runs.learned import read_learned
from coderepairrl.tasks.select import held_out
from coderepairrl.types import Task


def learned_by(model: str) -> frozenset[str]:
    """The ids of the tasks whose trajectories the model that `model` names was fine-tuned on, itself or through the run
    that it began from.

    A run of `crrl sft` writes them down with those that its own model has: ``write_learned(run, learned_by(model.path)
    | {example.task_id ...})``. Raises `UsageError` where there is no model, `RunError` for damage.
    """
    found = models.named(model)
    return read_learned(found.run or found.adapter or found.folder)


def check_learned(config: Config, tasks: Iterable[Task]) -> None:
    """Raise `TaskError` where the model of `config` has learned from trajectories of some of the training `tasks`, and
    ``tasks.learned`` does not say that they are meant."""
    if config.tasks.learned == "train" or config.model.init == "random":
        return
    known = learned_by(config.model.path)
    everything = [task.id for task in tasks]
    both = [name for name in everything if name in known]
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
