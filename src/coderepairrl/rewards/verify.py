"""Verification on real tasks, before a run's first step, that rewards keep their promise `repairs`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from random import Random
from typing import NamedTuple

from coderepairrl import grading
from coderepairrl.errors import GraderFault, PrerequisiteError, TaskError
from coderepairrl.protocols import Reward, SandboxBackend
from coderepairrl.registry import Finding
from coderepairrl.rewards import Weighted, score_episode
from coderepairrl.rewards.simple import make_patched_episode
from coderepairrl.types import Task

MOST_TRIED_WHOLE = 50
"""Number of tasks up to which all are tried; of more, `TRIED_PER_ENVIRONMENT` of each environment."""
TRIED_PER_ENVIRONMENT = 3
TOLERANCE = 1e-6
"""Most difference of a value from the promised 0 or 1."""
UNTOUCHED = b"""diff --git a/.crrl-untouched b/.crrl-untouched
new file mode 100644
index 0000000..e69de29
"""
"""Patch that repairs nothing: it creates an empty file, since rewards treat an empty patch specially."""
GROUP = "verify-487"
"""Name of a group that is drawn for every share of at least 0.001 (`tests.is_group_drawn`)."""
_MOST_SHOWN = 3


class Trial(NamedTuple):
    """Reward tried on a task."""

    task: Task
    reward: Reward


def list_repair_rewards(weighted: Iterable[Weighted]) -> list[Reward]:
    """Rewards that promise `repairs`, and have a weight or run checks."""
    return [reward for reward, weight in weighted if reward.repairs and (weight or reward.runs_checks)]


def list_trials(tasks: Sequence[Task], weighted: Iterable[Weighted], seed: int) -> list[Trial]:
    """Trials of each reward on each chosen task that it can judge."""
    return [
        Trial(task, reward)
        for reward in list_repair_rewards(weighted)
        for task in sample_tasks([task for task in tasks if task.checks or not reward.runs_checks], seed)
    ]


def sample_tasks(tasks: Sequence[Task], seed: int) -> list[Task]:
    """Tasks with a reference, beyond `MOST_TRIED_WHOLE` a sample of `TRIED_PER_ENVIRONMENT` per environment."""
    candidates = [task for task in tasks if task.reference.strip()]
    if len(candidates) <= MOST_TRIED_WHOLE:
        return candidates
    indices_by_key: dict[tuple[object, ...], list[int]] = {}
    for index, task in enumerate(candidates):
        indices_by_key.setdefault(make_checks_key(task), []).append(index)
    drawn = [
        index
        for key, members in indices_by_key.items()
        for index in Random(f"{seed}/{key}").sample(members, min(TRIED_PER_ENVIRONMENT, len(members)))
    ]
    return [candidates[index] for index in sorted(drawn)]


def make_checks_key(task: Task) -> tuple[object, ...]:
    """Key of the environment that a task's checks need."""
    kind, _, location = task.workspace.partition(":")
    repository = "" if kind == "dir" else location.rpartition("@")[0]
    programs = tuple((PurePosixPath(command.argv[0]).name, command.results) for command in task.checks.commands)
    return (task.environment, task.language, kind, repository, programs)


async def run_trial(trial: Trial, backend: SandboxBackend, useless: Mapping[str, bytes] | None = None) -> list[Finding]:
    """Try whether the reference earns 1, and each `useless` patch (by description) earns 0.

    The reference is scored as a sandbox's diff, like an attempt. Raises `GraderFault`, and as `score_episode`.
    """
    task, reward = trial
    patches = {
        "the reference": await _make_attempt_patch(task, backend),
        **(useless or {"a patch that repairs nothing": UNTOUCHED}),
    }
    findings = []
    for number, (name, patch) in enumerate(patches.items()):
        expected = float(number == 0)
        episode = make_patched_episode(task, patch, GROUP)
        [scored] = await score_episode([(reward, 1.0)], task, episode, backend)
        is_expected = abs(scored.value - expected) <= TOLERANCE
        note = f" ({scored.note})" if scored.note else ""
        findings.append(Finding(f"{name} earns {expected:g} by {reward.name}", is_expected, f"{scored.value:g}{note}"))
    return findings


async def _make_attempt_patch(task: Task, backend: SandboxBackend) -> bytes:
    if not task.workspace:
        return task.reference
    async with backend.open(task) as fresh:
        refused = await grading.apply_patch(fresh, task.reference)
        return task.reference if refused else await fresh.diff()


async def verify_rewards(trials: Sequence[Trial], backend: SandboxBackend) -> None:
    """Run trials, as many at once as there are CPUs.

    Raises `PrerequisiteError` if the sandbox lacks what the checks need, `TaskError` for a failed trial, and what the
    rewards raise.
    """
    semaphore = asyncio.Semaphore(len(os.sched_getaffinity(0)))

    async def verify_one(trial: Trial) -> list[Finding]:
        async with semaphore:
            return [finding for finding in await run_trial(trial, backend) if not finding.ok]

    running = [asyncio.create_task(verify_one(trial)) for trial in trials]
    try:
        results = await asyncio.gather(*running)
    except GraderFault as fault:
        raise PrerequisiteError(f"nothing can be graded: {fault}", fix=fault.fix) from fault
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    if failed := [(trial, failures[0]) for trial, failures in zip(trials, results, strict=True) if failures]:
        listed = "; ".join(
            f"{trial.task.id}: {check.name}: no, {check.detail}" for trial, check in failed[:_MOST_SHOWN]
        )
        tasks = {trial.task.id for trial, _ in failed}
        raise TaskError(
            f"{len(tasks)} of {len({trial.task.id for trial in trials})} tasks fail verification: {listed}",
            fix="repair these tasks or leave them out (crrl tasks verify SOURCE --output FILE writes the valid ones), "
            "or train on them unverified: tasks.verify=false",
        )
