"""What the learner is given for a step."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from coderepairrl.config import load_config
from coderepairrl.plan.learner import make_learn_settings
from coderepairrl.rollout.groups import Group, list_episodes
from coderepairrl.stages.policy import count_informative, make_batch
from coderepairrl.stages.train import compute_step_metrics, count_missing_groups
from coderepairrl.types import Ending, Episode, Origin, Score, Task, TokenSpan, ToolCall, Turn, VersionRange

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


def make_groups(attempts: list[Episode]) -> list[Group]:
    return [Group(name, cast(Task, None), tuple(e for e in attempts if e.group == name)) for name in REWARDS]


def compute_metrics(attempts: list[Episode]) -> dict[str, float]:
    return compute_step_metrics(make_groups(attempts), make_batch(attempts, load_config("hello")), {})


def test_dr_grpo_is_that_of_the_paper() -> None:
    """Reward minus mean, over a constant number of tokens, averaged over all episodes (arXiv 2503.20783)."""
    config = load_config("hello", ["train.algorithm=dr_grpo"])
    made = make_batch(episodes(), config)
    assert {row.episode_id: row.advantage for row in made.samples} == {"a0": -0.1, "a1": 0.1, "b0": -0.5, "b1": 0.5}
    assert made.episodes == 7
    assert make_learn_settings(config).max_completion_tokens == config.rollout.tokens


def test_the_configured_advantage_replaces_the_algorithms() -> None:
    for kind, size in (("mean", 0.1), ("zscore", 0.1 / (0.1 + 1e-4))):
        config = load_config("hello", ["train.algorithm=grpo", f"train.advantage={kind}"])
        assert make_batch(episodes(), config).samples[1].advantage == pytest.approx(size)
    rows = make_batch(episodes(), load_config("hello", ["train.beta=0.1"])).samples
    assert len(rows) == 7, "flat groups have a KL term"


REFILL = ("curriculum.refill=4", "rollout.tasks_per_step=4")


def test_a_step_is_refilled_for_groups_that_teach_nothing_once_rewards_are_shaped() -> None:
    """Two of the four are informative by their rewards alone."""
    groups = make_groups(episodes())

    def count(groups: list[Group], *overrides: str) -> tuple[int, int]:
        config = load_config("hello", [*REFILL, *overrides])
        own = count_informative(list_episodes(groups), config)
        assert own == len({row.group for row in make_batch(list_episodes(groups), config).samples})
        return own, count_missing_groups(groups, config)

    assert count(groups) == (2, 2)
    tied = make_groups([replace(e, scores=(*e.scores, Score("file_match", e.attempt, weight=0.0))) for e in episodes()])
    assert count(tied, "train.tie_break={file_match=0.1}", "reward={patch_edits=1,file_match=0}") == (3, 1)
    cut = make_groups([replace(e, ending=Ending.LIMIT) for e in episodes()])
    assert count(cut, "train.mask_truncated=true") == (0, 4)
    long = make_groups([replace(e, turns=(lengthen(e.turns[0]),)) if e.attempt else e for e in episodes()])
    assert count(long, "rollout.tokens=64", "rollout.turn_tokens=64", "train.overlong_buffer=10") == (3, 1)


def lengthen(turn: Turn) -> Turn:
    return replace(turn, output=TokenSpan((7,) * 60, Origin.POLICY, (-0.1,) * 60), versions=(VersionRange(0, 0, 60),))


def test_a_step_has_the_spread_of_scores_within_groups_and_the_shortest_and_longest_attempt() -> None:
    attempts = [
        replace(each, turns=(lengthen(each.turns[0]),)) if each.id in ("b1", "void1") else each for each in episodes()
    ]
    metrics = compute_metrics(attempts)
    assert metrics["r_std"] == pytest.approx((0.1 + 0.5) / 4), "a group's only valid attempt has no spread"
    assert (metrics["sampled_tokens_min"], metrics["sampled_tokens_max"]) == (1, 60)


def test_attempts_of_a_group_that_do_the_same_are_counted() -> None:
    """Void attempts do not count; episodes with unknown calls have no share of distinct ones."""
    edits = [replace(each, patch=each.id.encode() * (each.group == "b")) for each in episodes()]
    calls = [replace(each, tool_calls=(ToolCall(0, "shell", each.id, True),)) for each in edits]

    def diversity(attempts: list[Episode]) -> dict[str, float]:
        return {name: value for name, value in compute_metrics(attempts).items() if name.startswith("distinct")}

    assert diversity(edits) == {"distinct_patches": (0.5 + 1 + 0.5 + 1) / 4, "distinct_actions": (0.5 * 3 + 1) / 4}
    assert diversity(calls) == {"distinct_patches": (0.5 + 1 + 0.5 + 1) / 4, "distinct_actions": 1}
    assert "distinct_actions" not in diversity([replace(each, calls_known=False) for each in calls])
