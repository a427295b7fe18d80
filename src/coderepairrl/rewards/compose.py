"""Rewards by name, weighted and summed."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from coderepairrl import registry
from coderepairrl.errors import CodeRepairError, ConfigError, RewardFault, UsageError
from coderepairrl.protocols import Reward, SandboxBackend
from coderepairrl.rewards.parse import MalformedPatch, parse
from coderepairrl.rewards.text import TextReward
from coderepairrl.types import Episode, Score, Task

Weighted = tuple[Reward, float]

SHIPPED = {
    "patch_edits": "coderepairrl.rewards.edits:PatchEdits",
    "patch_lines": "coderepairrl.rewards.lines:PatchLines",
    "patch_similarity": "coderepairrl.rewards.similarity:PatchSimilarity",
    "tests": "coderepairrl.rewards.tests:TestsReward",
}
"""The rewards that ship, by name."""


def make(spec: str | Mapping[str, float]) -> list[Weighted]:
    """The rewards that `spec` names, each with its weight: one name, or names with weights.

    A name is one of `SHIPPED` or ``module:Class`` for a class of your own (constructed without arguments). Weight 0
    measures without paying. Raises `ConfigError` with the nearest name for an unknown one.
    """
    weights = {spec: 1.0} if isinstance(spec, str) else spec
    if not weights:
        raise ConfigError("no reward is named", fix=f"known rewards: {', '.join(SHIPPED)}")
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ConfigError(f"reward {name}: the weight {weight!r} is not a finite number", fix=f"write {name} = 1.0")
    rewards: list[Weighted] = [
        (registry.make("reward", name, SHIPPED, Reward, {}), float(weight)) for name, weight in weights.items()
    ]
    names = [reward.name for reward, _ in rewards]
    if len(set(names)) < len(names):
        raise ConfigError(f"two rewards share a name: {', '.join(names)}", fix="give each class a `name` of its own")
    return rewards


async def score(
    rewards: Sequence[Weighted], task: Task, episode: Episode, sandbox: SandboxBackend
) -> tuple[Score, ...]:
    """What each reward says of `episode`, with its weight; `types.total` sums them.

    Raises `RewardFault` where a reward cannot be computed, has a bug (with the traceback) or returns no finite number,
    and `TaskError` where the task itself is at fault.
    """
    scores = []
    for reward, weight in rewards:
        try:
            found: object = await reward(task, episode, sandbox)
        except CodeRepairError:
            raise
        except (Exception, SystemExit) as error:
            where = "".join(traceback.format_exception(error))
            said = f"reward {reward.name} raised {type(error).__name__} for task {task.id}: {error}"
            raise RewardFault(f"{said}\n{where}") from error
        if not (isinstance(found, Score) and isinstance(found.value, int | float) and math.isfinite(found.value)):
            raise RewardFault(
                f"reward {reward.name} returned {found!r} for task {task.id}", fix="return a Score with a finite value"
            )
        scores.append(replace(found, name=reward.name, weight=weight))
    return tuple(scores)


def score_files(reward: str, oracle: Path, patch: Path) -> float:
    """The value that reward `reward` gives to the diff in file `patch` when the one in `oracle` is the reference.

    Raises `UsageError` for a missing, unreadable or malformed file and for a reward that needs a repository,
    `ConfigError` for an unknown reward.
    """
    [(chosen, _)] = make(reward)
    if not isinstance(chosen, TextReward):
        raise UsageError(
            f"reward {reward} runs code and cannot compare two files",
            fix="use one that compares patches, such as patch_lines or patch_similarity",
        )
    wanted, given = _read(oracle, "oracle"), _read(patch, "patch")
    if not wanted.strip():
        raise UsageError(f"oracle {oracle} is empty", fix="name the file with the reference diff")
    return chosen.compare(wanted, given)


def _read(path: Path, role: str) -> bytes:
    """The bytes of a well-formed diff."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{role} {path}: {error.strerror}", fix="name a readable file with a unified diff") from error
    try:
        parse(content)
    except MalformedPatch as problem:
        raise UsageError(f"{role} {path}: {problem}", fix=problem.fix) from problem
    return content
