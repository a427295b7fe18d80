"""Evaluation and collection with somebody else's model: the same rollout before the same server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from coderepairrl.agents.scripted import Answer, Say, ScriptedAgent, ScriptedEndpoint, Write
from coderepairrl.gateway import Gateway, Remote
from coderepairrl.learn.stitch import stitch
from coderepairrl.rewards import ScriptedReward
from coderepairrl.rollout import LocalExecutor, Rollout, Terms, Ticket
from coderepairrl.runs import Log, logged_episodes
from coderepairrl.runs.log import read_records
from coderepairrl.sandbox.fake import ScriptedBackend
from coderepairrl.types import Ending, Limits, Sampling, Task

TASK = Task("toy/one", "repair one", "python", "dir:x", b"")
TICKET = Ticket(TASK, "eval", 0, "eval-one", 0, 7, Sampling(temperature=0.0))


@asynccontextmanager
async def rollout(folder: Path, *answers: Answer) -> AsyncIterator[Rollout]:
    log = Log(folder / "log.jsonl")
    async with ScriptedEndpoint(answers) as model, Remote(model.endpoint().base_url, model="m", attempts=1) as remote:
        server = Gateway(
            remote, sampling=Sampling(), on_turn=lambda episode, turn: log.append("turn", episode=episode, turn=turn)
        )
        await server.start()
        yield Rollout(
            executor=LocalExecutor(
                server,
                {
                    "": Terms(
                        ScriptedAgent([Say("Hello."), Write("a.py", "x = 1\n"), Say("Bye.")]),
                        ScriptedBackend(),
                        Limits(),
                        {"eval": [(ScriptedReward(default=0.5), 1.0)]},
                    )
                },
            ),
            log=log,
            concurrency=1,
        )
        await server.stop()
    log.close()


async def test_a_remote_models_episode_is_scored_and_never_trained(tmp_path: Path) -> None:
    async with rollout(tmp_path, Answer("Hi."), Answer("Done.")) as made:
        episode = await made.run(TICKET)
    assert (episode.ending, episode.reward) == (Ending.DONE, 0.5)
    assert [turn.messages[-1]["content"] for turn in episode.turns] == ["Hi.", "Done."]
    assert [(turn.base, turn.masked) for turn in episode.turns] == [(None, "relayed"), (0, "relayed")]
    rows, account = stitch(episode, 1.0, max_tokens=1000)
    assert rows == () and account.balanced and account.sampled == 0
    assert list(logged_episodes(read_records(tmp_path / "log.jsonl"))) == [episode]


async def test_a_remote_that_refuses_voids_the_episode(tmp_path: Path) -> None:
    async with rollout(tmp_path, Answer("Hi."), Answer(status=401)) as made:
        episode = await made.run(TICKET)
    assert (episode.ending, episode.reason, episode.scores) == (Ending.VOID, "remote", ())
    assert "answered 401" in episode.fault
