"""crrl attempt and crrl tasks shell as users call them: one task, by a model, by commands, or by hand."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
import time
from pathlib import Path

import pytest

from coderepairrl.agents.scripted import Answer, ScriptedEndpoint
from coderepairrl.runs import open_run
from coderepairrl.tasks import make_source
from coderepairrl.types import Task
from commands import CRRL
from test_library import repair_of

OPTIONS = ("n=2", "quoted=0", "agent=direct", "agent.options.format=function")


def mutant() -> tuple[Task, str]:
    """A task, and its reference as functions in fences."""
    [_, task] = make_source("mutants", split="unseen", n=2, quoted=0)
    return task, repair_of(task)


async def run_attempt(folder: Path, *arguments: str, code: int = 0) -> tuple[str, str]:
    """Run `crrl attempt`; returns stdout and stderr."""
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
        out, work = await run_attempt(tmp_path, *given, "-o", "runs/one")
        shown = [line for line in task.prompt.splitlines() if line.strip()] + ["> It is this:", "the whole function"]
        assert all(line in work for line in shown) and out.startswith("diff --git a/")
        assert "ended       submitted after 1 tool calls (0 failed)" in work and "score       tests 1, weight 1" in work
        assert "reward      1, done" in work and len(server.requests) == 1
        [episode] = open_run(tmp_path / "runs/one").episodes("eval-00000")
        assert episode.reward == 1 and episode.patch.decode() == out
        _, work = await run_attempt(tmp_path, *given, "-o", "runs/one", code=2)
        assert "runs/one already holds a run" in work and "--resume" not in work
        out, work = await run_attempt(tmp_path, *given, "select.holdout=0.001", "--json")
        found = json.loads(out)
        assert (found["reward"], found["patch"], found["reason"]) == (0, "", "submitted"), "whatever the score, exit 0"
        assert "no fenced block" in work and found["messages"][-1]["content"] == "I do not know."
        assert {path.name for path in tmp_path.iterdir()} == {"runs"}, "nothing else is kept"


async def test_faults_and_mistakes_are_no_scores(tmp_path: Path, isolating: None) -> None:
    task, _ = mutant()
    async with ScriptedEndpoint([Answer(status=503)]) as server:
        given = (*OPTIONS, "--policy", server.endpoint().base_url, "engine.options.model_name=x", "run.retries=0")
        _, work = await run_attempt(tmp_path, "mutants", task.id, *given, code=1)
        assert "503" in work and "reward      1" not in work
        _, work = await run_attempt(tmp_path, "mutants", "mutants/grid", *given, code=2)
        assert "mutants evaluates no task mutants/grid" in work and "such as mutants/" in work
    _, work = await run_attempt(tmp_path, "mutants", task.id, code=2)
    assert f"fix: crrl attempt mutants {task.id} --policy RUN" in work
    _, work = await run_attempt(tmp_path, "mutants", task.id, "select=5", "--policy", "builtin:tiny", code=2)
    assert "task source 'mutants': select must be a table" in work


async def test_a_config_brings_its_policy_agent_and_tasks(tmp_path: Path, isolating: None) -> None:
    """The policy, engine and agent of a shipped config; a task that it evaluates."""
    [first] = make_source("mutants", split="test", n=1)
    out, work = await run_attempt(tmp_path, "hello", first.id)
    assert "* " in work and "score " in work and "ended " in work and isinstance(out, str)


SHELL = [*CRRL, "tasks", "shell", "jsonl", "mine/add", "path=tasks.jsonl"]

LISTENS = (  # on the port of the terminal, which is an argument of the program that opened it
    'import os, socket; words = open(f"/proc/{os.getppid()}/stat").read().split();'
    ' words = open(f"/proc/{words[3]}/cmdline").read().split(chr(0));'
    " port = next(int(a) for a, b, c in zip(words[3:], words[4:], words[5:]) if (a + b + c).isdecimal());"
    ' link = socket.create_connection(("127.0.0.1", port)); link.settimeout(20);'
    ' print("got-" + (link.recv(9).decode() or "nothing"))'
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with two tasks: one that can be opened, and one whose commit is missing."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "add.py").write_text("def add(a, b):\n    return a - b\n")
    checks = {"commands": [{"argv": ["python", "check.py"]}], "restore": {"check.py": "import add\n"}}
    task = {"prompt": "It subtracts.", "language": "python", "reference": "", "checks": checks}
    tasks = [
        {"id": "mine/add", "workspace": f"dir:{tmp_path / 'project'}", **task},
        {"id": "mine/gone", "workspace": f"git:https://example.org/a@{'0' * 40}", **task},
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in tasks))
    return tmp_path


def run_shell(home: Path, *words: str, stdin: bytes = b"", code: int = 0) -> tuple[str, str]:
    done = subprocess.run([*SHELL, *words], cwd=home, input=stdin, capture_output=True, timeout=60)
    assert done.returncode == code, done.stderr
    return done.stdout.decode(), done.stderr.decode()


def test_commands_and_scripts_see_what_an_agent_sees_and_change_nothing(home: Path, isolating: None) -> None:
    out, said = run_shell(home, "--", "sh", "-c", "ls; echo x > add.py; exit 5", code=5)
    assert out == "add.py\n" and "changes are discarded" in said
    assert run_shell(home, "--checks", stdin=b"ls; git status --short; python3 -c 'import check'; cat add.py\n")[0] == (
        "add.py\ncheck.py\n?? check.py\ndef add(a, b):\n    return a - b\n"
    )
    words = [word.replace("add", "gone") for word in SHELL]
    refused = subprocess.run(words, cwd=home, capture_output=True, text=True)
    assert refused.returncode == 2 and "mine/gone is not prepared: it lacks commit" in refused.stderr
    assert "fix: crrl tasks prepare jsonl path=tasks.jsonl" in refused.stderr


def test_on_a_terminal_it_is_interactive(home: Path, isolating: None) -> None:
    child, terminal = pty.fork()
    if not child:
        os.chdir(home)
        os.execv(SHELL[0], SHELL)
    shown, deadline = b"", time.monotonic() + 60

    def read_until(word: bytes) -> None:
        nonlocal shown
        while word not in shown:
            assert time.monotonic() < deadline, shown
            shown += os.read(terminal, 1 << 16)
        shown = b""

    read_until(b"$ ")
    os.write(terminal, b"tty && echo at-$((40 + 2))\n")
    read_until(b"at-42")
    os.write(terminal, f"python3 -c '{LISTENS}'\n".encode())
    read_until(b"got-nothing")
    os.write(terminal, b"sleep 100; echo cut\n")
    read_until(b"sleep 100")
    time.sleep(0.3)
    os.write(terminal, b"\x03")  # the sleep's, and not ours
    os.write(terminal, b"exit 7\n")
    read_until(b"exit\r\n")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
