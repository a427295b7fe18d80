"""``crrl pipeline`` from random weights to an evaluated model, killed on the way: a real teacher, agent and sandbox."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from coderepairrl.errors import ExitCode
from coderepairrl.report import pipeline as report
from coderepairrl.runs import RunFolder
from coderepairrl.runs.examples import NAME, read_examples

from .conftest import Project, until

PIPELINE = """
[pipeline]
name = "small"
config = "hello"
set = ["model.init=random", "tasks.options.n=32", 'eval.options={split="test", n=2}', "rollout.tasks_per_step=1",
       "rollout.group_size=2", "tasks.verify=false"]

[stages.collect]
policy = "http://127.0.0.1:{port}/v1"
serve = "{python} -m workshop.tiny.teacher --port {port} --exact 1"
set = ["eval.attempts=1", "keep.passed=true"]

[stages.sft]
set = ["run.steps=12", "run.checkpoint_every=2", "data.batch=4", "data.held_out=0.2", "data.max_tokens=1024",
       "train.lr=3e-3"]

[stages.probe]
set = ["eval.tasks=2"]

[stages.rl]
set = ["run.steps=1"]

[stages.eval]
policies = ["collect", "rl"]
"""


def sums(home: Path) -> dict[str, Any]:
    """What each stage was made by."""
    return {
        path.stem: json.loads(path.read_text())["made_by"]
        for path in home.glob("**/*.json")
        if path.with_suffix("").is_dir()
    }


@pytest.mark.timeout(600)  # a dozen starts of engines and learners, on a machine that may be busy
async def test_from_random_weights_to_an_evaluated_model_killed_on_the_way(project: Project, isolating: None) -> None:
    (project.path / "small.toml").write_text(PIPELINE)
    home = project.path / "pipelines" / "small"

    async def crrl(*words: str) -> Any:
        return await asyncio.to_thread(project.crrl, "pipeline", "small.toml", *words, check=False)

    log = home / "sft" / "log.jsonl"
    with project.started("pipeline", "small.toml") as process:
        await until(process, lambda: log.is_file() and log.read_bytes().count(b'{"type":"step"') >= 3)
        process.send_signal(signal.SIGKILL)
    collected = (home / "collect" / NAME).read_bytes()
    examples = list(read_examples(home / "collect" / NAME))
    assert examples and all(each.passed and each.messages for each in examples)

    refused = await crrl()
    assert refused.returncode == ExitCode.HEALTH_GATE and "no-go" in refused.stderr, refused.stderr
    assert "collect is done" in refused.stderr and "sft goes on" in refused.stderr
    assert (home / "collect" / NAME).read_bytes() == collected
    steps = [record["step"] for record in RunFolder(home / "sft").records() if record["type"] == "step"]
    assert sorted(set(steps)) == list(range(1, 13))
    done = await crrl("probe.anyway=true", "--json")
    assert done.returncode == 0, done.stderr
    assert "sft is done" in done.stderr and "probe is done" in done.stderr
    numbers = json.loads(done.stdout)
    assert all(row["done"] for row in numbers["stages"]) and numbers["stages"][1]["brought"].startswith(
        "12 steps, held"
    )
    teacher, rl = (each for each in numbers["policies"] if each["metric"] == "reward")
    assert teacher["value"]["value"] == 1 and rl["change"]["value"] == rl["value"]["value"] - 1

    learned = {example.task_id for example in examples}
    trained = {name for name, task in RunFolder(home / "rl").tasks().items() if task.split == "train"}
    assert trained and not learned & trained, "training leaves out what was learned from"

    before = sums(home)
    again = await crrl("probe.anyway=true")
    assert "begins" not in again.stderr and "goes on" not in again.stderr and sums(home) == before
    changed = await crrl("probe.anyway=true", "rl.train.lr=1e-3")
    assert changed.returncode == 0, changed.stderr
    assert "rl is made anew: train.lr 0.0006 then, 0.001 now" in changed.stderr
    assert next(line for line in changed.stderr.splitlines() if line.endswith(" begins")) == "rl begins"
    assert (home / "rl.old-1" / "run.json").is_file() and sums(home)["sft"] == before["sft"]

    page = await asyncio.to_thread(project.crrl, "report", str(home))
    assert "held-out tasks: reward" in Path(project.path / page.stdout.strip()).read_text()
    assert report.read(home)[0] == "small"
