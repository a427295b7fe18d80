"""What the learner is given for a step."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from coderepairrl.assembly.learner import settings
from coderepairrl.config import load
from coderepairrl.errors import LearnerFault
from coderepairrl.learn import Learner
from coderepairrl.protocols import Engine
from coderepairrl.rollout import Group, episodes_of
from coderepairrl.runs import RunFolder
from coderepairrl.stages.history import History
from coderepairrl.stages.policy import LivePolicy, informative, make_batch
from coderepairrl.stages.train import lacking
from coderepairrl.sync.weights import Published
from coderepairrl.types import Ending, Episode, Origin, Score, Task, TokenSpan, Turn, VersionRange

REWARDS = {"a": (0.0, 0.2), "b": (0.0, 1.0), "flat": (0.5, 0.5), "void": (0.5, None)}


def episodes() -> list[Episode]:
    output = TokenSpan((7,), Origin.POLICY, (-0.1,))
    turn = Turn(0, None, TokenSpan((1,), Origin.GIVEN), output, versions=(VersionRange(0, 0, 1),))
    return [
        Episode(
            f"{group}{attempt}",
            group,
            "train",
            1,
            group,
            attempt,
            Ending.VOID if reward is None else Ending.DONE,
            turns=(turn,),
            scores=() if reward is None else (Score("r", reward),),
        )
        for group, rewards in REWARDS.items()
        for attempt, reward in enumerate(rewards)
    ]


def test_dr_grpo_alone_is_the_papers() -> None:
    """Reward minus mean, over a constant number of tokens, averaged over all episodes (arXiv 2503.20783)."""
    config = load("hello", ["train.algorithm=dr_grpo"])
    made = make_batch(episodes(), config)
    assert {row.episode_id: row.advantage for row in made.samples} == {"a0": -0.1, "a1": 0.1, "b0": -0.5, "b1": 0.5}
    assert made.episodes == 7
    assert settings(config).max_completion_tokens == config.rollout.tokens


REFILL = ("curriculum.refill=4", "rollout.tasks_per_step=4")


def test_a_step_is_refilled_for_groups_that_teach_nothing_once_rewards_are_shaped() -> None:
    """Two of the four are informative by their rewards alone."""
    groups = [Group(name, cast(Task, None), tuple(e for e in episodes() if e.group == name)) for name in REWARDS]

    def wanted(groups: list[Group], *overrides: str) -> tuple[int, int]:
        config = load("hello", [*REFILL, *overrides])
        own = informative(episodes_of(groups), config)
        assert own == len({row.group for row in make_batch(episodes_of(groups), config).samples})
        return own, lacking(groups, config)

    assert wanted(groups) == (2, 2)
    tied = [replace(g, episodes=tuple(replace(e, scores=(*e.scores, Score("file_match", e.attempt, weight=0.0)))
                                      for e in g.episodes)) for g in groups]  # fmt: skip
    assert wanted(tied, "train.tie_break={file_match=0.1}", "reward={patch_edits=1,file_match=0}") == (3, 1)
    cut = [replace(g, episodes=tuple(replace(e, ending=Ending.LIMIT) for e in g.episodes)) for g in groups]
    assert wanted(cut, "train.mask_truncated=true") == (0, 4)
    long = [replace(g, episodes=tuple(replace(e, turns=(_long(e.turns[0]),) if e.attempt else e.turns)
                                      for e in g.episodes)) for g in groups]  # fmt: skip
    assert wanted(long, "rollout.tokens=64", "rollout.turn_tokens=64", "train.overlong_buffer=10") == (3, 1)


@pytest.mark.parametrize("more", [("train.algorithm=ppo",), ("train.algorithm=grpo", "train.advantage=batch")])
def test_one_group_that_makes_all_others_informative_ends_a_refill(more: tuple[str, ...]) -> None:
    config = load("hello", [*REFILL, *more])
    flat = next(each for each in episodes() if each.group == "flat")
    groups = [
        Group(f"g{at}", cast(Task, None), (replace(flat, id=f"e{at}", group=f"g{at}", scores=(Score("r", reward),)),))
        for at, reward in enumerate((0.5, 0.5, 0.5, 0.5, 1.0))
    ]
    assert [lacking(groups[:count], config) for count in (4, 5)] == [4, 0]


def _long(turn: Turn) -> Turn:
    return replace(turn, output=TokenSpan((7,) * 60, Origin.POLICY, (-0.1,) * 60), versions=(VersionRange(0, 0, 60),))


class _Learner:
    """It dies at `fatal`, and stays dead; asked to take back what it has not put away it says so."""

    version = 0

    def __init__(self, fatal: str, file: Path) -> None:
        self.fatal, self.file, self.dead = fatal, file, False

    def _do(self, what: str) -> None:
        self.dead = self.dead or what == self.fatal
        if self.dead:
            raise LearnerFault(f"the learner died during {what}")

    async def take_back(self) -> int:
        self._do("take_back")
        return 0

    async def step(self, *_: object) -> dict[str, Any]:
        self._do("step")
        self.version += 1
        return {"loss": 0.5}

    async def publish(self, _: str) -> Published:
        self._do("publish")
        return Published(self.file, self.version, "sum")

    async def put_away(self) -> int:
        self._do("put_away")
        return 1

    async def save(self, path: Path) -> None:
        self._do("save")

    async def close(self, *, again: bool = False) -> None:
        pass


class _Engine:
    """It writes down whether it sleeps."""

    asleep = True

    async def sleep(self) -> None:
        self.asleep = True

    async def wake(self) -> None:
        self.asleep = False

    async def load(self, *_: object) -> None:
        self.asleep = False

    async def health(self) -> dict[str, float]:
        return {}


@pytest.mark.parametrize(
    ("turns", "fatal"),
    [(False, "step"), (False, "publish"), *((True, each) for each in ("take_back", "step", "publish", "put_away"))],
)
def test_a_learner_that_dies_is_replaced(turns: bool, fatal: str, tmp_path: Path) -> None:
    """By turns while the engine sleeps, and the dead one is not asked for anything."""
    (file := tmp_path / "weights").write_bytes(b"12345678")
    RunFolder(tmp_path).log.touch()
    config, engine, begun = load("hello", ["run.retries=1"]), _Engine(), list[bool]()
    config = config.model_copy(
        update={"engine": config.engine.model_copy(update={"share_devices": "turns" if turns else False})}
    )

    async def start(_: object) -> Learner:
        begun.append(engine.asleep)
        return cast(Learner, _Learner("", file))

    async def improved() -> dict[str, Any]:
        policy = LivePolicy(config, RunFolder(tmp_path), start, cast(Engine, engine),
                            cast(Learner, _Learner("", file)))  # fmt: skip
        await policy.restore(History())
        cast(_Learner, policy._learner).fatal = fatal
        metrics, checksum = await policy.improve(make_batch(episodes(), config), History())
        assert checksum == "sum" and policy.version == 1 and policy.restarts == 1
        return metrics

    metrics = asyncio.run(improved())
    assert begun == [True] and metrics["loss"] == 0.5 and not engine.asleep
