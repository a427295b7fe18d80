"""Rewards: the value of an episode's patch (docs/guides/rewards.md).

>>> [(reward.name, weight) for reward, weight in make_rewards({"patch_edits": 0.6, "tests": 0.4})]
[('patch_edits', 0.6), ('tests', 0.4)]
"""

from coderepairrl.rewards.compose import (
    PRESETS,
    SHIPPED,
    Weighted,
    make_reward,
    make_rewards,
    on_state_and_patch,
    reward_versions,
    score,
    score_files,
    versions_of,
)
from coderepairrl.rewards.edits import PatchEdits
from coderepairrl.rewards.lines import PatchLines
from coderepairrl.rewards.parse import MalformedPatch, parse_patch
from coderepairrl.rewards.simple import ScriptedReward, with_patch
from coderepairrl.rewards.tests import TestsReward
from coderepairrl.rewards.thesis import PatchSimilarity

__all__ = [
    "PRESETS",
    "SHIPPED",
    "MalformedPatch",
    "PatchEdits",
    "PatchLines",
    "PatchSimilarity",
    "ScriptedReward",
    "TestsReward",
    "Weighted",
    "make_reward",
    "make_rewards",
    "on_state_and_patch",
    "parse_patch",
    "reward_versions",
    "score",
    "score_files",
    "versions_of",
    "with_patch",
]
