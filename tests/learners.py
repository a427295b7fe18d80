"""A learner for one test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from coderepairrl.learn import Learner, LearnSettings


@asynccontextmanager
async def start_learner(model: Path, folder: Path, settings: LearnSettings, **more: Any) -> AsyncIterator[Learner]:
    """Start a learner with logs and published weights in `folder`; close it after the block."""
    learner = await Learner.start(model, settings, log_dir=folder / "logs", publish_dir=folder / "weights", **more)
    try:
        yield learner
    finally:
        await learner.close()
