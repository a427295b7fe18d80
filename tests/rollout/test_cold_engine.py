"""A cold engine is not the policy's fault: it is warmed up, and no token in time is a fault and no limit."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from coderepairrl import tokens
from coderepairrl.agents.scripted import Say, ScriptedAgent
from coderepairrl.engines import ScriptedEngine
from coderepairrl.errors import EngineFault
from coderepairrl.gateway import Gateway, PolicySource
from coderepairrl.protocols import Chunk, FirstRequest
from coderepairrl.rewards import ScriptedReward
from coderepairrl.rollout import LocalExecutor, Rollout, Terms, Ticket, warm_up, warmup
from coderepairrl.runs import Log
from coderepairrl.sandbox.fake import ScriptedBackend
from coderepairrl.types import Ending, Episode, Limits, Sampling, Task

TASK = Task("toy/add", "add() subtracts.", "python", "dir:x", b"")
LIMITS = Limits(seconds=0.2, turn_tokens=16)
REQUEST = FirstRequest([{"role": "user", "content": TASK.prompt}])


class Cold(ScriptedEngine):
    """An engine whose first reply takes long, and again after a fault of it."""

    def __init__(self, miniature: Path, cold: float, pace: float = 0.0) -> None:
        stop = tokens.load(miniature).stop_ids[0]
        super().__init__(lambda ids, sampling, seed: [65] * 15 + [stop], chunk=1, delay=pace)
        self.cold = cold

    async def generate(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[Chunk, None]:
        await asyncio.sleep(self.cold)
        self.cold = 0.0
        async for chunk in super().generate(ids, sampling, seed):
            yield chunk


@asynccontextmanager
async def attempts(engine: ScriptedEngine, miniature: Path, log: Log, *, warm: bool) -> AsyncIterator[Rollout]:
    source = PolicySource(tokens.load(miniature), engine)
    terms = Terms(ScriptedAgent([Say("hello")]), ScriptedBackend(), LIMITS, {"train": [(ScriptedReward(), 1.0)]})

    async def warming(_: Ticket) -> None:
        if warm:
            await warm_up(source, REQUEST, LIMITS, 2)

    async with Gateway(source, sampling=Sampling(), on_turn=log.turn).listening() as gateway:
        yield Rollout(executor=LocalExecutor(gateway, {"": terms}), log=log, concurrency=2, warm_up=warming)


def made(rollout: Rollout, attempt: int = 0) -> asyncio.Task[Episode]:
    return asyncio.create_task(rollout.run(Ticket(TASK, "train", 1, "toy-1", attempt, 0, Sampling())))


async def test_a_first_reply_that_takes_longer_than_an_episode_costs_no_attempt(miniature: Path, tmp_path: Path):
    engine = Cold(miniature, cold=0.4)
    with closing(Log(tmp_path / "log.jsonl")) as log:
        async with attempts(engine, miniature, log, warm=True) as rollout:
            episodes = await asyncio.gather(*(made(rollout, attempt) for attempt in range(2)))
            assert [(each.ending, each.sampled) for each in episodes] == [(Ending.DONE, 16)] * 2
            asked = [(len(each.ids), each.sampling.max_tokens) for each in engine.requests[:3]]
            assert asked == [(len(engine.requests[0].ids), warmup.TOKENS)] * 3, "a real prompt, alone and in a batch"


async def test_no_token_in_time_is_a_fault_after_which_the_engine_is_warmed_up_again(miniature: Path, tmp_path: Path):
    engine = Cold(miniature, cold=0.4)
    with closing(Log(tmp_path / "log.jsonl")) as log:
        async with attempts(engine, miniature, log, warm=False) as rollout:
            episode = await made(rollout)
            assert (episode.ending, episode.reason) == (Ending.VOID, "engine")
            assert "no token was sampled in the episode's 0.2 seconds" in episode.fault
            engine.cold, warmed = 0.0, []

            async def warming(ticket: Ticket) -> None:
                warmed.append(ticket.attempt)

            rollout._warm_up = warming
            assert [(await made(rollout, attempt)).ending for attempt in (1, 2)] == [Ending.DONE] * 2
            assert warmed == [1]


async def test_time_that_runs_out_after_a_token_is_a_limit(miniature: Path, tmp_path: Path):
    with closing(Log(tmp_path / "log.jsonl")) as log:
        async with attempts(Cold(miniature, cold=0.0, pace=0.05), miniature, log, warm=False) as rollout:
            episode = await made(rollout)
    assert (episode.ending, episode.reason) == (Ending.LIMIT, "time")
    assert 0 < episode.sampled < 16


async def test_opening_a_sandbox_is_not_on_the_clock(miniature: Path):
    engine = Cold(miniature, cold=0.0)
    async with Gateway(
        PolicySource(tokens.load(miniature), engine), sampling=Sampling(), on_turn=lambda *_: None
    ).listening() as gateway:
        session = gateway.open("one", limits=LIMITS, seed=0)
        session._budget.deadline = 0.0
        assert session.spent
        session.start_clock()
        assert not session.spent


async def test_an_engine_that_is_too_slow_for_the_limits_is_warned_of(miniature: Path, monkeypatch: pytest.MonkeyPatch):
    codec = tokens.load(miniature)
    slow = PolicySource(codec, Cold(miniature, cold=0.0, pace=0.02))
    warning = await warm_up(slow, REQUEST, LIMITS, 4)
    assert re.search(r"16 tokens take 0\.\d s where 4 attempts run at once, and an episode may take 0\.2 s", warning)
    assert await warm_up(slow, REQUEST, Limits(seconds=60.0, turn_tokens=16), 4) == ""
    monkeypatch.setattr(warmup, "SECONDS", 0.05)
    with pytest.raises(EngineFault, match=r"has not sampled 8 tokens in 0.05 seconds"):
        await warm_up(PolicySource(codec, Cold(miniature, cold=9.0)), REQUEST, LIMITS, 1)
