"""An attempt: its seeds, its records in the log, its workspace, and the model that answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from rollouts import open_rollout, read_episodes

from coderepairrl import rewards, tokens
from coderepairrl.agents.scripted import Answer, Say, ScriptedAgent, ScriptedEndpoint, Shell, Wait, Write
from coderepairrl.engines import ScriptedEngine
from coderepairrl.gateway import PolicySource, Remote
from coderepairrl.learn.stitch import stitch_episode
from coderepairrl.protocols import Agent
from coderepairrl.rewards import ScriptedReward
from coderepairrl.rollout.episodes import AttemptSettings, PlannedAttempt, Rollout
from coderepairrl.rollout.groups import Group, make_groups, plan_groups
from coderepairrl.runs.log import read_records
from coderepairrl.sandbox.fake import ScriptedBackend
from coderepairrl.sandbox.local import UnsafeLocal
from coderepairrl.types import Checks, Command, Ending, Limits, Sampling, Task

ONE, OTHER = (Task(f"toy/{name}", f"repair {name}", "python", "dir:x", b"") for name in ("one", "other"))
TALK = ScriptedAgent([Say("hello"), Write("a.py", "x\n"), Say("more")])


def terms(agent: Agent = TALK, limits: Limits = Limits(), phase: str = "train") -> AttemptSettings:  # noqa: B008
    return AttemptSettings(agent, ScriptedBackend(), limits, {phase: [(ScriptedReward(default=0.5), 2.0)]})


@pytest.fixture
def source(miniature: Path) -> PolicySource:
    codec = tokens.load_codec(miniature)
    return PolicySource(codec, ScriptedEngine(lambda ids, sampling, seed: [5 + seed % 90, *codec.stop_ids[:1]]))


async def run_groups(rollout: Rollout, *tasks: Task, step: int = 1, attempts: int = 2, **more: Any) -> list[Group]:
    chosen = plan_groups("train", step, tasks, attempts, seed=0)
    return await make_groups(rollout, chosen, sampling=Sampling(), retries=0, **more)


async def test_an_attempt_is_logged_as_it_happens(source: PolicySource, tmp_path: Path) -> None:
    async with open_rollout(source, tmp_path, terms()) as rollout:
        [group] = await run_groups(rollout, ONE, attempts=1)
    assert [record["type"] for record in read_records(tmp_path / "log.jsonl")] == ["episode", "turn", "turn", "verdict"]
    [episode] = group.episodes
    assert (episode.ending, episode.reason, episode.reward) == (Ending.DONE, "submitted", 1.0)
    assert b"+x" in episode.patch
    assert set(episode.timings) == {"sandbox", "diff", "generate", "tools", "reward", "total"}


async def test_attempts_differ_in_seeds_and_a_repeated_step_has_the_same(source: PolicySource, tmp_path: Path) -> None:
    """Also attempts at a task that a step has twice."""
    requests: Any = source.engine.requests  # type: ignore[attr-defined]
    async with open_rollout(source, tmp_path, terms()) as rollout:
        await run_groups(rollout, ONE, OTHER, ONE)
        first = [each.seed for each in requests]
        assert len(set(first)) == len(first) == 3 * 2 * 2
        await run_groups(rollout, ONE, OTHER, ONE)
        assert sorted(each.seed for each in requests[len(first) :]) == sorted(first)
        await run_groups(rollout, ONE, step=2)
        assert not {each.seed for each in requests[2 * len(first) :]} & set(first)


async def test_a_stop_is_not_taken_for_a_bug_of_the_agent(source: PolicySource, tmp_path: Path) -> None:
    async with open_rollout(source, tmp_path, terms(ScriptedAgent([Wait(60.0)]))) as rollout:
        working = asyncio.create_task(run_groups(rollout, ONE))
        await asyncio.sleep(0.2)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
    assert not any(record["type"] == "verdict" for record in read_records(tmp_path / "log.jsonl"))


async def test_an_interrupted_step_keeps_the_episodes_of_its_tasks_only(source: PolicySource, tmp_path: Path) -> None:
    """If the file of tasks has changed, an episode of another task is not used."""
    async with open_rollout(source, tmp_path, terms()) as rollout:
        [before] = await run_groups(rollout, ONE)
        tried = {(before.id, 0): 1, (before.id, 1): 1}
        for task, kept in ((ONE, True), (OTHER, False)):
            [group] = await run_groups(rollout, task, finished=before.episodes, tried=tried)
            assert {episode.task_id for episode in group.episodes} == {task.id}
            assert (group.episodes == before.episodes) is kept


async def test_a_workspace_is_judged_as_the_agent_left_it(source: PolicySource, tmp_path: Path) -> None:
    """An empty folder, which no diff has, counts. Files of the checks are restored first, and processes ended."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "expected").write_text("done\n")
    command = Command(("sh", "-c", "test -d built && cmp word expected && ! pgrep -f 'slee[p] 7654'"))
    task = Task("build/1", "build it", "c", f"dir:{home}", b"", Checks((command,), {"expected": "done\n"}))
    judges = {"train": rewards.make_rewards("state_tests")}
    for script, value in (
        ("mkdir built; echo done > word; sleep 7654 &", 1.0),
        ("mkdir built; echo no | tee word > expected", 0.0),
        ("echo done > word", 0.0),
    ):
        agent = ScriptedAgent([Say("hello"), Shell(script), Say("more")])
        async with open_rollout(source, tmp_path, AttemptSettings(agent, UnsafeLocal(), Limits(), judges)) as rollout:
            [group] = await run_groups(rollout, task, attempts=1)
        [episode] = group.episodes
        assert {score.name: score.value for score in episode.scores} == {"state_tests": value}, episode.fault
        assert b"word" in episode.patch and b"built" not in episode.patch


@pytest.mark.parametrize("last", [Answer("Done."), Answer(status=401)], ids=["answers", "refuses"])
async def test_a_remote_model_is_scored_but_not_trained_and_voids_if_it_refuses(last: Answer, tmp_path: Path) -> None:
    async with (
        ScriptedEndpoint([Answer("Hi."), last]) as model,
        Remote(model.endpoint().base_url, model="m", attempts=1) as remote,
        open_rollout(remote, tmp_path, terms(phase="eval")) as rollout,
    ):
        episode = await rollout.run(PlannedAttempt(ONE, "eval", 0, "eval-one", 0, 7, Sampling(temperature=0.0)))
    if last.status == 401:
        assert (episode.ending, episode.reason, episode.scores) == (Ending.VOID, "remote", ())
        assert "answered 401" in episode.fault
        return
    assert (episode.ending, episode.reward) == (Ending.DONE, 1.0)
    assert [turn.messages[-1]["content"] for turn in episode.turns] == ["Hi.", "Done."]
    assert [(turn.base, turn.masked) for turn in episode.turns] == [(None, "relayed"), (0, "relayed")]
    rows, account = stitch_episode(episode, 1.0, max_tokens=1000)
    assert rows == () and account.is_balanced and account.sampled == 0
    assert read_episodes(tmp_path) == [episode]
