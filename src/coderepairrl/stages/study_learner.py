"""The one learner that the trainings of a study share, where its file says ``learner = "shared"``.

The study itself listens for them, and its process starts with the first that asks; it ends with the study, killed or
not, and a study that goes on starts another.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from coderepairrl import models
from coderepairrl.assembly import devices
from coderepairrl.assembly.learner import settings
from coderepairrl.assembly.model import engine_of
from coderepairrl.errors import CodeRepairError, ConfigError
from coderepairrl.learn.shared_server import LearnerServer, hosted
from coderepairrl.stages.jobs import Say
from coderepairrl.stages.study import Job, Study
from coderepairrl.stages.study_sharing import Needs, in_common, own, require_frozen

_OWN = own("learner")


class SharedLearner(NamedTuple):
    """What the learner of a study is started as."""

    model: Path
    env: dict[str, str]
    """Of its process, beside ours: which GPU it sees."""
    gpu: bool
    """Whether it must see one."""
    restarts: int

    def __str__(self) -> str:
        return f"one learner for all trainings: {self.model}"


def learning(study: Study, jobs: Sequence[Job]) -> SharedLearner | None:
    """How `jobs` share a learner; None where each has its own, or nothing is trained. Raises as `in_common`."""
    if study.file.study.learner == "own":
        return None
    known = in_common(study, [job for job in jobs if job.kind == "train"], "learner", _needs)
    if not known:
        return None
    first = known[0].job.alone()
    return SharedLearner(known[0].model, known[0].env, bool(first.train.devices), first.run.retries)


@asynccontextmanager
async def training(study: Study, units: Sequence[Sequence[Job]], say: Say) -> AsyncIterator[LearnerServer | None]:
    """The learner of `units`; None where nothing of them is to be trained any more, or each run has its own.

    Raises what `learning` raises, and `UsageError` where another process has it.
    """
    left = any(job.kind == "train" and job.state() != "done" for unit in units for job in unit)
    shared = learning(study, study.jobs()) if left else None
    if shared is None:
        yield None
        return
    folder = study.learner_address.parent
    say(f"{shared}; its log is in {folder}")
    server = LearnerServer(folder, say=say, env=shared.env, gpu=shared.gpu, restarts=shared.restarts)
    async with hosted(server, study.learner_address):
        yield server


@dataclass(frozen=True, slots=True)
class _Needs(Needs):
    env: dict[str, str]


def _needs(job: Job) -> _Needs | None:
    """What `job` wants; None where its settings are wrong, which is told elsewhere. Raises `ConfigError` for what
    cannot be shared."""
    try:
        config = job.alone()
        named = models.named(config.model.path)
        env = devices.split(config, engine_of(config, None).takes_gpus).learner
        alone = settings(config)
    except CodeRepairError:
        return None
    if config.train.learner:
        raise ConfigError(
            f"train.learner={config.train.learner} joins a learner, and one is to be started",
            fix=f"leave train.learner out, or {_OWN}",
        )
    require_frozen(config, "learner")
    try:
        settings(job.config())
    except CodeRepairError as error:  # what such a learner does not do
        raise ConfigError(str(error), fix=_OWN) from error
    same: dict[str, Any] = {"train.precision": alone.precision, "model.quantise": alone.quantise}
    same["train.devices"] = list(config.train.devices)
    return _Needs(job, (named.adapter or named.folder).resolve(), same, env)
