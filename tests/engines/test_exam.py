"""The tiny engine passes the exam, and the exam catches broken engines."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from coderepairrl.checks import engine as exam
from coderepairrl.checks.engine import QUESTIONS, Finding, Reference, examine_engine
from coderepairrl.engines.tiny import TinyEngine
from coderepairrl.learn import Learner, LearnSettings
from coderepairrl.types import Chunk, Sampling

from .conftest import start_tiny
from .test_model import LLAMA3, build


async def test_tiny_passes(engine: TinyEngine, miniature: Path, reference: Reference, tmp_path: Path) -> None:
    checks = await examine_engine(engine, miniature, reference=reference, work=tmp_path)
    assert [check.name for check in checks] == list(QUESTIONS)
    assert find_failed(checks) == set()


@pytest.mark.parametrize(
    ("threads", "changes"),
    [
        (1, {"model_type": "llama", "rope_parameters": LLAMA3}),
        (1, {"model_type": "mistral", "sliding_window": 48}),
        (2, {"model_type": "qwen2", "tie_word_embeddings": False}),
        (1, {"model_type": "seed_oss"}),
    ],
    ids=["llama", "mistral", "qwen2, 2 threads", "seed_oss"],
)
async def test_every_architecture_passes(threads: int, changes: dict[str, Any], tmp_path: Path) -> None:
    """The reference is the real learner."""
    model = tmp_path / "model"
    build(model, max_position_embeddings=4096, **changes)
    settings = LearnSettings(algorithm="grpo", lr=1e-3, old_logprobs="recomputed")
    learner = await Learner.start(model, settings, log_dir=tmp_path, publish_dir=tmp_path)
    try:
        async with start_tiny(model, tmp_path, slots=16, threads=threads) as engine:
            checks = await examine_engine(engine, model, reference=learner.logprobs, work=tmp_path)
    finally:
        await learner.close()
    assert find_failed(checks) == set()


def find_failed(checks: list[Finding]) -> set[str]:
    return {f"{check.name}: {check.detail}" for check in checks if not check.ok}


class Stopped(TinyEngine):
    """Sleeps by SIGSTOP; requests wait in its pipe."""

    async def sleep(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    async def wake(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    async def health(self) -> Mapping[str, float]:
        if psutil.Process(self.pid).status() != psutil.STATUS_STOPPED:
            self.last_health = await super().health()
        return self.last_health

    async def load(self, path: Path, version: int, checksum: str) -> int:
        loading = asyncio.create_task(super().load(path, version, checksum))
        await asyncio.sleep(0)  # so that the command is in the pipe before the engine wakes
        await self.wake()
        return await loading


class Restless(Stopped):
    """Does not sleep."""

    async def sleep(self) -> None:
        self.last_health = await super().health()


class Greedy(Stopped):
    """Acknowledges a version loaded during its sleep without loading it."""

    async def load(self, path: Path, version: int, checksum: str) -> int:
        if psutil.Process(self.pid).status() == psutil.STATUS_STOPPED:
            await self.wake()
            return version
        return await super().load(path, version, checksum)


@pytest.mark.parametrize(
    ("kind", "failure"),
    [(Stopped, ""), (Restless, "it samples while it sleeps"), (Greedy, "versions")],
)
async def test_an_engine_that_does_not_sleep_as_it_says_is_caught(
    kind: type[TinyEngine],
    failure: str,
    miniature: Path,
    reference: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exam, "QUESTIONS", {})  # awake, they are the tiny engine, which passes
    async with start_tiny(miniature, tmp_path, kind, slots=16, context=512) as engine:
        try:
            [sleep] = await examine_engine(engine, miniature, reference=reference, work=tmp_path, sleeps=True)
        finally:
            os.kill(engine.pid, signal.SIGCONT)
    assert sleep.name.startswith("requests survive a sleep")
    assert sleep.ok == (not failure) and failure in sleep.detail, sleep


class Forgetful(TinyEngine):
    """Acknowledges loads that it does not do."""

    async def load(self, path: Path, version: int, checksum: str) -> int:
        return version


class Crowded(TinyEngine):
    """Changes the last id of a request that is not alone."""

    busy = 0

    async def generate(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[Chunk, None]:
        self.busy += 1
        try:
            wrong = [*ids[:-1], 3] if self.busy > 1 else ids
            async for chunk in super().generate(wrong, sampling, seed):
                yield chunk
        finally:
            self.busy -= 1


class Hot(TinyEngine):
    """Reports the logprobs of another temperature, and repeats the last chunk."""

    async def generate(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[Chunk, None]:
        chunks = [chunk async for chunk in super().generate(ids, sampling, seed)]
        for chunk in chunks:
            yield chunk._replace(logprobs=tuple(2 * logprob for logprob in chunk.logprobs))
        yield chunks[-1]


@pytest.mark.parametrize(
    ("impostor", "caught_by"),
    [
        (
            Forgetful,
            {
                "loads are acknowledged and whole",
                "no prefix outlives its weights",
                "an absurd update breaks, a roll-back restores",
                "requests survive a swap",
            },
        ),
        (Crowded, {"logprobs are the learner's", "concurrent output equals serial", "a seed fixes a stream"}),
        (Hot, {"logprobs are the learner's", "limits hold", "no prefix outlives its weights"}),
    ],
)
async def test_an_impostor_is_caught(
    impostor: type[TinyEngine],
    caught_by: set[str],
    miniature: Path,
    reference: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exam, "QUESTIONS", {name: QUESTIONS[name] for name in QUESTIONS if name in caught_by})
    async with start_tiny(miniature, tmp_path, impostor, context=256) as engine:
        checks = await examine_engine(engine, miniature, reference=reference, work=tmp_path)
    assert {check.name for check in checks if not check.ok} == caught_by
