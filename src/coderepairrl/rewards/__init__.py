"""Rewards: the value of an episode's patch (docs/guides/rewards.md).

>>> [(reward.name, weight) for reward, weight in make_rewards({"patch_edits": 0.6, "tests": 0.4})]
[('patch_edits', 0.6), ('tests', 0.4)]
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from coderepairrl import registry
from coderepairrl.errors import CodeRepairError, ConfigError, RewardFault, UsageError
from coderepairrl.grading import collect
from coderepairrl.protocols import Reward, SandboxBackend
from coderepairrl.rewards.edits import PatchEdits
from coderepairrl.rewards.lines import PatchLines
from coderepairrl.rewards.parse import MalformedPatch, parse_patch
from coderepairrl.rewards.simple import FunctionReward, ScriptedReward, make_patched_episode
from coderepairrl.rewards.tests import TestsReward
from coderepairrl.rewards.thesis import PatchSimilarity
from coderepairrl.types import Episode, Score, Task

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
    "collect_spec_versions",
    "collect_versions",
    "make_patched_episode",
    "make_reward",
    "make_rewards",
    "parse_patch",
    "score_episode",
    "score_files",
    "split_state_rewards",
]
Weighted = tuple[Reward, float]

LARGEST = 1e6
"""Largest absolute value of a score or weight; beyond, rounding hides differences in a group and squares overflow."""
SECONDS = 300.0
"""Time limit of a reward, on top of the time limits of the task's checks."""

SHIPPED = {
    "patch_edits": "coderepairrl.rewards.edits:PatchEdits",
    "patch_lines": "coderepairrl.rewards.lines:PatchLines",
    "patch_similarity": "coderepairrl.rewards.thesis:PatchSimilarity",
    "nano_similarity": "coderepairrl.rewards.thesis:NanoSimilarity",
    "test_patch_similarity": "coderepairrl.rewards.thesis:TestPatchSimilarity",
    "draft_similarity": "coderepairrl.rewards.thesis:DraftSimilarity",
    "file_match": "coderepairrl.rewards.thesis:FileMatch",
    "function_match": "coderepairrl.rewards.thesis:FunctionMatch",
    "swe_rl": "coderepairrl.rewards.swe_rl:SweRL",
    "search_replace_format": "coderepairrl.rewards.thesis:SearchReplaceFormat",
    "search_replace_similarity": "coderepairrl.rewards.thesis:SearchReplaceSimilarity",
    "reasoning_format": "coderepairrl.rewards.thesis:ReasoningFormat",
    "reasoning_format_strict": "coderepairrl.rewards.thesis:ReasoningFormatStrict",
    "label": "coderepairrl.rewards.text:Label",
    "classification": "coderepairrl.rewards.thesis:Classification",
    "tests": "coderepairrl.rewards.tests:TestsReward",
    "tests_graded": "coderepairrl.rewards.tests:GradedTests",
    "sampled_tests": "coderepairrl.rewards.tests:SampledTests",
    "state_tests": "coderepairrl.rewards.tests:StateTests",
    "build": "coderepairrl.rewards.hybrid:BuildReward",
    "hybrid": "coderepairrl.rewards.hybrid:HybridReward",
    "length": "coderepairrl.rewards.simple:LengthPenalty",
    "repeats": "coderepairrl.rewards.simple:RepeatPenalty",
    "time": "coderepairrl.rewards.simple:TimePenalty",
    "terminal_habits": "coderepairrl.rewards.thesis:TerminalHabits",
    "exploration_depth": "coderepairrl.rewards.thesis:ExplorationDepth",
}

_TAG_REWARDS = {"reasoning_format": 0.1, "reasoning_format_strict": 0.2}
PRESETS = {
    "thesis_repair": {**_TAG_REWARDS, "search_replace_format": 0.3, "search_replace_similarity": 0.4},
    "thesis_detection": {**_TAG_REWARDS, "classification": 0.7},
}
"""Names for several rewards, weighted as in the thesis' code for single-turn tasks."""


def make_rewards(spec: str | Mapping[str, float]) -> list[Weighted]:
    """Build the rewards that `spec` names, each with its weight.

    A name is in `SHIPPED`, ``module:name`` of a class or function (`FunctionReward`), or in `PRESETS`. With weight 0 a
    reward is only measured. Raises `ConfigError`.

    >>> [(reward.name, weight) for reward, weight in make_rewards("thesis_detection")]
    [('reasoning_format', 0.1), ('reasoning_format_strict', 0.2), ('classification', 0.7)]
    """
    weights = {spec: 1.0} if isinstance(spec, str) else spec
    if not weights:
        raise ConfigError("no reward is named", fix=f"known rewards: {', '.join(SHIPPED)}")
    for name, weight in weights.items():
        if isinstance(weight, bool) or not _is_within_limits(weight):
            raise ConfigError(
                f"reward {name}: the weight {weight!r} is not a number between -{LARGEST:g} and {LARGEST:g}",
                fix=f"write {name} = 1.0",
            )
    rewards = [
        (_build_reward(part), weight * share)
        for name, weight in weights.items()
        for part, share in PRESETS.get(name, {name: 1.0}).items()
    ]
    names = [reward.name for reward, _ in rewards]
    if len(set(names)) < len(names):
        raise ConfigError(f"two rewards share a name: {', '.join(names)}", fix="give each class a `name` of its own")
    return rewards


def make_reward(name: str) -> Reward:
    """Build one reward. Raises `ConfigError` as `make_rewards`, and for a preset."""
    if name in PRESETS:
        raise ConfigError(f"{name} is several rewards", fix=f"name one of them: {', '.join(PRESETS[name])}")
    [(reward, _)] = make_rewards(name)
    return reward


def split_state_rewards(rewards: Sequence[Weighted]) -> tuple[list[Weighted], list[Weighted]]:
    """Split `rewards` into those of the attempt's open workspace (`Reward.on_state`), and the others."""
    return [each for each in rewards if each[0].on_state], [each for each in rewards if not each[0].on_state]


def collect_spec_versions(*specs: str | Mapping[str, float]) -> dict[str, int]:
    """Version of each reward in `specs`. Raises `ConfigError`.

    >>> collect_spec_versions({"patch_edits": 0.5, "tests": 0.5}, "patch_lines")
    {'patch_edits': 3, 'tests': 1, 'patch_lines': 1}
    """
    return collect_versions(reward for spec in specs if spec for reward, _ in make_rewards(spec))


def collect_versions(rewards: Iterable[Reward]) -> dict[str, int]:
    """Version of each reward by name."""
    return {reward.name: reward.version for reward in rewards}


def _build_reward(name: str) -> Reward:
    target = registry.resolve_class("reward", name, SHIPPED)
    if inspect.isfunction(target):
        return FunctionReward(target)
    instance: Reward = registry.make_instance("reward", name, target, Reward, {})
    return instance


def _is_within_limits(number: object) -> bool:
    return isinstance(number, int | float) and -LARGEST <= number <= LARGEST


async def score_episode(
    rewards: Sequence[Weighted], task: Task, episode: Episode, sandbox: SandboxBackend
) -> tuple[Score, ...]:
    """Score `episode` by each reward that is `drawn`, except those of weight 0 that need checks the task lacks.

    Raises `RewardFault` if a reward fails, exceeds `SECONDS` plus twice the checks' time, or returns no valid `Score`;
    `TaskError` if the task is at fault.
    """
    scores = []
    seconds = sum(command.timeout for command in task.checks.commands)
    limit = SECONDS + 2 * (seconds + (collect.TIMEOUT_SECONDS if task.checks.collect else 0.0))
    for reward, weight in rewards:
        has_nothing_to_measure = reward.runs_checks and not task.checks and not weight
        if has_nothing_to_measure or not reward.drawn(episode):
            continue
        try:
            async with asyncio.timeout(limit) as clock:
                result: object = await reward(task, episode, sandbox)
        except CodeRepairError:
            raise
        except (Exception, SystemExit) as error:
            if clock.expired():
                raise RewardFault(
                    f"reward {reward.name} gave no answer for task {task.id} within {limit:g} s",
                    fix="make it faster, or give it a shorter time limit of its own",
                ) from error
            stack = "".join(traceback.format_exception(error))
            message = "".join(traceback.format_exception_only(error)).strip()  # works even if str(error) raises
            kind = type(error).__name__
            raise RewardFault(f"reward {reward.name} raised {kind} for task {task.id}: {message}\n{stack}") from error
        if not (isinstance(result, Score) and _is_within_limits(result.value)):
            raise RewardFault(
                f"reward {reward.name} returned {result!r:.200} for task {task.id}",
                fix=f"return a Score with a finite value between -{LARGEST:g} and {LARGEST:g}",
            )
        scores.append(replace(result, name=reward.name, weight=weight))
    return tuple(scores)


def score_files(reward: str, oracle: Path, patch: Path) -> float:
    """Score the diff in file `patch` by `reward`, with `oracle` as reference.

    Raises `UsageError` for an unusable file or a reward that needs more, `ConfigError` for an unknown reward.
    """
    comparer = make_reward(reward)
    oracle_diff, patch_diff = _read_patch(oracle, "oracle"), _read_patch(patch, "patch")
    if not oracle_diff.strip():
        raise UsageError(f"oracle {oracle} is empty", fix="name the file with the reference diff")
    value = comparer.compare(oracle_diff, patch_diff)
    if value is None:
        raise UsageError(
            f"reward {reward} cannot compare two files: it has no `compare`, since it needs a repository or a reply",
            fix="use one that compares patches, such as patch_edits; a class of your own may define `compare`",
        )
    return value


def _read_patch(path: Path, role: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{role} {path}: {error.strerror}", fix="name a readable file with a unified diff") from error
    try:
        parse_patch(content)
    except MalformedPatch as problem:
        raise UsageError(f"{role} {path}: {problem}", fix=problem.fix) from problem
    return content
