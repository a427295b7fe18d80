"""What a study starts for its runs to share: a server, a learner, both, or nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from coderepairrl.errors import CodeRepairError, ConfigError
from coderepairrl.protocols import SharedServer
from coderepairrl.runs import RunFolder
from coderepairrl.stages.jobs import Say
from coderepairrl.stages.study import Job, Study
from coderepairrl.stages.study_server import serving, sharing
from coderepairrl.stages.study_sharing import Shared


class Hosts(NamedTuple):
    """What runs while the runs of a study do."""

    server: SharedServer | None = None

    def failure(self, job: Job) -> str:
        """Why `job`, which needs it, cannot be run any more; empty if it can."""
        return self.server.failure if self.server is not None and job.joins_server else ""

    async def forget(self, job: Job) -> None:
        """Remove what `job` has left: it has ended, or was killed."""
        if self.server is not None:
            await self.server.forget(RunFolder(job.folder).logs)


@asynccontextmanager
async def hosting(study: Study, units: Sequence[Sequence[Job]], at_once: int, say: Say) -> AsyncIterator[Hosts]:
    """What `units` share, of which so many run at once, as far as there is anything to do for it.

    Raises what `serving` raises.
    """
    async with serving(study, units, at_once, say) as server:
        yield Hosts(server)


def planned(study: Study) -> tuple[list[str], list[CodeRepairError]]:
    """What would be started, in words, and what keeps the runs from sharing it."""
    found, problems = list[str](), list[CodeRepairError]()
    for plan in (sharing,):
        try:
            if (shared := plan(study, study.jobs())) is not None:
                found.append(f"{shared}. The study starts it, and ends it.")
        except CodeRepairError as error:
            problems.append(error)
    return found, problems


def require_one_machine(study: Study, option: str) -> None:
    """Raise `ConfigError` where runs on several machines would share something."""
    header = study.file.study
    which: tuple[tuple[Shared, str], ...] = (("server", header.server),)
    for what, said in which:
        if said == "shared":
            raise ConfigError(
                f'study.{what} = "shared" is for runs on the machine of the {what}, and {option} places them on any',
                fix=f'--jobs N, or study.{what} = "own"',
            )
