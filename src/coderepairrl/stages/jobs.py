"""Run a file's jobs, each as a plain command, unless done.

JOB.job.json records settings, checksums of input files and needed outputs, and CodeRepairRL's version. An unchanged job
is kept or continues; otherwise its folder is moved aside and it runs again, as do dependants if its output changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

from coderepairrl import config as configs
from coderepairrl import models
from coderepairrl.config import Config
from coderepairrl.errors import CodeRepairError, ConfigError, ExitCode, RunError, UsageError, combine_errors
from coderepairrl.plan import EVALUATION, resolve_evaluation
from coderepairrl.plan.imitation import ATTEMPTS_ONLY, resolve_imitation
from coderepairrl.printable import format_count
from coderepairrl.processes.children import NO_CWD_IMPORTS, read_log_end
from coderepairrl.registry import suggest_nearest
from coderepairrl.report import jobs as report
from coderepairrl.report.metrics import PER_TOOL, list_metric_names
from coderepairrl.report.reading import flatten_settings
from coderepairrl.report.verdict import Result, Table, render_result
from coderepairrl.runs import write_atomic, write_json
from coderepairrl.runs.examples import EXAMPLES_FILE
from coderepairrl.runs.storage import SUMS, hash_concatenated
from coderepairrl.stages import evaluation
from coderepairrl.stages.changes import list_changed_keys
from coderepairrl.stages.command import dry_run
from coderepairrl.stages.jobs_file import ATTEMPT, TRAIN, Job, Jobs
from coderepairrl.stages.life_cycle import pin_models
from coderepairrl.version import __version__

Say = Callable[[str], None]
Doing = Literal["is done", "goes on", "runs", "runs again"]
_SERVER_START_SECONDS = 600.0  # Until a policy's server listens: a large model takes minutes to load.
_STOP_SECONDS = 120.0  # For a job to stop cleanly.
_ERROR_LINE = re.compile(r"error: |[\w.]*(Error|Exception): ")  # Start of an error line of crrl or any Python program.
_SHOWN_DIFFERENCES = 4
_STEP_SETTINGS = (  # Settings that no attempt of `collect` and `eval` depends on.
    *(*ATTEMPTS_ONLY, "run.steps", "run.checkpoint_every", "run.keep_checkpoints"),
    *("eval.before", "eval.after", "eval.every"),
)


@dataclass(frozen=True, slots=True)
class JobState:
    """State of a job."""

    doing: Doing
    differs: Sequence[str] = ()
    """Differences between record and file."""
    waits: Sequence[str] = ()
    """Needed jobs that are not done."""

    @property
    def done(self) -> bool:
        """Whether no work is left."""
        return self.doing == "is done" and not self.waits


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """Job, its state and estimates."""

    job: Job
    state: JobState
    attempts: int
    gpu_hours: float | None
    """For training; None if unknown."""


# -- before anything is started


def plan_jobs(jobs: Jobs) -> tuple[list[PlannedJob], CodeRepairError | None]:
    """Plan all jobs; collect all mistakes. Seeds of an arm are checked once."""
    planned, estimates = list[PlannedJob](), dict[tuple[str, str], tuple[int, float | None]]()
    # by text, since jobs share mistakes: the error, and the jobs that have it
    mistakes: dict[tuple[str, str], tuple[CodeRepairError, list[str]]] = {}
    states = read_job_states(jobs)
    missing_outputs = [str(job.folder) for job in jobs.jobs if not _has_ended(job)]
    for job in jobs.jobs:
        key = (job.arm, job.folder.name)
        if key not in estimates:
            estimates[key] = (0, None)
            try:
                estimates[key] = _estimate_job(job, jobs)
            except CodeRepairError as error:
                for each in error.problems:
                    if any(path in str(each) for path in missing_outputs):
                        continue  # made by another job
                    where = f"{job.arm}.{job.folder.name}" if job.arm else job.name
                    mistakes.setdefault((str(each), each.fix), (each, []))[1].append(where)
        planned.append(PlannedJob(job, states[job.name], *estimates[key]))
    for problem, names in mistakes.values():
        problem.args = (f"{', '.join(names)}: {problem}",)  # prefixes the message
    return planned, combine_errors([problem for problem, _ in mistakes.values()]) if mistakes else None


def _estimate_job(job: Job, jobs: Jobs) -> tuple[int, float | None]:
    """Estimate attempts and GPU-hours. Raises like the job's command."""
    if job.kind == "command":
        return 0, None
    config = job.config()
    path, init = _find_initial_model(job.policy, jobs) if job.policy else (config.model.path, config.model.init)
    if job.kind in TRAIN:
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": path, "init": init})})
        if job.kind == "sft":
            resolve_imitation(pin_models(config, fetches=False))
            return 0, None
        preview, problem = dry_run(config)
        if problem is not None:
            raise problem
        hours = preview.get("needs", {}).get("run", {}).get("gpu_hours")
        return preview.get("training_episodes", 0), hours  # unknown until the model is downloaded
    if init == "random" and not any(models.find_model_folder(path).glob("*.safetensors")):
        return 0, None  # no weights are drawn yet
    source = Path(configs.shipped_configs().get(job.source, job.source)).expanduser()
    policy, collects = path.replace("{port}", "1"), job.kind == "collect"
    plan = resolve_evaluation(policy, job.attempt_settings(), settings_of=source, collects=collects)
    if problems := list(_check_questions(job, jobs, config, list_metric_names(plan.reward_versions))):
        raise combine_errors(problems)
    return evaluation.count_attempts(plan), None


def _find_initial_model(policy: str, jobs: Jobs) -> tuple[str, str]:
    """Model of `policy`, and whether its weights are read or drawn (`model.init`)."""
    maker = next((each for each in jobs.jobs if policy == str(each.folder)), None)
    if maker is None or maker.kind == "command" or _has_ended(maker):
        return policy, "weights"
    if maker.policy:
        return _find_initial_model(maker.policy, jobs)
    try:
        model = maker.config().model
    except CodeRepairError:  # a mistake of that job
        return policy, "weights"
    return model.path, model.init


def _check_questions(job: Job, jobs: Jobs, config: Config, names: set[str]) -> Iterator[ConfigError]:
    arm = job.arm or job.name
    if jobs.arms().get(arm, {}).get(job.seed) != job:  # not the job that measures its arm
        return
    for each in jobs.questions():
        if arm in each.arms and each.metric not in names and not each.metric.startswith(PER_TOOL):
            message = f"question {each.name}: there is no metric {each.metric!r}"
            yield ConfigError(message, fix=suggest_nearest(each.metric, names))
        if arm in each.arms and each.evaluation not in config.eval.each:
            message = f"question {each.name}: there is no evaluation {each.evaluation!r}"
            fix = f"there are: {', '.join(sorted(config.eval.each))}; eval.also adds further ones"
            yield ConfigError(message, fix=fix)
    if job.arm and len(jobs.file.seeds) > 1 and any(each.tasks for each in config.eval.each.values()):
        message = "eval.tasks draws a sample by run.seed, so seeds would be measured on different tasks"
        yield ConfigError(message, fix="eval.tasks=0, and eval.options.select.n for fewer")


def format_jobs_plan(jobs: Jobs, planned: Sequence[PlannedJob]) -> Result:
    """Format `planned` as table and plain data."""
    hours = any(each.gpu_hours is not None for each in planned)
    heads = ("job", "kind", "needs", "attempts", *(["GPU-hours"] if hours else []), "what happens")
    rows, data = [], []
    for each in planned:
        job, happens = each.job, describe_job_state(each.state)
        hour_cells = [] if not hours else ["-" if each.gpu_hours is None else f"{each.gpu_hours:,.1f}"]
        attempts = f"{each.attempts:,}" if each.attempts else "-"
        rows.append((job.name, job.kind, ", ".join(job.needs) or "-", attempts, *hour_cells, happens))
        estimates = {"attempts": each.attempts, "gpu_hours": each.gpu_hours}
        facts = {"job": job.name, "kind": job.kind, "needs": list(job.needs), **estimates, "happens": happens}
        data.append({**facts, "command": job.command_line()})
    title = f"{jobs.file.name}: {format_count(len(rows), 'job')}, in {jobs.folder}"
    return Result([], [Table(title, heads, rows)], [], {"jobs": data})


def describe_job_state(state: JobState) -> str:
    """Describe a job's state in a line."""
    if state.doing == "runs again":
        return f"runs again: {_format_differences(state.differs)}"
    if state.waits and state.doing != "runs":
        return f"{state.doing}; runs again if the output of {', '.join(state.waits)} changed"
    return state.doing


def make_slurm_script(jobs: Jobs, say: Say) -> str:
    """Script that submits each job to Slurm after its needs.

    ``sbatch`` reads further options from the environment (``SBATCH_GPUS``, ``SBATCH_TIMELIMIT``, ...). Done jobs end at
    once. Raises `ConfigError`; problems of this machine alone are printed.
    """
    _, problem = plan_jobs(jobs)
    if problem is not None:
        if mistakes := [each for each in problem.problems if isinstance(each, ConfigError)]:
            raise combine_errors(mistakes)
        say(f"problems on this machine that others may not have:\n{problem}")
    lines, ids = [], {job.name: f"job{number}" for number, job in enumerate(jobs.jobs, 1)}
    for job in jobs.jobs:
        after = f" --dependency=afterok:{':'.join(f'${ids[need]}' for need in job.needs)}" if job.needs else ""
        call = shlex.join(["crrl", "run", jobs.named, "--only", job.name])
        lines.append(f"# {job.name}: {shlex.join(job.command_line())}".replace("\n", "\n# "))
        name = shlex.quote(f"--job-name={jobs.file.name}-{job.name.replace('/', '-')}")
        lines.append(f"{ids[job.name]}=$(sbatch --parsable {name}{after} --wrap={shlex.quote(call)})")
    return "\n".join(lines)


# -- states of jobs


def read_job_states(jobs: Jobs) -> dict[str, JobState]:
    """States by job name. Raises `UsageError` for foreign folders, `RunError` for unreadable records."""
    states: dict[str, JobState] = {}
    by_name = {job.name: job for job in jobs.jobs}
    for job in jobs.jobs:
        waits = [name for name in job.needs if not states[name].done]
        record = report.read_job_record(job.folder)
        if record is None:
            if job.folder.exists():
                raise UsageError(f"{job.folder} was not made by this file", fix="give the file another name or dir")
            states[job.name] = JobState("runs", (), waits)
            continue
        needed = {name: by_name[name] for name in job.needs}
        try:
            differs = [] if waits else _list_differences(record, collect_inputs(job, needed))
        except (CodeRepairError, OSError) as error:  # `plan_jobs` reports it with all other mistakes
            differs = [str(error)]
        doing: Doing = "is done" if _has_ended(job) else "goes on" if _has_begun(job) else "runs"
        states[job.name] = JobState("runs again" if differs else doing, differs, waits)
    return states


def _has_ended(job: Job) -> bool:
    record = report.read_job_record(job.folder)
    return record is not None and record["ended"] and job.folder.exists()


def _has_begun(job: Job) -> bool:
    log = job.folder / "log.jsonl"
    return log.is_file() and log.stat().st_size > 0


def collect_inputs(job: Job, needed: Mapping[str, Job]) -> dict[str, Any]:
    """Inputs that decide whether `job` runs again; `needed` jobs are done. Raises OSError."""
    inputs: dict[str, Any] = {"kind": job.kind, "version": __version__, "policy": job.policy}
    if job.kind == "command":
        inputs["run"], words = list(job.run), list(job.run)
    else:
        settings = job.config().model_dump(mode="json")
        unread = {"gpu", "log"} if job.kind == "collect" else {"gpu", "log", "keep"}
        if job.kind in ATTEMPT:  # `policy` replaces the model
            unread |= {"model"} | settings.keys() - {*EVALUATION.used, "keep"}
        settings = {key: value for key, value in settings.items() if key not in unread}
        settings["run"] = {key: value for key, value in settings["run"].items() if key not in ("name", "dir")}
        inputs["settings"], words = settings, [job.policy, *job.serve, *_iter_strings(settings)]
    if job.serve:
        inputs["serve"] = list(job.serve)
    inputs["needs"] = {name: digest_output(each.folder) for name, each in needed.items()}
    # any word may be the path of a file or folder that the job reads
    paths = set(map(Path, words)) - {each.folder for each in needed.values()}
    inputs["files"] = {str(path): digest_output(path) for path in sorted(paths) if _is_input(path)}
    return inputs


def _iter_strings(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, Mapping | list | tuple):
        for each in data.values() if isinstance(data, Mapping) else data:
            yield from _iter_strings(each)


def _is_input(path: Path) -> bool:
    # A bare name is a shipped one, not a path.
    with contextlib.suppress(OSError, ValueError):  # such as a text that is too long for a path
        return ("/" in str(path) or "." in path.name) and path.name not in ("", "..") and path.exists()
    return False


def digest_output(path: Path) -> str:
    """Checksum of what jobs read from `path`. Raises OSError.

    In a run the newest checkpoint, else examples, else the log; elsewhere all bytes.
    """
    if any(path.glob("checkpoints/[0-9]*")) or (path / "config.json").is_file():
        checkpoint = models.resolve_model(str(path))
        place = checkpoint.adapter or checkpoint.folder
        files = models.list_model_files(place)
        if (sums := place / SUMS).is_file():  # not read again: files are checked against it whenever they are loaded
            names = {file.name for file in files}
            lines = [line for line in sums.read_text("ascii").splitlines() if line.partition("  ")[2] in names]
            return hashlib.sha256("\n".join(lines).encode()).hexdigest()
    elif path.is_file():
        files = [path]
    elif (path / EXAMPLES_FILE).is_file():
        files = sorted(path.glob("*.parquet"))
    elif (path / "log.jsonl").is_file():
        files = [path / "log.jsonl"]
    else:
        files = sorted(each for each in path.rglob("*") if each.is_file() and ".git" not in each.parts)
    lines = [f"{hash_concatenated([each])}  {os.path.relpath(each, path)}" for each in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _list_differences(record: Mapping[str, Any], inputs: Mapping[str, Any]) -> list[str]:
    old, new = flatten_settings(record["made_by"]), flatten_settings(json.loads(json.dumps(inputs)))
    # for an unfinished job step settings count too, since its `--resume` would refuse changes
    ignored = ("plan", *(_STEP_SETTINGS if inputs["kind"] in ATTEMPT and record["ended"] else ()))
    differences = []
    for key in list_changed_keys(new, old, [f"settings.{name}" for name in ignored]):
        kind, _, name = key.partition(".")
        if kind in ("needs", "files"):
            differences.append(f"{'the output of ' if kind == 'needs' else ''}{name} changed")
        else:
            setting = key.removeprefix("settings.")
            differences.append(f"{setting} {_shorten_value(old.get(key))} then, {_shorten_value(new.get(key))} now")
    return differences


def _shorten_value(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:12]}..."


def _format_differences(differences: Sequence[str]) -> str:
    return "; ".join(differences[:_SHOWN_DIFFERENCES])


# -- running


async def run_jobs(jobs: Jobs, at_once: int, say: Say, only: Collection[str] = ()) -> dict[str, str]:
    """Run unfinished jobs (`only` these names), `at_once` at a time; return failures by name.

    A failure fails dependent jobs only. Cancelling stops jobs cleanly.
    """
    slots, before = asyncio.Semaphore(at_once), read_job_states(jobs)
    by_name = {job.name: job for job in jobs.jobs}
    tasks: dict[str, asyncio.Task[str]] = {}

    async def run_after_needs(job: Job) -> str:
        for need in job.needs:
            if need not in tasks and not before[need].done:
                return f"{need}, which it needs, is not done"
            if need in tasks and await tasks[need]:
                return f"{need}, which it needs, failed"
        async with slots:
            reason = await _run_locked(job, {name: by_name[name] for name in job.needs}, say)
        if reason:
            say(f"{job.name} failed: {reason}\n{job.log}")
        return reason

    async with asyncio.TaskGroup() as group:
        for job in jobs.jobs:  # in order of needs
            if not only or job.name in only:
                tasks[job.name] = group.create_task(run_after_needs(job))
    return {name: task.result() for name, task in tasks.items() if task.result()}


async def _run_locked(job: Job, needed: Mapping[str, Job], say: Say) -> str:
    try:
        job.folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock_job(job):
            return await _run_unless_done(job, await asyncio.to_thread(collect_inputs, job, needed), say)
    except (CodeRepairError, OSError) as error:  # a fault of this job alone, its record or folder
        return str(error)


async def _run_unless_done(job: Job, inputs: Mapping[str, Any], say: Say) -> str:
    record = report.read_job_record(job.folder)
    if record and (differs := _list_differences(record, inputs)):
        aside = _move_aside(job)
        say(f"{job.name} runs again: {_format_differences(differs)}" + (f"; old output: {aside}" if aside else ""))
        record = None
    elif record and record["ended"] and job.folder.exists():
        say(f"{job.name} is done")
        return ""
    elif record and job.kind == "command":
        _move_aside(job)  # half done, and a program cannot resume
    resume = _has_begun(job) and job.kind != "command"
    port = record["port"] if record else _find_free_port() if job.serve else 0

    def write(*, ended: bool, failed: str = "") -> None:
        write_json(job.record, {"made_by": inputs, "port": port, "ended": ended, "failed": failed})

    write(ended=False)  # before the run folder exists, so that a folder without a record is a foreign one
    start = job.log.stat().st_size
    say(f"{job.name} {'goes on' if resume else 'begins'}")
    words = [*job.command_line(port), *(["--resume"] if resume else [])]
    async with _serve_policy(job, port, say), _run_process(words, job.log) as process:
        code = await process.wait()
    if code == ExitCode.INTERRUPTED:
        reason = "it was stopped by a signal"
    elif code:
        exit_reason = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        reason = find_last_error(job.log, start) or exit_reason
    else:
        reason = "" if job.folder.exists() else f"it ended without an error, and made no {job.folder}"
    write(ended=not reason, failed=reason)
    return reason


@contextmanager
def _lock_job(job: Job) -> Iterator[None]:
    # against other processes
    with job.log.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"another process runs {job.name}", fix="wait for its end, or stop it") from None
        yield


def _move_aside(job: Job) -> Path | None:
    if not job.folder.exists():
        return None
    to = next(path for n in count(1) if not (path := job.folder.with_name(f"{job.folder.name}.old-{n}")).exists())
    job.folder.rename(to)
    return to


@asynccontextmanager
async def _run_process(words: Sequence[str], log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a command, appending output to `log`; on exit stop it, by force after `_STOP_SECONDS`."""
    command = ["coderepairrl.cli", *words[1:]] if words[0] == "crrl" else ["--", *words]
    with log.open("ab") as sink:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "coderepairrl.processes.child", str(os.getpid()), *command),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env={**os.environ, **NO_CWD_IMPORTS},
            start_new_session=True,  # the terminal's Ctrl-C reaches only this process, which then stops the command
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), _STOP_SECONDS)
            except TimeoutError:
                process.kill()
                await process.wait()


def find_last_error(log: Path, start: int = 0) -> str:
    """Last error line in `log` after byte `start`, or empty."""
    errors = [line for line in read_log_end(log, start) if _ERROR_LINE.match(line)]
    return errors[-1].removeprefix("error: ") if errors else ""


def _find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@asynccontextmanager
async def _serve_policy(job: Job, port: int, say: Say) -> AsyncIterator[None]:
    if not job.serve:
        yield
        return
    words, log = job.server_command_line(port), job.folder.with_name(f"{job.folder.name}.serve.log")
    say(f"{job.name}: starting {shlex.join(words)}")
    async with _run_process(words, log) as process:
        await _wait_until_listening(process, port, log)
        yield


async def _wait_until_listening(process: asyncio.subprocess.Process, port: int, log: Path) -> None:
    try:
        async with asyncio.timeout(_SERVER_START_SECONDS):
            while process.returncode is None:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    return
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise RunError("the server of its policy does not listen", fix=f"see {log}") from None
    reason = find_last_error(log) or f"exit code {process.returncode}"
    raise RunError(f"the server of its policy has ended: {reason}", fix=f"see {log}")


def make_failure(failures: Mapping[str, str], jobs: Jobs) -> RunError:
    """Error for `failures`."""
    lines = [f"{name}: {reason}" for name, reason in failures.items()]
    message = f"{format_count(len(failures), 'job')} did not finish\n" + "\n".join(lines)
    return RunError(message, fix=f"crrl run {shlex.quote(jobs.named)} continues with unfinished jobs")


# -- the table


def write_jobs_table(jobs: Jobs) -> Result:
    """Costs and results of done jobs, also written to their folder."""
    states = read_job_states(jobs)
    jobs.folder.mkdir(parents=True, exist_ok=True)
    summary = {
        "schema": 1,
        "name": jobs.file.name,
        "seeds": list(jobs.file.seeds) if jobs.file.arms else [0],
        "questions": [asdict(each) for each in jobs.questions()],
        "criteria": jobs.file.criteria,
        "arms": {
            arm: {"about": jobs.about(arm), "jobs": {seed: job.name for seed, job in seeds.items()}}
            for arm, seeds in jobs.arms().items()
        },
        "jobs": [
            {"name": job.name, "kind": job.kind, "about": job.about, "stale": _explain_stale(states[job.name])}
            for job in jobs.jobs
        ],
    }
    write_json(jobs.folder / report.JOBS_FILE, summary)
    report_result = report.summarise_jobs(jobs.folder)
    for name, form in (("report.md", "markdown"), ("report.json", "json")):
        write_atomic(jobs.folder / name, f"{render_result(report_result, form)}\n")
    return report_result


def _explain_stale(state: JobState) -> str:
    if state.doing == "runs again":
        return _format_differences(state.differs)
    return f"it needs {state.waits[0]}, which is not done" if state.waits else ""
