"""What an attempt is: its seeds, its limits, and its place in the log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from coderepairrl import tokens
from coderepairrl.agents.scripted import Say, ScriptedAgent, Wait, Write
from coderepairrl.engines import ScriptedEngine
from coderepairrl.gateway import Gateway, PolicySource
from coderepairrl.protocols import Agent
from coderepairrl.rewards import ScriptedReward
from coderepairrl.rollout import Group, LocalExecutor, Rollout, Terms, attempts, collect, slots
from coderepairrl.runs import Log
from coderepairrl.runs.log import read_records
from coderepairrl.sandbox.fake import ScriptedBackend
from coderepairrl.types import Ending, Limits, Sampling, Task

ONE, OTHER = (Task(f"toy/{name}", f"repair {name}", "python", "dir:x", b"") for name in ("one", "other"))


@asynccontextmanager
async def rollout(
    miniature: Path, folder: Path, agent: Agent, limits: Limits
) -> AsyncIterator[tuple[Rollout, ScriptedEngine]]:
    codec = tokens.load_codec(miniature)
    engine = ScriptedEngine(lambda ids, sampling, seed: [5 + seed % 90, *codec.stop_ids[:1]])
    log = Log(folder / "log.jsonl")
    gateway = Gateway(
        PolicySource(codec, engine),
        sampling=Sampling(),
        on_turn=lambda episode, turn: log.append("turn", episode=episode, turn=turn),
    )
    await gateway.start()
    rewards = {"train": [(ScriptedReward(default=0.5), 2.0)]}
    backend = ScriptedBackend()
    try:
        made = Rollout(
            executor=LocalExecutor(gateway, {"": Terms(agent, backend, limits, rewards)}), log=log, concurrency=4
        )
        yield made, engine
    finally:
        await gateway.stop()
        log.close()


async def groups(rollout: Rollout, *tasks: Task, step: int = 1, attempts: int = 2) -> list[Group]:
    chosen = slots("train", step, tasks, attempts, seed=0)
    return await collect(rollout, chosen, sampling=Sampling(), retries=0)


async def test_an_attempt_is_logged_as_it_happens(miniature: Path, tmp_path: Path) -> None:
    agent = ScriptedAgent([Say("hello"), Write("a.py", "x\n"), Say("more")])
    async with rollout(miniature, tmp_path, agent, Limits()) as (made, _):
        [group] = await groups(made, ONE, attempts=1)
    assert [record["type"] for record in read_records(tmp_path / "log.jsonl")] == ["episode", "turn", "turn", "verdict"]
    [episode] = group.episodes
    assert (episode.ending, episode.reason, episode.reward) == (Ending.DONE, "submitted", 1.0)
    assert b"+x" in episode.patch
    assert set(episode.timings) == {"sandbox", "diff", "generate", "tools", "reward", "total"}


async def test_every_attempt_has_seeds_of_its_own_and_the_same_ones_again(miniature: Path, tmp_path: Path) -> None:
    """A step may have a task twice: its attempts are then as different from each other as any."""
    agent = ScriptedAgent([Say("hello"), Say("more")])
    async with rollout(miniature, tmp_path, agent, Limits()) as (made, engine):
        await groups(made, ONE, OTHER, ONE)
        first = [asked.seed for asked in engine.requests]
        assert len(set(first)) == len(first) == 3 * 2 * 2
        await groups(made, ONE, OTHER, ONE)
        again = [asked.seed for asked in engine.requests[len(first) :]]
        assert sorted(again) == sorted(first)
        await groups(made, ONE, step=2)
        assert not {asked.seed for asked in engine.requests[2 * len(first) :]} & set(first)


async def test_an_agent_that_does_not_notice_the_time_is_stopped(
    miniature: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "_GRACE", 0.1)
    agent = ScriptedAgent([Write("a.py", "x\n"), Wait(60.0)])
    async with rollout(miniature, tmp_path, agent, Limits(seconds=0.2)) as (made, _):
        [group] = await groups(made, ONE, attempts=1)
    [episode] = group.episodes
    assert (episode.ending, episode.reason, b"+x" in episode.patch) == (Ending.LIMIT, "time", True)
    assert episode.reward == 1.0, "it is scored on what stands"


async def test_a_stop_is_not_taken_for_a_bug_of_the_agent(miniature: Path, tmp_path: Path) -> None:
    async with rollout(miniature, tmp_path, ScriptedAgent([Wait(60.0)]), Limits()) as (made, _):
        working = asyncio.create_task(groups(made, ONE))
        await asyncio.sleep(0.2)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
    assert not any(record["type"] == "verdict" for record in read_records(tmp_path / "log.jsonl"))


async def test_an_interrupted_step_keeps_the_episodes_of_its_tasks_only(miniature: Path, tmp_path: Path) -> None:
    """Somebody has changed the file of tasks in between: what was done at another task is not taken for this one's."""
    async with rollout(miniature, tmp_path, ScriptedAgent([Say("hello"), Say("more")]), Limits()) as (made, _):
        [before] = await groups(made, ONE)
        for task, kept in ((ONE, True), (OTHER, False)):
            [group] = await collect(
                made, slots("train", 1, [task], 2, seed=0), sampling=Sampling(), retries=0,
                finished=before.episodes, tried={(before.id, 0): 1, (before.id, 1): 1},
            )  # fmt: skip
            assert {episode.task_id for episode in group.episodes} == {task.id}
            assert (group.episodes == before.episodes) is kept
