"""The asynchronous loop: real rollout, gateway and log, a scripted engine, and weights that are a digest of all
training data."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from coderepairrl import tokens
from coderepairrl.agents.scripted import Say, ScriptedAgent
from coderepairrl.config import Config, to_toml
from coderepairrl.engines import ScriptedEngine
from coderepairrl.errors import HealthGateError, LearnerFault, RunError
from coderepairrl.gateway import Gateway, PolicySource
from coderepairrl.learn import Batch
from coderepairrl.learn.account import count_run_tokens
from coderepairrl.protocols import Reward, SandboxBackend
from coderepairrl.rollout.curriculum import Curriculum, WeightedTasks
from coderepairrl.rollout.episodes import AttemptSettings, Rollout
from coderepairrl.rollout.local import LocalExecutor
from coderepairrl.runs import Log, RunFolder
from coderepairrl.sandbox.fake import ScriptedBackend
from coderepairrl.stages.history import History, read_consumed_episodes, read_history
from coderepairrl.stages.parts import TrainingContext
from coderepairrl.stages.policy import LivePolicy, make_batch
from coderepairrl.stages.progress import Progress
from coderepairrl.stages.train import train
from coderepairrl.types import Chunk, Episode, Limits, Sampling, Score, Task, Turn

TASKS_PER_STEP, ATTEMPTS, STEPS = 2, 2, 5


class Engine(ScriptedEngine):
    """Replies with random letters by the seed, in chunks at the random speed of `pace`."""

    def __init__(self, pace: random.Random) -> None:
        super().__init__(self._letters, chunk=3)
        self.pace = pace
        self.emitted: dict[tuple[int, ...], list[int]] = {}
        """The versions of a reply's tokens, as they were sampled."""
        self.half_way: set[object] = set()
        self.sampled = 0

    @staticmethod
    def _letters(ids: Sequence[int], sampling: Sampling, seed: int) -> list[int]:
        chance = random.Random(seed)
        return [chance.randrange(65, 91) for _ in range(chance.randrange(6, 24))] + list(sampling.stop_ids[:1])

    async def generate(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[Chunk, None]:
        me, said, versions = object(), list[int](), list[int]()
        try:
            async for chunk in super().generate(ids, sampling, seed):
                said += chunk.ids
                self.sampled += len(chunk.ids)
                versions += [chunk.version] * len(chunk.ids)
                self.emitted[tuple(said)] = versions
                self.half_way.add(me)
                yield chunk
                for _ in range(self.pace.randrange(4)):
                    await asyncio.sleep(0.001)
        finally:
            self.half_way.discard(me)


class Loudness(Reward):
    """Almost always different for two replies."""

    name = "loudness"

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        said = episode.turns[0].output.ids if episode.turns else ()
        return Score(self.name, sum(said) % 97 / 97)


class Policy:
    """Learns for a random time, then serves the new version."""

    def __init__(self, config: Config, folder: RunFolder, engine: Engine, pace: random.Random) -> None:
        self.config, self.folder, self.engine, self.pace = config, folder, engine, pace
        self.version, self.state, self.fault = 0, "initial", False
        self.meanwhile = 0
        """Tokens that were sampled while it learned."""

    def _learn(self, made: Batch) -> None:
        self.state = hashlib.sha256(f"{self.state} {made.samples!r} {made.episodes}".encode()).hexdigest()
        self.version += 1

    async def restore(self, history: History) -> None:
        """Replay the log, which must give the logged weights."""
        self.version, self.state = 0, "initial"
        for step, episodes in read_consumed_episodes(self.folder, history.steps).items():
            if (made := make_batch(episodes, self.config)).samples:
                self._learn(made)
            assert history.steps[step - 1]["checksum"] == self.state
        self.engine.version = self.version

    async def improve(self, made: Batch, history: History) -> tuple[dict[str, Any], str]:
        before = self.engine.sampled
        for _ in range(self.pace.randrange(12)):
            await asyncio.sleep(0.001)
        if self.fault:
            raise LearnerFault("the learner died")
        for _ in range(200):  # until a reply is half of one version, if there is one
            if self.engine.half_way:
                break
            await asyncio.sleep(0)
        self.meanwhile += self.engine.sampled - before
        if made.samples:
            self._learn(made)
            self.engine.version = self.version
        return {"grad_norm": 0.1}, self.state

    async def save(self, step: int) -> Path:
        return Path("nowhere")


@contextlib.asynccontextmanager
async def make_parts(folder: RunFolder, model: Path, staleness: int, seed: int) -> AsyncIterator[TrainingContext]:
    run = {"name": folder.path.name, "dir": str(folder.path.parent), "steps": STEPS, "retries": 1}
    rollouts = {"tasks_per_step": TASKS_PER_STEP, "group_size": ATTEMPTS, "max_staleness": staleness}
    evaluation = {"before": False, "after": False}
    config = Config.model_validate({"run": run, "rollout": rollouts, "eval": evaluation})
    if not folder.path.exists():
        folder.create(to_toml(config), {"config": config.model_dump(mode="json")})
    log, pace = folder.writer(), random.Random(seed)
    engine = Engine(pace)
    gateway = Gateway(PolicySource(tokens.load_codec(model), engine), sampling=Sampling(), on_turn=log.turn)
    await gateway.start()
    terms = AttemptSettings(
        cast(Any, ScriptedAgent([Say("hello")])),
        ScriptedBackend({"a.py": b"x = 0\n"}),
        Limits(calls=4, tokens=2000, seconds=60.0, turn_tokens=32),
        {"train": [(Loudness(), 1.0)]},
    )
    tasks = tuple(Task(f"toy/{i}", "add() subtracts.", "python", "dir:unused", b"") for i in range(7))
    try:
        yield TrainingContext(
            config=config,
            folder=folder,
            log=log,
            eval_tasks={},
            rollout=Rollout(executor=LocalExecutor(gateway, {"": terms}), log=log, concurrency=5),
            progress=Progress(STEPS, quiet=True),
            curriculum=Curriculum(sources=(WeightedTasks(tasks),), per_step=TASKS_PER_STEP, seed=0),
            policy=cast(LivePolicy, Policy(config, folder, engine, pace)),
        )
    finally:
        await gateway.stop()
        log.close()


def versions(turn: Turn) -> list[int]:
    return [span.version for span in turn.versions for _ in range(span.start, span.end)]


def count_sampled_tokens(folder: RunFolder, staleness: int) -> list[tuple[float, float]]:
    """After each step, the tokens by the logged rates so far, and those of the logged turns."""
    found, said, sampled = list[tuple[float, float]](), 0.0, 0
    for record in folder.records():
        if record["type"] == "turn":
            sampled += len(record["turn"]["output"]["ids"]) + len(record["turn"]["tail"]["ids"])
        elif record["type"] == "step":
            metrics = record["metrics"]
            seconds = metrics["rollout_seconds"] + (metrics["learn_seconds"] if staleness else 0.0)
            said += metrics["tokens_per_second"] * seconds
            found.append((said, sampled))
    return found


def check_finished_run(folder: RunFolder, staleness: int) -> list[Episode]:
    """Check that a finished run trained every attempt once, on recent tokens, and accounts for all tokens."""
    steps = read_history(folder).steps
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    names = [name.split("-retry")[0] for step in steps for name in step["episodes"]]
    assert len(set(names)) == len(names) == STEPS * TASKS_PER_STEP * ATTEMPTS
    assert count_run_tokens(folder.records()).is_balanced
    trained: list[Episode] = []
    before = 0
    for step, episodes in zip(steps, read_consumed_episodes(folder, steps).values(), strict=True):
        turns = [turn for episode in episodes for turn in episode.turns]
        assert all(before - staleness <= version <= before for turn in turns for version in versions(turn))
        trained += episodes
        before = step["version"]
    return trained


@pytest.mark.parametrize("staleness", [0, 1, 3])
async def test_engine_and_learner_work_at_once_within_the_bound(
    staleness: int, miniature: Path, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    async with make_parts(folder, miniature, staleness, seed=staleness) as parts:
        policy = cast(Policy, parts.policy)
        engine = policy.engine
        await train(parts, read_history(folder))
    episodes = check_finished_run(folder, staleness)
    assert (policy.meanwhile > 0) == (staleness > 0)
    # turns that end while a step is written down are of the next; what is consumed would be a quarter of it at first
    assert all(said == pytest.approx(logged, rel=0.3) for said, logged in count_sampled_tokens(folder, staleness))
    turns = [turn for episode in episodes for turn in episode.turns]
    assert all(versions(turn) == engine.emitted[turn.output.ids] for turn in turns)
    assert any(len(turn.versions) > 1 for turn in turns) == (staleness > 0), "replies are carried over a weight change"
    rows = [row for episode in episodes for row in make_batch([episode], parts.config).samples]
    assert all(set(row.versions) - {-1} for row in rows)
    assert [step["metrics"].get("ahead") for step in read_history(folder).steps] == (
        [min(staleness, STEPS - step) * TASKS_PER_STEP for step in range(1, STEPS + 1)] if staleness else [None] * STEPS
    )


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("what", ["interrupt", "engine", "learner", "disk"])
async def test_whatever_stops_it_nothing_is_lost_or_trained_twice(
    what: str, seed: int, miniature: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, chance = RunFolder(tmp_path / "run"), random.Random(f"{what} {seed}")
    errors = {"interrupt": asyncio.CancelledError, "engine": HealthGateError, "learner": LearnerFault, "disk": RunError}
    append, moment, count = Log.append, chance.randrange(15, 40), 0

    async with make_parts(folder, miniature, 2, seed) as parts:
        running = asyncio.create_task(train(parts, read_history(folder)))

        def strike(log: Log, type: str, **fields: Any) -> None:
            nonlocal count
            count += 1
            if count == moment and what == "interrupt":
                running.cancel()
            elif count == moment and what == "engine":
                cast(Policy, parts.policy).engine.kill()
            elif count == moment and what == "learner":
                cast(Policy, parts.policy).fault = True
            elif count >= moment and what == "disk":
                raise RunError("no space left on device")
            append(log, type, **fields)

        with monkeypatch.context() as patched:
            patched.setattr(Log, "append", strike)
            with pytest.raises(errors[what]):
                await running
            left = [task for task in asyncio.all_tasks() if "make_group" in repr(task) or "attempt" in repr(task)]
            assert not left
    stopped = read_history(folder).step
    assert stopped < STEPS

    async with make_parts(folder, miniature, 2, seed) as parts:
        await train(parts, read_history(folder))
    check_finished_run(folder, 2)


async def test_a_lower_bound_gives_up_what_is_too_old_and_attempts_it_again(miniature: Path, tmp_path: Path) -> None:
    """After a resume, groups begun under the old bound are accounted for and attempted again."""
    folder = RunFolder(tmp_path / "run")
    async with make_parts(folder, miniature, 3, seed=0) as parts:
        policy = cast(Policy, parts.policy)
        improve = policy.improve

        async def last(made: Batch, history: History) -> tuple[dict[str, Any], str]:
            if history.step == 2:
                raise LearnerFault("the learner died")
            return await improve(made, history)

        policy.improve = last  # type: ignore[method-assign]
        with pytest.raises(LearnerFault):
            await train(parts, read_history(folder))
    begun = {name: group.version for name, group in read_history(folder).begun.items()}
    async with make_parts(folder, miniature, 0, seed=1) as parts:
        await train(parts, read_history(folder))
    shed = [record for record in folder.records() if record["type"] == "shed"]
    old: set[str] = set()
    for step, episodes in read_consumed_episodes(folder, (steps := read_history(folder).steps)[2:]).items():
        old |= {e.group for e in episodes if begun.get(e.group, STEPS) < steps[step - 2]["version"]}
    assert old and {group for record in shed for group in record["groups"]} == old
    assert count_run_tokens(folder.records()).dropped["stale"] > 0
    for step, episodes in read_consumed_episodes(folder, steps[2:]).items():
        assert {v for e in episodes for t in e.turns for v in versions(t)} == {steps[step - 2]["version"]}
    names = [name.split("-retry")[0] for step in steps for name in step["episodes"]]
    assert len(set(names)) == len(names) == STEPS * TASKS_PER_STEP * ATTEMPTS
    await Policy(parts.config, folder, cast(Policy, parts.policy).engine, random.Random(0)).restore(
        read_history(folder)
    )
