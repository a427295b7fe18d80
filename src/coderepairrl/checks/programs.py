"""Exam of programs as agents, in a real sandbox, before the gateway.

The model is a script behind an HTTP server, in the program's dialect. Programs count neither calls nor tokens, so
limits are the gateway's.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from coderepairrl.agents.scripted import Answer, Behaviour, Request, ScriptedEndpoint
from coderepairrl.checks.agent import EDIT, PROMPT, command, mentioned, python, small_repair, writes_python
from coderepairrl.errors import RemoteFault, SandboxFault
from coderepairrl.gateway import Gateway, Remote
from coderepairrl.printable import visible
from coderepairrl.protocols import Agent, SandboxBackend
from coderepairrl.registry import Finding
from coderepairrl.rollout import Attempt, attempt
from coderepairrl.types import AgentReport, Ending, Limits, Sampling

_PLENTY = 200_000  # Tokens: more than any program opens with.
_SECONDS = 600.0
_SHORT = 15.0  # Seconds for a program to be stopped.
_SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # Printed at the end for mini-swe-agent, whose prompt says so.
_SYSTEM_CHARS = 200  # Enough to distinguish system prompts; some have the time of day later.
_LAST_CHARS = 2_000


@dataclass(frozen=True, slots=True)
class _Trial:
    made: Attempt
    requests: list[Request]

    @property
    def ending(self) -> str:
        """Exit, or the failure with the last line of output."""
        if isinstance(self.made.outcome, AgentReport):
            return self.made.outcome.exit
        kind, _, rest = str(self.made.outcome or self.made.fault).partition(": ")
        return f"{kind}: {rest.strip().rpartition(chr(10))[2]}"

    @property
    def limit(self) -> str:
        """Limit that ended it, or empty."""
        return self.made.reason if self.made.ending is Ending.LIMIT else ""

    @property
    def conversation(self) -> list[Request]:
        """Longest conversation, preferably with tools; others are side calls."""
        conversations: dict[_Opening, list[Request]] = defaultdict(list)
        for request in self.requests:
            conversations[_opening(request)].append(request)
        return max(conversations.values(), key=lambda each: (len(each), bool(each[0].get("tools"))), default=[])

    @property
    def printed(self) -> str:
        """End of the program's output, safe for a terminal."""
        return visible(self.made.printed.strip()[-_LAST_CHARS:])

    @property
    def stopped(self) -> bool:
        """Whether it ended by itself, perhaps with a failing exit code."""
        outcome = self.made.outcome
        return outcome.exit == "submitted" if isinstance(outcome, AgentReport) else outcome is not None


async def examine(agent: Agent, backend: SandboxBackend) -> list[Finding]:
    """Examine `agent` in sandboxes of `backend`. Takes minutes."""
    with small_repair() as (task, folder):

        async def run(script: Behaviour, limits: Limits) -> _Trial:
            async with (
                ScriptedEndpoint(script) as model,
                Remote(model.endpoint().base_url, model="exam", attempts=1) as remote,
                Gateway(remote, sampling=Sampling(max_tokens=limits.turn_tokens), on_turn=lambda *_: None).listening(
                    socket=folder / "gateway.sock"
                ) as gateway,
            ):
                result = await attempt(gateway, task, agent, backend, name="exam", limits=limits, seed=0)
            if isinstance(result.fault, SandboxFault):
                raise result.fault
            return _Trial(result, model.requests)

        repaired = await run(_repair(), Limits(tokens=_PLENTY, seconds=_SECONDS))
        calls = await run(_again, Limits(calls=1, tokens=_PLENTY, seconds=_SECONDS))
        tokens = await run(lambda it: _again(it, 2 * _PLENTY), Limits(calls=6, tokens=_PLENTY, seconds=_SECONDS))
        time = await run(lambda request: Answer("Late.", delay=_SECONDS), Limits(tokens=_PLENTY, seconds=_SHORT))
        broken = await run(lambda request: Answer(status=401), Limits(tokens=_PLENTY, seconds=_SECONDS))
    turns = len(calls.made.turns)
    held = calls.stopped and 1 <= turns <= 3  # fewer, if it is told of the limit and heeds it
    # one that compacts its history makes room again and again, until its calls are spent
    spent = tokens.stopped and tokens.limit in ("tokens", "calls")
    fault = broken.made.fault
    blamed = broken.stopped and isinstance(fault, RemoteFault)
    return [
        *_repaired(agent, repaired),
        Finding("a limit of calls ends it", held, f"{turns} calls, {calls.limit or calls.ending}"),
        Finding("spent tokens end it", spent, tokens.limit or tokens.ending),
        Finding("a slow model ends with the time limit", time.limit == "time", time.limit or time.ending),
        Finding("a broken endpoint is a fault", blamed, str(fault or broken.ending)),
    ]


def _repaired(agent: Agent, trial: _Trial) -> list[Finding]:
    turns, requests = trial.made.turns, trial.conversation
    dialects = sorted({turn.dialect for turn in turns})
    diff = trial.made.patch.decode(errors="replace")
    touched = re.findall(r"^diff --git a/(\S+)", diff, re.M)
    edited = "+    return a + b" in diff
    evidence = diff or f"no diff; printed: {trial.printed}"
    recorded = bool(turns) and all(turn.masked == "relayed" for turn in turns)
    return [
        Finding("ends by itself", trial.ending == "submitted", trial.ending),
        Finding(f"speaks {agent.dialect}", dialects == [agent.dialect], ", ".join(dialects)),
        Finding("states the issue", mentioned(requests[:1], PROMPT)),
        Finding("shows what is in the repository", mentioned(requests[:2], "return a - b")),
        Finding("edits arrive in the diff", edited, "" if edited else evidence),
        Finding("leaves nothing else there", touched == ["add.py"], ", ".join(touched)),
        Finding("its calls are recorded", recorded, _kept(trial)),
    ]


def _kept(trial: _Trial) -> str:
    turns, side_calls = trial.made.turns, len(trial.requests) - len(trial.conversation)
    forks = sum(turn.base != index - 1 for index, turn in enumerate(turns) if index)
    calls = f"{len(turns)} calls, "
    if side_calls:
        return f"{calls}{side_calls} of which beside the conversation"
    return calls + (f"{forks} of which fork" if forks else "one conversation")


_Opening = tuple[bool, str, str]


def _opening(request: Request) -> _Opening:
    """Mark of a conversation: tools or none, system prompt, question."""
    texts = [(message["role"], str(message.get("content"))) for message in request["messages"]]
    system = next((text for role, text in texts if role in ("system", "developer")), "")
    question = next((text for role, text in texts if role == "user"), "")
    return bool(request.get("tools")), system[:_SYSTEM_CHARS], question


def _repair() -> Behaviour:
    """Script that looks, edits and finishes."""
    # Counted by conversation: side calls, for a title, say, take no step of the repair.
    steps: list[Callable[[Request], Answer]] = [_again, _edit, _done]
    counts: Counter[_Opening] = Counter()

    def script(request: Request) -> Answer:
        opening = _opening(request)
        counts[opening] += 1
        return steps[min(counts[opening], len(steps)) - 1](request)

    return script


def _edit(request: Request) -> Answer:
    if request.get("tools") or writes_python(request):
        return command(request, EDIT)
    return Answer(_block("a - b", "a + b"))


def _done(request: Request) -> Answer:
    if request.get("tools") and mentioned([request], _SUBMIT):
        return command(request, f"echo {_SUBMIT}")
    return Answer(python('final_answer("Repaired.")') if writes_python(request) else "Repaired.")


def _again(request: Request, tokens: int | None = None) -> Answer:
    if request.get("tools") or writes_python(request):
        return command(request, "cat add.py", tokens=tokens)
    return Answer(_block("a * b", "a + b"), tokens=tokens)  # which is not there


def _block(old: str, new: str) -> str:
    return f"add.py\n```python\n<<<<<<< SEARCH\n    return {old}\n=======\n    return {new}\n>>>>>>> REPLACE\n```\n"
