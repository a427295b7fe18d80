"""A cold engine is warmed up; an episode without any token in time is a fault, not a limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coderepairrl import tokens
from coderepairrl.agents.scripted import Say, ScriptedAgent
from coderepairrl.config import Config
from coderepairrl.engines import ScriptedEngine
from coderepairrl.errors import EngineFault
from coderepairrl.gateway import Gateway, PolicySource
from coderepairrl.rewards import ScriptedReward
from coderepairrl.rollout import supervise
from coderepairrl.rollout.episodes import AttemptSettings, PlannedAttempt, Rollout
from coderepairrl.rollout.supervise import warm_up
from coderepairrl.runs import Log
from coderepairrl.sandbox.fake import ScriptedBackend
from coderepairrl.stages.parts import open_rollout
from coderepairrl.types import Chunk, Ending, Episode, FirstRequest, Limits, Sampling, Task

TASK = Task("toy/add", "add() subtracts.", "python", "dir:x", b"")
LIMITS = Limits(seconds=20.0, turn_tokens=16)
REQUEST = FirstRequest([{"role": "user", "content": TASK.prompt}])


class Stalling(ScriptedEngine):
    """Emits single tokens; its first reply with `max_tokens=stalled` waits for `go` after `before` tokens."""

    def __init__(self, miniature: Path, *, stalled: int, before: int = 0) -> None:
        stop = tokens.load_codec(miniature).stop_ids[0]
        super().__init__(lambda ids, sampling, seed: [65] * 15 + [stop], chunk=1)
        self.go = asyncio.Event()
        self.stalled, self.before = stalled, before

    async def generate(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[Chunk, None]:
        count, stalls = 0, sampling.max_tokens == self.stalled and self.stalled not in self.asked
        async for chunk in super().generate(ids, sampling, seed):
            if stalls and count == self.before:
                await self.go.wait()
            yield chunk
            count += 1

    @property
    def asked(self) -> list[int]:
        """`max_tokens` of each request."""
        return [request.sampling.max_tokens for request in self.requests]


@asynccontextmanager
async def open_cold(engine: ScriptedEngine, miniature: Path, folder: Path, seconds: float) -> AsyncIterator[Rollout]:
    limits = Limits(seconds=seconds, turn_tokens=16)
    terms = AttemptSettings(
        ScriptedAgent([Say("hello")]), ScriptedBackend(), limits, {"train": [(ScriptedReward(), 1.0)]}
    )
    settings = {"concurrency": 2, "tasks_per_step": 1, "group_size": 2}
    config = Config.model_validate({"run": {"name": "x"}, "rollout": settings})
    plan: Any = SimpleNamespace(config=config, kinds={"": terms}, eval_tasks={})
    source = PolicySource(tokens.load_codec(miniature), engine)
    with closing(Log(folder / "log.jsonl")) as log:
        async with open_rollout(plan, source, log, folder / "socket", lambda _: None, lambda _: None) as rollout:
            yield rollout


def start_attempt(rollout: Rollout, attempt: int = 0) -> asyncio.Task[Episode]:
    return asyncio.create_task(
        rollout.run(PlannedAttempt(TASK, "train", 1, "toy-1", attempt, 0, Sampling(max_tokens=16)))
    )


async def test_attempts_begin_once_the_engine_has_answered(miniature: Path, tmp_path: Path) -> None:
    engine = Stalling(miniature, stalled=1)
    async with open_cold(engine, miniature, tmp_path, seconds=20.0) as rollout:
        running = [start_attempt(rollout, attempt) for attempt in range(2)]
        while not engine.requests:
            await asyncio.sleep(0.01)
        assert not (tmp_path / "log.jsonl").read_text()
        engine.go.set()
        assert [((await each).ending, (await each).sampled) for each in running] == [(Ending.DONE, 16)] * 2
    assert engine.asked == [1, 16, 16]


async def test_an_episode_without_a_token_is_void_and_the_engine_is_warmed_up_again(
    miniature: Path, tmp_path: Path
) -> None:
    engine = Stalling(miniature, stalled=16)
    async with open_cold(engine, miniature, tmp_path, seconds=0.6) as rollout:
        episode = await start_attempt(rollout)
        assert (episode.ending, episode.reason) == (Ending.VOID, "engine")
        assert "no token was sampled in the episode's 0.6 seconds" in episode.fault
        await start_attempt(rollout, 1)
    assert [max_tokens for max_tokens, _ in groupby(engine.asked)] == [1, 16, 1, 16]


async def test_time_that_runs_out_after_a_token_is_a_limit(miniature: Path, tmp_path: Path) -> None:
    engine = Stalling(miniature, stalled=16, before=1)
    async with open_cold(engine, miniature, tmp_path, seconds=0.5) as rollout:
        episode = await start_attempt(rollout)
    assert (episode.ending, episode.reason, episode.sampled) == (Ending.LIMIT, "time", 1)


async def test_the_clock_of_a_session_can_start_after_its_sandbox_is_open(miniature: Path) -> None:
    source = PolicySource(tokens.load_codec(miniature), Stalling(miniature, stalled=0))
    async with Gateway(source, sampling=Sampling(), on_turn=lambda *_: None).listening() as gateway:
        session = gateway.open("one", limits=LIMITS, seed=0)
        session._budget.deadline = 0.0
        assert session.is_spent
        session.start_clock()
        assert not session.is_spent


async def test_an_engine_that_never_answers_is_a_fault(miniature: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = PolicySource(tokens.load_codec(miniature), Stalling(miniature, stalled=1))
    monkeypatch.setattr(supervise, "WARM_UP_SECONDS", 0.05)
    with pytest.raises(EngineFault, match=r"has not sampled a token in 0.05 seconds"):
        await warm_up(source, REQUEST)
