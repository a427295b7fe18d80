"""What the runs of a study have in common that share a process: where they differ, they cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from coderepairrl.config import Config
from coderepairrl.errors import CodeRepairError, ConfigError, several
from coderepairrl.stages.study import Job, Study


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run wants of a process that others use, too."""

    job: Job
    model: Path
    settings: dict[str, Any]
    """By dotted key: what must be the same in all runs."""


N = TypeVar("N", bound=Needs)
Shared = Literal["server"]


def own(what: Shared) -> str:
    """What to write where runs cannot share."""
    return f'study.{what} = "own": a {what} for each run'


def require_frozen(config: Config, what: Shared) -> None:
    """Raise `ConfigError` where a run of `config` has weights that no other run has."""
    if config.train.lora is None:
        raise ConfigError(
            "all weights are trained, and what runs share is frozen",
            fix=f"train.lora=true in all arms, or {own(what)}",
        )
    if config.model.init == "random":
        raise ConfigError(
            "model.init=random draws other weights for each seed",
            fix=f"name a folder of weights in model.path, or {own(what)}",
        )


def in_common(study: Study, jobs: Sequence[Job], what: Shared, needs: Callable[[Job], N | None]) -> list[N]:
    """What each of `jobs` wants by `needs`, which gives None for one that wants nothing, or whose settings are wrong.

    Raises all that keeps them from sharing one, as `ConfigError`. What is wrong with an arm by itself is not among it.
    """
    problems, known = list[CodeRepairError](), list[N]()
    for job in jobs:
        if job.seed != study.seeds[0]:
            continue
        try:
            found = needs(job)
        except CodeRepairError as error:
            problems.append(ConfigError(f'arm {job.arm}, and study.{what} = "shared": {error}', fix=error.fix))
            continue
        if found is None:
            continue
        problems += _apart(found, known[0], what) if known else []
        known.append(found)
    if problems:
        raise several(problems)
    return known


def _apart(one: Needs, other: Needs, what: Shared) -> list[CodeRepairError]:
    """Why the two cannot have one."""
    arms = f"arms {other.job.arm} and {one.job.arm} cannot share a {what}"
    found: list[CodeRepairError] = []
    if one.model != other.model:
        found.append(ConfigError(f"{arms}: {other.model} and {one.model} are two models", fix=own(what)))
    for key in sorted({*one.settings, *other.settings}):
        if one.settings.get(key) != other.settings.get(key):
            values = f"{other.settings.get(key, 'unset')} and {one.settings.get(key, 'unset')}"
            found.append(ConfigError(f"{arms}: {key} is {values}", fix=f"the same in all arms, or {own(what)}"))
    return found
