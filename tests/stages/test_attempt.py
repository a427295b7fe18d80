"""`crrl attempt` as its users call it: a real sandbox, tests and HTTP, a model that says what the test wants."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

from coderepairrl.agents.fences import format_reply
from coderepairrl.agents.scripted import Answer, ScriptedEndpoint
from coderepairrl.runs import open_run
from coderepairrl.sandbox.contents import read_local_files
from coderepairrl.tasks import make_source
from coderepairrl.tasks.patches import apply_to_text, changed_paths
from coderepairrl.types import Task
from commands import CRRL

OPTIONS = ("n=2", "quoted=0", "agent=direct", "agent.options.format=function")


def mutant() -> tuple[Task, str]:
    """A task, and its reference as functions in fences."""
    [_, task] = make_source("mutants", split="unseen", n=2, quoted=0)
    [path] = changed_paths(task.reference)
    before = read_local_files(task.workspace, [path])[path]
    after = apply_to_text(before or b"", task.reference)
    assert before is not None and after is not None
    return task, format_reply("function", path, before, after)


async def called(folder: Path, *arguments: str, code: int = 0) -> tuple[str, str]:
    """What `crrl attempt` prints: the result, and its work."""
    command = [*CRRL, "attempt", *arguments]
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout, done.stderr


async def test_an_attempt_is_shown_as_it_is_made_and_kept(tmp_path: Path, isolating: None) -> None:
    task, reply = mutant()
    async with ScriptedEndpoint([Answer(f"It is this:\n\n{reply}"), Answer("I do not know.")]) as server:
        given = ("mutants", task.id, *OPTIONS, "--policy", server.endpoint().base_url, "engine.options.model_name=x")
        out, work = await called(tmp_path, *given, "-o", "runs/one")
        shown = [line for line in task.prompt.splitlines() if line.strip()] + ["> It is this:", "the whole function"]
        assert all(line in work for line in shown) and out.startswith("diff --git a/")
        assert "ended       submitted after 1 tool calls (0 failed)" in work and "score       tests 1, weight 1" in work
        assert "reward      1, done" in work and len(server.requests) == 1
        [episode] = open_run(tmp_path / "runs/one").episodes("eval-00000")
        assert episode.reward == 1 and episode.patch.decode() == out
        out, work = await called(tmp_path, *given, "select.holdout=0.001", "--json")
        found = json.loads(out)
        assert (found["reward"], found["patch"], found["reason"]) == (0, "", "submitted"), "whatever the score, exit 0"
        assert "no fenced block" in work and found["messages"][-1]["content"] == "I do not know."
        assert {path.name for path in tmp_path.iterdir()} == {"runs"}, "nothing else is kept"


async def test_faults_and_mistakes_are_no_scores(tmp_path: Path, isolating: None) -> None:
    task, _ = mutant()
    async with ScriptedEndpoint([Answer(status=503)]) as server:
        given = (*OPTIONS, "--policy", server.endpoint().base_url, "engine.options.model_name=x", "run.retries=0")
        _, work = await called(tmp_path, "mutants", task.id, *given, code=1)
        assert "503" in work and "reward      1" not in work
        _, work = await called(tmp_path, "mutants", "mutants/grid", *given, code=2)
        assert "mutants evaluates no task mutants/grid" in work and "such as mutants/" in work
    _, work = await called(tmp_path, "mutants", task.id, code=2)
    assert f"fix: crrl attempt mutants {task.id} --policy RUN" in work
    _, work = await called(tmp_path, "mutants", task.id, "select=5", "--policy", "builtin:tiny", code=2)
    assert "task source 'mutants': select is a table" in work


async def test_a_config_brings_its_policy_agent_and_tasks(tmp_path: Path, isolating: None) -> None:
    """The policy, engine and agent of a shipped config; a task that it evaluates."""
    [first] = make_source("mutants", split="test", n=1)
    out, work = await called(tmp_path, "hello", first.id)
    assert "* " in work and "score " in work and "ended " in work and isinstance(out, str)
