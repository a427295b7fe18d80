"""An agent that breaks after the model has spoken is scored: real processes that die, in the real sandbox."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest
from programs import Reply, call, encode_reply, play, rollout_in, sandbox_or_skip, stand_in

from coderepairrl import tokens
from coderepairrl.agents.command import Command
from coderepairrl.agents.scripted import Say, ScriptedAgent
from coderepairrl.engines import ScriptedEngine
from coderepairrl.errors import UsageError
from coderepairrl.gateway import PolicySource
from coderepairrl.gateway.session import request_seed
from coderepairrl.learn import build_batch
from coderepairrl.protocols import Agent, Sandbox, SandboxBackend
from coderepairrl.rollout.episodes import derive_seed
from coderepairrl.rollout.groups import Group, make_groups, plan_groups
from coderepairrl.rollout.supervise import SupervisedEngine
from coderepairrl.runs import logged_episodes
from coderepairrl.runs.log import read_records
from coderepairrl.stats.measures import summarise
from coderepairrl.types import AgentReport, Ending, Endpoint, Episode, Finish, Sampling, Task

REPAIR = call("bash", cmd="sed -i 's/a - b/a + b/' calc/add.py; echo REPAIRED")
MALFORMED = Reply("", (("bash", {"cmd": ["ls"]}),))
KILL, SEGFAULT = call("bash", cmd="kill -KILL $PPID"), call("bash", cmd="kill -SEGV $PPID")


async def test_a_program_that_the_policy_breaks_is_scored_on_what_stands(tmp_path: Path, miniature: Path) -> None:
    outcome = await play(Command(**stand_in()), [REPAIR, KILL], folder=tmp_path, model=miniature)
    episode = outcome.episode
    assert (episode.ending, episode.reason, episode.fault) == (Ending.CRASH, "SIGKILL", ""), outcome.describe()
    assert "ended with exit code 137: running sed" in episode.crash
    assert episode.reward == 1.0, "its repair stands"
    assert [len(turn.output) > 0 and not turn.masked for turn in episode.turns] == [True, True]
    [again] = logged_episodes(read_records(tmp_path / "log.jsonl"))
    assert again == episode


# -- a group


class Mixed:
    """Repairs in the first `good` attempts, and breaks the program in the others, each time in another way."""

    def __init__(self, codec: tokens.Codec, good: int, attempts: int) -> None:
        self.codec = codec
        first = [request_seed(derive_seed(0, "train", 1, "toy/add", at), 0) for at in range(attempts)]
        breaks = [MALFORMED, KILL, SEGFAULT]
        self.opening = {seed: REPAIR if at < good else breaks[at % 3] for at, seed in enumerate(first)}
        self.asked = 0
        self.before: Callable[[int], None] = lambda asked: None

    def __call__(self, ids: Sequence[int], sampling: Sampling, seed: int) -> list[int]:
        self.asked += 1
        self.before(self.asked)
        return encode_reply(self.codec, self.opening.get(seed, Reply("Repaired.")))


class Watched(SandboxBackend):
    """A backend whose open sandboxes can be killed from outside."""

    def __init__(self, backend: SandboxBackend) -> None:
        self.backend, self.name = backend, backend.name
        self.boxes: list[Any] = []

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Sandbox]:
        async with self.backend.open(task) as box:
            self.boxes.append(box)
            try:
                yield box
            finally:
                self.boxes.remove(box)


async def make_group(
    folder: Path, miniature: Path, good: int, count: int, spoil: Literal["", "sandbox", "engine"] = ""
) -> tuple[Group, list[Episode]]:
    """A group, and all episodes that its log has. `spoil`: what is killed at the third model call."""
    (folder / "repo" / "calc").mkdir(parents=True)
    (folder / "repo" / "calc" / "add.py").write_text("def add(a, b):\n    return a - b\n")
    codec = tokens.load_codec(miniature)
    mixed = Mixed(codec, good, count)
    backend = Watched(sandbox_or_skip(Command(**stand_in())))
    engines: list[ScriptedEngine] = []

    async def start() -> ScriptedEngine:
        engines.append(ScriptedEngine(mixed, context=1 << 16, chunk=64))
        return engines[-1]

    def kill(asked: int) -> None:
        if asked == 3 and spoil == "sandbox":
            signal.pidfd_send_signal(backend.boxes[0].guest.pidfd, signal.SIGKILL)
        elif asked == 3 and spoil == "engine":
            engines[-1].kill("out of memory")

    mixed.before = kill
    source = PolicySource(codec, SupervisedEngine(await start(), start, restarts=2))
    async with rollout_in(folder, source, Command(**stand_in()), backend, None) as (rollout, task):
        [group] = await make_groups(
            rollout, plan_groups("train", 1, [task], count, seed=0), sampling=Sampling(), retries=2
        )
    return group, list(logged_episodes(read_records(folder / "log.jsonl")))


async def test_three_repairs_beside_five_crashes_are_no_flat_group(tmp_path: Path, miniature: Path) -> None:
    """The policy learns not to break its agent: crashes are in the baseline, trained, measured, and not tried again."""
    group, logged = await make_group(tmp_path, miniature, good=3, count=8)
    assert [e.ending for e in group.episodes] == [Ending.DONE] * 3 + [Ending.CRASH] * 5, [e.fault for e in logged]
    assert {e.reason for e in group.episodes[3:]} == {"exit 1", "SIGKILL", "SIGSEGV"}
    assert (group.void, len(logged)) == (0, 8), "none is retried"
    made = build_batch(group.episodes, "zscore", max_tokens=1 << 16)
    [advantages] = made.groups.values()
    assert not advantages.flat
    assert advantages.mean == pytest.approx(3 / 8)
    assert all(value is not None and value > 0.5 for value in advantages.values[:3])
    assert all(value is not None and value < -0.5 for value in advantages.values[3:])
    assert {sample.episode_id for sample in made.samples if any(sample.trained)} == {e.id for e in group.episodes}
    assert made.account.dropped == {}
    summary = summarise(group.episodes)
    assert (summary.episodes, summary.void) == (8, 0)
    assert summary.values["reward"].value == pytest.approx(3 / 8)
    assert (summary.values["crash"].value, summary.values["limit"].value) == (5 / 8, 0.0)


@pytest.mark.parametrize("spoil", ["sandbox", "engine"])
async def test_a_killed_sandbox_or_engine_leaves_the_mean_as_it_is(
    tmp_path: Path, miniature: Path, spoil: Literal["sandbox", "engine"]
) -> None:
    """It is no crash, although the program dies of it after the model has replied."""
    group, logged = await make_group(tmp_path, miniature, good=2, count=4, spoil=spoil)
    assert [e.ending for e in group.episodes] == [Ending.DONE] * 2 + [Ending.CRASH] * 2
    [void] = [e for e in logged if e.ending is Ending.VOID]
    assert (void.reason, void.crash, void.scores) == (spoil, "", ())
    assert len(void.turns) > 0, "the model had replied"
    assert (group.void, len(logged)) == (1, 5)
    assert build_batch(group.episodes, "mean", max_tokens=1 << 16).groups[group.id].mean == pytest.approx(0.5)


# -- on the host


class Host(Agent):
    """An agent on the host that speaks with the model and then does as told."""

    name = "host"
    placement: Literal["host", "sandbox"] = "host"

    def __init__(self, end: Callable[[Sandbox, Endpoint], Awaitable[Any]], *, speaks: bool = True) -> None:
        self.end, self.speaks = end, speaks

    async def run(self, task: Task, sandbox: Sandbox, endpoint: Endpoint) -> AgentReport:
        if self.speaks:
            await ScriptedAgent([Say("hello")]).run(task, sandbox, endpoint)
        await sandbox.write("calc/add.py", b"def add(a, b):\n    return a + b\n")
        return await self.end(sandbox, endpoint)  # type: ignore[no-any-return]


def raises(error: BaseException) -> Callable[[Sandbox, Endpoint], Awaitable[None]]:
    async def end(sandbox: Sandbox, endpoint: Endpoint) -> None:
        raise error

    return end


async def is_refused(sandbox: Sandbox, endpoint: Endpoint) -> AgentReport:
    return await ScriptedAgent([Say("more")]).run(
        Task("t", "", "python", "", b""), sandbox, replace(endpoint, base_url=f"{endpoint.base_url}/nowhere")
    )


class Speechless(Exception):
    """An error whose text is one more error."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


BREAKS: dict[str, tuple[Callable[[Sandbox, Endpoint], Awaitable[Any]], str]] = {
    "exit": (raises(SystemExit(0)), "SystemExit"),
    "diff": (raises(UsageError("no unified diff")), "UsageError"),
    "surrogate": (raises(ValueError("\ud800 is not a character")), "ValueError"),
    "speechless": (raises(Speechless()), "Speechless"),
    "endless": (raises(ValueError("x" * 5_000_000)), "ValueError"),
    "refused": (is_refused, "HTTP 404"),
}


@pytest.mark.parametrize("how", BREAKS)
async def test_an_agent_on_the_host_that_breaks_is_scored(tmp_path: Path, miniature: Path, how: str) -> None:
    end, reason = BREAKS[how]
    episode = (await play(Host(end), [Reply("hi")], folder=tmp_path, model=miniature)).episode
    assert (episode.ending, episode.reason, episode.reward) == (Ending.CRASH, reason, 1.0), episode.fault
    assert len(episode.crash) < 50_000
    [again] = logged_episodes(read_records(tmp_path / "log.jsonl"))
    assert again == episode


@pytest.mark.parametrize("heard", [True, False])
async def test_a_reply_that_is_left_half_read_counts_once_something_was_said(
    tmp_path: Path, miniature: Path, heard: bool
) -> None:
    """A client may break on the first words of a stream, which are the policy's; not on none."""

    async def reads(sandbox: Sandbox, endpoint: Endpoint) -> None:
        body = {"model": endpoint.model, "messages": [{"role": "user", "content": "?"}], "stream": True}
        async with (
            asyncio.timeout(None if heard else 0.5),
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {endpoint.api_key}"}) as http,
            http.post(f"{endpoint.base_url}/chat/completions", json=body) as response,
        ):
            async for line in response.content:
                if b"word" in line:
                    raise ValueError("cannot read this")

    agent, delay = Host(reads, speaks=False), 0.2 if heard else 60.0
    outcome = await play(agent, [Reply("word " * 200)], folder=tmp_path, model=miniature, delay=delay)
    episode = outcome.episode
    [turn] = episode.turns
    assert (turn.finish, turn.sampled > 0) == (Finish.ABORT, heard)
    assert (episode.ending, episode.reason) == ((Ending.CRASH, "ValueError") if heard else (Ending.VOID, "agent"))
