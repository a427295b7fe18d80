"""The tiny engine passes the exam, and the exam fails engines that deserve it."""

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
from coderepairrl.engines.tiny import Tiny, TinyEngine
from coderepairrl.learn import Learner, LearnSettings
from coderepairrl.types import Chunk, Sampling

from .test_model import LLAMA3, build


async def test_tiny_passes(engine: TinyEngine, miniature: Path, reference: Reference, tmp_path: Path) -> None:
    checks = await examine_engine(engine, miniature, reference=reference, work=tmp_path)
    assert [check.name for check in checks] == list(QUESTIONS)
    assert [check for check in checks if not check.ok] == []


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "llama", "rope_parameters": LLAMA3},
        {"model_type": "mistral", "sliding_window": 48},
        {"model_type": "qwen2", "tie_word_embeddings": False},
        {"model_type": "seed_oss"},
    ],
    ids=lambda changes: changes["model_type"],
)
async def test_every_architecture_passes(changes: dict[str, Any], tmp_path: Path) -> None:
    assert await failures(tmp_path, **changes) == []


async def test_two_threads_pass(tmp_path: Path) -> None:
    assert await failures(tmp_path, threads=2, model_type="qwen2") == []


async def failures(folder: Path, *, threads: int = 1, **changes: Any) -> list[Finding]:
    """What a random model fails, beside the real learner."""
    model = folder / "model"
    build(model, max_position_embeddings=4096, **changes)
    settings = LearnSettings(algorithm="grpo", lr=1e-3, old_logprobs="recomputed")
    learner = await Learner.start(model, settings, log_dir=folder, publish_dir=folder)
    try:
        engine = await Tiny(slots=16, threads=threads).start(model, log_dir=folder)
        try:
            checks = await examine_engine(engine, model, reference=learner.logprobs, work=folder)
        finally:
            await engine.close()
    finally:
        await learner.close()
    return [check for check in checks if not check.ok]


class Stopped(TinyEngine):
    """It sleeps by being stopped; requests wait in its pipe."""

    async def sleep(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    async def wake(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    async def health(self) -> Mapping[str, float]:
        """As the last one before it was stopped."""
        if psutil.Process(self.pid).status() != psutil.STATUS_STOPPED:
            self.told = await super().health()
        return self.told

    async def load(self, path: Path, version: int, checksum: str) -> int:
        loading = asyncio.create_task(super().load(path, version, checksum))
        await asyncio.sleep(0)  # it waits in the pipe with the requests, and comes before their first token
        await self.wake()
        return await loading


class Restless(Stopped):
    """It does not sleep."""

    async def sleep(self) -> None:
        self.told = await super().health()


class Greedy(Stopped):
    """What it wakes up with is not what it fell asleep with: it keeps a version to itself."""

    async def load(self, path: Path, version: int, checksum: str) -> int:
        if psutil.Process(self.pid).status() == psutil.STATUS_STOPPED:
            await self.wake()
            return version
        return await super().load(path, version, checksum)


@pytest.mark.parametrize(
    ("kind", "said"),
    [(Stopped, ""), (Restless, "it samples while it sleeps"), (Greedy, "versions")],
)
async def test_what_sleeps_is_asked(
    kind: type[TinyEngine],
    said: str,
    miniature: Path,
    reference: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That question alone: awake, they are the tiny engine, which passes."""
    monkeypatch.setattr(exam, "QUESTIONS", {})

    class Sleeper(Tiny):
        engine = kind

    engine = await Sleeper(slots=16, context=512).start(miniature, log_dir=tmp_path)
    try:
        *_, last = await examine_engine(engine, miniature, reference=reference, work=tmp_path, sleeps=True)
    finally:
        os.kill(engine.pid, signal.SIGCONT)
        await engine.close()
    assert last.name.startswith("requests survive a sleep") and last.ok == (not said) and said in last.detail, last


def failed(checks: list[Finding]) -> set[str]:
    return {check.name for check in checks if not check.ok}


class Forgetful(TinyEngine):
    """Acknowledges loads that it does not do."""

    async def load(self, path: Path, version: int, checksum: str) -> int:
        return version


class Crowded(TinyEngine):
    """Mixes up its neighbours: a request that is not alone is served with another's last id."""

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
    """Reports the logprobs of another temperature, samples one token too many, and never lets go."""

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
    """By each of these questions; what the others say of it is left open."""
    monkeypatch.setattr(exam, "QUESTIONS", {name: QUESTIONS[name] for name in QUESTIONS if name in caught_by})

    class Spec(Tiny):
        engine = impostor

    engine = await Spec(context=256).start(miniature, log_dir=tmp_path)
    try:
        assert failed(await examine_engine(engine, miniature, reference=reference, work=tmp_path)) == caught_by
    finally:
        await engine.close()
