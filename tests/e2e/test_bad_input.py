"""crrl train under bad input, signals and a full disk: mistakes are reported before any file is written."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
from dataclasses import replace

import pytest

from coderepairrl import config as configs
from coderepairrl import models
from coderepairrl.errors import CodeRepairError, ConfigError, UsageError
from coderepairrl.plan import plan_run
from coderepairrl.stages import command
from coderepairrl.sync.weights import find_shared_path
from coderepairrl.tasks import make_source, write_jsonl
from coderepairrl.types import Command
from e2e.conftest import HERE, Project, wait_until


@pytest.fixture(autouse=True)
def _enter_project_folder(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.path)
    monkeypatch.syspath_prepend(HERE)


@pytest.mark.parametrize(
    ("override", "message", "fix"),
    [
        ("reward=patch_line", "patch_line", "patch_lines"),
        ("agent.options.nudg=true", "nudg", "nudge"),
        ("engine.options.slots=0", "engine.options.slots", ""),
        ("engine.options.context=1000000", "engine.options.context", ""),
        ("engine.options.kv_gib=0.0001", "engine.options.kv_gib", "engine.options.context"),
        ("engine=scripted", "script", "engine.options"),
        ("sandbox=bwarp", "bwarp", "bwrap"),
        ("sandbox={name='unsafe-local', options={env='A=b'}}", "option env", ""),
        ("sandbox.options.show=['/']", "no option 'show'", ""),
        ("agent.options.name=nano", "no option 'name'", ""),
        ("model.path=/nowhere", "/nowhere", "config.json"),
        ("model.path=Qwen/Qwen3-14B", "Qwen/Qwen3-14B", "hf download Qwen/Qwen3-14B"),
        ("tasks.split=nix", "nix", "train"),
        ("train.lr=inf", "train.lr", ""),
        ("run.steps=10000000000000", "run.steps", ""),
        ("run.seed=99999999999999999999", "run.seed", ""),
    ],
)
def test_a_mistake_costs_no_run_folder(project: Project, override: str, message: str, fix: str) -> None:
    with pytest.raises(CodeRepairError, match=message) as caught:
        plan_run(configs.load_config(project.config, [override]))
    assert caught.value.exit_code == 2
    assert fix in caught.value.fix
    with pytest.raises(CodeRepairError, match=message):
        asyncio.run(command.run_training(configs.load_config(project.config, [override]), quiet=True))
    assert not project.run.path.exists()


def test_a_model_that_its_engine_cannot_serve_is_refused_beforehand(project: Project) -> None:
    other = project.path / "other"
    shutil.copytree(models.find_model_folder("builtin:tiny"), other)
    spec = json.loads((other / "config.json").read_text())
    phi = spec | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
    (other / "config.json").write_text(json.dumps(phi))
    with pytest.raises(ConfigError, match="serves .*Qwen3ForCausalLM.*, and .* is Phi3ForCausalLM") as caught:
        plan_run(configs.load_config(project.config, ["model.path=other"]))
    assert "engine=vllm" in caught.value.fix
    (other / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="no weights") as caught_too:
        plan_run(configs.load_config(project.config, ["model.path=other", "model.init=weights"]))
    assert "model.init=random" in caught_too.value.fix


async def test_a_signal_while_starting_leaves_nothing_and_costs_nothing(project: Project) -> None:
    with project.started("train", str(project.config)) as process:
        await wait_until(process, (project.run.logs / "engine.log").exists)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.to_thread(process.communicate)
    assert process.returncode == 130, errors
    assert "before its first step" in errors and "Traceback" not in errors
    assert not find_shared_path(project.run).exists()
    assert project.train("run.steps=1", "train.lr=2e-3")["steps"] == 1, "another try may have other settings"


def test_a_run_that_a_health_gate_stopped_says_so(project: Project) -> None:
    broken = ["agent={name='e2e_rewards:Broken', options={}}", "run.retries=0", "run.steps=1"]
    done = project.crrl("train", str(project.config), *broken, check=False)
    assert done.returncode == 4 and "6 of 6 episodes are void" in done.stderr and "--resume" in done.stderr
    last = project.records()[-1]
    assert (last["type"], last["step"]) == ("stop", 0) and "nothing works today" in last["reason"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk takes root")
async def test_a_disk_that_fills_up_costs_nothing_that_was_logged(project: Project) -> None:
    disk = project.path / "runs"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", disk], check=True)
    try:
        with project.started("train", str(project.config), "run.steps=1000", "run.checkpoint_every=1") as process:
            await wait_until(process, lambda: bool(project.steps()))
            with contextlib.suppress(OSError), (disk / "other").open("wb", buffering=0) as other:
                while other.write(bytes(1 << 16)):
                    pass
            _, errors = await asyncio.to_thread(process.communicate)
        assert process.returncode == 1 and "Traceback" not in errors, errors
        assert "full" in errors or "No space left" in errors
        logged = project.run.log.read_bytes().rpartition(b"\n")[0]
        (disk / "other").unlink()
        steps = len(project.steps())
        summary = project.resume(f"run.steps={steps + 1}")
        assert summary["steps"] == steps + 1 and summary["account"]["balanced"]
        assert project.run.log.read_bytes().startswith(logged)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_resume_writes_exports_and_checkpoint_that_a_kill_prevented(project: Project) -> None:
    """After a kill between the record of the last step and its files."""
    project.train("run.steps=2")
    exported = {path: path.read_bytes() for path in [project.run.path / "metrics.jsonl"]}
    exported |= {path: path.read_bytes() for path in (project.run.path / "episodes").iterdir()}
    lines = project.run.log.read_text().splitlines(keepends=True)
    unwritten = ('"type":"checkpoint"', '"type":"end"')
    project.run.log.write_text("".join(line for line in lines if not any(each in line for each in unwritten)))
    weights = (project.run.checkpoints / "00002" / "model.safetensors").read_bytes()
    subprocess.run(
        ["rm", "-r", project.run.checkpoints / "00002", *list(exported)[:1], *list(exported)[-1:]], check=True
    )
    project.resume()
    assert {path: path.read_bytes() for path in exported} == exported
    assert (project.run.checkpoints / "00002" / "model.safetensors").read_bytes() == weights
    assert [record["type"] for record in project.records()[-3:-1]] == ["checkpoint", "used"]


def test_a_step_without_a_token_says_why(project: Project) -> None:
    """Prompts fit, but not the files that the agent adds in the sandbox."""
    agent = "agent={name='direct', options={system='', files='all', context_chars=1500}}"
    longest = plan_run(configs.load_config(project.config, [agent])).prompt
    assert longest is not None
    room = [agent, f"rollout.tokens={longest.tokens + 1}", "rollout.turn_tokens=1"]
    done = project.crrl("train", str(project.config), *room, "run.steps=1", "eval.before=true", check=False)
    assert done.returncode == 4 and "nothing was sampled" in done.stderr
    assert "eval: all 2 attempts sampled nothing" in done.stderr
    assert "rollout.tokens" in done.stderr.partition("fix: ")[2]
    project.resume("run.steps=2", "rollout.tokens=3000")


def test_a_grader_that_cannot_run_stops_the_run_before_it_begins(project: Project, isolating: None) -> None:
    """Else a perfect repair would earn tests=0, and the run train on it."""
    [task] = (each for each in make_source("handmade") if each.id == "handmade/pager")
    pytest_is_missing = replace(task.checks, commands=(Command(("python3", "-m", "pytest", "-q"), results="pytest"),))
    write_jsonl([replace(task, checks=pytest_is_missing)], project.path / "tasks.jsonl")
    tasked = ["tasks.source=jsonl", "tasks.options.path=tasks.jsonl", "reward=tests", "run.steps=1", "eval.tasks=0"]
    done = project.crrl("train", str(project.config), *tasked, check=False)
    assert done.returncode == 3, done.stderr
    assert "No module named pytest" in done.stderr
    assert "sandbox.options.binds" in done.stderr
    assert not project.run.path.exists()
    for overrides, verdict in ((tasked, "tests on the reference patches of 1 task"), (["tasks.verify=false"], "off: ")):
        assert command.dry_run(configs.load_config(project.config, overrides))[0]["verify"].startswith(verdict)
