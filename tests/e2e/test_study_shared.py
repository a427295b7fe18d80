"""A study whose runs share a server that it starts: with a script in vLLM's place, and with the real one."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from coderepairrl.engines.vllm.hosted import tenant_of
from coderepairrl.runs import RunFolder
from engines.conftest import require_vllm
from engines.test_vllm import adapter, site

from .conftest import Project, until

CONFIG = """
[model]
path = "{model}"
[tasks]
source = "jsonl"
options = {{ path = "labels.jsonl" }}
[agent]
name = "direct"
options = {{ system = "" }}
[engine]
name = "vllm"
options = {{ python = "{python}", env = {{ PYTHONPATH = "{site}" }}, dtype = "bfloat16" }}
[rollout]
calls = 1
tokens = 400
turn_tokens = 16
[eval]
split = "train"
reward = "classification"
"""
STUDY = """
[study]
name = "s"
config = "own.toml"
seeds = [0]
server = "shared"
metric = "classification"
[arms.base]
policy = "{model}"
[arms.one]
policy = "adapters/one"
[arms.two]
policy = "adapters/two"
"""


@pytest.fixture
def shared(project: Project, miniature: Path) -> Project:
    rows = [{"id": f"q/{at}", "prompt": f"{at}?", "language": "c", "answer": "yes"} for at in range(3)]
    (project.path / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (project.path / "adapters").mkdir()
    for name in ("one", "two"):
        folder, _ = adapter(project.path / "adapters" / name)
        about = json.loads((folder / "adapter_config.json").read_text())
        about["base_model_name_or_path"] = str(miniature)
        (folder / "adapter_config.json").write_text(json.dumps(about))
    packages = site(project.path / "site")["PYTHONPATH"]
    (project.path / "own.toml").write_text(CONFIG.format(model=miniature, python=sys.executable, site=packages))
    (project.path / "study.toml").write_text(STUDY.format(model=miniature))
    return project


def servers(project: Project) -> list[psutil.Process]:
    """Processes of vLLM, or what stands in for it, that work on the model of `project`'s study."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "vllm.entrypoints.openai.api_server" in words and "guard.py" not in " ".join(words):
            found += [process] if process.cwd() == str(project.path) else []
    return found


async def test_one_server_for_all_runs_ends_with_the_study(shared: Project) -> None:
    """Killed, too, and what it had begun goes on at another."""
    folder = shared.path / "studies" / "s"
    with shared.started("study", "study.toml", "--jobs", "2") as process:
        await until(process, lambda: any(folder.glob("*/seed-0-eval/log.jsonl")))
        [server] = servers(shared)
        process.send_signal(signal.SIGKILL)
    assert psutil.wait_procs([server], timeout=20)[1] == []
    done = shared.crrl("study", "study.toml", "--jobs", "2", "--json")
    [question] = json.loads(done.stdout)["questions"]
    assert [each["arm"] for each in question["contrasts"]] == ["one", "two"]
    assert done.stderr.count("one vllm server for all runs") == 1 and "adapters up to rank 8, 2 at once" in done.stderr
    assert servers(shared) == [] and not os.path.lexists(folder / ".server" / "socket")
    assert not list(folder.glob("*/*/logs/engine.log")) and (folder / ".server" / "engine.log").is_file()
    for run in folder.glob("*/seed-*-eval"):
        about: dict[str, Any] = RunFolder(run).about()
        assert about["config"]["engine"]["options"]["url"] == "unix:studies/s/.server/socket"
    assert shared.crrl("study", "study.toml", "--jobs", "2").stderr == "", "nothing is left to do, and nothing starts"


REAL = """
[study]
name = "s"
config = "e2e.toml"
seeds = [0, 1]
server = "shared"
learner = "shared"
set = ["run.steps=1", "run.checkpoint_every=1", "tasks.verify=false", "rollout.group_size=2", "eval.tasks=0",
    "eval.options.select.n=2", "train.lora={{ rank = 4 }}", "rollout.seconds=120", "engine=vllm",
    "engine.options={{ context = 3072, slots = 16, start_seconds = 1500 }}"]
metric = "reward"
[arms.base]
policy = "{model}"
[arms.rl]
"""


@pytest.mark.timeout(1800)
def test_adapters_are_trained_and_evaluated_at_one_real_server(
    project: Project, miniature: Path, isolating: None
) -> None:
    require_vllm()
    (project.path / "study.toml").write_text(REAL.format(model=miniature))
    done = project.crrl("study", "study.toml", "--jobs", "2", "--json")
    [question] = json.loads(done.stdout)["questions"]
    assert [each["arm"] for each in question["contrasts"]] == ["rl"]
    folder = project.path / "studies" / "s"
    assert not [*folder.glob("*/*/logs/engine.log"), *folder.glob("*/*/logs/learner.log")] and servers(project) == []
    log = (folder / ".server" / "engine.log").read_text(errors="replace")
    assert all(log.count(f"Loaded new LoRA adapter: name 'policy-{tenant_of(run / 'logs')}-v1-") == 1
               for run in (*folder.glob("rl/seed-?"), *folder.glob("rl/seed-?-eval")))  # fmt: skip
