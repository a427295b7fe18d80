"""The table of algorithms equals its page; settings that have no effect or contradict each other are refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coderepairrl.config import load_config
from coderepairrl.config.schema import Lora
from coderepairrl.errors import ConfigError
from coderepairrl.learn import RECIPES, LearnSettings, RewardShaping, build_batch, compute_group_advantages
from coderepairrl.learn.algorithms import break_ties, compute_overlong_penalty
from coderepairrl.learn.losses import AGGREGATIONS, LOG_RATIOS, OBJECTIVES
from coderepairrl.types import Ending, Episode, Origin, Score, TokenSpan, Turn, VersionRange

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "algorithms.md"


def test_the_page_has_the_parts_of_every_algorithm():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `") and line.count("|") == 8][1:]
    table = {cells[0]: cells[1:5] for cells in ([c.strip(" `") for c in line.split("|")[1:]] for line in lines)}
    assert table == {name: list(recipe[:4]) for name, recipe in RECIPES.items()}
    for part in (*LOG_RATIOS, *OBJECTIVES, *AGGREGATIONS):
        assert f"| `{part}` | " in PAGE.read_text().split("## Parts")[1], part
    for name, recipe in RECIPES.items():
        (line,) = (line for line in lines if line.startswith(f"| `{name}` "))
        low, high = recipe.clip
        assert {"cispo": f"none, {high}", "reinforce": "none"}.get(name, f"{low}, {high}") == line.split("|")[6].strip()


PPO = {"algorithm": "ppo", "value_head": True}
NF4 = {"quantise": "nf4", "lora": Lora()}
REFUSED = [
    ({"algorithm": "cispo", "eps_low": 0.2}, "eps_low=0.2 has no effect with algorithm=cispo", "take one of rloo"),
    ({"algorithm": "grpo", "delta": 1.2}, "not above 1 \\+ eps_high = 1.2", "a larger delta"),
    ({"algorithm": "sft", "delta": 3.0}, "algorithm=sft, which has no ratio", "leave delta out"),
    (
        {"algorithm": "reinforce", "old_logprobs": "recomputed"},
        "which has no ratio to them",
        "mismatch_correction=token",
    ),
    ({"mismatch_correction": "token"}, "nothing to correct", "old_logprobs=recomputed"),
    ({"algorithm": "grpo", "max_completion_tokens": 9}, "max_completion_tokens=9 with algorithm=grpo", "dr_grpo"),
    ({"algorithm": "dr_grpo"}, "max_completion_tokens=None with algorithm=dr_grpo", "set it only there"),
    ({**PPO, "algorithm": "grpo"}, "whose advantages are of whole episodes", "algorithm=ppo"),
    ({**PPO, "advantage": "mean"}, "advantage=mean", "leave advantage out"),
    ({**PPO, "processes": 2, "strategy": "zero2"}, "untested with ZeRO", "fsdp2"),
    ({"strategy": "zero2"}, "among processes, and there is one", "raise processes"),
    ({"strategy": "zero2", "processes": 2, "optimizer": "adamw_8bit"}, "not of adamw_8bit", "strategy=ddp"),
    ({"strategy": "zero3", "processes": 2, "beta": 0.1}, "a whole copy of the model", "train adapters"),
    ({"strategy": "fsdp2", "processes": 2, "algorithm": "sft", "teacher": "t"}, "whole on every device", "zero2"),
    ({**NF4, "lora": None}, "quantise=nf4", "train.lora=true"),
    ({**NF4, "strategy": "fsdp2", "processes": 2}, "strategy=fsdp2 cannot divide", "strategy=ddp"),
]


@pytest.mark.parametrize(("options", "says", "fix"), REFUSED, ids=str)
def test_settings_without_effect_or_that_contradict_each_other_are_refused_with_a_fix(options, says, fix):
    with pytest.raises(ConfigError, match=says) as caught:
        LearnSettings(**options)
    assert fix in caught.value.fix


def test_reinforce_takes_recomputed_logprobs_with_a_correction():
    LearnSettings(algorithm="reinforce", old_logprobs="recomputed", mismatch_correction="token")


@given(st.integers(0, 200), st.integers(1, 99))
@pytest.mark.filterwarnings("ignore")
def test_the_overlong_punishment_is_trls(tokens, buffer):
    from trl.rewards import get_soft_overlong_punishment

    theirs = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=buffer)
    assert -compute_overlong_penalty(tokens, 100, buffer) == pytest.approx(theirs([[0] * tokens])[0])


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, None]), st.floats(0, 1)), min_size=1, max_size=8))
def test_tie_breaks_keep_the_mean_of_equal_rewards_and_follow_the_scores(group):
    rewards, scores = zip(*group, strict=True)
    values = compute_group_advantages(rewards, "mean").values
    broken = break_ties(values, rewards, scores, 0.1)
    for reward in {*rewards} - {None}:
        tied = [at for at, other in enumerate(rewards) if other == reward]
        moved = [(broken[at] or 0.0) - (values[at] or 0.0) for at in tied]
        assert sum(moved) == pytest.approx(0, abs=1e-9)
        order = sorted(tied, key=lambda at: scores[at])
        assert all(broken[a] <= broken[b] + 1e-9 for a, b in pairwise(order) if None not in (broken[a], broken[b]))
    assert all(broken[at] is None for at, reward in enumerate(rewards) if reward is None)


def episode(name, reward, ending=Ending.DONE, tokens=8, **scores):
    output = TokenSpan(tuple(range(tokens)), Origin.POLICY, (-0.5,) * tokens)
    turn = Turn(0, None, TokenSpan((1, 2), Origin.GIVEN), output, versions=(VersionRange(0, 0, tokens),))
    measured = (Score(score, value, weight=0.0) for score, value in scores.items())
    return Episode(name, "t", "train", 0, "g", 0, ending, turns=(turn,), scores=(Score("r", reward), *measured))


def test_truncated_episodes_are_compared_but_not_trained():
    group = [episode("a", 1.0), episode("b", 0.0), episode("c", 0.5, Ending.LIMIT, tokens=30)]
    batch = build_batch(group, "mean", max_tokens=100, shaping=RewardShaping(mask_truncated=True))
    assert [(row.episode_id, row.advantage, row.group) for row in batch.samples] == [("a", 0.5, "g"), ("b", -0.5, "g")]
    assert batch.account.dropped == {"truncated": 30} and batch.account.is_balanced
    assert (batch.episodes, batch.tokens) == (3, 16), "a mean over episodes counts it, one over tokens does not"


def test_rewards_fall_before_the_limit_and_further_scores_break_ties():
    long = [episode("a", 1.0), episode("b", 1.0, tokens=93)]  # with its prompt 5 of the last 20 tokens are left
    shaped = build_batch(long, "mean", max_tokens=100, shaping=RewardShaping(buffer=20, limits={"": 100}))
    assert [row.advantage for row in shaped.samples] == pytest.approx([0.375, -0.375])
    tied = [episode("a", 0.0, files=1.0), episode("b", 0.0, files=0.0)]
    broken = build_batch(tied, max_tokens=100, shaping=RewardShaping(ties={"files": 0.1}))
    assert [row.advantage for row in broken.samples] == [0.05, -0.05]
    assert not build_batch(tied, max_tokens=100).samples


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["train.tie_break={file_match=0.1}"], "train.tie_break: file_match is not measured: add it to reward"),
        (["train.overlong_buffer=100000"], "is no less than rollout.tokens"),
        (["train.overlong_buffer=500", "kinds.short.tokens=400"], "is no less than kinds.short.tokens"),
    ],
)
def test_shaping_that_cannot_act_is_refused(overrides, says):
    with pytest.raises(ConfigError, match=says):
        load_config("hello", overrides)
    load_config(
        "hello", ["train.tie_break={file_match=0.1}", "reward={patch_edits=1,file_match=0}", "train.overlong_buffer=9"]
    )
