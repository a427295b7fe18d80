"""``crrl fix``: an attempt at a user's bug, by the agent, sandbox and gateway of training (docs/guides/fix.md)."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coderepairrl.errors import TaskError, UsageError
from coderepairrl.gateway import Gateway
from coderepairrl.plan import ServedModelPlan, check_local_prompts
from coderepairrl.plan.model import ModelCommand, ServingPlan, plan_model
from coderepairrl.plan.parts import Check, part, raise_errors
from coderepairrl.plan.serving import open_model
from coderepairrl.plan.terms import AgentPlan
from coderepairrl.processes import hostgit
from coderepairrl.processes.scratch import scratch
from coderepairrl.processes.signals import STOPPING
from coderepairrl.rollout.attempts import Attempt, make_attempt
from coderepairrl.rollout.episodes import AttemptSettings
from coderepairrl.rollout.supervise import warm_up
from coderepairrl.runs.codec import bytes_to_text
from coderepairrl.stages.trace import Trace
from coderepairrl.types import AgentReport, Ending, Sampling, Task

REPAIR = ModelCommand(
    "crrl fix",
    used=(
        *("agent", "sandbox", "engine", "model.thinking"),
        *("rollout.calls", "rollout.tokens", "rollout.seconds", "rollout.turn_tokens"),
    ),
    # larger limits than for the episodes of a training: it is one attempt, and a user waits for it
    defaults=("run.name=fix", "rollout.seconds=600", "rollout.tokens=32768"),
)


class Repair(ServedModelPlan, AgentPlan):
    """Plan of the repair of a user's bug: an attempt at one task, without rewards."""

    def __init__(self, repository: Path, issue: Path, served: ServingPlan) -> None:
        super().__init__(served)
        self.repository_path, self.issue_path = repository, issue

    @part
    def repository(self) -> Repository:
        """The user's repository, which must be clean."""
        return open_repository(self.repository_path)

    @part
    def issue(self) -> str:
        """Description of the bug."""
        return read_issue(self.issue_path)

    @part
    def task(self) -> Task:
        """The bug, in a copy of the repository."""
        root, commit = self.repository.root, self.repository.commit
        return Task(f"{root.name}@{commit[:12]}", self.issue, "", f"dir:{root}", b"")

    @part
    def eval_tasks(self) -> dict[str, tuple[Task, ...]]:
        """No evaluation."""
        return {}

    @part
    def kinds(self) -> dict[str, AttemptSettings]:
        """The same settings for every kind of task."""
        return {"": AttemptSettings(self.agent_setup.agent, self.agent_setup.sandbox, self.limits, {})}

    def _checks(self) -> list[Check]:
        return [*super()._checks(), lambda: check_local_prompts(self, self.kinds, [self.task])]


def plan_repair(repository: Path, issue: Path, model: str, overrides: Sequence[str] = ()) -> Repair:
    """Plan the repair by `model` of the bug that the file `issue` describes, in the clean `repository`.

    Raises as `parts.raise_errors`.
    """
    served = plan_model(model, overrides, REPAIR)
    plan = Repair(repository, issue, served)
    raise_errors([*served.errors(), *plan.errors()])
    return plan


async def attempt_repair(
    plan: Repair, *, temperature: float = 0.0, trace: Trace | None = None
) -> tuple[bytes, dict[str, Any]]:
    """Let the model attempt the repair in a sandboxed copy of the repository; return the diff, and the facts to print.

    Raises as `open_model`, `TaskError`, and the `Fault` of a broken part.
    """
    repository, task, limits = plan.repository, plan.task, plan.limits
    config, trace = plan.config, trace or Trace(quiet=True)
    agent, backend = plan.agent_setup.agent, plan.agent_setup.sandbox
    trace.say("repository", f"{repository.root} at {repository.commit[:12]}")
    trace.say("sandbox", f"{backend.name}: {plan.choice.why}")
    trace.say("model", f"{plan.model.name}, temperature {temperature:g}")
    trace.say("engine", f"{config.engine.name} starts")
    sampling = Sampling(temperature=temperature, max_tokens=limits.turn_tokens)
    with scratch("fix") as home:
        home.chmod(0o711)  # guests run as another user, and must reach the socket in it
        async with (
            open_model(plan, home) as source,
            Gateway(source, sampling=sampling, on_turn=lambda _, turn: trace.show_turn(turn)).listening(
                socket=home / "gateway.sock"
            ) as gateway,
        ):
            await warm_up(source, agent.first_request(task))
            trace.say("agent", f"{agent.name} works")
            result = await make_attempt(gateway, task, agent, backend, name="fix", limits=limits, seed=0)
            if result.fault is not None:
                raise result.fault
            report = _agent_report(result)
            trace.show_end(report, result.seconds)
            if not result.patch:
                trace.say("patch", "none: nothing in the repository has changed")
                if agent.placement == "sandbox" and report.exit != "crash":  # a crash shows the output itself
                    trace.show_output(result.printed)
    return result.patch, {
        "patch": bytes_to_text(result.patch),
        "exit": report.exit,
        "model": plan.model.name,
        "repository": str(repository.root),
        "commit": repository.commit,
        "seconds": round(result.seconds, 3),
        "tool_calls": None if report.tool_calls is None else len(report.tool_calls),
        "sandbox": backend.name,
        "limits": asdict(limits),
    }


def _agent_report(attempt: Attempt) -> AgentReport:
    """Agent's report; without one, its limit or crash."""
    outcome = attempt.outcome
    if isinstance(outcome, AgentReport):
        return outcome
    return AgentReport("crash", log=str(outcome)) if attempt.ending is Ending.CRASH else AgentReport(attempt.reason)


@dataclass(frozen=True, slots=True)
class Repository:
    """A clean git repository: root of its working tree, and commit."""

    root: Path
    commit: str


def open_repository(path: Path) -> Repository:
    """Open the repository around `path`. Raises `TaskError` if it is missing, empty, or has uncommitted changes."""
    if not path.is_dir():
        raise TaskError(f"{path} is not a folder", fix="name the folder of a git repository")
    repository = hostgit.find_repository(path, around=True)
    root = repository.name
    with hostgit.open_view(repository) as view:
        commit = view.head()
        if changes := view.changes():
            message = f"{root} has uncommitted changes: {', '.join(changes[:3])}"
            raise TaskError(message, fix="commit or stash them first")
    return Repository(root, commit)


def read_issue(path: Path) -> str:
    """Read the text of an issue. Raises `UsageError` if it is empty or unreadable."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", fix="--issue names a text file in UTF-8") from error
    if not text.strip():
        raise UsageError(f"{path} is empty", fix="write what is wrong, as you would tell a colleague")
    return text


def apply_patch(repository: Repository, patch: bytes) -> bool:
    """Apply `patch` to the working tree, all or nothing, without staging; returns whether there was a patch.

    Raises `TaskError` if the repository has changed since it was opened, or git refuses the patch.
    """
    if not patch:
        return False
    if open_repository(repository.root) != repository:
        raise TaskError(f"{repository.root} has another commit than the patch was made for", fix="run crrl fix again")
    with hostgit.open_view(hostgit.find_repository(repository.root)) as view, _ignore_signals():
        try:
            view.apply(patch)
        except subprocess.CalledProcessError as error:
            raise TaskError(
                f"the patch does not apply to {repository.root}: {hostgit.explain_git_error(error)}",
                fix="save the diff and apply it by hand; nothing was changed",
            ) from error
    return True


@contextmanager
def _ignore_signals() -> Iterator[None]:
    """Ignore signals, also in git, which must not stop between two files."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
