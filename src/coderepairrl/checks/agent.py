"""Exam of agents on the host, and of programs as agents in a real sandbox, through the gateway with a scripted model.

The model uses the agent's tools: one with a single required string is its shell; without tools, answers hold a fenced
``bash`` block. Agents that take edits from replies get fewer checks. A program is examined in its dialect; it
counts neither calls nor tokens, so the gateway enforces limits.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from coderepairrl.agents.patching import HEAD
from coderepairrl.agents.scripted import Answer, Behaviour, Request, ScriptedEndpoint
from coderepairrl.errors import RemoteFault, SandboxFault
from coderepairrl.gateway import Gateway, Remote
from coderepairrl.printable import visible
from coderepairrl.processes.scratch import scratch
from coderepairrl.protocols import Agent, SandboxBackend
from coderepairrl.registry import Finding
from coderepairrl.rollout.attempts import Attempt, make_attempt
from coderepairrl.sandbox.local import UnsafeLocal
from coderepairrl.types import AgentReport, Ending, Limits, Sampling, Task

PROMPT = "add(a, b) in add.py subtracts. Repair it."
SOURCE = "def add(a, b):\n    return a - b\n"
# Qwen Code refuses a bare `sed -i`; the shell of the original Nano has no redirection.
EDIT = "env sed -i 's/a - b/a + b/' add.py"
_EDIT_REPLY = f"add.py\n{HEAD}\n    return a - b\n=======\n    return a + b\n>>>>>>> REPLACE\n"
_COUNT = "echo x >> count.txt"
# Values of a tool's other required arguments, by type.
_FILLERS: dict[Any, Any] = {"string": "exam", "boolean": False, "integer": 1, "number": 1, "array": [], "object": {}}
_SLACK = 2.0  # Seconds beyond its time limit for an agent to stop.


@dataclass(frozen=True, slots=True)
class _Trial:
    attempt: Attempt
    requests: list[Request]

    @property
    def ending(self) -> str:
        """Exit, or the failure with the last line of output."""
        if isinstance(self.attempt.outcome, AgentReport):
            return self.attempt.outcome.exit
        kind, _, rest = str(self.attempt.outcome or self.attempt.fault).partition(": ")
        return f"{kind}: {rest.strip().rpartition(chr(10))[2]}"

    @property
    def limit(self) -> str:
        """Limit that ended it, or empty."""
        return self.attempt.reason if self.attempt.ending is Ending.LIMIT else ""

    @property
    def executed(self) -> int:
        """Number of executions of `_COUNT`."""
        return self.attempt.patch.count(b"\n+x")

    @property
    def conversation(self) -> list[Request]:
        """Longest conversation, preferably with tools; others are side calls."""
        conversations: dict[_ConversationKey, list[Request]] = defaultdict(list)
        for request in self.requests:
            conversations[_conversation_key(request)].append(request)
        return max(conversations.values(), key=lambda each: (len(each), bool(each[0].get("tools"))), default=[])

    @property
    def stopped(self) -> bool:
        """Whether it ended by itself, perhaps with a failing exit code."""
        outcome = self.attempt.outcome
        return outcome.exit == "submitted" if isinstance(outcome, AgentReport) else outcome is not None


async def examine_agent(agent: Agent, backend: SandboxBackend | None = None) -> list[Finding]:
    """Examine `agent` in sandboxes of `backend`, on a small repository with a bug.

    Without a backend, commands run on the host (`unsafe-local`). Agents inside the sandbox need one whose guests
    reach the host's loopback.
    """
    with _open_exam(agent, backend or UnsafeLocal()) as attempt:
        first = await attempt(lambda request: Answer("I do not know."), Limits())
        takes_edits = not any(request.get("tools") for request in first.requests) and is_mentioned(first.requests, HEAD)
        findings = await (_examine_edits(attempt, first) if takes_edits else _examine_commands(attempt))
        full = await attempt(lambda request: Answer(status=400, code="context_length_exceeded"), Limits())
        slow = await attempt(lambda request: Answer("Late.", delay=5.0), Limits(seconds=1.0))
        broken = await attempt(lambda request: Answer(status=502), Limits(seconds=5.0))
    return [
        *findings,
        Finding("a full context is an ending, not an error", full.ending == "tokens", full.ending),
        _time_limit_finding("a slow model ends with the time limit", slow),
        Finding("a broken endpoint is a fault", isinstance(broken.attempt.fault, RemoteFault), broken.ending),
    ]


@contextmanager
def open_small_repair() -> Iterator[tuple[Task, Path]]:
    """Task of one file with a bug, and a temporary folder for sandboxes."""
    with scratch("exam") as folder:
        folder.chmod(0o755)  # a sandbox may read it as another user
        workspace = folder / "add"
        workspace.mkdir(mode=0o755)
        (workspace / "add.py").write_text(SOURCE)
        yield Task("exam/add", PROMPT, "python", f"dir:{workspace}", b""), folder


_Attempt = Callable[[Behaviour, Limits], Awaitable[_Trial]]


@contextmanager
def _open_exam(agent: Agent, backend: SandboxBackend) -> Iterator[_Attempt]:
    with open_small_repair() as (task, folder):

        async def attempt(script: Behaviour, limits: Limits) -> _Trial:
            async with (
                ScriptedEndpoint(script) as model,
                Remote(model.endpoint().base_url, model="exam", attempts=1) as remote,
                Gateway(remote, sampling=Sampling(max_tokens=limits.turn_tokens), on_turn=lambda *_: None).listening(
                    socket=folder / "gateway.sock"
                ) as gateway,
            ):
                result = await make_attempt(gateway, task, agent, backend, name="exam", limits=limits, seed=0)
            if isinstance(result.fault, SandboxFault):
                raise result.fault
            return _Trial(result, model.requests)

        yield attempt


def make_command_answer(request: Request, *commands: str, tokens: int | None = None) -> Answer:
    """Answer that makes the agent run `commands` by its tool.

    Takes a string ``cmd`` or ``command``, a list ``commands``, or a single required string; agents that reply in Python
    (smolagents) call ``shell``.
    """
    functions = [tool["function"] for tool in request.get("tools") or ()]
    for named in (("cmd", "command", "commands"), ()):  # in the second pass, a tool's only required argument
        for function in functions:
            parameters = function.get("parameters") or {}
            properties, required = parameters.get("properties", {}), parameters.get("required", [])
            alone = required if len(required) == 1 else ()
            for name in named or alone:
                kind = properties.get(name, {}).get("type")
                if kind == "string" or (kind == "array" and name == "commands"):
                    rest = {other: _FILLERS[properties[other].get("type")] for other in required if other != name}
                    values = [line if kind == "string" else [line] for line in commands]
                    calls = tuple((function["name"], {name: each, **rest}) for each in values)
                    return Answer("Running it.", calls, tokens)
    if writes_python(request):
        return Answer(smolagents_reply(*(f"print(shell({line!r}))" for line in commands)), tokens=tokens)
    return Answer("Running it.\n" + "\n".join(f"```bash\n{line}\n```" for line in commands), tokens=tokens)


def writes_python(request: Request) -> bool:
    """Whether the agent runs Python between ``<code>`` and ``</code>``, as smolagents."""
    return "</code>" in str(request["messages"][0])


def smolagents_reply(*lines: str) -> str:
    """Reply in Python, for smolagents."""
    return "\n".join(["Running it.", "<code>", *lines, "</code>"])


def is_mentioned(requests: list[Request], text: str) -> bool:
    """Whether any of `requests` contains `text`."""
    return any(text in str(message) for request in requests for message in request["messages"])


async def _examine_edits(attempt: _Attempt, empty: _Trial) -> list[Finding]:
    # `empty` had a reply without edits
    repair = await attempt(lambda request: Answer(_EDIT_REPLY), Limits())
    one_call = await attempt(lambda request: Answer(_EDIT_REPLY), Limits(calls=1))
    requests = repair.requests
    is_stated = bool(requests) and all(is_mentioned([request], PROMPT) for request in requests)
    is_empty = empty.ending == "submitted" and not empty.attempt.patch
    is_limited = len(one_call.requests) == 1 and one_call.ending in ("submitted", "calls")
    return [
        *_submission_findings(repair),
        Finding("states the issue", is_stated, f"{len(requests)} requests"),
        Finding("shows the code", is_mentioned(requests, "return a - b")),
        Finding("a reply without edits is an empty patch", is_empty, empty.ending),
        Finding("a limit of 1 call allows 1", is_limited, f"{len(one_call.requests)} requests, {one_call.ending}"),
    ]


async def _examine_commands(attempt: _Attempt) -> list[Finding]:
    steps = iter([[_COUNT], ["cat add.py"], [EDIT]])

    def script(request: Request) -> Answer:
        commands = next(steps, None)
        return make_command_answer(request, *commands) if commands else Answer("Repaired.")

    repair = await attempt(script, Limits())
    single = await attempt(lambda request: make_command_answer(request, _COUNT), Limits(calls=3))
    several = await attempt(lambda request: make_command_answer(request, _COUNT, _COUNT), Limits(calls=3))
    spent = await attempt(lambda request: make_command_answer(request, _COUNT, tokens=5000), Limits(tokens=5000))
    long = await attempt(lambda request: make_command_answer(request, "sleep 30"), Limits(seconds=1.0))
    requests = repair.requests
    is_appended = all(
        later["messages"][: len(earlier["messages"])] == earlier["messages"] for earlier, later in pairwise(requests)
    )
    is_exact = single.executed == 3 and single.ending == "calls"
    is_limited = several.executed <= 3 and several.ending == "calls"
    is_ended = len(spent.requests) == 1 and spent.ending == "tokens"
    return [
        *_submission_findings(repair),
        Finding("states the issue", is_mentioned(requests[:1], PROMPT)),
        Finding("shows what commands print", is_mentioned(requests, "return a - b")),
        Finding("history is appended only", is_appended and len(requests) > 3, f"{len(requests)} requests"),
        Finding("a limit of 3 calls allows 3", is_exact, f"{single.executed} executed, {single.ending}"),
        Finding(
            "several calls in a reply do not overshoot", is_limited, f"{several.executed} executed, {several.ending}"
        ),
        Finding("spent tokens end it", is_ended, f"{len(spent.requests)} requests, {spent.ending}"),
        _time_limit_finding("a long command ends with the time limit", long),
    ]


def _submission_findings(trial: _Trial) -> list[Finding]:
    diff = trial.attempt.patch
    return [
        Finding("submits", trial.ending == "submitted", trial.ending),
        Finding("edits arrive in the diff", b"+    return a + b" in diff, diff.decode(errors="replace")),
    ]


def _time_limit_finding(name: str, trial: _Trial) -> Finding:
    # of a trial with a limit of 1 s
    seconds = trial.attempt.seconds
    return Finding(name, seconds < 1.0 + _SLACK and trial.limit == "time", f"{seconds:.1f} s, {trial.ending}")


_MANY_TOKENS = 200_000  # More than any program's first request has.
_LONG_SECONDS = 600.0
_SHORT_SECONDS = 15.0  # Until a program is stopped.
_SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # Printed at the end for mini-swe-agent, whose prompt says so.
_SYSTEM_CHARS = 200  # Enough to distinguish system prompts; some have the time of day later.
_LAST_CHARS = 2_000


async def examine_agent_program(agent: Agent, backend: SandboxBackend) -> list[Finding]:
    """Examine `agent` in sandboxes of `backend`. Takes minutes."""
    with _open_exam(agent, backend) as attempt:
        repaired = await attempt(_make_repair_script(), Limits(tokens=_MANY_TOKENS, seconds=_LONG_SECONDS))
        calls = await attempt(_make_look_answer, Limits(calls=1, tokens=_MANY_TOKENS, seconds=_LONG_SECONDS))
        tokens = await attempt(
            lambda request: _make_look_answer(request, 2 * _MANY_TOKENS),
            Limits(calls=6, tokens=_MANY_TOKENS, seconds=_LONG_SECONDS),
        )
        time = await attempt(
            lambda request: Answer("Late.", delay=_LONG_SECONDS), Limits(tokens=_MANY_TOKENS, seconds=_SHORT_SECONDS)
        )
        broken = await attempt(lambda request: Answer(status=401), Limits(tokens=_MANY_TOKENS, seconds=_LONG_SECONDS))
    turns = len(calls.attempt.turns)
    held = calls.stopped and 1 <= turns <= 3  # the gateway allows 2 more calls than the limit
    # a program that compacts its history regains tokens each time, until its calls are spent
    spent = tokens.stopped and tokens.limit in ("tokens", "calls")
    fault = broken.attempt.fault
    blamed = broken.stopped and isinstance(fault, RemoteFault)
    return [
        *_repair_findings(agent, repaired),
        Finding("a limit of calls ends it", held, f"{turns} calls, {calls.limit or calls.ending}"),
        Finding("spent tokens end it", spent, tokens.limit or tokens.ending),
        Finding("a slow model ends with the time limit", time.limit == "time", time.limit or time.ending),
        Finding("a broken endpoint is a fault", blamed, str(fault or broken.ending)),
    ]


def _repair_findings(agent: Agent, trial: _Trial) -> list[Finding]:
    turns, requests = trial.attempt.turns, trial.conversation
    dialects = sorted({turn.dialect for turn in turns})
    diff = trial.attempt.patch.decode(errors="replace")
    touched = re.findall(r"^diff --git a/(\S+)", diff, re.M)
    edited = "+    return a + b" in diff
    evidence = diff or f"no diff; printed: {visible(trial.attempt.printed.strip()[-_LAST_CHARS:])}"
    recorded = bool(turns) and all(turn.masked == "relayed" for turn in turns)
    return [
        Finding("ends by itself", trial.ending == "submitted", trial.ending),
        Finding(f"speaks {agent.dialect}", dialects == [agent.dialect], ", ".join(dialects)),
        Finding("states the issue", is_mentioned(requests[:1], PROMPT)),
        Finding("shows what is in the repository", is_mentioned(requests[:2], "return a - b")),
        Finding("edits arrive in the diff", edited, "" if edited else evidence),
        Finding("leaves nothing else there", touched == ["add.py"], ", ".join(touched)),
        Finding("its calls are recorded", recorded, _describe_recorded_calls(trial)),
    ]


def _describe_recorded_calls(trial: _Trial) -> str:
    turns, side_calls = trial.attempt.turns, len(trial.requests) - len(trial.conversation)
    # a turn that does not continue the one before it is a fork
    forks = sum(turn.base != index - 1 for index, turn in enumerate(turns) if index)
    calls = f"{len(turns)} calls, "
    if side_calls:
        return f"{calls}{side_calls} of which beside the conversation"
    return calls + (f"{forks} of which fork" if forks else "one conversation")


_ConversationKey = tuple[bool, str, str]


def _conversation_key(request: Request) -> _ConversationKey:
    """Key of a conversation: whether it has tools, system prompt, question."""
    texts = [(message["role"], str(message.get("content"))) for message in request["messages"]]
    system = next((text for role, text in texts if role in ("system", "developer")), "")
    question = next((text for role, text in texts if role == "user"), "")
    return bool(request.get("tools")), system[:_SYSTEM_CHARS], question


def _make_repair_script() -> Behaviour:
    """Script that looks, edits and finishes."""
    # Steps are counted by conversation, so that side calls (for a title, say) take none.
    steps: list[Callable[[Request], Answer]] = [_make_look_answer, _make_edit_answer, _make_final_answer]
    counts: Counter[_ConversationKey] = Counter()

    def script(request: Request) -> Answer:
        key = _conversation_key(request)
        counts[key] += 1
        return steps[min(counts[key], len(steps)) - 1](request)

    return script


def _make_edit_answer(request: Request) -> Answer:
    if request.get("tools") or writes_python(request):
        return make_command_answer(request, EDIT)
    return Answer(_format_edit_block("a - b"))


def _make_final_answer(request: Request) -> Answer:
    if request.get("tools") and is_mentioned([request], _SUBMIT):
        return make_command_answer(request, f"echo {_SUBMIT}")
    return Answer(smolagents_reply('final_answer("Repaired.")') if writes_python(request) else "Repaired.")


def _make_look_answer(request: Request, tokens: int | None = None) -> Answer:
    if request.get("tools") or writes_python(request):
        return make_command_answer(request, "cat add.py", tokens=tokens)
    return Answer(_format_edit_block("a * b"), tokens=tokens)  # `a * b` is not in the file


def _format_edit_block(old: str) -> str:
    return f"add.py\n```python\n<<<<<<< SEARCH\n    return {old}\n=======\n    return a + b\n>>>>>>> REPLACE\n```\n"
