"""What cannot fit is refused: the GPU, what it needs and has, and a change with which it then fits."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from coderepairrl import stages
from coderepairrl.assembly.learner import settings
from coderepairrl.assembly.sizing import KNOWN, PUBLISHED, DoesNotFit, Evaluation, estimate, learner_memory, require
from coderepairrl.assembly.sizing.attempts import computed
from coderepairrl.assembly.sizing.engine import EngineSettings, engine_memory
from coderepairrl.assembly.sizing.estimate import Estimate
from coderepairrl.assembly.sizing.loop import Planned
from coderepairrl.assembly.sizing.simulation import Row
from coderepairrl.config import Config, load, to_toml
from coderepairrl.errors import ConfigError, ExitCode, UsageError
from coderepairrl.learn import LearnSettings
from coderepairrl.runs import RunFolder
from coderepairrl.stages.command import _what_may_not_fit

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
    return load(file, overrides)


def planned(given: Config) -> Estimate:
    found = estimate(given, settings(given))
    assert isinstance(found, Estimate)
    return found


CASES = [
    (("train.gradient_checkpointing=false",), "GPU 1 has 24.0 GB", "train.gradient_checkpointing=true"),
    (("train.micro_tokens=65536",), "GPU 1 has 24.0 GB", "train.micro_tokens="),
    (("train.precision=fp32",), "GPU 1 has 24.0 GB", "train.precision=bf16"),
    (("train.lora=false",), "GPU 1 has 24.0 GB", "train.lora=true"),
    (("gpu.memory_gb=16", "engine.options.context=40960"), "one sequence of 40,960", "engine.options.context=8192"),
    (
        ("engine.options.args=['--gpu-memory-utilization','0.45']",),
        "(0.45 of the memory)",
        "engine.options.args=",
    ),
    (("model.path=Qwen/Qwen3-8B", "engine.devices=[0]"), "GPU 1 has 24.0 GB", "model.quantise=nf4"),
    (
        (
            "model.path=Qwen/Qwen3-32B",
            "engine.options.context=8192",
            "train.processes=2",
            "train.devices=[1,2]",
            "gpu.memory_gb=80",
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
        stages.needs(config(tmp_path, *overrides))
    assert message in str(refused.value)
    assert fix in refused.value.fix
    assert refused.value.exit_code is ExitCode.USAGE
    change = shlex.split(refused.value.fix.removeprefix("nearest change that fits: "))
    assert not planned(config(tmp_path, *overrides, *change)).problem


BY_TURNS = ("engine.share_devices=turns", "train.devices=[0]")


def test_by_turns_a_gpu_holds_the_larger_turn_and_what_the_other_leaves(tmp_path: Path) -> None:
    given = config(tmp_path, *BY_TURNS)
    found, together = planned(given), planned(config(tmp_path, "engine.share_devices=true", "train.devices=[0]"))
    assert found.server is not None and found.server.room is not None
    turns = found.server.room + 2e9, found.learner.peak + 2e9 + 2e9
    assert found.needs(0) == max(turns) < together.needs(0) == pytest.approx(sum(turns) - 4e9)
    with pytest.raises(DoesNotFit, match="of engine and learner as well"):
        stages.needs(given)  # 0.92 of 24 GB and the learner's 2
    fits = (*BY_TURNS, "engine.options.args=['--gpu-memory-utilization','0.9']")
    plan = stages.needs(config(tmp_path, *fits))
    server, held = found.server.memory, found.learner
    trained = held.adapters + held.optimizer
    moved = 2 * (server.weights + server.adapters) + held.weights + 2 * trained
    assert plan["turns"]["moved_in_a_step_gb"] == pytest.approx(moved / 1e9, abs=0.01)
    assert plan["turns"]["host_gb"] < plan["turns"]["moved_in_a_step_gb"]
    assert plan["turns"]["host_at_most_gb"] == pytest.approx(2 * plan["turns"]["host_gb"], abs=0.02)
    assert "switching" in plan["step"]["learner"] and "switching" in plan["assumed"]


def test_a_learner_of_several_runs_has_the_model_once_on_a_gpu_of_its_own(tmp_path: Path) -> None:
    alone = planned(config(tmp_path)).learner
    given = ("train.learner=/tmp/learner.sock", "train.devices=[]")
    plan = stages.needs(config(tmp_path, *given, "gpu.memory_gb=48"))
    told = plan["learner of several runs"]
    assert not [name for name in plan if "(learner)" in name] and plan["run"]["gpu_hours"] == plan["run"]["hours"]
    assert told["weights_gb"] == pytest.approx(alone.weights / 1e9, abs=0.01)
    assert told["each_run_gb"] == pytest.approx((alone.adapters + alone.optimizer) / 1e9, abs=0.01)
    assert sum(told[part] for part in ("weights_gb", "step_gb", "each_run_gb")) == pytest.approx(
        alone.peak / 1e9 + 2, abs=0.02
    )
    assert told["runs"] == (48 - told["weights_gb"] - told["step_gb"]) // told["each_run_gb"]
    with pytest.raises(DoesNotFit, match="the learner that runs share .* one run alone needs") as refused:
        stages.needs(config(tmp_path, *given, "train.gradient_checkpointing=false"))
    assert "train.gradient_checkpointing=true" in refused.value.fix


def test_switching_costs_its_time_and_no_more(tmp_path: Path) -> None:
    """On the same attempts as a card that holds both."""
    args = "engine.options.args=['--gpu-memory-utilization','0.4']"
    given = ("train.devices=[0]", "gpu.memory_gb=80", "rollout.seconds=3600", args)
    shared, turns = (stages.needs(config(tmp_path, f"engine.share_devices={how}", *given)) for how in ("true", "turns"))
    switch = turns["turns"]["moved_in_a_step_gb"] / 20
    assert turns["step"]["seconds"] - shared["step"]["seconds"] == pytest.approx(switch, abs=0.1)


def test_an_evaluation_does_not_switch(tmp_path: Path) -> None:
    more = ("engine.options.args=['--gpu-memory-utilization','0.4']", "gpu.memory_gb=80", "rollout.seconds=3600")
    given = [
        planned(config(tmp_path, f"engine.share_devices={how}", "train.devices=[0]", *more))
        for how in ("true", "turns")
    ]
    shared, turns = (Planned.of(each) for each in given)
    assert shared is not None and turns is not None and turns.loop.switch > 0
    evaluation = Evaluation(("",) * 4, 1, 1)
    assert turns.evaluating(evaluation) == shared.evaluating(evaluation)


def test_what_nothing_helps_says_so(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFit) as refused:
        stages.needs(config(tmp_path, "model.path=Qwen/Qwen3-32B", "gpu.memory_gb=6"))
    assert refused.value.fix == "take a smaller model, or larger GPUs"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("engine.options.context=4096",), "engine.options.context=4096 is less than rollout.tokens=8192"),
        (("engine.options.args=['--tensor-parallel-size','2']",), "ask for 2 GPUs"),
        (("engine.options.args=['--tensor-parallel-size','two']",), "wants a number, not 'two'"),
        (("engine.options.args=['-tp=0']",), "-tp must be positive, not 0"),
        (("engine.options.args=['--tensor_parallel_size=2']",), "ask for 2 GPUs"),
        (("engine.options.args=['-tp=inf']",), "-tp must be positive, not inf"),
        (("engine.options.args=['-tp=0.5']",), "must be a whole number, not 0.5"),
        (("engine.options.args=['-tp=3']", "engine.devices=[0,2,3]"), "3 does not divide the 32 heads"),
        (("engine.options.slots=0",), "slots must be a whole number of at least 1, not 0"),
        (("engine.options.context='long'",), "context: Input should be a valid integer, not 'long'"),
        (("engine.options.lora_rank=513",), "lora_rank must be a whole number from 0 to 512, not 513"),
        (("engine.options.args=['--max_model_len=4096']",), "args has --max_model_len"),
        (("engine.options.args=['--quantization', 'fp8']",), "args has --quantization: quantised weights are not"),
        (("engine.options.args=['-q=awq']",), "args has -q=awq: quantised weights are not"),
        (("engine.options.args=['--tensor-parallel', 'two']",), "wants a number, not 'two'"),
        (("engine.options.max_loras=1",), "max_loras must be a whole number of at least 2, not 1"),
        (("engine.options.context=40961",), "positions of Qwen/Qwen3-4B reach to 40,960"),
        (("train.devices=[1,2]",), "for train.processes=1"),
        (("engine.devices=[0,0]",), "names a GPU twice"),
        (("train.devices=[0]",), "both take GPU 0"),
        (("engine.options.slotz=1",), "slotz"),
    ],
)
def test_what_no_memory_helps_is_refused_too(overrides: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        stages.needs(config(tmp_path, *overrides))


def test_where_memory_is_not_known_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    plan = stages.needs(config(tmp_path, "gpu.memory_gb=0", "train.lora=false"))
    assert plan["gpu 1 (learner)"]["has_gb"] == "unknown"
    assert "seconds" not in plan["step"]
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 24576\necho 81559\n")
    driver.chmod(0o755)
    with pytest.raises(DoesNotFit, match=r"GPU 1 has 25\.8 GB"):  # the smaller one's
        stages.needs(config(tmp_path, "gpu.memory_gb=0", "train.lora=false"))


def test_an_engine_elsewhere_and_a_model_of_another_kind_are_left_out(tmp_path: Path) -> None:
    plan = stages.needs(config(tmp_path, "engine.options={url='http://127.0.0.1:1'}", "engine.devices=[]"))
    assert [key for key in plan if key.startswith("gpu")] == ["gpu 1 (learner)"]
    for argument in ("--cpu-offload-gb=4", "--kv-cache-dtype nvfp4", "--speculative_config.method ngram"):
        given = f"engine.options.args={argument.split()}"
        assert stages.needs(config(tmp_path, given))["memory"] == (
            f"not planned: it is not known what the server holds with {argument}"
        )
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    assert "mamba" not in (said := stages.needs(config(tmp_path, f"model.path={tmp_path}"))["memory"])
    assert said.startswith("not planned")
    for nothing in ("[]", '{"model_type": "qwen3", "hidden_size": null}'):
        (tmp_path / "config.json").write_text(nothing)
        assert stages.needs(config(tmp_path, f"model.path={tmp_path}"))["memory"] == said
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        stages.needs(config(tmp_path, f"model.path={tmp_path}"))
    method = {"quant_method": "compressed-tensors"}  # and not how many bits
    quantised = {**PUBLISHED["Qwen3-4B"], "quantization_config": method}
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(UsageError, match="quant_method=compressed-tensors"):
        stages.needs(config(tmp_path, f"model.path={tmp_path}"))


def test_on_a_cpu_the_learner_is_told_and_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no driver
    plan = stages.needs(load("hello"))
    assert plan["process 0 (learner)"].keys() == {
        *("weights_gb", "gradients_gb", "optimizer_gb", "activations_gb", "work_gb", "logits_gb", "needs_gb")
    }
    assert plan["step"] == {"episodes": 64}
    assert "run" not in plan


def test_a_run_says_its_doubt_and_goes_on() -> None:
    assert "this may not fit: GPU 0 has 0.1 GB" in _what_may_not_fit(load("hello", ["gpu.memory_gb=0.1"]))
    assert _what_may_not_fit(load("hello", ["gpu.memory_gb=24"])) == ""


def test_processes_that_share_hold_less() -> None:
    model, tokens = KNOWN["Qwen3-14B"], 8192
    base = LearnSettings(precision="bf16", gradient_checkpointing=True)
    alone = learner_memory(model, base, longest=tokens)
    assert alone.static == 16 * model.parameters  # float32: weights, gradients, two moments

    def of(strategy: Any) -> Any:
        return learner_memory(model, base.but(processes=4, strategy=strategy), longest=tokens)

    assert of("ddp").static == 20 * model.parameters  # and the buckets
    assert of("fsdp2").static == 16 * model.parameters // 4
    assert alone.weights < of("ddp").peak > of("fsdp2").peak > of("fsdp2").static + of("fsdp2").activations


def test_a_server_by_hand() -> None:
    """14B in bf16 on two GPUs: half of the weights; keys and values of 40 layers with 8 heads of 128."""
    options = {"args": ["-tp", "2", "--gpu-memory-utilization=0.5"], "context": 4096, "slots": 8, "lora_rank": 20}
    server = EngineSettings.of(options, KNOWN["Qwen3-14B"], None, small=False)
    assert (server.gpus, server.share, server.rank, server.batched) == (2, 0.5, 32, 8192)
    memory = engine_memory(KNOWN["Qwen3-14B"], server)
    assert memory.weights == KNOWN["Qwen3-14B"].parameters
    assert memory.kv_token == 2 * 40 * 8 * 128 * 2 // 2
    assert memory.adapters == 2 * 128_450_560  # two of rank 32 in bf16, halved
    assert memory.cached(memory.fixed + 10 * memory.kv_token) == 10


def kv_token(*args: str, **options: Any) -> int:
    """Bytes of a token's keys and values at a server of 14B."""
    model = KNOWN["Qwen3-14B"]
    server = EngineSettings.of({"args": list(args), "context": 4096, **options}, model, None, small=False)
    return engine_memory(model, server).kv_token


def test_a_cache_of_8_bits_takes_half(tmp_path: Path) -> None:
    whole = kv_token()
    assert kv_token("--kv-cache-dtype", "fp8") == kv_token("--kv_cache_dtype=fp8_e4m3") == whole // 2
    assert kv_token("--kv-cache-dtype", "fp8", "--kv-cache-dtype", "auto") == kv_token(dtype="half") == whole
    assert kv_token(dtype="float32") == 2 * kv_token("--kv-cache-dtype=bfloat16", dtype="float32") == 2 * whole
    plain = stages.needs(config(tmp_path))
    halved = stages.needs(config(tmp_path, "engine.options.args=['--kv-cache-dtype', 'fp8']"))
    assert halved["kv_tokens"] == pytest.approx(2 * plain["kv_tokens"], abs=1)
    assert halved["gpu 0 (engine)"] == plain["gpu 0 (engine)"]


def needs(tmp_path: Path, *overrides: str) -> dict[str, Any]:
    return stages.needs(config(tmp_path, *overrides))


def test_what_ends_an_episode_first_bounds_sampling_and_training(tmp_path: Path) -> None:
    """A row that no episode reaches in its time is not trained on either."""
    by_tokens, by_time = (needs(tmp_path, f"rollout.seconds={seconds}")["step"] for seconds in (3600, 20))
    assert by_tokens["limit"] == "rollout.tokens=8192" and by_tokens["ends_by"] == "tokens 100%"
    assert by_tokens["tokens"] == by_tokens["episodes"] * 8192
    assert by_time["ends_by"] == "time 100%"
    assert by_time["tokens"] < by_tokens["tokens"] / 2
    reached = round(by_time["tokens"] / by_time["episodes"])
    assert by_time["limit"] == f"rollout.seconds=20: an episode gets to {reached} of 8192 tokens"
    assert by_time["seconds"] < by_tokens["seconds"] / 2


def test_hours_are_those_of_all_steps_and_gpus(tmp_path: Path) -> None:
    plan = needs(tmp_path, "run.steps=100")
    assert plan["run"]["hours"] == pytest.approx(100 * plan["step"]["seconds"] / 3600, abs=0.06)
    assert plan["run"]["gpu_hours"] == pytest.approx(2 * plan["run"]["hours"], abs=0.2)
    rate = plan["step"]["episodes"] * 100 / plan["run"]["gpu_hours"]
    assert plan["run"]["episodes_per_gpu_hour"] == pytest.approx(rate, rel=0.02)


def test_evaluations_are_hours_of_the_same_gpus(tmp_path: Path) -> None:
    def run(*evaluations: Evaluation) -> dict[str, float]:
        given = config(tmp_path, "run.steps=100")
        found: dict[str, float] = require(given, settings, evaluations)["run"]
        return found

    without, twice, larger = run(), run(Evaluation(("",) * 500, 1, 2)), run(Evaluation(("",) * 500, 4, 2))
    assert "evaluation_hours" not in without and without["hours"] == twice["hours"]
    assert larger["evaluation_hours"] == pytest.approx(4 * twice["evaluation_hours"], rel=0.15)
    hours = twice["hours"] + twice["evaluation_hours"]
    assert twice["gpu_hours"] == pytest.approx(2 * hours, abs=0.3) and twice["evaluation_hours"] > 0.2


def test_an_evaluation_has_the_kinds_of_its_own_tasks(tmp_path: Path) -> None:
    """However often training draws a kind: an evaluation of one alone takes what it takes where all are like that."""
    sources = "tasks.sources=[{source='hello', kind='short', weight=9}, {source='mutants', kind='long'}]"
    same = "rollout.seconds=3600", "plan.call_tokens=200"

    def seconds(kinds: tuple[str, ...], *overrides: str) -> float:
        plan = Planned.of(planned(config(tmp_path, *same, *overrides)))
        assert plan
        return plan.evaluating(Evaluation(kinds * 40, 3, 1))

    both = sources, "kinds.short.calls=2", "kinds.long.calls=8"
    short, long, mixed = (seconds(kinds, *both) for kinds in (("short",), ("long",), ("short", "long")))
    assert [short, long] == pytest.approx([seconds(("",), f"rollout.calls={calls}") for calls in (2, 8)])
    assert mixed == pytest.approx(short + long, rel=0.1) and 2 * short < long


def test_kinds_of_tasks_have_limits_of_their_own(tmp_path: Path) -> None:
    """Half of the groups is cut after two calls."""
    same = "plan.call_tokens=200", "rollout.seconds=3600"
    both = "tasks.sources=[{source='hello', kind='short'}, {source='mutants', kind='long'}]"
    step = needs(tmp_path, both, "kinds.short.calls=2", "kinds.long.calls=8", *same)["step"]
    assert step["limit"] == "the calls of the run and its kinds" and step["ends_by"] == "calls 100%"
    of_two, of_eight = (needs(tmp_path, f"rollout.calls={calls}", *same)["step"] for calls in (2, 8))
    assert of_two["tokens"] < step["tokens"] < of_eight["tokens"]
    assert of_two["seconds"] < step["seconds"] < of_eight["seconds"]


def test_an_evaluation_alone_takes_no_steps(tmp_path: Path) -> None:
    assert list(needs(tmp_path, "run.steps=0")["step"]) == ["episodes"]


def test_overlap_never_costs_time_and_alternation_is_the_sum(tmp_path: Path) -> None:
    def seconds(*overrides: str) -> float:
        return float(needs(tmp_path, "rollout.seconds=3600", *overrides)["step"]["seconds"])

    alone, ahead = seconds(), seconds("rollout.max_staleness=2", "train.old_logprobs=recomputed")
    recomputed = seconds("train.old_logprobs=recomputed")
    assert alone / 2 < ahead < recomputed
    room = ("gpu.memory_gb=80", "engine.options.args=['--gpu-memory-utilization','0.4']")  # alike: no more is evicted
    room += ("rollout.max_staleness=2", "train.old_logprobs=recomputed")
    in_turn = seconds("engine.share_devices=true", "train.devices=[0]", *room)
    assert in_turn > seconds(*room), "on one GPU the engine stops while the learner learns"


@pytest.mark.parametrize(
    ("size", "share"), [("0.6B", 0.08), ("1.7B", 0.08), ("4B", 0.2), ("8B", 0.2), ("14B", 0.32), ("32B", 0.32)]
)
def test_a_gpu_reaches_what_was_measured_at_that_size(size: str, share: float, tmp_path: Path) -> None:
    given = (f"model.path=Qwen/Qwen3-{size}", "gpu.memory_gb=200")
    assert planned(config(tmp_path, *given)).utilisation == share
    assert planned(config(tmp_path, *given, "gpu.utilisation=0.5")).utilisation == 0.5


def test_a_group_s_prompt_is_computed_once_in_a_pass() -> None:
    rows = [Row(100, 150, 30), Row(100, 180, 30)]
    assert sum(tokens for _, tokens, _ in computed([rows], 1000)) == 230
    assert sum(tokens for _, tokens, _ in computed([rows], 1000, parts=2)) == 330
    assert sum(tokens for _, tokens, _ in computed([rows], 140)) == 130 + 4 * 100  # 40 of its own in each
    positions = sum(each for _, _, each in computed([rows], 1000))
    assert positions == pytest.approx((150**2 + 180**2 - 100**2) / 2)


def test_the_proposed_division_is_the_best_of_those_that_fit(tmp_path: Path) -> None:
    """Of four GPUs, of which three serve, and a learner alone is too slow for them."""
    server = ("engine.devices=[0,1,2]", "engine.options.args=['--data-parallel-size','3']")
    overrides = (*server, "train.devices=[3]", "gpu.memory_gb=80", "rollout.concurrency=64")
    split = needs(tmp_path, *overrides)["split"]
    rates = {name: float(said.split()[0]) for name, said in split.items() if name != "proposed"}
    assert rates.keys() == {f"{a}_engine_{4 - a}_learner" for a in (1, 2, 3)}
    best = max(rates, key=lambda name: rates[name])
    assert rates[best] > 1.1 * rates["3_engine_1_learner"], "else it is proposed to leave it"
    assert split["proposed"] == f"{best[0]} for the engine, {best[-9]} to learn"
    assert "split" not in needs(tmp_path)


def test_an_average_number_of_calls_is_drawn(tmp_path: Path) -> None:
    few = needs(tmp_path, "plan.calls=5", "plan.call_tokens=145", "rollout.seconds=3600")
    assert few["step"]["ends_by"].startswith("done 100%")
    assert few["step"]["limit"] == ""
    mean = few["step"]["tokens"] / few["step"]["episodes"]
    assert mean == pytest.approx(1000 - 73 + 5 * 145 + 73, rel=0.25)
    assert few["assumed"]["attempts"] == "5 calls on average"
    assert few["assumed"]["tokens"] == "1000 of prompt; a call samples 73, and 72 are given to it"


@pytest.mark.parametrize("what", ["nothing", "a run without a step", "a fine-tuning"])
def test_a_run_that_says_nothing_is_refused(what: str, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "empty"
    if what != "nothing":
        RunFolder(run).create(to_toml(load("hello")), {})
        step = {"type": "step", "step": 1, "metrics": {"learn_seconds": 1.0}}
        run.joinpath("log.jsonl").write_text(json.dumps(step) + "\n" if what == "a fine-tuning" else "")
    with pytest.raises(UsageError) as refused:
        needs(tmp_path, f"plan.run={run}")
    assert str(run) in str(refused.value) and refused.value.fix


def test_flops_of_a_step_by_hand(tmp_path: Path) -> None:
    """Of adapters with checkpointing: forward, again, and the gradient of activations."""
    given = planned(config(tmp_path, "rollout.tasks_per_step=1", "rollout.group_size=2"))
    model, n = KNOWN["Qwen3-4B"], 8192
    linear = 36 * (2 * 2560 * 4096 + 2 * 2560 * 1024 + 3 * 2560 * 9728)
    square = 2 * 2 * (n / 2) * 4096 * 36  # a token's scores and values
    scored = 0.5 * 2 * 2560 * 151_936 * 2  # at half the speed, in TF32
    assert model.products == linear
    rows = [[Row(0, n, n // 2)] * 2]  # which share nothing
    assert given.training_flops(rows) == pytest.approx(2 * n * (2 * linear * 3 + square * 4 + scored * 4))
    terms = ("train.old_logprobs=recomputed", "train.minibatches=2")  # the second is scored before the first update
    looked = planned(config(tmp_path, "rollout.tasks_per_step=1", "rollout.group_size=2", *terms))
    forward = 2 * n * (2 * linear + square + scored)
    assert looked.training_flops(rows) == pytest.approx(given.training_flops(rows) + forward / 2)
    terms = ("train.algorithm=ppo", "train.value_head=true", "train.old_logprobs=recomputed")  # both in one pass
    valued = planned(config(tmp_path, "rollout.tasks_per_step=1", "rollout.group_size=2", *terms))
    assert valued.training_flops(rows) == pytest.approx(given.training_flops(rows) + forward)


def test_refill_is_sampled_and_not_trained(tmp_path: Path) -> None:
    plain = needs(tmp_path, "rollout.seconds=3600")
    more = needs(tmp_path, "rollout.seconds=3600", "curriculum.refill=4")

    def learning(plan: Any) -> float:
        share = float(plan["step"]["learner"].split("learning ")[1].split("%")[0]) / 100
        return share * float(plan["step"]["seconds"])

    assert more["step"]["episodes"] == 2 * plain["step"]["episodes"]
    assert more["step"]["seconds"] > 1.3 * plain["step"]["seconds"]
    assert learning(more) == pytest.approx(learning(plain), rel=0.1)
