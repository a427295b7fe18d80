"""What cannot fit is refused: the GPU, what it needs and has, and a change with which it then fits."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from coderepairrl.config import Config, load_config
from coderepairrl.errors import ConfigError, ExitCode, UsageError
from coderepairrl.learn import LearnSettings
from coderepairrl.plan.learner import make_learn_settings
from coderepairrl.plan.sizing import DoesNotFit, count_training_flops
from coderepairrl.plan.sizing.architecture import KNOWN, PUBLISHED
from coderepairrl.plan.sizing.engine import EngineSettings, estimate_engine_memory
from coderepairrl.plan.sizing.estimate import Estimate, estimate_memory
from coderepairrl.plan.sizing.learner import compute_learner_memory
from coderepairrl.stages import command
from coderepairrl.stages.command import _estimate_fit

BASE = """
[run]
name = "fit"
[model]
path = "Qwen/Qwen3-4B"
[engine]
name = "vllm"
devices = [0]
[engine.options]
context = 16384
[rollout]
tokens = 8192
[train]
precision = "bf16"
lora = true
gradient_checkpointing = true
micro_tokens = 8192
devices = [1]
[gpu]
memory_gb = 24
"""


def config(tmp_path: Path, *overrides: str) -> Config:
    file = tmp_path / "run.toml"
    file.write_text(BASE)
    return load_config(file, overrides)


def needs(tmp_path: Path, *overrides: str) -> dict[str, Any]:
    return command.compute_needs(config(tmp_path, *overrides))


def planned(given: Config) -> Estimate:
    found = estimate_memory(given, make_learn_settings(given))
    assert isinstance(found, Estimate)
    return found


CASES = [
    (("train.gradient_checkpointing=false",), "GPU 1 has 24.0 GB", "train.gradient_checkpointing=true"),
    (("train.precision=fp32",), "GPU 1 has 24.0 GB", "train.precision=bf16"),
    (("gpu.memory_gb=16", "engine.options.context=40960"), "one sequence of 40,960", "engine.options.context=8192"),
    (("engine.options.args=['--gpu-memory-utilization','0.45']",), "(0.45 of the memory)", "engine.options.args="),
    (("model.path=Qwen/Qwen3-8B", "engine.devices=[0]"), "GPU 1 has 24.0 GB", "model.quantise=nf4"),
    (
        (
            *("model.path=Qwen/Qwen3-32B", "engine.options.context=8192", "train.processes=2"),
            *("train.devices=[1,2]", "gpu.memory_gb=80"),
        ),
        "GPU 1 has 80.0 GB",
        "train.strategy=fsdp2",
    ),
    (("model.path=Qwen/Qwen3-14B",), "GPU 0: the engine has 22.1 GB", "--tensor-parallel-size"),
    (("engine.share_devices=true", "train.devices=[0]", "gpu.memory_gb=48"), "GPU 0 has 48.0 GB", "utilization"),
    (("engine.share_devices=true", "train.devices=[0]", "gpu.memory_gb=20"), "GPU 0 has 20.0 GB", "devices=turns"),
    (("engine.share_devices=true", "train.devices=[0]", "gpu.memory_gb=15"), "GPU 0 has 15.0 GB", "train.devices=[1]"),
]


@pytest.mark.parametrize(("overrides", "message", "fix"), CASES)
def test_a_refusal_names_the_nearest_change_that_fits(
    overrides: tuple[str, ...], message: str, fix: str, tmp_path: Path
) -> None:
    assert not planned(config(tmp_path)).problem
    with pytest.raises(DoesNotFit) as refused:
        needs(tmp_path, *overrides)
    assert message in str(refused.value)
    assert fix in refused.value.fix
    assert refused.value.exit_code is ExitCode.USAGE
    change = shlex.split(refused.value.fix.removeprefix("nearest change that fits: "))
    assert not planned(config(tmp_path, *overrides, *change)).problem


def test_the_plan_says_what_the_learner_needs_with_one_setting_changed(tmp_path: Path) -> None:
    given = ("gpu.memory_gb=80", "train.processes=2", "train.devices=[1,2]")
    plan = needs(tmp_path, *given)
    now, changed = plan["learner_gb"], plan["learner_gb_with"]
    assert now == plan["gpu 1, 2 (learner)"]["needs_gb"]
    for override, gb in changed.items():
        assert planned(config(tmp_path, *given, override)).needs(1) / 1e9 == pytest.approx(gb, abs=0.006), override
    costly = {"train.lora=false", "train.precision=fp32", "train.gradient_checkpointing=false"}
    assert {override for override, gb in changed.items() if gb > now} >= {*costly, "train.micro_tokens=32768"}
    spared = {"train.strategy=fsdp2", "train.strategy=zero3", "train.optimizer=adamw_8bit", "model.quantise=nf4"}
    assert {override for override, gb in changed.items() if gb < now} == spared
    dividing = {"train.strategy=fsdp2", "train.strategy=zero2", "train.strategy=zero3"}
    assert changed.keys() - needs(tmp_path)["learner_gb_with"].keys() == dividing, "one process has nothing to divide"


BY_TURNS = ("engine.share_devices=turns", "train.devices=[0]")


def test_by_turns_a_gpu_holds_the_larger_turn_and_what_the_other_leaves(tmp_path: Path) -> None:
    given = config(tmp_path, *BY_TURNS)
    found, together = planned(given), planned(config(tmp_path, "engine.share_devices=true", "train.devices=[0]"))
    assert found.server is not None and found.server.room is not None
    turns = found.server.room + 2e9, found.learner.peak + 2e9 + 2e9
    assert found.needs(0) == max(turns) < together.needs(0) == pytest.approx(sum(turns) - 4e9)
    with pytest.raises(DoesNotFit, match="and of engine and learner"):
        command.compute_needs(given)  # 0.92 of 24 GB and the learner's 2
    fits = (*BY_TURNS, "engine.options.args=['--gpu-memory-utilization','0.9']")
    plan = needs(tmp_path, *fits)
    server, held = found.server.memory, found.learner
    trained = held.adapters + held.optimizer
    moved = 2 * (server.weights + server.adapters) + held.weights + 2 * trained
    assert plan["turns"]["moved_in_a_step_gb"] == pytest.approx(moved / 1e9, abs=0.01)
    assert plan["turns"]["host_gb"] < plan["turns"]["moved_in_a_step_gb"]
    assert plan["turns"]["host_at_most_gb"] == pytest.approx(2 * plan["turns"]["host_gb"], abs=0.02)
    assert plan["step"]["switch_seconds"] == pytest.approx(moved / 20e9, rel=1e-3)


def test_torchruns_learner_is_planned_apart(tmp_path: Path) -> None:
    alone = planned(config(tmp_path)).learner
    given = ("train.listen=10.0.0.1:29500", "train.processes=8", "train.devices=[]")
    plan = needs(tmp_path, *given, "gpu.memory_gb=48")
    assert not [name for name in plan if "(learner)" in name]
    assert plan["each learner GPU"]["weights_gb"] == pytest.approx(alone.weights / 1e9, abs=0.01)
    assert plan["run"]["gpu_hours"] == pytest.approx(9 * plan["run"]["hours"], abs=0.5)  # the engine has one
    with pytest.raises(DoesNotFit, match="each GPU of the learner .* are needed") as refused:
        needs(tmp_path, *given, "train.gradient_checkpointing=false")
    assert "train.gradient_checkpointing=true" in refused.value.fix


def test_a_run_that_no_change_fits_names_a_smaller_model(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFit) as refused:
        needs(tmp_path, "model.path=Qwen/Qwen3-32B", "gpu.memory_gb=6")
    assert refused.value.fix == "take a smaller model, or larger GPUs"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("engine.options.context=4096",), "engine.options.context=4096 is less than rollout.tokens=8192"),
        (("engine.options.args=['--tensor-parallel-size','2']",), "ask for 2 GPUs"),
        (("engine.options.args=['--tensor-parallel-size','two']",), "must be a number, not 'two'"),
        (("engine.options.args=['-tp=0.5']",), "must be a whole number, not 0.5"),
        (("engine.options.args=['-tp=3']", "engine.devices=[0,2,3]"), "3 does not divide the 32 heads"),
        (("engine.options.args=['--quantization', 'fp8']",), "args has --quantization: quantised weights differ"),
        (("engine.options.context=40961",), "positions of Qwen/Qwen3-4B reach to 40,960"),
        (("train.devices=[0]",), "both take GPU 0"),
    ],
)
def test_contradictory_engine_settings_are_refused(overrides: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        needs(tmp_path, *overrides)


def test_where_memory_is_not_known_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    plan = needs(tmp_path, "gpu.memory_gb=0", "train.lora=false")
    assert plan["gpu 1 (learner)"]["has_gb"] == "unknown"
    assert "seconds" not in plan["step"]
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 24576\necho 81559\n")
    driver.chmod(0o755)
    with pytest.raises(DoesNotFit, match=r"GPU 1 has 25\.8 GB"):  # the smaller one's
        needs(tmp_path, "gpu.memory_gb=0", "train.lora=false")


def test_an_engine_elsewhere_and_a_model_of_another_kind_are_left_out(tmp_path: Path) -> None:
    plan = needs(tmp_path, "engine.options={url='http://127.0.0.1:1'}", "engine.devices=[]")
    assert [key for key in plan if key.startswith("gpu")] == ["gpu 1 (learner)"]
    for argument in ("--cpu-offload-gb=4", "--kv-cache-dtype nvfp4", "--speculative_config.method ngram"):
        given = f"engine.options.args={argument.split()}"
        assert needs(tmp_path, given)["memory"] == f"not planned: the server's memory with {argument} is not known"
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    assert "mamba" not in (said := needs(tmp_path, f"model.path={tmp_path}")["memory"])
    assert said.startswith("not planned")
    for nothing in ("[]", '{"model_type": "qwen3", "hidden_size": null}'):
        (tmp_path / "config.json").write_text(nothing)
        assert needs(tmp_path, f"model.path={tmp_path}")["memory"] == said
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        needs(tmp_path, f"model.path={tmp_path}")
    method = {"quant_method": "compressed-tensors"}  # and not how many bits
    quantised = {**PUBLISHED["Qwen3-4B"], "quantization_config": method}
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(UsageError, match="quant_method=compressed-tensors"):
        needs(tmp_path, f"model.path={tmp_path}")


def test_on_a_cpu_the_plan_names_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no driver
    plan = command.compute_needs(load_config("hello"))
    assert plan["process 0 (learner)"].keys() == {
        *("weights_gb", "gradients_gb", "optimizer_gb", "activations_gb", "work_gb", "logits_gb", "needs_gb")
    }
    assert plan["step"] == {"episodes": 64} and "run" not in plan


def test_a_run_that_may_not_fit_warns_and_goes_on() -> None:
    plan, doubt = _estimate_fit(load_config("hello", ["gpu.memory_gb=0.1"]))
    assert "this may not fit: GPU 0 has 0.1 GB" in doubt and plan["memory"].startswith("not planned: GPU 0 has 0.1 GB")
    plan, doubt = _estimate_fit(load_config("hello", ["gpu.memory_gb=24"]))
    assert doubt == "" and plan["learner_gb"] == plan["gpu 0 (learner)"]["needs_gb"]


def test_processes_that_share_weights_hold_less() -> None:
    model, tokens = KNOWN["Qwen3-14B"], 8192
    base = LearnSettings(precision="bf16", gradient_checkpointing=True)
    alone = compute_learner_memory(model, base, longest=tokens)
    assert alone.static == 16 * model.parameters  # float32: weights, gradients, two moments

    def of(strategy: Any) -> Any:
        return compute_learner_memory(model, base.with_changes(processes=4, strategy=strategy), longest=tokens)

    assert of("ddp").static == 20 * model.parameters  # and the buckets
    assert of("fsdp2").static == 16 * model.parameters // 4
    assert alone.weights < of("ddp").peak > of("fsdp2").peak > of("fsdp2").static + of("fsdp2").activations


def test_the_memory_of_a_server_is_that_computed_by_hand() -> None:
    """14B in bf16 on two GPUs: half of the weights; keys and values of 40 layers with 8 heads of 128."""
    options = {"args": ["-tp", "2", "--gpu-memory-utilization=0.5"], "context": 4096, "slots": 8, "lora_rank": 20}
    server = EngineSettings.from_options(options, KNOWN["Qwen3-14B"], None, small=False)
    assert (server.gpus, server.share, server.rank, server.batched) == (2, 0.5, 32, 8192)
    memory = estimate_engine_memory(KNOWN["Qwen3-14B"], server)
    assert memory.weights == KNOWN["Qwen3-14B"].parameters
    assert memory.kv_token == 2 * 40 * 8 * 128 * 2 // 2
    assert memory.adapters == 2 * 128_450_560  # two of rank 32 in bf16, halved
    assert memory.cached_tokens(memory.fixed + 10 * memory.kv_token) == 10


def kv_token(*args: str, **options: Any) -> int:
    """Bytes of a token's keys and values at a server of 14B."""
    model = KNOWN["Qwen3-14B"]
    server = EngineSettings.from_options({"args": list(args), "context": 4096, **options}, model, None, small=False)
    return estimate_engine_memory(model, server).kv_token


def test_a_cache_of_8_bits_takes_half(tmp_path: Path) -> None:
    whole = kv_token()
    assert kv_token("--kv-cache-dtype", "fp8") == kv_token("--kv_cache_dtype=fp8_e4m3") == whole // 2
    assert kv_token("--kv-cache-dtype", "fp8", "--kv-cache-dtype", "auto") == kv_token(dtype="half") == whole
    assert kv_token(dtype="float32") == 2 * kv_token("--kv-cache-dtype=bfloat16", dtype="float32") == 2 * whole
    plain = needs(tmp_path)
    halved = needs(tmp_path, "engine.options.args=['--kv-cache-dtype', 'fp8']")
    assert halved["kv_tokens"] == pytest.approx(2 * plain["kv_tokens"], abs=1)
    assert halved["gpu 0 (engine)"] == plain["gpu 0 (engine)"]


def test_what_ends_an_episode_first_bounds_sampling_and_training(tmp_path: Path) -> None:
    """A row that no episode reaches in its time is not trained on either."""
    by_tokens, by_time, given = (
        needs(tmp_path, *more)["step"]
        for more in (("rollout.seconds=3600",), ("rollout.seconds=20",), ("plan.tokens=500", "rollout.seconds=3600"))
    )
    assert by_tokens["limit"] == "rollout.tokens=8192" and by_tokens["tokens"] == by_tokens["episodes"] * 8192
    reached = by_time["tokens"] // by_time["episodes"]
    assert by_time["limit"] == f"rollout.seconds=20: an episode gets to {reached} of 8192 tokens" and reached < 4096
    assert by_time["seconds"] < by_tokens["seconds"] / 2
    assert (given["limit"], given["tokens"]) == ("", 500 * given["episodes"])


def test_measured_speeds_are_taken_as_they_are(tmp_path: Path) -> None:
    """By hand: 32 episodes of 5,000 tokens, of which 1,000 are prompt and 2,000 sampled; refills are sampled alone."""
    speeds = ("plan.tokens=5000", "plan.engine_tokens_per_second=1000", "plan.learner_tokens_per_second=4000")
    common = (*speeds, "rollout.seconds=3600", "run.steps=100")
    plan = needs(tmp_path, *common, "curriculum.refill=4")
    step, run = plan["step"], plan["run"]
    assert (step["episodes"], step["tokens"]) == (64, 32 * 5000)
    assert (step["rollout_seconds"], step["learn_seconds"]) == (128, 40)
    assert step["seconds"] == pytest.approx(168 + step["weights_seconds"], abs=0.1)
    assert plan["assumed"]["engine"] == "1,000 sampled tokens/s: plan.engine_tokens_per_second"
    assert run["hours"] == pytest.approx(100 * step["seconds"] / 3600, abs=0.06)
    assert run["gpu_hours"] == pytest.approx(2 * run["hours"], abs=0.1)
    assert run["episodes_per_gpu_hour"] == pytest.approx(32 * 3600 / (2 * step["seconds"]), abs=1)
    assert list(needs(tmp_path, *common, "run.steps=0")["step"]) == ["episodes"], "an evaluation takes no steps"


def test_overlap_is_the_larger_of_both_and_alternation_the_sum(tmp_path: Path) -> None:
    def step(*overrides: str) -> dict[str, float]:
        args = "engine.options.args=['--gpu-memory-utilization','0.4']"
        found: dict[str, float] = needs(tmp_path, "gpu.memory_gb=80", args, "train.devices=[0]", *overrides)["step"]
        return found

    ahead = ("rollout.max_staleness=2", "train.old_logprobs=recomputed")
    apart = step("train.devices=[1]", *ahead)
    work = apart["rollout_seconds"], apart["learn_seconds"]
    assert apart["seconds"] == pytest.approx(max(work) + apart["weights_seconds"], rel=1e-3)
    shared, turns = (step(f"engine.share_devices={how}", *ahead) for how in ("true", "turns"))
    assert shared["seconds"] == pytest.approx(sum(work) + shared["weights_seconds"], rel=1e-3)
    assert turns["seconds"] == pytest.approx(shared["seconds"] + turns["switch_seconds"], rel=1e-3)


def test_the_flops_of_a_token_are_those_computed_by_hand(tmp_path: Path) -> None:
    """Of adapters with checkpointing: forward, again, and the gradient of activations."""
    linear = 36 * (2 * 2560 * 4096 + 2 * 2560 * 1024 + 3 * 2560 * 9728)
    scored = 0.5 * 2560 * 151_936 * 2  # at half the speed, in TF32
    assert count_training_flops(planned(config(tmp_path))) == pytest.approx(2 * (linear * 3 + scored * 4))
    for terms, more in (
        (("train.old_logprobs=recomputed", "train.minibatches=2"), 0.5),  # the second is scored before the first update
        (("train.algorithm=ppo", "train.value_head=true", "train.old_logprobs=recomputed"), 1),  # both in one pass
    ):
        wanted = 2 * (linear * (3 + more) + scored * (4 + more))
        assert count_training_flops(planned(config(tmp_path, *terms))) == pytest.approx(wanted)
