"""The one server that the runs of a study join, where its file says ``server = "shared"``.

It is started when something is to be run, and ends with the study, killed or not; a study that goes on starts another.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from coderepairrl import models
from coderepairrl.assembly import devices
from coderepairrl.assembly.model import engine_of
from coderepairrl.config import Config
from coderepairrl.errors import CodeRepairError, ConfigError
from coderepairrl.protocols import EngineSpec, SharedServer
from coderepairrl.stages.jobs import Say, flat
from coderepairrl.stages.study import Job, Study
from coderepairrl.stages.study_sharing import Needs, in_common, own, require_frozen
from coderepairrl.sync import weights

_OWN = own("server")


class Sharing(NamedTuple):
    """What the server of a study is started as."""

    spec: EngineSpec
    """With room for the largest adapters, on its GPUs."""
    model: Path
    rank: int
    trains: bool
    """Whether some of its runs train."""
    restarts: int

    def __str__(self) -> str:
        adapters = f"adapters up to rank {self.rank}" if self.rank else "no adapters"
        return f"one {self.spec.name} server for all runs: {self.model}, {adapters}"


def sharing(study: Study, jobs: Sequence[Job]) -> Sharing | None:
    """How `jobs` share a server; None where each has its own, or needs none. Raises as `in_common`."""
    if study.file.study.server == "own":
        return None
    trained = {str(job.folder): job for job in jobs if job.kind == "train"}
    using = [job for job in jobs if _samples(job)]
    known = in_common(study, using, "server", lambda job: _needs(job, trained.get(job.policy)))
    if not known:
        return None
    config, rank = known[0].job.alone(), max(each.rank for each in known)
    spec = devices.serving(config, engine_of(config, rank or None))
    trains = any(each.job.kind == "train" for each in known)
    return Sharing(spec, known[0].model, rank, trains, config.run.retries)


@asynccontextmanager
async def serving(
    study: Study, units: Sequence[Sequence[Job]], at_once: int, say: Say
) -> AsyncIterator[SharedServer | None]:
    """The server of `units`, of which so many run at once; None where there is nothing to do for one.

    Raises what `sharing` and `EngineSpec.share` raise.
    """
    left = [unit for unit in units if any(_samples(job) and job.state() != "done" for job in unit)]
    shared = sharing(study, study.jobs()) if left else None
    if shared is None:
        yield None
        return
    runs = min(at_once, len(left))
    say(f"{shared}, {runs} at once; its log is in {study.address.parent}")
    server = await shared.spec.share(
        shared.model,
        runs=runs,
        train=shared.trains,
        address=study.address,
        log_dir=study.address.parent,
        restarts=shared.restarts,
        say=say,
    )
    try:
        yield server
    finally:
        await server.close()


@dataclass(frozen=True, slots=True)
class _Needs(Needs):
    """Its settings are those of the engine."""

    rank: int
    """Of its adapters; 0: none."""


def _samples(job: Job) -> bool:
    """Whether it samples from a model that is served here."""
    return job.kind == "train" or not job.policy.startswith(("http://", "https://"))


def _needs(job: Job, training: Job | None) -> _Needs | None:
    """What `job` wants, which evaluates what `training` makes if that is given; None where its settings are wrong,
    which is told elsewhere. Raises `ConfigError` for what cannot be shared."""
    try:
        config = job.alone()
        source = training.alone() if training else config
        trained = job if job.kind == "train" else training
        named = models.named(source.model.path if trained else job.policy)
    except CodeRepairError:
        return None
    engine = engine_of(config, None)
    engine.joining(Path())  # whether there is such a server
    if devices.have_turns(config):
        raise ConfigError(
            "engine.share_devices=turns, and a server that several runs sample from cannot sleep for one",
            fix=f"engine.share_devices=false with GPUs for each, or {_OWN}",
        )
    if trained:
        _check_base(source, named)
    rank = source.train.lora.rank if trained and source.train.lora else 0
    if not trained and named.adapter is not None:
        rank = weights.adapter_rank(named.adapter)
    engine.with_adapters(rank or 1)
    if job.kind == "train":
        devices.split(config, engine.takes_gpus)
    settings = flat({"engine": config.engine.model_dump(mode="json", include={"name", "options", "devices"})})
    return _Needs(job, named.folder.resolve(), settings, rank)


def _check_base(config: Config, named: models.Named) -> None:
    """Raise `ConfigError` where a run of `config` would train, or train adapters on, weights that no other has."""
    require_frozen(config, "server")
    if named.adapter is not None:
        raise ConfigError(
            f"{named.adapter} are adapters, which each run merges into weights of its own",
            fix=f"merge them once (crrl export), and name that folder in model.path, or {_OWN}",
        )
    if config.model.quantise not in ("none", models.quantised(named.folder)):
        raise ConfigError(
            f"model.quantise={config.model.quantise}, for which each run writes out weights of its own", fix=_OWN
        )
