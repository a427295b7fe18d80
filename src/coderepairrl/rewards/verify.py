"""Verification on real tasks, before a run's first step, that rewards keep their promise `repairs`."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from random import Random
from typing import NamedTuple

from coderepairrl import grading
from coderepairrl.errors import GraderFault, PrerequisiteError, TaskError
from coderepairrl.protocols import Reward, SandboxBackend
from coderepairrl.registry import Finding
from coderepairrl.rewards import Weighted, score_episode
from coderepairrl.rewards.simple import make_patched_episode
from coderepairrl.types import Task

UP_TO = 50
"""Most tasks that are all tried; of more, `EACH` per environment."""
EACH = 3
NEAR = 1e-6
UNTOUCHED = b"""diff --git a/.crrl-untouched b/.crrl-untouched
new file mode 100644
index 0000000..e69de29
"""
"""Patch that repairs nothing. Not an empty one, which rewards treat apart."""
GROUP = "verify-487"
"""Name of a group that is drawn for every share from a thousandth (`tests.is_group_drawn`)."""
_NAMED = 3
_PROBE_SECONDS = 60.0
_PROBE_BYTES = 8 << 20
# prints what identifies an environment: kernel, programs on the path, Python and its packages
_PROBE = """
cd /; uname -rm; IFS=:; for folder in $PATH; do ls -lLn "$folder"; done 2>&1
python3 -c 'import sys, importlib.metadata as m; print(sys.version, sys.path)
print(sorted(f"{d.name} {d.version} {d.locate_file(str())}" for d in m.distributions()))' 2>&1
"""


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
    """Tasks with a reference, beyond `UP_TO` a sample of `EACH` per environment."""
    candidates = [task for task in tasks if task.reference.strip()]
    if len(candidates) <= UP_TO:
        return candidates
    places: dict[tuple[object, ...], list[int]] = {}
    for place, task in enumerate(candidates):
        places.setdefault(make_checks_key(task), []).append(place)
    drawn = [
        place
        for key, members in places.items()
        for place in Random(f"{seed}/{key}").sample(members, min(EACH, len(members)))
    ]
    return [candidates[place] for place in sorted(drawn)]


def make_checks_key(task: Task) -> tuple[object, ...]:
    """Key of what checks need."""
    kind, _, location = task.workspace.partition(":")
    repository = "" if kind == "dir" else location.rpartition("@")[0]
    programs = tuple((PurePosixPath(command.argv[0]).name, command.results) for command in task.checks.commands)
    return (task.environment, task.language, kind, repository, programs)


async def run_trial(trial: Trial, backend: SandboxBackend, nothing: Mapping[str, bytes] | None = None) -> list[Finding]:
    """Try whether the reference earns 1, and each patch of `nothing` earns 0.

    The reference is scored as a sandbox's diff, like an attempt. Raises `GraderFault`, and as `score_episode`.
    """
    task, reward = trial
    patches = {
        "the reference": await _make_attempt_patch(task, backend),
        **(nothing or {"a patch that repairs nothing": UNTOUCHED}),
    }
    findings = []
    for number, (name, patch) in enumerate(patches.items()):
        expected = float(number == 0)
        episode = make_patched_episode(task, patch, GROUP)
        [scored] = await score_episode([(reward, 1.0)], task, episode, backend)
        is_expected = abs(scored.value - expected) <= NEAR
        note = f" ({scored.note})" if scored.note else ""
        findings.append(Finding(f"{name} earns {expected:g} by {reward.name}", is_expected, f"{scored.value:g}{note}"))
    return findings


async def _make_attempt_patch(task: Task, backend: SandboxBackend) -> bytes:
    if not task.workspace:
        return task.reference
    async with backend.open(task) as fresh:
        refused = await grading.apply_patch(fresh, task.reference)
        return task.reference if refused else await fresh.diff()


async def verify_rewards(
    trials: Sequence[Trial],
    backend: SandboxBackend,
    *,
    about: Sequence[object] = (),
    cache: Path | None = None,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> int:
    """Run trials, except passed ones in the folder `cache`; return the number of these.

    Rewards outside this package are not cached; `about` are the sandbox's settings. Raises `PrerequisiteError` if the
    sandbox lacks what the checks need, `TaskError` for a failed trial, and as the rewards.
    """
    marks = await _list_marks(trials, backend, about, cache) if cache is not None and trials else [None] * len(trials)
    cached = [mark is not None and os.path.exists(mark) for mark in marks]  # noqa: PTH110 - false where reading is forbidden
    semaphore = asyncio.Semaphore(len(os.sched_getaffinity(0)))

    async def verify_one(trial: Trial, mark: Path | None, is_cached: bool) -> list[Finding]:
        failures: list[Finding] = []
        if not is_cached:
            async with semaphore:
                failures = [finding for finding in await run_trial(trial, backend) if not finding.ok]
            if not failures and mark is not None:
                _write_mark(mark, trial)
        on_trial(trial)
        return failures

    running = [asyncio.create_task(verify_one(*each)) for each in zip(trials, marks, cached, strict=True)]
    try:
        results = await asyncio.gather(*running)
    except GraderFault as fault:
        raise PrerequisiteError(f"nothing can be graded: {fault}", fix=fault.fix) from fault
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    if failed := [(trial, failures[0]) for trial, failures in zip(trials, results, strict=True) if failures]:
        listed = "; ".join(f"{trial.task.id}: {check.name}: no, {check.detail}" for trial, check in failed[:_NAMED])
        tasks = {trial.task.id for trial, _ in failed}
        raise TaskError(
            f"{len(tasks)} of {len({trial.task.id for trial in trials})} tasks fail verification: {listed}",
            fix="repair these tasks or leave them out (crrl tasks verify SOURCE --output FILE writes those that hold), "
            "or train on them unverified: tasks.verify=false",
        )
    return sum(cached)


async def _list_marks(
    trials: Sequence[Trial], backend: SandboxBackend, about: Sequence[object], cache: Path
) -> list[Path | None]:
    """Files that mark passed trials."""
    package = _hash_folder(Path(__file__).parents[1])
    machine = ""
    without_image = next((trial.task for trial in trials if not trial.task.workspace.startswith("image:")), None)
    if without_image is not None:  # the digest of an image stands for its contents
        async with backend.open(without_image) as fresh:
            done = await fresh.exec(["sh", "-c", _PROBE], timeout=_PROBE_SECONDS, max_bytes=_PROBE_BYTES)
        machine = hashlib.sha256(done.output).hexdigest()
    paths: list[Path | None] = []
    for task, reward in trials:
        if not type(reward).__module__.startswith("coderepairrl."):
            paths.append(None)
            continue
        kind, _, location = task.workspace.partition(":")
        workspace_files = _hash_folder(Path(location)) if kind == "dir" else ""
        place = "" if kind == "image" else machine
        settings = (package, backend.name, tuple(about), place, reward.name, type(reward).__qualname__)
        facts = (task.id, task.workspace, workspace_files, task.environment, task.language, task.reference, task.checks)
        paths.append(cache / f"{hashlib.sha256(repr((settings, facts)).encode()).hexdigest()[:32]}.json")
    return paths


def _hash_folder(folder: Path) -> str:
    lines = []
    for base, _, names in os.walk(folder):
        for name in names if "__pycache__" not in base else ():
            path = os.path.join(base, name)  # noqa: PTH118 - of thousands of files
            with contextlib.suppress(OSError):
                status = os.lstat(path)
                lines.append(os.fsencode(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_mode}"))
    return hashlib.sha256(b"".join(sorted(lines))).hexdigest()


def _write_mark(path: Path, trial: Trial) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"task": trial.task.id, "reward": trial.reward.name}) + "\n", encoding="utf-8")
