"""The table of algorithms: what the page says of it, and what is refused under each."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from coderepairrl.config import load_config
from coderepairrl.config.schema import Lora
from coderepairrl.errors import ConfigError
from coderepairrl.learn import RECIPES, LearnSettings, RewardShaping, build_batch, compute_group_advantages
from coderepairrl.learn.algorithms import break_ties, compute_overlong_penalty
from coderepairrl.learn.losses import AGGREGATIONS, LOG_RATIOS, OBJECTIVES
from coderepairrl.types import Ending, Episode, Origin, Score, TokenSpan, Turn, VersionRange

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "algorithms.md"


def of(algorithm, **options):
    """Settings of `algorithm`, with the constant denominator where it has one."""
    constant = RECIPES[algorithm].aggregation == "constant" if algorithm in RECIPES else False
    return LearnSettings(algorithm=algorithm, max_completion_tokens=64 if constant else None, **options)


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
TEACHER = {"algorithm": "sft", "teacher": "t", "processes": 2}
REFUSED = [
    ({"algorithm": "cispo", "eps_low": 0.2}, "eps_low=0.2 has no effect with algorithm=cispo", "take one of rloo"),
    ({"algorithm": "reinforce", "eps_high": 0.2}, "has no effect with algorithm=reinforce", "leave eps_high out"),
    ({"algorithm": "grpo", "delta": 1.2}, "not above 1 \\+ eps_high = 1.2", "a larger delta"),
    ({"algorithm": "sft", "delta": 3.0}, "algorithm=sft, which has no ratio", "leave delta out"),
    ({"algorithm": "sft", "entropy": 0.1}, "algorithm=sft", "leave entropy out"),
    ({"algorithm": "sft", "eps_low": 0.1}, "eps_low", ""),
    ({"algorithm": "sft", "minibatches": 2}, "minibatches", ""),
    ({"algorithm": "sft", "updates_per_batch": 2}, "updates_per_batch", ""),
    ({"algorithm": "sft", "old_logprobs": "recomputed"}, "old_logprobs", ""),
    (
        {"algorithm": "reinforce", "old_logprobs": "recomputed"},
        "which has no ratio to them",
        "mismatch_correction=token",
    ),
    ({"algorithm": "grpo", "max_completion_tokens": 9}, "max_completion_tokens=9 with algorithm=grpo", "dr_grpo"),
    ({**PPO, "algorithm": "grpo"}, "whose advantages are of whole episodes", "algorithm=ppo"),
    ({**PPO, "advantage": "mean"}, "advantage=mean", "leave advantage out"),
    ({**PPO, "processes": 2, "strategy": "zero2"}, "untested with ZeRO", "fsdp2"),
    ({**PPO, "algorithm": "sft"}, "algorithm=sft", "leave value_head out"),
    ({**TEACHER, "strategy": "fsdp2"}, "whole on every device", ""),
    ({**TEACHER, "strategy": "zero3"}, "whole on every device", ""),
    ({**NF4, "lora": None}, "quantise=nf4", "train.lora=true"),
    ({**NF4, "strategy": "fsdp2", "processes": 2}, "strategy=fsdp2 cannot divide", "strategy=ddp"),
]
IMPOSSIBLE = [
    {"algorithm": "dpo"},
    {"algorithm": "dr_grpo"},
    {"max_completion_tokens": 10},
    {"lr": -1.0},
    {"temperature": 0.0},
    {"beta": math.nan},
    {"algorithm": "grpo", "eps_low": 1.0},
    {"betas": (0.9, 1.0)},
    {"old_logprobs": "guessed"},
    {"micro_tokens": 0},
    {"minibatches": 0},
    {"mismatch_correction": "word"},
    {"mismatch_correction": "token"},  # with recorded old logprobs
    {"precision": "fp8"},
    {"strategy": "fsdp2"},  # among one process
    {"strategy": "zero2"},
    {"strategy": "fsdp2", "processes": 2, "beta": 0.1},  # a second whole model
    {"strategy": "zero3", "processes": 2, "beta": 0.1},
    {"strategy": "zero2", "processes": 2, "optimizer": "adamw_8bit"},
    {"optimizer": "sgd"},
    {"processes": 0},
]


@pytest.mark.parametrize(("options", "says", "fix"), REFUSED, ids=str)
def test_what_does_nothing_or_cannot_be_is_refused_with_the_fix(options, says, fix):
    with pytest.raises(ConfigError, match=says) as caught:
        LearnSettings(**options)
    assert fix in caught.value.fix


@pytest.mark.parametrize("options", IMPOSSIBLE, ids=str)
def test_values_that_are_none_are_refused(options):
    with pytest.raises((ConfigError, ValidationError)):
        LearnSettings(**options)


def test_adapters_have_a_rank_and_a_scale():
    with pytest.raises((ConfigError, ValidationError)):
        Lora(rank=0)
    assert LearnSettings().with_changes(lora=Lora(rank=4, alpha=8)).lora.scaling == 2.0


@pytest.mark.parametrize("algorithm", RECIPES)
def test_every_algorithm_takes_old_logprobs_with_a_correction_and_has_its_own_clip(algorithm):
    """For `reinforce` they are what its samples are weighted by."""
    of(algorithm, old_logprobs="recomputed", mismatch_correction="token")
    assert of(algorithm).clip == RECIPES[algorithm].clip


@given(st.integers(0, 200), st.integers(1, 99))
@pytest.mark.filterwarnings("ignore")
def test_the_overlong_punishment_is_trls(tokens, buffer):
    from trl.rewards import get_soft_overlong_punishment

    theirs = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=buffer)
    assert -compute_overlong_penalty(tokens, 100, buffer) == pytest.approx(theirs([[0] * tokens])[0])


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, None]), st.floats(0, 1)), min_size=1, max_size=8))
def test_broken_ties_add_up_to_nothing_between_different_rewards(group):
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
    made = (Score("r", reward), *(Score(score, value, weight=0.0) for score, value in scores.items()))
    return Episode(name, "t", "train", 0, "g", 0, ending, turns=(turn,), scores=made)


def test_what_a_limit_ended_is_compared_and_not_trained():
    group = [episode("a", 1.0), episode("b", 0.0), episode("c", 0.5, Ending.LIMIT, tokens=30)]
    made = build_batch(group, "mean", max_tokens=100, shaping=RewardShaping(mask_truncated=True))
    assert [(row.episode_id, row.advantage, row.group) for row in made.samples] == [("a", 0.5, "g"), ("b", -0.5, "g")]
    assert made.account.dropped == {"truncated": 30} and made.account.is_balanced
    assert (made.episodes, made.tokens) == (3, 16), "a mean over episodes counts it, one over tokens does not"


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
