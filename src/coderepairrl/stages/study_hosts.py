"""What a study starts for its runs to share: a learner, or nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from coderepairrl.errors import CodeRepairError, ConfigError
from coderepairrl.learn.shared_server import LearnerServer
from coderepairrl.stages.jobs import Say
from coderepairrl.stages.study import Job, Study
from coderepairrl.stages.study_learner import learning, training


class Hosts(NamedTuple):
    """What runs while the runs of a study do."""

    learner: LearnerServer | None = None

    def failure(self, job: Job) -> str:
        """Why `job`, which needs it, cannot be run any more; empty if it can."""
        return self.learner.failure if self.learner is not None and job.kind == "train" else ""


@asynccontextmanager
async def hosting(study: Study, units: Sequence[Sequence[Job]], say: Say) -> AsyncIterator[Hosts]:
    """What `units` share, as far as there is anything to do for it.

    Raises what `training` raises.
    """
    async with training(study, units, say) as learner:
        yield Hosts(learner)


def planned(study: Study) -> tuple[list[str], list[CodeRepairError]]:
    """What would be started, in words, and what keeps the runs from sharing it."""
    found, problems = list[str](), list[CodeRepairError]()
    try:
        if (shared := learning(study, study.jobs())) is not None:
            found.append(f"{shared}. The study starts it, and ends it.")
    except CodeRepairError as error:
        problems.append(error)
    return found, problems


def require_one_machine(study: Study, option: str) -> None:
    """Raise `ConfigError` where runs on several machines would share something."""
    if study.file.study.learner == "shared":
        raise ConfigError(
            f'study.learner = "shared" is for runs on the machine of the learner, and {option} places them on any',
            fix='--jobs N, or study.learner = "own"',
        )
