"""Trials of each task, in fresh sandboxes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from coderepairrl import grading
from coderepairrl.checks import task_source
from coderepairrl.checks.audit.history import History, find_unreachable, search_history
from coderepairrl.checks.audit.wrong import Mutants, Texts, WrongPatch, draw_mutants
from coderepairrl.environments.verify import check_environments
from coderepairrl.errors import (
    CodeRepairError,
    Fault,
    GraderFault,
    PrerequisiteError,
    TaskError,
    UsageError,
)
from coderepairrl.grading import Verdict
from coderepairrl.grading.reports import Outcome
from coderepairrl.protocols import Sandbox, SandboxBackend, TaskSource
from coderepairrl.rewards.parse import MalformedPatch, parse_patch
from coderepairrl.rewards.tests import TO_INSTALL
from coderepairrl.rollout.groups import gather_or_cancel
from coderepairrl.runs import codec
from coderepairrl.runs.log import JsonLines
from coderepairrl.tasks import select
from coderepairrl.tasks.prepare import prepare_tasks
from coderepairrl.types import Checks, Task

Say = Callable[[str], None]
Row = dict[str, Any]
_SHOWN_CHARS = 300


class Settings(NamedTuple):
    """Settings of an audit."""

    dataset: str
    """Source and options, as written."""
    sandbox: str
    repeat: int = 1
    """Runs of the checks on the reference, the untouched workspace, and passing wrong patches."""
    mutants: int = 5
    """Most wrong patches of a task."""
    seed: int = 0


class MutantTrial(NamedTuple):
    """Wrong patch, and whether checks always passed; None: not run."""

    wrong: WrongPatch
    accepted: bool | None
    problem: str


class TaskAudit(NamedTuple):
    """Results of a task; unanswered questions are None, with reasons in `faults`."""

    task: Task
    passes: bool | None
    """Whether the checks always pass on the reference."""
    fails: bool | None
    """Whether they always fail on the untouched repository."""
    flaky: tuple[str, ...] | None
    """Tests whose outcomes varied; None for one run."""
    history: History | None
    wrong: tuple[MutantTrial, ...]
    no_wrong: str
    """Reason for trying no wrong patch."""
    same: int
    """Mutants dropped as equivalent to the reference."""
    problems: tuple[str, ...]
    settled: Task | None
    """Task with its steady tests (`task_source.keep_steady_tests`); None if unusable, or unknown."""
    faults: Mapping[str, str]
    """Reasons by unanswered question."""


def draw_tasks(source: TaskSource, limit: int, seed: int) -> list[Task]:
    """Draw `limit` tasks (0: all) by `seed`, in source order; larger draws include smaller ones.

    Raises `UsageError` for no tasks and for a source that breaks the rules; `TaskError`.
    """
    findings, tasks = task_source.examine_source(source)
    if not tasks:
        raise UsageError(f"{source.name} has no tasks", fix="crrl tasks list shows those of a source")
    if failed := next((each for each in findings if not each.ok), None):
        raise UsageError(f"{source.name}: {failed.name}: no ({failed.detail})", fix="give each task an id of its own")
    order = list(range(len(tasks)))
    Random(f"{seed}/tasks").shuffle(order)
    return [tasks[at] for at in sorted(order[: limit or None])]


async def audit_tasks(
    source: TaskSource,
    tasks: Sequence[Task],
    sandbox: SandboxBackend,
    settings: Settings,
    file: Path,
    *,
    resume: bool = False,
    jobs: int = 2,
    say: Say = lambda _: None,
) -> list[TaskAudit]:
    """Run the trials of `settings` on `tasks`, in order; with `resume`, those missing in `file`.

    Prepares the tasks' needs first. Infrastructure faults are not written, so that `resume` retries them.

    Raises `UsageError` for an existing `file` (without `resume`) or another audit's, `PrerequisiteError`, and
    `TaskError` for an environment changed since it was built.
    """
    rows = JsonLines.read(file) if resume else []
    if file.exists() and not resume:
        raise UsageError(f"{file} already exists", fix="continue it with --resume, or name another folder with -o")
    header = {"audit": settings._asdict()}
    if rows and rows[0] != header:
        raise UsageError(
            f"{file} holds another audit: {json.dumps(rows[0])[:_SHOWN_CHARS]}", fix="name another folder with -o"
        )
    rows_by_run = _read_trials(file, rows[1:], tasks)
    await _prepare_tasks(tasks, jobs, say)
    lines = JsonLines(file)
    try:
        if not rows:
            lines.append(header)
        trial_slots, task_slots, done = asyncio.Semaphore(jobs), asyncio.Semaphore(jobs), 0

        async def audit_task(task: Task) -> TaskAudit:
            nonlocal done
            async with task_slots:  # else the first trials of all tasks would run before any task is done
                result = await _Trials(source, sandbox, settings, lines, rows_by_run, trial_slots, say, task).run()
            done += 1
            say(f"[{done}/{len(tasks)}] {summarize_audit(result)}")
            return result

        return await gather_or_cancel(audit_task(task) for task in tasks)
    finally:
        lines.close()


async def _prepare_tasks(tasks: Sequence[Task], jobs: int, say: Say) -> None:
    try:
        await prepare_tasks(tasks, jobs=jobs, say=say)
    except CodeRepairError as error:
        if any(isinstance(each, PrerequisiteError) for each in error.problems):
            raise
        say(f"not everything is ready: {error}")
    await asyncio.to_thread(check_environments, tasks)


def _read_trials(file: Path, rows: Iterable[Row], tasks: Iterable[Task]) -> dict[tuple[str, str, int], Row]:
    """Rows by task, trial and run; `of` is the digest of the tried task. Raises `UsageError`."""
    digests, rows_by_run = {task.id: _task_digest(task) for task in tasks}, {}
    for number, row in enumerate(rows, 2):
        try:
            key = row["task"], row["what"], row["run"]
            is_same = digests.get(row["task"], row["of"]) == row["of"]
        except KeyError as error:
            raise UsageError(
                f"{file}, line {number}: not a trial: it has no {error}", fix="name another folder with -o"
            ) from None
        if not is_same:
            raise UsageError(
                f"{file}, line {number}: task {row['task']} has changed since", fix="name another folder with -o"
            )
        rows_by_run[key] = row
    return rows_by_run


def _task_digest(task: Task) -> str:
    place = "" if task.workspace.startswith("dir:") else task.workspace  # a path of this machine
    content = (place, task.environment, task.checks, task.reference)
    return hashlib.sha256(repr(content).encode("utf-8", "surrogateescape")).hexdigest()[:16]


@dataclass
class _Trials:
    """Trials of one task."""

    source: TaskSource
    sandbox: SandboxBackend
    settings: Settings
    lines: JsonLines
    earlier_rows: dict[tuple[str, str, int], Row]
    slots: asyncio.Semaphore
    say: Say
    task: Task
    faults: dict[str, str] = field(default_factory=dict)

    async def run(self) -> TaskAudit:
        task, faults = self.task, self.faults
        solution = None if task.reference else self.source.oracle(task.id)
        survey = None
        if not task.reference and solution is None:
            faults["reference"] = "it has no reference, and its source no solution"
        else:
            if not task.checks:
                faults["reference"] = "it has no checks"
            survey = await self._run_trial("survey", 0, lambda: self._survey(solution), "history")
        history = codec.restore(History, survey["history"]) if survey else None
        audited = TaskAudit(task, None, None, None, history, (), "", 0, (), None, faults)
        if faults.get("reference"):
            return audited._replace(no_wrong="its checks cannot be tried")
        runs = range(self.settings.repeat)
        repaired_task = task if solution is None else replace(task, checks=solution)

        def grade_repaired(run: int) -> Awaitable[Verdict | None]:
            return self._run_verdict_trial("reference", run, lambda: self._grade_reference(repaired_task))

        def grade_untouched(run: int) -> Awaitable[Verdict | None]:
            return self._run_verdict_trial(
                "untouched", run, lambda: task_source.grade_in_fresh_sandbox(task, self.sandbox, b"")
            )

        verdicts = await asyncio.gather(*map(grade_repaired, runs), *map(grade_untouched, runs))
        repaired = [each for each in verdicts[: len(runs)] if each is not None]
        untouched = [each for each in verdicts[len(runs) :] if each is not None]
        if len(repaired) == len(runs):
            audited = audited._replace(passes=not any(each.problem for each in repaired))
        if len(untouched) == len(runs):
            audited = audited._replace(fails=all(each.problem for each in untouched))
        if None in (audited.passes, audited.fails):
            return audited._replace(no_wrong="its checks could not run")
        audited = audited._replace(
            flaky=tuple(task_source.list_flaky_tests(task, untouched, repaired)) if len(runs) > 1 else None,
            problems=tuple(
                f"{each.name}: no ({each.detail})"
                for each in task_source.make_check_findings(task, untouched, repaired)
                if not each.ok
            ),
            settled=task_source.keep_steady_tests(task, untouched, repaired),
        )
        if not (audited.passes and audited.fails):
            return audited._replace(no_wrong="its checks do not tell the reference from the untouched repository")
        if survey is None:
            return audited._replace(no_wrong="the reference could not be read in the sandbox")
        return await self._try_mutants(audited, survey)

    async def _try_mutants(self, audited: TaskAudit, survey: Row) -> TaskAudit:
        wrong, no_wrong = [codec.restore(WrongPatch, each) for each in survey["wrong"]], survey["no_wrong"]
        reference = self.task.reference or survey["solution"].encode("utf-8", "surrogateescape")
        if wrong and not self.task.reference:
            verdict = await self._run_verdict_trial(
                "solution as a patch", 0, lambda: self._grade_patched(reference, reference)
            )
            if verdict is None or verdict.problem:
                wrong, no_wrong = [], "the solution does more than change files of the workspace"
        accepted = await asyncio.gather(*(self._try_mutant(each, reference) for each in wrong))
        return audited._replace(wrong=tuple(accepted), no_wrong=no_wrong, same=survey["same"])

    async def _try_mutant(self, wrong: WrongPatch, reference: bytes) -> MutantTrial:
        # Repeated while the checks pass, so that a flaky test accepts no mutant.
        question = f"mutant {hashlib.sha256(wrong.patch).hexdigest()[:16]}"
        for run in range(self.settings.repeat):
            verdict = await self._run_verdict_trial(question, run, lambda: self._grade_patched(wrong.patch, reference))
            if verdict is None:
                return MutantTrial(wrong, None, self.faults[question])
            if verdict.problem:
                return MutantTrial(wrong, False, verdict.problem)
        return MutantTrial(wrong, True, "")

    async def _grade_patched(self, patch: bytes, reference: bytes) -> Verdict:
        # A patch may change those steering files (`grading.steering`) that the task's reference changes.
        task = replace(self.task, reference=reference)
        return (await task_source.grade_in_fresh_sandbox(task, self.sandbox, patch))._replace(outcomes={})

    async def _grade_reference(self, repaired_task: Task) -> Verdict:
        # Raises `GraderFault` if nothing shows that the checks began.
        verdict = await task_source.grade_in_fresh_sandbox(repaired_task, self.sandbox, repaired_task.reference)
        if verdict.doubtful:
            raise GraderFault(f"the checks cannot run in the sandbox: {verdict.problem}", fix=TO_INSTALL)
        return verdict

    async def _run_verdict_trial(self, what: str, run: int, job: Callable[[], Awaitable[Verdict]]) -> Verdict | None:
        async def grade() -> Row:
            verdict = await job()
            outcomes = {name: outcome.name.lower() for name, outcome in verdict.outcomes.items()}
            return {"problem": verdict.problem, "outcomes": outcomes}

        row = await self._run_trial(what, run, grade, what)
        if row is None:
            return None
        return Verdict(row["problem"], {name: Outcome[each.upper()] for name, each in row["outcomes"].items()})

    async def _run_trial(self, what: str, run: int, job: Callable[[], Awaitable[Row]], question: str) -> Row | None:
        """Earlier or new row; None on failure, whose reason becomes the fault of `question`."""
        task = self.task
        earlier = self.earlier_rows.get((task.id, what, run))
        if earlier is not None:
            return earlier
        async with self.slots:
            began = time.monotonic()
            try:
                row = await job()
            except (Fault, TaskError) as error:
                self.faults[question] = f"{error}: {error.fix}" if error.fix else str(error)
                self.say(f"{task.id}, {what}: not tried: {self.faults[question]}")
                return None
            seconds = round(time.monotonic() - began, 1)
        self.lines.append(
            {"task": task.id, "of": _task_digest(task), "what": what, "run": run, "seconds": seconds, **row}
        )
        return row

    async def _survey(self, solution: Checks | None) -> Row:
        """Search the history, and draw mutants."""
        async with self.sandbox.open(self.task) as fresh:
            objects = await find_unreachable(fresh)
            patch = self.task.reference if solution is None else await _solve(fresh, solution)
        try:
            files = parse_patch(patch)
        except MalformedPatch as error:
            raise TaskError(f"the reference cannot be read: {error}") from error
        async with self.sandbox.open(self.task) as fresh:
            before = {each.path: await _read_content(fresh, each.path) for each in files}
            refused = await _apply_to_fresh(fresh, self.task, patch)
            paths = {each.new or each.path for each in files}
            after: Texts = {} if refused else {path: await _read_content(fresh, path) for path in paths}
        async with self.sandbox.open(self.task) as fresh:
            history = await search_history(fresh, objects, before, after)
        mutants = Mutants((), 0, refused)
        if self.settings.mutants and not refused:
            seed = f"{self.settings.seed}/{self.task.id}"
            mutants = await asyncio.to_thread(draw_mutants, patch, before, after, self.settings.mutants, seed)
        return {
            "history": codec.dump(history),
            "wrong": codec.dump(mutants.patches),
            "no_wrong": mutants.why_none,
            "same": mutants.equivalent,
            "solution": "" if solution is None else patch.decode("utf-8", "surrogateescape"),
        }


async def _apply_to_fresh(fresh: Sandbox, task: Task, patch: bytes) -> str:
    rules = grading.harness.find_benchmark_rules(task.checks)
    if rules is not None and rules.apply:
        return await grading.harness.apply_by_rules(fresh, patch, rules)
    return await grading.apply_patch(fresh, patch)


async def _read_content(fresh: Sandbox, path: str) -> bytes | None:
    try:
        return await fresh.read(path)
    except OSError:
        return None


async def _solve(fresh: Sandbox, solution: Checks) -> bytes:
    """Diff that the first command of `solution` makes, without the files in `solution.restore`."""
    if problem := await grading.restore_files(fresh, solution):
        raise TaskError(f"the solution cannot be put in place: {problem}")
    await fresh.exec(solution.commands[0].argv, timeout=solution.commands[0].timeout)
    parts = re.split(rb"(?=^diff --git )", await fresh.diff(), flags=re.MULTILINE)
    heads = {f"diff --git a/{path} b/{path}\n".encode("utf-8", "surrogateescape") for path in solution.restore}
    return b"".join(part for part in parts if not any(part.startswith(head) for head in heads))


def summarize_audit(audited: TaskAudit) -> str:
    """Summarise a task in a line."""
    if audited.faults and audited.passes is None:
        return f"{audited.task.id}: cannot be tried: {next(iter(audited.faults.values())).partition(chr(10))[0]}"
    marks = []
    if audited.passes is not None:
        marks.append("reference passes" if audited.passes else "reference FAILS")
    if audited.fails is not None:
        marks.append("untouched fails" if audited.fails else "untouched PASSES")
    if audited.flaky:
        marks.append(f"FLAKY: {audited.flaky[0]}")
    if audited.history is not None and (audited.history.repair or audited.history.commits):
        marks.append(f"history LEAKS: {audited.history.repair or f'{audited.history.commits} later commits'}")
    judged = [each for each in audited.wrong if each.accepted is not None]
    marks.append(f"{sum(bool(each.accepted) for each in judged)} of {len(judged)} mutants accepted")
    return f"{audited.task.id}: {', '.join(marks)}"


def list_verified_tasks(audited: Iterable[TaskAudit]) -> list[select.VerifiedTask]:
    """Tried tasks, each with its problem if any, for `select.write_quarantine`.

    A history with the repair makes a task unusable; accepted patches are for a human to judge.
    """
    verified = []
    for each in audited:
        if each.passes is None or each.fails is None:
            continue
        leak = each.history.repair if each.history is not None else ""
        reason = f"its history holds {leak}" if leak else next(iter(each.problems), "")
        verified.append(select.VerifiedTask(each.task, None if leak else each.settled, reason))
    return verified
