"""Runs a pipeline: everything checked first, then each stage as the command that it is, unless that is done already.

What a stage was made by, PIPELINE/STAGE.json, is its settings, the checksums of what it reads (policy, examples,
tasks) and the versions of what computes. A stage of which all this is as before is kept, or goes on where it was
killed. Of one that differs the old run is put aside, with what differs said, and it is made anew; what follows it is
made anew if what it reads has become another.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shlex
import socket
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal

from coderepairrl import __version__, models
from coderepairrl import config as configs
from coderepairrl.assembly.imitation import resolve_imitation
from coderepairrl.assembly.learner import teacher
from coderepairrl.assembly.plan import resolve
from coderepairrl.errors import CodeRepairError, RunError, UsageError, several
from coderepairrl.printable import counted
from coderepairrl.report import pipeline as report
from coderepairrl.report.outcomes import digest_of
from coderepairrl.report.verdict import Result, Table, render
from coderepairrl.runs import Log
from coderepairrl.runs.examples import NAME as EXAMPLES
from coderepairrl.runs.folder import machine, write_atomic
from coderepairrl.runs.storage import SUMS, digests
from coderepairrl.stages import evaluation, probe
from coderepairrl.stages.command import pinned
from coderepairrl.stages.jobs import Say, flat, last_error, stop, until_done
from coderepairrl.stages.pipeline import TRAIN, Pipeline, Step
from coderepairrl.stages.preview import dry_run
from coderepairrl.stages.shards import WHOLE, measured_by
from coderepairrl.types import Task

_STARTS = 600.0
"""Seconds that a server of a policy may take to listen."""
_SHOWN = 4
"""Of the settings that differ, so many are named."""
Doing = Literal["kept", "goes on", "runs", "anew", "left out"]


# -- before anything is started


@dataclass(frozen=True, slots=True)
class Planned:
    """What is known of a step before it is started."""

    step: Step
    doing: Doing
    differs: Sequence[str]
    """How what was made differs from what the file says now."""
    tasks: str
    """A digest of the tasks that it attempts; empty where it attempts none, or something is wrong."""
    attempts: int
    waits: frozenset[str] = frozenset()
    """Stages that it reads from and that are not done: what it reads may become another."""


def check(
    pipeline: Pipeline, only: Sequence[str] = (), first: str = ""
) -> tuple[list[Planned], CodeRepairError | None]:
    """What each step would do, and all that is wrong with any of them.

    `only` are the stages that may run, or those from `first` on; nothing else is started, and what the others made is
    used as it is. Raises `UsageError` for stages that there are none of.
    """
    chosen = _chosen(pipeline, only, first)
    problems, found, unknown = list[CodeRepairError](), list[Planned](), list[tuple[Step, list[CodeRepairError]]]()
    for step in pipeline.steps:
        try:
            digest, attempts = _resolved(step, pipeline)
            found.append(_planned(step, digest, attempts, found, step.stage in chosen))
        except CodeRepairError as error:
            wrong = [_of(step, each) for each in getattr(error, "problems", (error,))]
            if step.stage in chosen:
                problems += wrong
            else:
                unknown.append((step, wrong))
    for each in found:
        if each.doing != "left out":
            problems += [
                _lacking(each, needed) for needed in found if needed.step.stage in each.step.needs - chosen
                and needed.doing == "left out" and (needed.differs or needed.step.state() != "done")
            ]  # fmt: skip
    read = {stage for each in pipeline.steps if each.stage in chosen for stage in each.needs}
    problems += [error for step, wrong in unknown if step.stage in read for error in wrong]  # it may be stale
    return found, several(problems) if problems else None


def _chosen(pipeline: Pipeline, only: Sequence[str], first: str) -> frozenset[str]:
    stages = list(pipeline.file.stages)
    for each in [*only, *([first] if first else [])]:
        if each not in stages:
            raise UsageError(f"there is no stage {each}", fix=f"stages: {', '.join(stages)}")
    return frozenset(only or (stages[stages.index(first) :] if first else stages))


def _lacking(each: Planned, needed: Planned) -> CodeRepairError:
    what = f"it is stale ({'; '.join(needed.differs[:_SHOWN])})" if needed.differs else "it is not done"
    return UsageError(
        f"stage {each.step} reads what stage {needed.step} makes, which is left out, and {what}",
        fix=f"let {needed.step.stage} run, too",
    )


def _of(step: Step, error: CodeRepairError) -> CodeRepairError:
    return type(error)(f"stage {step}: {error}", fix=error.fix)


def _resolved(step: Step, pipeline: Pipeline) -> tuple[str, int]:
    """A digest of the tasks that `step` attempts, and how many attempts there are. Raises what its command would.

    In place of a policy that is not trained yet stands the one that the pipeline begins with.
    """
    trained = not step.policy.stage or _has_policy(step.policy.path)
    policy = step.policy.at(1) if trained else pipeline.base.model.path
    if step.kind == "rl":
        config = step.config(policy) if trained else _untrained(step, pipeline)
        _, problem = dry_run(config)
        if problem is not None:
            raise problem
        made = resolve(config)
        return _digest(made.train_tasks), config.run.steps * config.rollout.tasks_per_step * config.rollout.group_size
    if step.kind == "sft":
        absent = [str(path) for path in step.examples if not (path.is_file() or (path / EXAMPLES).is_file())]
        try:
            resolve_imitation(pinned(step.config(policy) if trained else _untrained(step, pipeline)))
        except CodeRepairError as error:  # what is collected before it is not there yet, and all else is checked
            there = [
                each for each in getattr(error, "problems", (error,)) if not any(name in str(each) for name in absent)
            ]
            if there:
                raise several(there) from None
        return "", 0
    if not trained and pipeline.base.model.init == "random":  # there is no policy yet with which it could be resolved
        step.config()
        return "", 0
    path = Path(configs.shipped().get(step.source, step.source)).expanduser()
    if step.kind == "probe":
        plan = probe.resolve(step.source, step.given, policy)
    else:
        preset = evaluation.PRESETS[step.preset] if step.preset else ()
        plan = evaluation.resolve(policy, [f"run.name={step.kind}", *preset, *step.given], settings_of=path,
                                  collects=step.kind == "collect")  # fmt: skip
    return _digest(chain(*plan.eval_tasks.values())), evaluation.attempts(plan, WHOLE)


def _untrained(step: Step, pipeline: Pipeline) -> configs.Config:
    config = step.config(pipeline.base.model.path)
    return config.model_copy(update={"model": config.model.model_copy(update={"init": pipeline.base.model.init})})


def _has_policy(path: str) -> bool:
    try:
        models.named(path)
    except UsageError:
        return False
    return True


def _digest(tasks: Iterable[Task]) -> str:
    return hashlib.sha256("".join(sorted(f"{task.id} {digest_of(task)}\n" for task in tasks)).encode()).hexdigest()


def _planned(step: Step, digest: str, attempts: int, before: Sequence[Planned], chosen: bool) -> Planned:
    waits = frozenset(
        each.step.stage
        for each in before
        if each.step.stage in step.needs and (each.doing in ("runs", "anew", "goes on") or each.waits)
    )
    differs = [] if waits or not step.record.exists() else _differences(step, digest)
    doing: Doing = {"done": "kept", "begun": "goes on", "new": "runs"}[step.state()]  # type: ignore[assignment]
    if step.folder.exists() and not step.record.exists():
        raise UsageError(
            f"{step.folder} is there, and was not made by this pipeline", fix="give the pipeline another name or dir"
        )
    doing = "anew" if differs else doing
    return Planned(step, doing if chosen else "left out", differs, digest, attempts, waits)


def plan_table(pipeline: Pipeline, planned: Sequence[Planned]) -> Table:
    """`planned` for people."""
    rows = [
        (
            each.step.name,
            each.step.kind,
            each.step.policy.name,
            f"{each.attempts:,}" if each.attempts else "-",
            _in_words(each),
            str(each.step.folder),
        )
        for each in planned
    ]
    heads = ("stage", "kind", "policy", "attempts", "what happens", "folder")
    return Table(f"{pipeline.file.pipeline.name}: {counted(len(rows), 'stage')}", heads, rows)


def _in_words(each: Planned) -> str:
    words = {"kept": "is done", "anew": f"is made anew: {'; '.join(each.differs[:_SHOWN])}"}.get(each.doing, each.doing)
    return (
        f"{words}, unless what {', '.join(sorted(each.waits))} makes is another"
        if each.waits and each.doing != "runs"
        else words
    )


def plan_json(planned: Sequence[Planned]) -> list[dict[str, Any]]:
    """`planned` as plain data."""
    return [
        {
            "stage": each.step.name,
            "kind": each.step.kind,
            "policy": each.step.policy.name,
            "attempts": each.attempts,
            "doing": each.doing,
            "differs": list(each.differs),
            "waits": sorted(each.waits),
            "command": ["crrl", *each.step.words()],
            "folder": str(each.step.folder),
        }
        for each in planned
    ]


# -- what a stage was made by


def made_by(step: Step, tasks: str) -> dict[str, Any]:
    """All that the outputs of `step` depend on, but its code: settings, checksums of what it reads, and versions.

    Raises what reading them raises: `UsageError` for a policy that is not there, OSError.
    """
    config = step.config("").model_dump(mode="json")
    sections = measured_by(config)
    sections.pop("gpu")
    sections["model"] = {key: value for key, value in sections["model"].items() if key != "path"}
    if step.kind not in TRAIN:
        sections = {key: value for key, value in sections.items() if key in (*evaluation.USE.used, "keep")}
    elif step.kind == "rl":
        sections = {key: value for key, value in sections.items() if key not in ("data", "keep")}
    sections.get("data", {}).pop("paths", None)
    about = machine()
    return {
        "kind": step.kind,
        "settings": sections,
        "policy": {"name": step.policy.name, "serve": step.policy.serve, **_policy_files(step)},
        "examples": {f"{n} {path.name}": _example_files(path) for n, path in enumerate(step.examples, 1)},
        "files": _named_files(step),
        "tasks": tasks,
        "versions": {"coderepairrl": __version__, **about["versions"]},
    }


def _policy_files(step: Step) -> dict[str, str]:
    path = step.policy.path
    if "://" in path:
        return {}
    found = models.named(path) if step.policy.stage or not path.startswith("builtin:") else None
    places = [models.folder(path)] if found is None else [found.folder, *([found.adapter] if found.adapter else [])]
    known: dict[str, str] = {}
    for place in places:
        sums = place / SUMS  # a checkpoint's are compared with its files whenever they are read
        lines = sums.read_text("ascii").splitlines() if sums.is_file() else ()
        named = {name: digest for digest, _, name in (line.partition("  ") for line in lines)} or digests(
            models.files(place)
        )
        known |= {name: digest for name, digest in named.items() if name in {file.name for file in models.files(place)}}
    return known


def _named_files(step: Step) -> dict[str, dict[str, str]]:
    """Checksums of what the settings of a stage that trains name by its path."""
    if step.kind not in TRAIN:
        return {}
    config = step.config("")
    found: dict[str, dict[str, str]] = {}
    if config.curriculum.probe:
        found["probe"] = digests([Path(config.curriculum.probe)])
    if folder := teacher(config):
        found["teacher"] = digests(models.files(folder))
    return found


def _example_files(path: Path) -> dict[str, str]:
    return digests(path.glob("*.parquet") if path.is_dir() else [path])


def _differences(step: Step, tasks: str) -> list[str]:
    try:
        then = json.loads(step.record.read_text("utf-8"))["made_by"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunError(
            f"{step.record} cannot be read: {error!r}", fix=f"rm -r {shlex.quote(str(step.folder))}*"
        ) from None
    old, new = (flat(each) for each in (then, json.loads(json.dumps(made_by(step, tasks)))))
    return [
        f"{key.removeprefix('settings.')} {_short(old.get(key))} then, {_short(new.get(key))} now"
        for key in dict.fromkeys([*new, *old])
        if old.get(key) != new.get(key)
    ]


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:12]}..."


# -- running


async def run(pipeline: Pipeline, planned: Sequence[Planned], say: Say) -> None:
    """Run what is not done of `planned`, one stage after the other.

    Cancelling it stops the stage that runs, in order; the kernel kills it where this process is killed. Raises
    `RunError` for a stage that did not end well, `HealthGateError` for a probe that says no, and `UsageError` where
    another process runs the pipeline.
    """
    pipeline.folder.mkdir(parents=True, exist_ok=True)
    log = Log(pipeline.folder / "pipeline.jsonl")  # of two processes one gets it
    try:
        write_atomic(pipeline.folder / report.NAME, json.dumps(_about(pipeline), indent=2) + "\n")
        for each in planned:
            if each.doing != "left out":
                await _run(pipeline, each, log, say)
    finally:
        log.close()


def _about(pipeline: Pipeline) -> dict[str, Any]:
    """What a report needs of the file."""
    return {
        "schema": 1,
        "name": pipeline.file.pipeline.name,
        "stages": [
            {"name": step.name, "stage": step.stage, "kind": step.kind, "policy": step.policy.name,
             "about": pipeline.file.stages[step.stage].about}
            for step in pipeline.steps
        ],
    }  # fmt: skip


async def _run(pipeline: Pipeline, each: Planned, log: Log, say: Say) -> None:
    step, known = each.step, dict[str, Any]()
    # what it reads is there now
    tasks = each.tasks or (await asyncio.to_thread(_resolved, step, pipeline))[0]
    now = await asyncio.to_thread(made_by, step, tasks)
    if step.record.exists():
        if differs := await asyncio.to_thread(_differences, step, tasks):
            aside = _put_aside(step)
            log.append("aside", stage=step.name, to=str(aside or ""), differs=differs)
            say(f"{step} is made anew: {'; '.join(differs[:_SHOWN])}" + (f"; the old one is {aside}" if aside else ""))
        else:
            known = json.loads(step.record.read_text("utf-8"))
    port = known.get("port") or (_free_port() if step.policy.serve else 0)
    if step.state() != "done":
        step.folder.parent.mkdir(parents=True, exist_ok=True)
        # before the run folder: what has begun is known to have begun so
        write_atomic(step.record, json.dumps({"made_by": now, "port": port}, indent=2) + "\n")
        log.append("begin", stage=step.name)
        async with _serving(step, port, say):
            reason = await until_done(_At(step, port), say, lambda job, seconds: say(f"{job} took {seconds:,.0f} s"))
        if reason:
            raise RunError(
                f"stage {step} did not finish: {reason}",
                fix=f"{step.log} has what it printed; crrl pipeline {shlex.quote(pipeline.named)} goes on",
            )
        log.append("end", stage=step.name)
    else:
        say(f"{step} is done")
    if step.kind == "probe" and not step.anyway:
        found = json.loads((step.folder / probe.VERDICT).read_text("utf-8"))
        if not found["go"]:
            reasons = [probe.Reason(**reason) for reason in found["reasons"]]
            again = f"crrl pipeline {shlex.quote(pipeline.named)} {step}.anyway=true goes on"
            raise probe.refusal(reasons, again)


@dataclass(frozen=True, slots=True)
class _At:
    """A step whose policy is served at a port."""

    step: Step
    port: int

    @property
    def words(self) -> Sequence[str]:
        return self.step.words(self.port)

    @property
    def log(self) -> Path:
        return self.step.log

    def state(self) -> Literal["done", "begun", "new"]:
        return self.step.state()

    def __str__(self) -> str:
        return str(self.step)


def _put_aside(step: Step) -> Path | None:
    """Rename what a step has made; where to, if there was anything."""
    number = next(n for n in count(1) if not step.folder.with_name(f"{step.folder.name}.old-{n}").exists())
    to = step.folder.with_name(f"{step.folder.name}.old-{number}")
    for path, target in ((step.log, to.with_name(f"{to.name}.log")), (step.folder, to)):
        if path.exists():
            path.rename(target)
    return to if to.exists() else None


def _free_port() -> int:
    with socket.socket() as probed:
        probed.bind(("127.0.0.1", 0))
        port: int = probed.getsockname()[1]
        return port


@asynccontextmanager
async def _serving(step: Step, port: int, say: Say) -> AsyncIterator[None]:
    """The policy of `step`, served while it runs if the file says how. Raises `RunError` where it does not start."""
    if not step.policy.serve:
        yield
        return
    words = [word.replace("{python}", sys.executable) for word in shlex.split(step.policy.serve)]
    words = [word.replace("{port}", str(port)) for word in words]
    log = step.folder.with_name(f"{step.folder.name}.serve.log")
    say(f"{step}: starting {shlex.join(words)}")
    with log.open("ab") as sink:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "coderepairrl.processes.child", str(os.getpid()), "--", *words),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
    try:
        await _listens(step, process, port, log)
        yield
    finally:
        if process.returncode is None:
            await stop(process)


async def _listens(step: Step, process: asyncio.subprocess.Process, port: int, log: Path) -> None:
    try:
        async with asyncio.timeout(_STARTS):
            while process.returncode is None:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    return
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise RunError(f"stage {step}: what serves its policy does not listen", fix=f"see {log}") from None
    why = last_error(log) or f"exit code {process.returncode}"
    raise RunError(f"stage {step}: what serves its policy has ended: {why}", fix=f"see {log}")


# -- what it has come to


def table(pipeline: Pipeline) -> Result:
    """What the stages that are done have cost and brought; written into the pipeline's folder, too."""
    found = report.result(pipeline.folder)
    for name, text in (("report.md", "markdown"), ("report.json", "json")):
        write_atomic(pipeline.folder / name, f"{render(found, text)}\n")
    return found
