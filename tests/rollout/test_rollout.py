"""Groups of episodes with a real gateway, a scripted agent and engine, and faults of each part."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollouts import open_rollout, read_episodes

from coderepairrl import rewards, sandbox, tokens
from coderepairrl.agents.chat import Chat
from coderepairrl.agents.scripted import Say, ScriptedAgent, Write
from coderepairrl.engines import ScriptedEngine
from coderepairrl.errors import EngineFault, GatewayFault, HealthGateError, RewardFault
from coderepairrl.gateway import PolicySource
from coderepairrl.learn import build_batch
from coderepairrl.protocols import Agent, Reward, Sandbox, SandboxBackend
from coderepairrl.rewards.simple import LengthPenalty
from coderepairrl.rollout.curriculum import Curriculum, WeightedTasks
from coderepairrl.rollout.episodes import AttemptSettings, Rollout, derive_seed
from coderepairrl.rollout.groups import (
    Group,
    check_health,
    list_episodes,
    make_groups,
    plan_due_groups,
    plan_groups,
)
from coderepairrl.rollout.supervise import SupervisedEngine
from coderepairrl.sandbox.fake import ScriptedBackend
from coderepairrl.types import AgentReport, Ending, Endpoint, Episode, Limits, Sampling, Score, Task, VerifiedRepair

TASKS = [Task(f"toy/{i}", "add() subtracts.", "python", "dir:unused", b"") for i in range(5)]


class Breaking(Agent):
    """An agent that says something and calls `breaks[n]` on its n-th run."""

    name, placement = "breaking", "host"

    def __init__(self, breaks: dict[int, Callable[[Sandbox], None]]) -> None:
        self.breaks = breaks
        self.runs = 0

    async def run(self, task: Task, box: Sandbox, endpoint: Endpoint) -> AgentReport:
        self.runs += 1
        number = self.runs
        await ScriptedAgent([Say("hello")]).run(task, box, endpoint)
        if number in self.breaks:
            self.breaks[number](box)
        await box.write("a.py", b"x = 1\n")
        return AgentReport("submitted")


class Titling(Agent):
    """An agent that asks for a title between two steps, which it declares as not trained."""

    name, placement, side_calls = "titling", "host", "mask"

    async def run(self, task: Task, box: Sandbox, endpoint: Endpoint) -> AgentReport:
        for text in ("You repair.", "Generate a title.", "You repair."):
            messages = [{"role": "system", "content": text}, {"role": "user", "content": task.prompt}]
            async with Chat(endpoint, {}) as chat:
                await chat.complete(messages, [], 8, 5.0)
        return AgentReport("submitted")


Make = Callable[..., Awaitable[Rollout]]


@pytest.fixture
async def make(miniature: Path, tmp_path: Path) -> AsyncIterator[Make]:
    """Function that opens a rollout of an agent."""

    def reply(ids: object, sampling: Sampling, seed: int) -> list[int]:
        return [65] * (1 + seed % 5) + list(sampling.stop_ids[:1])

    async with AsyncExitStack() as stack:

        async def open_one(
            agent: Agent, backend: Any = None, rewards: Any = None, folder: Path = tmp_path, side_calls: Any = None
        ) -> Rollout:
            source = PolicySource(tokens.load_codec(miniature), ScriptedEngine(reply))
            limits = Limits(calls=4, tokens=2000, seconds=5.0, turn_tokens=16)
            judges = {"train": rewards or [(LengthPenalty(), 1.0)]}
            terms = AttemptSettings(agent, backend or ScriptedBackend({"a.py": b"x = 0\n"}), limits, judges, side_calls)
            return await stack.enter_async_context(open_rollout(source, folder, terms, concurrency=3))

        yield open_one


@pytest.mark.parametrize(("side_calls", "side"), [(None, (1,)), ("train", ())])
async def test_side_calls_are_trained_only_if_the_setting_says_so(
    make: Make, tmp_path: Path, side_calls: Any, side: tuple[int, ...]
) -> None:
    """The setting overrides the agent's; the log names them."""
    [group] = await run_groups(await make(Titling(), side_calls=side_calls), TASKS[:1])
    assert [episode.side for episode in group.episodes] == [side] * 3
    account = build_batch(group.episodes, max_tokens=2000).account
    lost = sum(episode.turns[index].sampled for episode in group.episodes for index in side)
    assert account.is_balanced and account.dropped.get("side", 0) == lost == account.sampled - account.trained
    assert {each.id: each for each in read_episodes(tmp_path)} == {each.id: each for each in group.episodes}


async def run_groups(rollout: Rollout, tasks: list[Task], retries: int = 2, **kwargs: Any) -> list[Group]:
    chosen = plan_groups("train", 1, tasks, 3, seed=0)
    return await make_groups(rollout, chosen, sampling=Sampling(), retries=retries, **kwargs)


def raise_fault(error: Exception) -> Callable[[Sandbox], None]:
    def raise_it(box: Sandbox) -> None:
        raise error

    return raise_it


def kill(box: Any) -> None:
    box.kill()


async def test_an_episode_whose_sandbox_dies_is_void_and_retried(make: Make, tmp_path: Path) -> None:
    """Property 5: the group's rewards are those of the group without the fault."""
    (tmp_path / "calm").mkdir()
    calm = await run_groups(await make(Breaking({}), folder=tmp_path / "calm"), TASKS[:2])
    faulty = await run_groups(await make(Breaking({2: kill, 4: kill})), TASKS[:2])
    assert [group.void for group in calm] == [0, 0]
    assert sum(group.void for group in faulty) == 2
    assert all(episode.ending is Ending.DONE for episode in list_episodes(faulty))
    assert [e.reward for e in list_episodes(calm)] == [e.reward for e in list_episodes(faulty)]
    logged = read_episodes(tmp_path)
    void = [episode for episode in logged if episode.ending is Ending.VOID]
    assert {episode.reason for episode in void} == {"sandbox"}
    assert all(not episode.scores and episode.turns for episode in void)
    assert len({episode.id for episode in logged}) == len(logged) == 8


async def test_a_lasting_fault_does_not_change_the_baseline(make: Make) -> None:
    rollout = await make(Breaking({number: raise_fault(GatewayFault("broken")) for number in (1, 4, 5)}))
    rollout._room._value = 1  # one at a time
    [group] = await run_groups(rollout, TASKS[:1], retries=0)
    endings = [episode.ending for episode in group.episodes]
    assert endings.count(Ending.VOID) == group.void == 1
    valid = [episode for episode in group.episodes if episode.ending is not Ending.VOID]
    made = build_batch(group.episodes, "mean", max_tokens=2000)
    [advantages] = made.groups.values()
    assert advantages.mean == pytest.approx(sum(e.reward for e in valid) / len(valid))
    assert made.account.is_balanced
    check_health([group])
    void = next(episode for episode in group.episodes if episode.ending is Ending.VOID)
    with pytest.raises(HealthGateError, match="2 of 3 episodes are void: GatewayFault: broken"):
        check_health([replace(group, episodes=(*valid[:1], void, void))])


async def test_a_reward_that_fails_voids_the_episode(make: Make) -> None:
    class Broken(Reward):
        name = "broken"

        async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
            raise RewardFault("its sandbox died")

    [group] = await run_groups(await make(Breaking({}), rewards=[(Broken(), 1.0)]), TASKS[:1], retries=0)
    assert {(e.ending, e.reason) for e in group.episodes} == {(Ending.VOID, "reward")}


async def test_a_real_sandbox_and_the_thesis_reward(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "repo"
    folder.mkdir(mode=0o755)
    tmp_path.chmod(0o755)
    (folder / "a.py").write_text("x = 0\n")
    agent = ScriptedAgent([Say("hello"), Write("a.py", "x = 1\n")])
    oracle = b"diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-x = 0\n+x = 1\n"
    task = replace(TASKS[0], workspace=f"dir:{folder}", reference=oracle)
    backend = sandbox.make_backend(sandbox.choose_backend().name)
    rollout = await make(agent, backend=backend, rewards=rewards.make_rewards({"patch_lines": 1.0}))
    [group] = await run_groups(rollout, [task])
    assert [episode.reward for episode in group.episodes] == [1.0, 1.0, 1.0]


ALL = Curriculum(sources=(WeightedTasks(TASKS),), per_step=2, seed=3)


def test_each_source_has_its_share_and_its_epochs() -> None:
    """Of all tasks so far each source has its share, up to one."""
    few, many = TASKS[:2], TASKS[2:]
    mixed = Curriculum(sources=(WeightedTasks(few, 1.0), WeightedTasks(many, 3.0)), per_step=3, seed=3)
    flat = [task.id for step in range(1, 9) for task in mixed.schedule(step)]
    for length in range(1, len(flat) + 1):
        had = sum(name in {task.id for task in few} for name in flat[:length])
        assert abs(had - length / 4) <= 1
    own = [name for name in flat if name in {task.id for task in many}]
    for epoch in range(len(own) // len(many)):
        assert Counter(own[3 * epoch : 3 * epoch + 3]) == Counter(task.id for task in many)


def test_epochs_and_seeds_have_different_orders() -> None:
    epochs = replace(ALL, per_step=5)
    assert epochs.schedule(1) != epochs.schedule(2)
    assert replace(epochs, seed=4).schedule(1) != epochs.schedule(1)


def test_seeds_are_the_same_on_every_machine() -> None:
    assert derive_seed(0, "train", 1, "toy/0", 0) == 8794020450185706182
    assert derive_seed(0, "a", "bc") != derive_seed(0, "ab", "c")
    assert derive_seed(1) < 1 << 63


CHECKSUM = "50e721e49c013f00c62cf59f2163542a9d8df02464efeb615d31051b0fddc326"


def weights_in(folder: Path) -> Path:
    """A file whose checksum is `CHECKSUM`."""
    (folder / "weights").write_bytes(b"w")
    return folder / "weights"


async def test_a_dead_engine_is_replaced_with_the_current_weights_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, made = weights_in(tmp_path), list[ScriptedEngine]()
    loads: list[int] = []
    stillborn = False
    load = ScriptedEngine.load

    async def counted(engine: ScriptedEngine, path: Path, version: int, checksum: str) -> int:
        loads.append(await load(engine, path, version, checksum))
        return version

    async def start() -> ScriptedEngine:
        made.append(ScriptedEngine(lambda ids, sampling, seed: [65, 66]))
        if stillborn:
            made[-1].kill("stillborn")
        return made[-1]

    async def ask() -> list[int]:
        return [chunk.version async for chunk in engine.generate([1], Sampling(), 0)]

    monkeypatch.setattr(ScriptedEngine, "load", counted)
    engine = SupervisedEngine(await start(), start, restarts=2)
    await engine.load(weights, 3, CHECKSUM)
    made[0].kill("killed")
    with pytest.raises(EngineFault, match="killed"):
        await ask()
    assert set(await ask()) == {3} and len(made) == 2, "the new one serves the weights of the old one"
    for version in (4, 5):  # a request or the load itself notices the death
        made[-1].kill("before a load")
        if version == 4:
            with pytest.raises(EngineFault, match="before a load"):
                await ask()
        assert await engine.load(weights, version, CHECKSUM) == version and set(await ask()) == {version}
    assert loads == [3, 3, 4, 5], "old weights may be gone by then"
    stillborn = True
    made[-1].kill("again")
    for message in ("again", "stillborn", "stillborn", "died 3 times in a row"):
        with pytest.raises(EngineFault, match=message):
            await ask()
    assert len(made) == 6, "restarts end"


async def test_weights_that_a_restarted_engine_refuses_cost_no_restart(tmp_path: Path) -> None:
    weights, made = weights_in(tmp_path), list[ScriptedEngine]()

    async def start() -> ScriptedEngine:
        made.append(ScriptedEngine(lambda ids, sampling, seed: [65]))
        return made[-1]

    engine = SupervisedEngine(await start(), start, restarts=1)
    await engine.load(weights, 1, CHECKSUM)
    made[0].kill("killed")
    for version in (2, 3):
        with pytest.raises(EngineFault, match="SHA-256"):
            await engine.load(weights, version, "0" * 64)
    assert [chunk.version async for chunk in engine.generate([1], Sampling(), 0)] == [1], "what was served before"
    assert await engine.load(weights, 4, CHECKSUM) == made[1].version == 4
    assert len(made) == 2 and (await engine.health())["restarts"] == 1


async def test_only_rewards_see_further_references(make: Make, tmp_path: Path) -> None:
    repair = VerifiedRepair(b"SECRET", "train-00001-000-00", 1)
    shown: list[Task] = []
    judged: dict[str, list[tuple[VerifiedRepair, ...]]] = {}

    class Watching(ScriptedBackend):
        def open(self, task: Task) -> Any:
            shown.append(task)
            return super().open(task)

    class Asking(ScriptedAgent):
        async def run(self, task: Task, sandbox: Sandbox, endpoint: Endpoint) -> AgentReport:
            shown.append(task)
            return await super().run(task, sandbox, endpoint)

    class Judge(LengthPenalty):
        async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
            judged.setdefault(task.id, []).append(task.verified)
            return await super().__call__(task, episode, sandbox)

    rollout = await make(Asking([Say("hello")]), backend=Watching({"a.py": b"x = 0\n"}), rewards=[(Judge(), 1.0)])
    await run_groups(rollout, TASKS[:2], verified={TASKS[0].id: (repair,)})
    assert len(shown) == 12 and all(task in TASKS for task in shown)
    assert judged == {TASKS[0].id: [(repair,)] * 3, TASKS[1].id: [()] * 3}
    assert b"SECRET" not in (tmp_path / "log.jsonl").read_bytes()


@given(st.data())
def test_groups_that_are_consumed_in_any_order_come_once(data: st.DataObject) -> None:
    straight = [slot for step in range(1, 13) for slot in plan_groups("train", step, ALL.schedule(step), 4, 3)]
    consumed: set[str] = set()
    for _ in range(8):
        ahead = data.draw(st.integers(0, 4))
        begun = [slot.group for slot in straight if slot.group not in consumed][: 2 + ahead]
        assert plan_due_groups(ALL, 4, 2, consumed) == [slot for slot in straight if slot.group in begun[:2]]
        consumed.update(data.draw(st.permutations(begun))[:2])
    left = [slot for slot in straight if slot.group not in consumed]
    assert plan_due_groups(ALL, 4, 2, consumed) == left[:2]
