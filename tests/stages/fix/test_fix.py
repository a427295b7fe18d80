"""`crrl fix`: real repository, sandbox, agent and HTTP, with a scripted model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from coderepairrl.agents.scripted import Answer, ScriptedEndpoint
from coderepairrl.plan.model import plan_model
from coderepairrl.plan.parts import raise_errors
from coderepairrl.plan.terms import AgentPlan
from coderepairrl.stages.fix import REPAIR, Repair, Repository
from coderepairrl.types import Task
from commands import CRRL
from fix.conftest import PATCH, SHORT, Home, make_call, set_replies

DONE = "It adds now."
FIX = Answer(None, (("apply_patch", {"file_path": "add.py", "old_content": "a - b", "new_content": "a + b"}),))


def plan_repair_by(model: str, *overrides: str) -> AgentPlan:
    plan = Repair(Path(), Path(), plan_model(model, ["sandbox=scripted", *overrides], REPAIR))
    plan.repository, plan.issue = Repository(Path(), "0" * 40), "It fails."
    plan.task = Task("mine", plan.issue, "", "dir:.", b"")
    raise_errors([*plan.served.errors(), *plan.errors()])
    return plan


def test_the_diff_is_printed_and_nothing_else_happens(home: Home, miniature: Path) -> None:
    before = home.state
    done = home.fix(miniature, *SHORT, *set_replies("Let me look." + make_call("shell", cmd="cat add.py"), PATCH, DONE))
    assert home.state == before
    assert b"-    return a - b\r\n+    return a + b\r\n" in done.stdout
    subprocess.run(["git", "-C", str(home.repo), "apply", "--check", "-"], input=done.stdout, check=True)
    shown = done.stderr.decode()
    for line in ("Let me look.", "* shell cat add.py", "    return a - b", "file_path: add.py", DONE, "2 tool calls"):
        assert line in shown
    assert "\x1b" not in shown, "plain where it is not a terminal"


def test_apply_changes_the_tree_exactly_as_the_agent_did_and_commits_nothing(home: Home, miniature: Path) -> None:
    change = r"rm old.txt; chmod +x run.sh; mkdir new; printf '\000\377\r\n' > new/raw.bin; printf 'no end' > new/text"
    head = home.git("rev-parse", "HEAD")
    (folder := home.repo / "sub").mkdir()  # a folder inside the repository
    done = home.fix(
        miniature, *SHORT, "--apply", "--json", *set_replies(PATCH + make_call("shell", cmd=change), DONE), repo=folder
    )
    summary = json.loads(done.stdout)
    assert summary["applied"] and summary["exit"] == "submitted" and summary["tool_calls"] == 2
    assert home.git("rev-parse", "HEAD") == head
    assert home.git("diff", "--cached") == ""
    assert (home.repo / "add.py").read_bytes() == b"def add(a, b):\r\n    return a + b\r\n"
    assert (home.repo / "new/raw.bin").read_bytes() == b"\x00\xff\r\n"
    assert (home.repo / "new/text").read_text() == "no end"
    assert not (home.repo / "old.txt").exists()
    assert os.access(home.repo / "run.sh", os.X_OK)

    again = home.fix(miniature, *SHORT, *set_replies(DONE), code=2)
    assert b"uncommitted changes" in again.stderr and b"commit or stash" in again.stderr


async def test_work_that_began_meanwhile_is_kept_and_the_patch_is_only_printed(home: Home) -> None:
    def reply(request: dict[str, Any]) -> Answer:
        if len(request["messages"]) < 3:
            return FIX
        (home.repo / "mine.txt").write_text("mine")
        return Answer(DONE)

    async with ScriptedEndpoint(reply) as server:
        url = server.endpoint().base_url
        done = await asyncio.to_thread(home.fix, url, "--model-name", "any", "--apply", code=2)
    assert b"+    return a + b" in done.stdout
    assert home.git("status", "--porcelain") == "?? mine.txt\n"


async def test_a_url_gets_its_key_and_the_agent_does_not(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    look = Answer("Looking.", (("shell", {"cmd": "env; cat /proc/*/environ"}),))
    async with ScriptedEndpoint([look, FIX, Answer(DONE)]) as server:
        url = server.endpoint().base_url
        named = ["--key-env", "MY_KEY", "--model-name", "theirs"]
        done = await asyncio.to_thread(home.fix, url, *named, "--temperature", "0.5")
        assert server.authorizations == ["Bearer sk-secret"] * 3
        assert {(request["model"], request["temperature"]) for request in server.requests} == {("theirs", 0.5)}
        assert "sk-secret" not in json.dumps(server.requests)
        assert b"+    return a + b" in done.stdout and b"sk-secret" not in done.stderr
        unset = await asyncio.to_thread(home.fix, url, "--key-env", "NO_SUCH_KEY", code=2)
        assert b"NO_SUCH_KEY is not set" in unset.stderr
    gone = await asyncio.to_thread(home.fix, url, "--model-name", "theirs", code=1)
    assert b"cannot be reached" in gone.stderr and b"fix: check the URL" in gone.stderr


@pytest.mark.parametrize("stop", ["SIGINT", "the terminal is closed"])
async def test_being_stopped_leaves_nothing(home: Home, stop: str) -> None:
    """No process or folder is left, and the repository is unchanged."""
    before = home.state
    change = Answer("First this.", (("shell", {"cmd": "echo changed > add.py; setsid sleep 1000 & sleep 1000 &"}),))
    async with ScriptedEndpoint(lambda request: change if len(request["messages"]) < 3 else Answer("", delay=60)) as it:
        command = home.command(it.endpoint().base_url, "--model-name", "slow", "--apply")
        by_hand, terminal = os.openpty()
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        if stop not in signal.Signals.__members__:
            command = ["setsid", "--ctty", *command]
            streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
        process = subprocess.Popen(command, cwd=home.path, env=home.environment, **streams)
        os.close(terminal)
        async with asyncio.timeout(120):
            while len(it.requests) < 2:
                assert process.poll() is None
                await asyncio.sleep(0.05)
            started = psutil.Process(process.pid).children(recursive=True)
            if stop in signal.Signals.__members__:
                process.send_signal(signal.Signals[stop])
            os.close(by_hand)
            output, errors = await asyncio.to_thread(process.communicate)
            assert process.returncode == 130, errors
            assert not output and b"Traceback" not in (errors or b"")
            assert len(started) > 1
            while not all(map(has_ended, started)):
                await asyncio.sleep(0.05)
    assert home.state == before
    assert not list(home.tmp.iterdir()), "no sandbox, socket or log is left"


def has_ended(process: psutil.Process) -> bool:
    """Whether it has ended, perhaps as a zombie."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_a_run_brings_its_checkpoint_and_its_settings(home: Home, miniature: Path) -> None:
    """A random policy repairs nothing, which is a result."""
    (home.path / "mine.toml").write_text(f"""
run = {{ name = "mine", steps = 1 }}
model.path = "{miniature}"
tasks.source = "handmade"
agent = {{ name = "nano", options = {{ system = "compact", tools = "compact", nudge = false }} }}
rollout = {{ tasks_per_step = 1, group_size = 2, calls = 2, tokens = 3000, turn_tokens = 8, seconds = 20 }}
eval = {{ before = false, after = false }}
""")
    run = home.path / "runs" / "mine"
    done = subprocess.run([*CRRL, "train", "mine.toml"], cwd=home.path, env=home.environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    done = home.fix("runs/mine", "--json", code=1)
    summary = json.loads(done.stdout)
    assert home.path / summary["model"] == run / "checkpoints" / "00001"
    assert summary["limits"] == {"calls": 2, "tokens": 3000, "turn_tokens": 8, "seconds": 20.0}
    assert summary["patch"] == "" and not summary["applied"]
    plan = plan_repair_by(str(run), "rollout.calls=9")
    assert plan.limits.calls == 9
    assert plan.config.agent.options == {"system": "compact", "tools": "compact", "nudge": False}
    subprocess.run(["rm", "-r", str(run / "checkpoints")], check=True)
    assert b"no checkpoint yet" in home.fix(run, code=2).stderr
