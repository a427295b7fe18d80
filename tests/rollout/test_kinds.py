"""Tasks of several kinds in one rollout: each is attempted and judged by the terms of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from coderepairrl import rewards, tokens
from coderepairrl.agents.scripted import Say, ScriptedAgent, Shell
from coderepairrl.engines import ScriptedEngine
from coderepairrl.gateway import Gateway, PolicySource
from coderepairrl.rollout import LocalExecutor, Rollout, Terms, collect, slots
from coderepairrl.runs import Log
from coderepairrl.sandbox.local import UnsafeLocal
from coderepairrl.types import Checks, Command, Limits, Sampling, Task

REPLY = "<answer>CWE-79</answer>"
RIGHT, WRONG = (Task(f"cwe/{name}", "which?", "c", "", b"", kind="label", answer=name) for name in ("CWE-79", "CWE-20"))


@asynccontextmanager
async def rollout(miniature: Path, folder: Path, kinds: Mapping[str, Terms]) -> AsyncIterator[Rollout]:
    codec = tokens.load_codec(miniature)
    engine = ScriptedEngine(lambda ids, sampling, seed: [*codec.encode(REPLY), *codec.stop_ids[:1]])
    log = Log(folder / "log.jsonl")
    gateway = Gateway(
        PolicySource(codec, engine),
        sampling=Sampling(),
        on_turn=lambda episode, turn: log.append("turn", episode=episode, turn=turn),
    )
    await gateway.start()
    try:
        yield Rollout(executor=LocalExecutor(gateway, kinds), log=log, concurrency=4)
    finally:
        await gateway.stop()
        log.close()


async def test_a_workspace_is_judged_as_it_stands(miniature: Path, tmp_path: Path) -> None:
    """An empty folder is in no diff, and counts all the same. What the checks compare with is put back first, and no
    process of the attempt lives on."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "expected").write_text("done\n")
    command = Command(("sh", "-c", "test -d built && cmp word expected && ! pgrep -f 'slee[p] 7654'"))
    task = Task("build/1", "build it", "c", f"dir:{home}", b"", Checks((command,), {"expected": "done\n"}))
    scripts = (
        ("mkdir built; echo done > word; sleep 7654 &", 1.0),
        ("mkdir built; echo no | tee word > expected", 0.0),
        ("echo done > word", 0.0),
    )
    for at, (script, value) in enumerate(scripts):
        agent = ScriptedAgent([Say("hello"), Shell(script), Say("more")])
        terms = Terms(agent, UnsafeLocal(), Limits(), {"train": rewards.make_rewards("state_tests")})
        folder = tmp_path / str(at)
        folder.mkdir()
        async with rollout(miniature, folder, {"": terms}) as made:
            [group] = await collect(made, slots("train", 1, [task], 1, seed=0), sampling=Sampling(), retries=0)
        [episode] = group.episodes
        assert {score.name: score.value for score in episode.scores} == {"state_tests": value}, episode.fault
        assert b"word" in episode.patch and b"built" not in episode.patch
