"""Every shipped preset is a run: `crrl train NAME --dry-run` finds nothing wrong where its model and GPUs are."""

from __future__ import annotations

import json
import runpy
import shlex
import shutil
import signal
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from coderepairrl import cli, models
from coderepairrl.config import load_config, shipped_configs
from coderepairrl.plan.learner import describe_clip, make_learn_settings
from coderepairrl.plan.sizing.architecture import KNOWN, PUBLISHED, find_published
from coderepairrl.processes.installs import install_extra
from coderepairrl.stages.command import compute_needs
from engines.test_vllm import site

PRESETS = sorted(
    name for name in shipped_configs() if not name.startswith("sft-") and load_config(name).engine.name != "tiny"
)
GPUS = {
    "thesis": (1, 2),
    "thesis-8b": (1, 1),
    "thesis-32b": (2, 4),
    "draft": (1, 2),
    "qwen3-14b": (1, 2),
    "qwen3-30b-a3b": (2, 2),
}
"""Number of GPUs that serve and that learn; other presets share one."""
ROW = {
    "repo": "o/toy",
    "base_commit": "5" * 40,
    "patch": "--- a/maths.py\n+++ b/maths.py\n@@ -2 +2 @@\n-    return a - b\n+    return a + b\n",
    "problem_statement": "add(2, 3) is -1.",
}
CURRICULUM = ("tasks.options.swe_gym=gym.jsonl", "tasks.options.multilingual=multilingual.jsonl")
"""Local files instead of the hub's."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of six GPUs and a vLLM, with the folders that presets name: real numbers, a small tokenizer, no weights
    to speak of."""
    tiny = models.find_model_folder("builtin:tiny")
    spec = json.loads((tiny / "config.json").read_text())
    del spec["layer_types"]  # which has another number of layers
    for name, published in PUBLISHED.items():
        folder = tmp_path / "Qwen" / name
        folder.mkdir(parents=True)
        for file in (*tiny.glob("tokenizer*"), tiny / "chat_template.jinja"):
            shutil.copy(file, folder)
        kind = published["model_type"].removesuffix("_text").replace("_5", ".5").title().replace("_", "")
        said = {**spec, **published, "architectures": [f"{kind.replace('.', '_')}ForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(said))
        save_file({}, folder / "model.safetensors")
    for name, count in (("gym", 800), ("multilingual", 293)):
        rows = ({**ROW, "instance_id": f"{name}-{number}"} for number in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    site(tmp_path / "site", "0.32.1")
    return tmp_path


def crrl(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["crrl", *arguments])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with pytest.raises(SystemExit) as ended:
        cli.main()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return int(ended.value.code or 0)


def test_the_clip_acts_and_the_rounding_of_two_programs_is_not_clipped() -> None:
    """In bfloat16 a row's mean logprob differs between engine and learner by 1e-3, GSPO's range is 2e-5 to 4e-4."""
    for name in PRESETS:
        config = load_config(name)
        learn = make_learn_settings(config)
        assert (learn.precision, learn.old_logprobs) == ("bf16", "recomputed"), name
        assert learn.mismatch_correction == "token", "what the ratio no longer says of the engine"
        assert describe_clip(config, learn).startswith("never" if name == "draft" else "from the second"), name


@pytest.mark.parametrize("name", ["thesis-32b", "qwen3-30b-a3b", "qwen3.5-4b"])
def test_a_preset_is_a_run(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert crrl(monkeypatch, "train", name, "--dry-run", "--json", *(CURRICULUM if name in GPUS else ())) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    if name in GPUS:
        assert plan["tasks"] == {"train": 1000, "held_out": {"eval": 43}}
    assert plan["needs"]["step"]["episodes"] == plan["episodes_per_step"]
    assert plan["needs"]["step"]["seconds"] > 0


def test_every_preset_fits_the_gpus_that_it_names() -> None:
    for name in PRESETS:
        config = load_config(name)
        assert find_published(config.model.path) is not None
        serving, learning = GPUS.get(name, (1, 1))
        engine, train = config.engine.devices, config.train.devices
        assert (len(engine), len(train), len({*engine, *train})) == (
            *(serving, learning),
            serving + learning if name in GPUS else 1,
        )
        needs = compute_needs(config)
        gpus = [value for key, value in needs.items() if key.startswith("gpu ")]
        assert all(gpu["needs_gb"] <= gpu["has_gb"] == config.gpu.memory_gb for gpu in gpus)
        assert needs["longest_sequences_at_once"] >= 4


def test_the_documented_plan_is_the_plan(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, presets = (
        (Path(__file__).parents[2] / "docs" / "guides" / name).read_text() for name in ("plan.md", "presets.md")
    )
    shown, refused = (
        plan.partition("$ crrl train thesis --dry-run --verbose\n...\n")[2].partition("\n```")[0].split("\n\n$ ")
    )
    command, _, said = refused.partition("\n")
    assert crrl(monkeypatch, "train", "thesis", "--dry-run", "--verbose", *CURRICULUM) == 0
    assert shown in capsys.readouterr().out
    assert crrl(monkeypatch, *shlex.split(command)[1:]) == 2
    assert " ".join(said.split()) in " ".join(capsys.readouterr().err.split())
    for name in PRESETS:
        most = max(gpu["needs_gb"] for key, gpu in compute_needs(load_config(name)).items() if key.startswith("gpu "))
        assert f"{most:.1f}" in next(line for line in presets.splitlines() if line.startswith(f"| `{name}` |"))


def test_the_documented_speeds_are_the_plans() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "guides" / "presets.md").read_text()
    script = runpy.run_path(str(root / "benchmarks" / "gpu" / "presets.py"))
    table = script["table"]()
    assert len(table) == 2 + len(PRESETS)
    assert "\n".join(table) in page
    assert {*shipped_configs()} == {*PRESETS, *script["NONE"]}


def test_14b_makes_300_episodes_in_a_gpu_hour() -> None:
    """By the plan, with episodes that go on until a limit."""
    thesis, ahead = (
        compute_needs(load_config(name))["run"]["episodes_per_gpu_hour"] for name in ("thesis", "qwen3-14b")
    )
    assert thesis < 300 < ahead


THESIS: dict[str, Any] = {
    "train.algorithm": "gspo",
    "train.eps_low": 2e-5,
    "train.eps_high": 4e-4,
    "train.beta": 0.02,
    "rollout.group_size": 8,
    "rollout.tasks_per_step": 8,  # and 32 episodes an update
    "train.minibatches": 2,
    "train.lora.rank": 32,
    "train.lora.alpha": 64,
    "train.lora.targets": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "train.lr": 1e-4,
    "train.warmup_updates": 46,  # a tenth of 460
    "train.decay_updates": 0,  # constant
    "train.betas": (0.9, 0.99),
    "train.weight_decay": 0.1,
    "train.max_grad_norm": 0.1,
    "train.precision": "bf16",
    "rollout.temperature": 1.0,
    "run.checkpoint_every": 10,  # 20 updates
    "rollout.calls": 30,
    "rollout.tokens": 10_240,
    "agent.options": {"shell_seconds": 4, "output_chars": 2000},
    "model.thinking": False,
    "train.gradient_checkpointing": True,
    "reward": {"patch_similarity": 1.0, "patch_edits": 0.0},
    "eval.temperature": 0.2,
    "eval.top_p": 0.9,
}
"""Settings of the final run of the thesis."""
SERVED = {
    "--gpu-memory-utilization": "0.94",
    "--max-num-batched-tokens": "8192",
    "--long-prefill-token-threshold": "2048",
}


@pytest.mark.parametrize(
    ("name", "model", "seconds"),
    [("thesis", "Qwen3-14B", 60), ("thesis-8b", "Qwen3-8B", 60), ("thesis-32b", "Qwen3-32B", 80)],
)
def test_the_thesis_values(name: str, model: str, seconds: float) -> None:
    """The thesis's final run: its learner, more time for large models, its server's flags."""
    config = load_config(name)
    assert {key: attrgetter(key)(config) for key in THESIS} == THESIS
    assert (config.engine.options["slots"], config.engine.options["context"]) == (16, 14_336)
    assert (Path(config.model.path).name, config.rollout.seconds) == (model, seconds)
    words = config.engine.options["args"]
    assert {word: words[words.index(word) + 1] for word in SERVED} == SERVED
    assert "--enable-prefix-caching" in words
    assert ("--async-scheduling" in words) == (name != "thesis-32b")
    tensor = words[words.index("--tensor-parallel-size") + 1] if "--tensor-parallel-size" in words else "1"
    assert tensor == str(len(config.engine.devices))


def test_the_draft() -> None:
    """The draft's table of hyper-parameters, and its reward."""
    config = load_config("draft")
    learn = make_learn_settings(config)
    episodes = config.rollout.tasks_per_step * config.rollout.group_size
    assert (episodes, config.rollout.tokens, learn.beta, learn.algorithm) == (32, 8192, 0.1, "grpo")
    assert 5_000 <= episodes * config.run.steps < 5_000 + episodes
    assert learn.rate(0) == learn.lr == 1e-5
    assert learn.rate(78) == pytest.approx(0.5e-5, rel=0.02)  # half way down
    assert learn.rate(config.run.steps - 1) < 1e-8
    assert "draft_similarity" in config.reward


def test_a_plan_needs_nothing_but_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """On a laptop: the numbers on stdout, what is missing on stderr, exit code 3; the model is a download."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert crrl(monkeypatch, "train", "thesis", "--dry-run", "--json") == 3
    said = capsys.readouterr()
    assert install_extra("hub") in said.err
    assert all(f"tasks.options.{name}=FILE" in said.err for name in ("swe_gym", "multilingual"))
    plan = json.loads(said.out.splitlines()[-1])
    needs = plan["needs"]
    assert needs["parameters"] == KNOWN["Qwen3-14B"].parameters
    assert needs["gpu 1, 2 (learner)"]["weights_gb"] == 29.54
    assert next(iter(plan)) == "verdict" and "the run downloads Qwen/Qwen3-14B when it starts" in plan["verdict"]
    assert "Qwen3-14B" not in said.err


@pytest.mark.parametrize(
    ("version", "what"),
    [
        ("", f"there is no vLLM in {sys.executable}"),
        ("0.31.2", f"{sys.executable} has vLLM 0.31.2, and only 0.32.x is supported"),
    ],
)
def test_a_plan_says_that_vllm_is_missing_or_too_old(
    version: str, what: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """All of the plan, what is missing, and exit code 3; the run itself leaves nothing."""
    shutil.rmtree(place / "site")
    if version:
        site(place / "site", version)
    run = ("train", "qwen3-0.6b", f"engine.options.python={sys.executable}")
    assert crrl(monkeypatch, *run, "--dry-run", "--json") == 3
    said = capsys.readouterr()
    plan = json.loads(said.out.splitlines()[-1])
    assert plan["missing"]["what"].startswith(what) and "pip install 'vllm==0.32.*'" in plan["missing"]["fix"]
    assert plan["needs"]["kv_tokens"] > 0 and plan["steps"] > 0
    assert what in said.err
    assert crrl(monkeypatch, *run, "--dry-run") == 3
    printed = capsys.readouterr().out
    assert f"missing\n  what                       {what}" in printed and "[run]" not in printed
    assert crrl(monkeypatch, *run) == 3
    assert what in capsys.readouterr().err
    assert not (place / "runs").exists()
