"""Runs a study: everything checked and counted first, then each run as the command that it is, here or by Slurm or Ray.

A run that fails is reported with its error and the others go on; the next call goes on with what is not done.
"""

from __future__ import annotations

import asyncio
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coderepairrl import config as configs
from coderepairrl.errors import (
    CodeRepairError,
    ConfigError,
    ExitCode,
    RunError,
    Several,
    UsageError,
    several,
)
from coderepairrl.printable import counted
from coderepairrl.registry import nearest
from coderepairrl.report.metrics import PER_TOOL, names
from coderepairrl.report.study import result
from coderepairrl.report.verdict import Result, Table
from coderepairrl.rollout.ray_cluster import connected, one_line, watch_head
from coderepairrl.runs.folder import write_atomic
from coderepairrl.stages import evaluation, study_hosts
from coderepairrl.stages.jobs import Command, Say, last_error, python, until_done
from coderepairrl.stages.preview import dry_run
from coderepairrl.stages.shards import WHOLE
from coderepairrl.stages.study import Job, Study
from coderepairrl.stages.study_hosts import Hosts

_NOTHING = Hosts()

# -- before anything is started


@dataclass(frozen=True, slots=True)
class Cost:
    """What the runs of an arm are to do, those that are done included."""

    arm: str
    runs: int
    done: int
    training_episodes: int
    evaluation_episodes: int | None
    """None where something is wrong with it."""
    gpu_hours: float | None
    """Of its training, by the plan; None where there is none."""


def check(study: Study) -> tuple[list[Cost], CodeRepairError | None]:
    """What each arm is to cost, and what is wrong with any of them: every mistake once, with the arms that have it."""
    found: dict[tuple[type[CodeRepairError], str, str], dict[str, None]] = {}
    costs = []
    jobs = study.jobs()
    for arm in study.file.arms:
        own = [job for job in jobs if job.arm == arm]
        (trained, measured, hours), problems = _arm(study, [job for job in own if job.seed == study.seeds[0]], jobs)
        done, seeds = sum(job.state() == "done" for job in own), len(study.seeds)
        costs.append(Cost(arm, len(own), done, trained * seeds, measured and measured * seeds, hours and hours * seeds))
        for problem in problems:
            for each in problem.problems if isinstance(problem, Several) else (problem,):
                found.setdefault((type(each), str(each), each.fix), {})[arm] = None
    wrong = [kind(f"{_named(list(arms), study)}: {message}", fix=fix) for (kind, message, fix), arms in found.items()]
    wrong += study_hosts.planned(study)[1]
    wrong += _other_settings(jobs)
    return costs, several(wrong) if wrong else None


def _named(arms: Sequence[str], study: Study) -> str:
    if len(arms) == len(study.file.arms) > 1:
        return "all arms"
    return f"{'arm' if len(arms) == 1 else 'arms'} {', '.join(arms)}"


def _arm(
    study: Study, own: Sequence[Job], jobs: Sequence[Job]
) -> tuple[tuple[int, int | None, float | None], list[CodeRepairError]]:
    """Episodes of training and of evaluation, and GPU-hours, of one seed; and what is wrong."""
    trained, measured = 0, None
    hours: float | None = None
    problems = list[CodeRepairError]()
    for job in own:
        try:
            config = job.alone()  # what it lacks of a server, the one of the study lacks, too
            if job.kind == "train":
                shown, problem = dry_run(config)
                trained = config.run.steps * config.rollout.tasks_per_step * config.rollout.group_size
                hours = shown.get("needs", {}).get("run", {}).get("gpu_hours")
                problems += [problem] if problem else []
                continue
            path = Path(configs.shipped().get(job.source, job.source))
            plan = evaluation.resolve(_initial(job, jobs), job.overrides, settings_of=path)
            measured = evaluation.attempts(plan, WHOLE)
            problems += _of_questions(study, job.arm, set(config.eval.each), names(plan.reward_versions))
            if len(study.seeds) > 1 and any(each.tasks for each in config.eval.each.values()):
                problems.append(
                    ConfigError(
                        "eval.tasks draws a sample by run.seed, so seeds would be measured on different tasks",
                        fix="eval.tasks=0, and eval.options.select.n for fewer",
                    )
                )
        except CodeRepairError as error:
            problems.append(error)
    return (trained, measured, hours), problems


def _initial(job: Job, jobs: Sequence[Job]) -> str:
    """The policy of an evaluation before it is trained: the one that its training begins with."""
    training = next((each for each in jobs if each.kind == "train" and str(each.folder) == job.policy), None)
    if training is None:
        return job.policy
    try:
        return training.config().model.path
    except CodeRepairError:  # which is its arm's mistake
        return job.config().model.path


def _of_questions(study: Study, arm: str, evaluations: set[str], known: set[str]) -> list[CodeRepairError]:
    """What is asked of `arm` that its `evaluations`, which have the metrics `known`, cannot answer."""
    asked = [each for each in study.questions if arm in each.arms]
    wrong: list[CodeRepairError] = [
        ConfigError(f"question {each.name}: there is no metric {each.metric!r}", fix=nearest(each.metric, known))
        for each in asked
        if each.metric not in known and not each.metric.startswith(PER_TOOL)
    ]
    return wrong + [
        ConfigError(
            f"question {each.name} is about evaluation {each.evaluation!r}, which there is none of",
            fix=f"there are: {', '.join(sorted(evaluations))}; eval.also adds further ones",
        )
        for each in asked
        if each.evaluation not in evaluations
    ]


def _other_settings(jobs: Sequence[Job]) -> list[CodeRepairError]:
    """Runs that are there, and were made by other settings than the study has now."""
    found = list[CodeRepairError]()
    for job in jobs:
        try:
            if job.state() != "new" and (differ := job.changed()):
                found.append(
                    UsageError(
                        f"{job.folder} was made otherwise than the study says now: {'; '.join(differ[:4])}",
                        fix=f"give the changed study another name, or: rm -r {shlex.quote(str(job.folder))}",
                    )
                )
        except CodeRepairError as error:
            found.append(error)
    return found


def require(study: Study) -> None:
    """Raise what `check` finds."""
    if (problem := check(study)[1]) is not None:
        raise problem


def _require_settings(study: Study, say: Say) -> None:
    """Raise what no machine can mend; the rest of what `check` finds may be otherwise elsewhere, and is said."""
    problems = []
    for job in study.jobs():
        try:
            job.config()
        except CodeRepairError as error:
            problems.append(error)
    if problems:
        raise several(problems)
    if (problem := check(study)[1]) is not None:
        say(f"on this machine, which need not be so on others:\n{problem}")


def costs_notes(study: Study) -> list[str]:
    """What `costs_table` does not say: what the runs share."""
    return study_hosts.planned(study)[0]


def _total(episodes: Iterable[int | None]) -> str:
    """Their sum; "-" where one is not known."""
    found = [*episodes]
    return "-" if None in found else f"{sum(each or 0 for each in found):,}"


def costs_table(study: Study, costs: Sequence[Cost]) -> Table:
    """`costs` for people."""
    known = any(each.gpu_hours is not None for each in costs)
    rows = [
        (
            each.arm,
            f"{each.done} of {each.runs}",
            f"{each.training_episodes:,}",
            "-" if each.evaluation_episodes is None else f"{each.evaluation_episodes:,}",
            *([] if not known else ["-" if each.gpu_hours is None else f"{each.gpu_hours:,.1f}"]),
        )
        for each in costs
    ]
    total = [
        "all",
        f"{sum(each.done for each in costs)} of {sum(each.runs for each in costs)}",
        f"{sum(each.training_episodes for each in costs):,}",
        _total(each.evaluation_episodes for each in costs),
        *([f"{sum(each.gpu_hours or 0 for each in costs):,.1f}"] if known else []),
    ]
    heads = ["arm", "runs done", "episodes trained on", "episodes of evaluations"]
    heads += ["GPU-hours of training"] if known else []
    title = f"{study.file.study.name}: {counted(len(study.seeds), 'seed')}, in {study.folder}"
    return Table(title, heads, [*rows, tuple(total)])


# -- running


@dataclass(frozen=True, slots=True)
class Failure:
    """A run that did not end well."""

    job: Job
    reason: str


async def run_here(study: Study, units: Sequence[Sequence[Job]], at_once: int, say: Say) -> list[Failure]:
    """As `run`, with what they share, where the study has such. Raises what `study_hosts.hosting` raises."""
    async with study_hosts.hosting(study, units, say) as hosts:
        return await run(units, at_once, say, hosts)


async def run(units: Sequence[Sequence[Job]], at_once: int, say: Say, hosts: Hosts = _NOTHING) -> list[Failure]:
    """Run what is not done of `units`, so many at a time; what did not end well. They share `hosts`.

    Cancelling it stops the runs, in order; the kernel kills them where this process is killed.
    """
    queue, failures = list(units), list[Failure]()
    counter = _Counter(sum(map(len, units)), sum(job.state() == "done" for unit in units for job in unit), say)

    async def work() -> None:
        while queue:
            for job in (unit := queue.pop(0)):
                try:
                    reason = hosts.failure(job) or await until_done(job, say, counter.finished)
                except (CodeRepairError, OSError) as error:  # of this one alone: its log, its folder
                    reason = str(error)
                if reason:
                    failures.append(Failure(job, reason))
                    say(f"{job} failed: {reason}\n{job.log}")
                    if job.kind == "train":
                        failures.extend(Failure(each, "its policy was not trained") for each in unit if each != job)
                        break

    async with asyncio.TaskGroup() as group:
        for _ in range(min(at_once, len(queue))):
            group.create_task(work())
    return failures


class _Counter:
    def __init__(self, total: int, done: int, say: Say) -> None:
        self.total, self.done, self.say = total, done, say

    def finished(self, job: Command, seconds: float) -> None:
        self.done += 1
        self.say(f"{self.done} of {self.total} runs: {job} took {seconds:,.0f} s")


# -- what it has come to


def table(study: Study) -> Result:
    """What the finished runs say, and which are missing. Raises what `Job.changed` finds."""
    if wrong := _other_settings(study.jobs()):
        raise several(wrong)
    notes = []
    for job in study.jobs():
        if (state := job.state()) != "done":
            reason = last_error(job.log)
            what = "has not begun" if state == "new" else "is not finished"
            notes.append(f"{job} {what}{f': {reason}' if reason else ''}.")
    if notes:
        notes.append(f"{len(notes)} of {len(study.jobs())} runs are missing: this is a table of the others.")
    return result(study.questions, study.runs(), study.seeds, study.arms(), notes)


def failed(failures: Sequence[Failure], study: Study) -> RunError:
    """The error that a study with `failures` ends with."""
    lines = [f"{each.job}: {each.reason}" for each in failures]
    return RunError(
        f"{counted(len(failures), 'run')} did not finish\n" + "\n".join(lines),
        fix=f"crrl study {shlex.quote(study.named)} goes on with what is not done",
    )


# -- elsewhere

_ARRAY = """\
#!/bin/bash
# Written by `crrl study {named} --slurm`: a task of the array is one policy, trained and evaluated.
#SBATCH --job-name=crrl-{name}
#SBATCH --array=1-{count}
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={folder}/slurm-%A-%a.log
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
again= status=0
trap 'again=yes; kill -USR1 $!' USR1 # five minutes before the time is up
${{CRRL:-{crrl}}} study {named} --run "$SLURM_ARRAY_TASK_ID" &
wait $! || status=$?
if [ -n "$again" ]; then # the wait was interrupted, not the run
    status=0
    wait $! || status=$?
fi
if [ -n "$again" ] && [ "$status" = {interrupted} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""
_TABLE = """\
#!/bin/bash
# Written by `crrl study {named} --slurm`: the table, once the array has ended.
#SBATCH --job-name=crrl-{name}-table
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --time=0:30:00
#SBATCH --output={folder}/slurm-%j-table.log
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
${{CRRL:-{crrl}}} study {named} --table
"""


def slurm(study: Study, say: Say) -> str:
    """Write the two jobs into the study's folder; the commands that submit them. Raises `ConfigError` for settings."""
    study_hosts.require_one_machine(study, "--slurm")
    _require_settings(study, say)
    given = {
        "named": shlex.quote(study.named),
        "name": study.file.study.name,
        "folder": study.folder,
        "count": len(study.units()),
        "gpus": gpus(study),
        "crrl": f"{shlex.quote(sys.executable)} -m coderepairrl.cli",
        "interrupted": int(ExitCode.INTERRUPTED),
    }
    study.folder.mkdir(parents=True, exist_ok=True)
    jobs = [study.folder / "array.sh", study.folder / "table.sh"]
    for path, text in zip(jobs, (_ARRAY, _TABLE), strict=True):
        write_atomic(path, text.format(**given))
    array, after = (shlex.quote(str(path)) for path in jobs)
    return f"job=$(sbatch --parsable {array})\nsbatch --dependency=afterany:${{job%%;*}} {after}"


def gpus(study: Study) -> int:
    """How many a run needs at most, as its configuration names them."""
    found = [job.config() for job in study.jobs() if job.seed == study.seeds[0]]
    return max(len({*each.engine.devices, *each.train.devices}) for each in found)


def on_ray(study: Study, address: str, say: Say) -> list[str]:
    """Run the units as tasks of the Ray cluster at `address` (``local`` starts one here); what did not end well.

    Its machines need this file system and this Python. Raises `ConfigError` for settings, `PrerequisiteError` without
    the package or the cluster, and `RunError` where the cluster ends.
    """
    study_hosts.require_one_machine(study, "--ray")
    _require_settings(study, say)
    return asyncio.run(_units_on_ray(study, address, say))


async def _units_on_ray(study: Study, address: str, say: Say) -> list[str]:
    place, needed, path = Path.cwd(), gpus(study), study.named
    failures = []

    def unit(number: int) -> tuple[int, str]:
        words = ["study", path, "--run", str(number)]
        done = subprocess.run(python(words), cwd=place, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    async with connected(address) as ray:
        remote: Any = ray.remote(num_cpus=1, num_gpus=needed, max_retries=0)(unit)

        async def made(number: int) -> None:
            try:
                code, printed = await remote.remote(number)
            except ray.exceptions.RayError as error:
                code, printed = 1, f"error: {one_line(error)}"
            say(printed.rstrip())
            if code:
                failures.append(f"task {number}: exit code {code}")

        units: asyncio.Future[Any] = asyncio.gather(*(made(number) for number in range(1, len(study.units()) + 1)))
        watch: asyncio.Future[Any] = asyncio.ensure_future(watch_head(ray))
        try:
            await asyncio.wait([units, watch], return_when=asyncio.FIRST_COMPLETED)
            await (watch if watch.done() else units)
        finally:
            units.cancel()
            watch.cancel()
    return failures
