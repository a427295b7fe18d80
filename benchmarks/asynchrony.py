"""How long engine and learner wait for each other, by `rollout.max_staleness`, where episodes have a long tail.

The real loop (`stages.train`) runs with scripted episodes that only take their time, drawn from a log-normal
distribution, and a learner that takes a time per step, on a clock that jumps to the next moment at which anything
happens: only waits caused by the order of work are counted, not the machine's speed. The bound is the time of the
slower side alone: all episodes on all slots without a gap, or all steps one after the other.

Run: ``python benchmarks/asynchrony.py [--steps 60] [--seeds 2] [--longest 2 4 8]``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from coderepairrl.config import Config
from coderepairrl.learn import Batch
from coderepairrl.rollout.curriculum import Curriculum, WeightedTasks
from coderepairrl.rollout.episodes import PlannedAttempt
from coderepairrl.runs import RunFolder
from coderepairrl.stages.history import History
from coderepairrl.stages.parts import TrainingContext
from coderepairrl.stages.progress import Progress
from coderepairrl.stages.train import train
from coderepairrl.types import Ending, Episode, Origin, Score, Task, TokenSpan, Turn, VersionRange

TASKS, ATTEMPTS, SLOTS = 4, 8, 16
"""Tasks per step, attempts per task, attempts at once; at about 1 s an attempt, the engine needs about 2 s a step."""
RATIOS = (0.5, 1.0, 2.0)
"""Ratios of the learner's time for a step to the engine's."""
SPREAD = 1.0
"""Standard deviation of the logarithm of an attempt's time, before it is cut: 1 in 100 takes six times the mean."""


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        select = cast(Any, self)._selector.select

        def jump(timeout: float | None) -> Any:
            if ready := select(None if timeout is None else 0):
                return ready
            self._now += timeout or 0.0
            return []

        cast(Any, self)._selector.select = jump

    def time(self) -> float:
        """Seconds of simulated time since the loop was made."""
        return self._now


class Attempts:
    """Stands in for `Rollout`: episodes only sleep, at most `SLOTS` at once."""

    def __init__(self, policy: Learner, longest: float) -> None:
        self.policy, self.longest, self.room, self.busy = policy, longest, asyncio.Semaphore(SLOTS), 0.0

    async def run(self, planned: PlannedAttempt, began: Callable[[], None]) -> Episode:
        """The episode of `planned`, whose seed decides how long it takes."""
        chance = random.Random(planned.seed)
        seconds = min(self.longest, chance.lognormvariate(-(SPREAD**2) / 2, SPREAD))
        async with self.room:
            began()
            version = self.policy.version
            await asyncio.sleep(seconds)
        self.busy += seconds
        return episode(planned, version, chance.random())


def episode(planned: PlannedAttempt, version: int, reward: float) -> Episode:
    """An episode of one token, sampled by `version`."""
    turn = Turn(
        0,
        None,
        TokenSpan((1,), Origin.GIVEN),
        TokenSpan((2,), Origin.POLICY, (-1.0,)),
        versions=(VersionRange(version, 0, 1),),
    )
    return Episode(
        planned.episode_id,
        planned.task.id,
        planned.phase,
        planned.step,
        planned.group,
        planned.attempt,
        Ending.DONE,
        turns=(turn,),
        scores=(Score("any", reward),),
    )


class Learner:
    """Stands in for `LivePolicy`: a step takes `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.version, self.busy, self.ages = seconds, 0, 0.0, list[int]()

    async def restore(self, history: History) -> None:
        """Nothing to restore."""

    async def improve(self, batch: Batch, history: History) -> tuple[dict[str, Any], str]:
        """Sleep for the time of a step, and note how stale its tokens are."""
        self.ages += [self.version - version for row in batch.samples for version in row.versions if version >= 0]
        await asyncio.sleep(self.seconds)
        self.busy += self.seconds
        self.version += 1
        return {"grad_norm": 1.0}, str(self.version)

    async def save(self, step: int) -> Path:
        """Nothing to save."""
        return Path(str(step))


@dataclass(frozen=True)
class Waits:
    """Waiting times of a run."""

    seconds: float
    over: float
    """Ratio of its time to the bound, minus 1."""
    engine: float
    learner: float
    """Idle shares of its time: of the engine's slots, and of the learner."""
    age: float
    """Mean staleness of a token."""


def measure(staleness: int, ratio: float, steps: int, seed: int, longest: float) -> Waits:
    """Simulate one run."""
    with tempfile.TemporaryDirectory() as home, contextlib.closing(JumpingLoop()) as loop:
        return loop.run_until_complete(_run(Path(home), staleness, ratio, steps, seed, longest))


async def _run(home: Path, staleness: int, ratio: float, steps: int, seed: int, longest: float) -> Waits:
    run = {"name": "waits", "dir": str(home), "steps": steps, "seed": seed, "checkpoint_every": steps}
    rollouts = {"tasks_per_step": TASKS, "group_size": ATTEMPTS, "max_staleness": staleness}
    config = Config.model_validate({"run": run, "rollout": rollouts, "eval": {"before": False, "after": False}})
    folder = RunFolder(home / "waits")
    folder.create("", {})
    learner = Learner(ratio * TASKS * ATTEMPTS / SLOTS)
    attempts = Attempts(learner, longest)
    tasks = [Task(f"task/{at}", "", "python", "dir:none", b"") for at in range(10 * TASKS)]
    with contextlib.closing(folder.writer()) as log, Progress(steps, quiet=True) as progress:
        parts = TrainingContext(
            config=config,
            folder=folder,
            log=log,
            eval_tasks={},
            rollout=cast(Any, attempts),
            progress=progress,
            curriculum=Curriculum(sources=(WeightedTasks(tasks),), per_step=TASKS, seed=seed),
            policy=cast(Any, learner),
        )
        await train(parts, History())
    elapsed = asyncio.get_running_loop().time()
    engine = attempts.busy / SLOTS
    return Waits(
        elapsed,
        elapsed / max(engine, learner.busy) - 1,
        1 - engine / elapsed,
        1 - learner.busy / elapsed,
        fmean(learner.ages),
    )


def rows(steps: int, seeds: int, longest: float) -> Iterator[str]:
    """The table for attempts that take at most `longest` seconds."""
    for ratio in RATIOS:
        for staleness in (0, 1, 2, 4):
            waits = [measure(staleness, ratio, steps, seed, longest) for seed in range(seeds)]
            over, engine, learner, age = (
                fmean(getattr(each, name) for each in waits) for name in ("over", "engine", "learner", "age")
            )
            yield f"{longest:7g} {ratio:15g} {staleness:14d} {over:15.1%} {engine:11.1%} {learner:13.1%} {age:15.2f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--longest", type=float, nargs="+", default=[2.0, 4.0, 8.0], help="seconds of an attempt")
    options = parser.parse_args()
    print("longest  learner/engine  max_staleness  over the bound  idle slots  idle learner  mean staleness")
    for longest in options.longest:
        for row in rows(options.steps, options.seeds, longest):
            print(row, flush=True)


if __name__ == "__main__":
    main()
