"""Test of a reward's promise `repairs` on real tasks, before a run's first step."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from random import Random
from typing import NamedTuple

from coderepairrl import grading
from coderepairrl.errors import GraderFault, PrerequisiteError, TaskError
from coderepairrl.protocols import Reward, Sandbox, SandboxBackend
from coderepairrl.registry import Finding
from coderepairrl.rewards import Weighted, score
from coderepairrl.rewards.simple import with_patch
from coderepairrl.types import Task

UP_TO = 50
"""Most references that are all tested; of more, `EACH` per environment."""
EACH = 3
NEAR = 1e-6
UNTOUCHED = b"""diff --git a/.crrl-untouched b/.crrl-untouched
new file mode 100644
index 0000000..e69de29
"""
"""A patch that adds an empty file: it repairs nothing, but no reward sees an empty patch."""
GROUP = "verify-487"
"""Group name that every share of at least a thousandth draws (`tests.group_drawn`)."""
_NAMED = 3
_PROBE_SECONDS = 60.0
_PROBE_BYTES = 8 << 20
# identifies an environment: its kernel, programs on its path, Python and packages
_PROBE = """
cd /; uname -rm; IFS=:; for folder in $PATH; do ls -lLn "$folder"; done 2>&1
python3 -c 'import sys, importlib.metadata as m; print(sys.version, sys.path)
print(sorted(f"{d.name} {d.version} {d.locate_file(str())}" for d in m.distributions()))' 2>&1
"""


class Trial(NamedTuple):
    """Reward tried on a task."""

    task: Task
    reward: Reward


def measuring_repair(weighted: Iterable[Weighted]) -> list[Reward]:
    """Rewards that declare `repairs`, and are paid or run checks."""
    return [reward for reward, weight in weighted if reward.repairs and (weight or reward.runs_checks)]


def trials(tasks: Sequence[Task], weighted: Iterable[Weighted], seed: int) -> list[Trial]:
    """Trials of each reward on each chosen task."""
    return [Trial(task, reward) for reward in measuring_repair(weighted) for task in sample_tasks(tasks, seed)]


def sample_tasks(tasks: Sequence[Task], seed: int) -> list[Task]:
    """Tasks with a reference, beyond `UP_TO` a sample of `EACH` per environment."""
    candidates = [task for task in tasks if task.reference.strip()]
    if len(candidates) <= UP_TO:
        return candidates
    places: dict[tuple[object, ...], list[int]] = {}
    for place, task in enumerate(candidates):
        places.setdefault(checks_key(task), []).append(place)
    drawn = [
        place
        for key, members in places.items()
        for place in Random(f"{seed}/{key}").sample(members, min(EACH, len(members)))
    ]
    return [candidates[place] for place in sorted(drawn)]


def checks_key(task: Task) -> tuple[object, ...]:
    """Key of what checks need."""
    kind, _, where = task.workspace.partition(":")
    place = "" if kind == "dir" else where.rpartition("@")[0]
    programs = tuple((PurePosixPath(command.argv[0]).name, command.results) for command in task.checks.commands)
    return (task.environment, task.language, kind, place, programs)


async def answers(trial: Trial, backend: SandboxBackend, nothing: Mapping[str, bytes] | None = None) -> list[Finding]:
    """Run a trial: 1 for the reference, 0 for each patch of `nothing`.

    The reference is tried as a sandbox's diff, like an attempt. Raises `GraderFault`, and as `score`.
    """
    task, reward = trial
    patches = {
        "the reference": await _attempted_patch(task, backend),
        **(nothing or {"a patch that repairs nothing": UNTOUCHED}),
    }
    findings = []
    for number, (name, patch) in enumerate(patches.items()):
        expected = float(number == 0)
        episode = with_patch(task, patch, GROUP)
        [scored] = await score([(reward, 1.0)], task, episode, backend)
        held = abs(scored.value - expected) <= NEAR
        note = f" ({scored.note})" if scored.note else ""
        findings.append(Finding(f"{name} earns {expected:g} by {reward.name}", held, f"{scored.value:g}{note}"))
    return findings


async def _attempted_patch(task: Task, backend: SandboxBackend) -> bytes:
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
    """Raise unless every trial keeps its promise; returns the number of cached ones.

    Kept promises are cached in folder `cache`, except for rewards outside this package; `about` identifies the
    sandbox's settings.

    Raises `PrerequisiteError` if the sandbox lacks what the checks need, `TaskError` for a broken promise, and as the
    rewards.
    """
    marks = await _marks(trials, backend, about, cache) if cache is not None and trials else [None] * len(trials)
    cached = [mark is not None and os.path.exists(mark) for mark in marks]  # noqa: PTH110 - false where reading is forbidden
    room = asyncio.Semaphore(len(os.sched_getaffinity(0)))

    async def one(trial: Trial, mark: Path | None, kept: bool) -> list[Finding]:
        broken: list[Finding] = []
        if not kept:
            async with room:
                broken = [check for check in await answers(trial, backend) if not check.ok]
            if not broken and mark is not None:
                _remember(mark, trial)
        on_trial(trial)
        return broken

    working = [asyncio.create_task(one(*each)) for each in zip(trials, marks, cached, strict=True)]
    try:
        results = await asyncio.gather(*working)
    except GraderFault as fault:
        raise PrerequisiteError(f"nothing can be graded: {fault}", fix=fault.fix) from fault
    finally:
        for each in working:
            each.cancel()
        await asyncio.gather(*working, return_exceptions=True)
    if failed := [(trial, broken[0]) for trial, broken in zip(trials, results, strict=True) if broken]:
        listed = "; ".join(f"{trial.task.id}: {check.name}: no, {check.detail}" for trial, check in failed[:_NAMED])
        tasks = {trial.task.id for trial, _ in failed}
        raise TaskError(
            f"{len(tasks)} of {len({trial.task.id for trial in trials})} tasks fail verification: {listed}",
            fix="repair these tasks or leave them out (crrl tasks verify SOURCE --output FILE writes those that hold), "
            "or train on them unverified: tasks.verify=false",
        )
    return sum(cached)


async def _marks(
    trials: Sequence[Trial], backend: SandboxBackend, about: Sequence[object], cache: Path
) -> list[Path | None]:
    package = _manifest(Path(__file__).parents[1])
    inside = ""
    sandboxed = [trial.task for trial in trials if not trial.task.workspace.startswith("image:")]
    if sandboxed:  # the digest of an image stands for its contents
        async with backend.open(sandboxed[0]) as fresh:
            inside = await _probe(fresh)
    paths: list[Path | None] = []
    for task, reward in trials:
        if not type(reward).__module__.startswith("coderepairrl."):
            paths.append(None)
            continue
        kind, _, where = task.workspace.partition(":")
        workspace_files = _manifest(Path(where)) if kind == "dir" else ""
        place = "" if kind == "image" else inside
        where_asked = (package, backend.name, tuple(about), place, reward.name, type(reward).__qualname__)
        asks = (task.id, task.workspace, workspace_files, task.environment, task.language, task.reference, task.checks)
        paths.append(cache / f"{hashlib.sha256(repr((where_asked, asks)).encode()).hexdigest()[:32]}.json")
    return paths


async def _probe(sandbox: Sandbox) -> str:
    done = await sandbox.exec(["sh", "-c", _PROBE], timeout=_PROBE_SECONDS, max_bytes=_PROBE_BYTES)
    return hashlib.sha256(done.output).hexdigest()


def _manifest(folder: Path) -> str:
    digest = hashlib.sha256()
    for line in sorted(_file_states(folder)):
        digest.update(line)
    return digest.hexdigest()


def _file_states(folder: Path) -> Iterator[bytes]:
    for base, _, names in os.walk(folder):
        if "__pycache__" not in base:
            for name in names:
                path = os.path.join(base, name)  # noqa: PTH118 - of thousands of files
                with contextlib.suppress(OSError):
                    seen = os.lstat(path)
                    yield os.fsencode(f"{path}\0{seen.st_size}\0{seen.st_mtime_ns}\0{seen.st_mode}")


def _remember(path: Path, trial: Trial) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"task": trial.task.id, "reward": trial.reward.name}) + "\n", encoding="utf-8")
