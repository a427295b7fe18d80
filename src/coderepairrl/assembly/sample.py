"""Which of the held-out tasks are evaluated where not all of them are."""

from __future__ import annotations

from collections.abc import Sequence

from coderepairrl.rollout import derive_seed
from coderepairrl.types import Task


def sample(tasks: Sequence[Task], n: int, seed: int) -> tuple[Task, ...]:
    """`n` of `tasks`, drawn without replacement by `seed`; all of them, as they come, for 0 or where there are no more.

    The first few tasks of a source are often of one repository or one kind, and are no sample of it. A task is drawn
    by its id alone: the same ones in whatever order the source lists them, and a larger `n` adds to those of a smaller
    one.
    """
    if not 0 < n < len(tasks):
        return tuple(tasks)
    return tuple(sorted(tasks, key=lambda task: (derive_seed(seed, "eval", task.id), task.id))[:n])
