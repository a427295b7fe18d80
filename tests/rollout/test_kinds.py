"""Tasks of several kinds in one rollout: each is attempted and judged by the terms of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path

from coderepairrl import rewards, tokens
from coderepairrl.agents.direct import Direct
from coderepairrl.agents.scripted import Say, ScriptedAgent, Shell, Write
from coderepairrl.engines import ScriptedEngine
from coderepairrl.gateway import Gateway, PolicySource
from coderepairrl.learn import Account, batch
from coderepairrl.learn.account import accounts_by_kind, run_account
from coderepairrl.protocols import SandboxBackend
from coderepairrl.rewards import ScriptedReward
from coderepairrl.rollout import LocalExecutor, Rollout, Terms, collect, slots
from coderepairrl.runs import Log, logged_episodes
from coderepairrl.runs.log import read
from coderepairrl.sandbox.fake import ScriptedBackend
from coderepairrl.sandbox.local import UnsafeLocal
from coderepairrl.types import Checks, Command, Ending, Limits, Sampling, Task

REPLY = "<answer>CWE-79</answer>"
REPAIR = Task("toy/one", "repair it", "python", "dir:x", b"", repository="o/r", difficulty=0.5)
RIGHT, WRONG = (Task(f"cwe/{name}", "which?", "c", "", b"", kind="label", answer=name) for name in ("CWE-79", "CWE-20"))


@asynccontextmanager
async def rollout(miniature: Path, folder: Path, kinds: Mapping[str, Terms]) -> AsyncIterator[Rollout]:
    codec = tokens.load(miniature)
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


class Closed(SandboxBackend):
    """A backend that nobody may open."""

    name = "closed"

    def open(self, task: Task) -> None:
        raise AssertionError(f"no sandbox is needed for {task.id}")


async def test_a_label_and_a_repair_each_by_their_terms(miniature: Path, tmp_path: Path) -> None:
    """A question has no workspace, and none is opened: its answer is judged, and not a patch."""
    agent = ScriptedAgent([Say("hello"), Write("a.py", "x\n"), Say("more")])
    kinds = {
        "": Terms(agent, ScriptedBackend(), Limits(), {"train": [(ScriptedReward(default=0.5), 1.0)]}),
        "label": Terms(
            Direct(system=""),
            Closed(),
            Limits(tokens=200),
            {"train": rewards.make("classification")},  # type: ignore[arg-type]
        ),
    }
    async with rollout(miniature, tmp_path, kinds) as made:
        chosen = slots("train", 1, [REPAIR, RIGHT, WRONG], 2, seed=0)
        groups = await collect(made, chosen, sampling=Sampling(), retries=0)
    repair, right, wrong = (group.episodes for group in groups)
    assert [[score.name for score in e.scores] for e in (repair[0], right[0])] == [["scripted"], ["classification"]]
    assert [e.reward for e in (*repair, *right, *wrong)] == [0.5, 0.5, 1.0, 1.0, 0.0, 0.0]
    assert all(e.ending is Ending.DONE and (not e.patch) == (e.kind == "label") for e in (*repair, *right, *wrong))
    assert [len(e.turns) for e in (repair[0], right[0])] == [2, 1]
    assert (repair[0].repository, repair[0].difficulty, right[0].language) == ("o/r", 0.5, "c")
    assert {e.id: e.kind for e in logged_episodes(read(tmp_path / "log.jsonl"))} == {
        e.id: e.kind for group in groups for e in group.episodes
    }

    both = batch([e for group in groups for e in group.episodes], max_tokens=2000)
    assert both.kinds.keys() == {"", "label"} and all(account.balanced for account in both.kinds.values())
    assert both.account == sum(both.kinds.values(), Account()) and both.account.balanced
    step = {"type": "step", "account": asdict(both.account), "kinds": {k: asdict(a) for k, a in both.kinds.items()}}
    records = list(read(tmp_path / "log.jsonl"))
    found = accounts_by_kind([*records, {**step, "episodes": [e.id for g in groups for e in g.episodes]}])
    assert found == dict(both.kinds), "every token that was sampled is in a step"
    assert run_account(records).dropped == {"pending": both.account.sampled}


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
        terms = Terms(agent, UnsafeLocal(), Limits(), {"train": rewards.make("state_tests")})
        folder = tmp_path / str(at)
        folder.mkdir()
        async with rollout(miniature, folder, {"": terms}) as made:
            [group] = await collect(made, slots("train", 1, [task], 1, seed=0), sampling=Sampling(), retries=0)
        [episode] = group.episodes
        assert {score.name: score.value for score in episode.scores} == {"state_tests": value}, episode.fault
        assert b"word" in episode.patch and b"built" not in episode.patch
