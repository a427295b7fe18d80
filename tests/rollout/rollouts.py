"""A rollout with a real gateway, as in a run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

from coderepairrl.gateway import Gateway, PolicySource, Remote
from coderepairrl.rollout.episodes import AttemptSettings, Rollout
from coderepairrl.rollout.local import LocalExecutor
from coderepairrl.runs import Log, logged_episodes
from coderepairrl.runs.log import read_records
from coderepairrl.types import Episode, Sampling


@asynccontextmanager
async def open_rollout(
    source: PolicySource | Remote, folder: Path, terms: AttemptSettings, *, concurrency: int = 4
) -> AsyncIterator[Rollout]:
    """Open a rollout that logs to ``log.jsonl`` in `folder`."""
    with closing(Log(folder / "log.jsonl")) as log:
        async with Gateway(source, sampling=Sampling(), on_turn=log.turn).listening() as gateway:
            yield Rollout(executor=LocalExecutor(gateway, {"": terms}), log=log, concurrency=concurrency)


def read_episodes(folder: Path) -> list[Episode]:
    return list(logged_episodes(read_records(folder / "log.jsonl")))
