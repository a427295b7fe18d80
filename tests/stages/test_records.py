"""A replay by record: a step consumes the episodes that its record names, whatever step they were begun for."""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest

from coderepairrl.config import Config, to_toml
from coderepairrl.errors import RunError
from coderepairrl.learn import Learner, LearnSettings
from coderepairrl.learn.account import run_account
from coderepairrl.plan.learner import learn_settings
from coderepairrl.rollout import Curriculum, Share, due_slots
from coderepairrl.runs import RunFolder
from coderepairrl.stages import policy
from coderepairrl.stages.history import finished_episodes, read_consumed_episodes, read_history
from coderepairrl.types import Ending, Episode, Origin, Score, Task, TokenSpan, Turn, VersionRange

GROUPS = ("train-00001-000", "train-00001-001", "train-00002-000", "train-00002-001")
CROSSED = {1: (GROUPS[0], GROUPS[3]), 2: (GROUPS[2],)}
"""What each step consumes; group 1 of the first is finished and left behind."""
TASKS = [Task(f"toy/{at}", "repair it", "python", "dir:x", b"") for at in range(4)]


def attempt(group: str, number: int, *, retry: int = 0, ending: Ending = Ending.DONE) -> Episode:
    chance = random.Random(f"{group}/{number}")
    said = tuple(chance.randrange(256) for _ in range(12))
    span = TokenSpan(said, Origin.POLICY, tuple(-5.5 + chance.random() / 8 for _ in said))
    turn = Turn(0, None, TokenSpan((1, 2, 3), Origin.GIVEN), span, versions=(VersionRange(0, 0, len(said)),))
    name = f"{group}-{number:02d}" + (f"-retry{retry}" if retry else "")
    scores = (Score("reward", float(number)),)
    return Episode(name, "toy", "train", int(group[6:11]), group, number, ending, turns=(turn,), scores=scores)


class Engine:
    """Serves nothing, and knows what it was given."""

    adapters = False
    served = ""

    async def load(self, path: Path, version: int, checksum: str) -> int:
        self.served = checksum
        return version


async def live(config: Config, run: RunFolder, model: Path) -> tuple[policy.LivePolicy, Engine]:
    async def start(settings: LearnSettings) -> Learner:
        return await Learner.start(model, settings, log_dir=run.logs, publish_dir=run.path.parent / "weights")

    engine = Engine()
    return policy.LivePolicy(config, run, start, cast(Any, engine), await start(learn_settings(config))), engine


async def made(home: Path, miniature: Path) -> tuple[Config, RunFolder]:
    """A run whose steps consumed `CROSSED`, as its log has it."""
    config = Config.model_validate({"run": {"name": "crossed", "dir": str(home)}, "train": {"lr": 1e-3}})
    run = RunFolder(home / "crossed")
    run.create(to_toml(config), {})
    spoilt = attempt(GROUPS[0], 1, ending=Ending.VOID)
    episodes = [spoilt, *(attempt(g, at, retry=g == GROUPS[0] and at) for g in GROUPS for at in range(2))]
    trained, _ = await live(config, run, miniature)
    with closing(run.writer()) as log:
        for e in sorted(episodes, key=lambda episode: episode.attempt):
            log.append("episode", id=e.id, phase="train", step=e.step, group=e.group, attempt=e.attempt, task="toy")
            for turn in e.turns:
                log.append("turn", episode=e.id, turn=turn)
            log.append("verdict", verdict=replace(e, turns=()))
        for step, groups in CROSSED.items():
            own = [e for group in groups for e in episodes if e.group == group and e.ending is not Ending.VOID]
            batch = policy.make_batch(own, config)
            _, checksum = await trained.improve(batch, read_history(run))
            names = [e.id for e in own]
            log.append("step", step=step, checksum=checksum, episodes=names, account=asdict(batch.account), metrics={})
    await trained.close()
    return config, run


async def test_groups_cross_steps_and_the_weights_come_out(miniature: Path, tmp_path: Path) -> None:
    config, run = await made(tmp_path, miniature)
    history = read_history(run)
    again, engine = await live(config, run, miniature)
    try:
        await again.restore(history)
    finally:
        await again.close()
    assert engine.served == history.steps[-1]["checksum"] != history.steps[0]["checksum"]

    account = run_account(run.records())
    assert account.balanced and account.trained == 6 * 12
    assert account.dropped == {"void": 12, "pending": 2 * 12}
    slots = due_slots(Curriculum(sources=(Share(TASKS),), per_step=2, seed=0), 2, 2, history.consumed)
    assert [slot.group for slot in slots] == [GROUPS[1], "train-00003-000"], "what was left behind comes first"
    assert [e.id for e in finished_episodes(run, [GROUPS[1]])] == [f"{GROUPS[1]}-00", f"{GROUPS[1]}-01"]


async def test_an_episode_that_is_lost_is_named(miniature: Path, tmp_path: Path) -> None:
    _, run = await made(tmp_path, miniature)
    steps = read_history(run).steps
    lines = run.log.read_text().splitlines(keepends=True)
    run.log.write_text("".join(line for line in lines if not ('"verdict"' in line and f"{GROUPS[3]}-01" in line)))
    with pytest.raises(RunError, match=f"{GROUPS[3]}-01"):
        read_consumed_episodes(run, steps)
