"""Models whose files have codes for weights: the learner has the numbers that they stand for, and trains adapters."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from coderepairrl import models
from coderepairrl.assembly.learner import settings as settings_of
from coderepairrl.assembly.numerics import resolved
from coderepairrl.assembly.sizing import Architecture, learner_memory
from coderepairrl.config import Config
from coderepairrl.config.sections.train import Lora
from coderepairrl.errors import ConfigError, UsageError
from coderepairrl.learn import LearnSettings
from coderepairrl.learn.conversions import merge
from coderepairrl.learn.policy import Policy
from coderepairrl.learn.quantised import QuantisedLinear
from coderepairrl.learn.trainer import Trainer

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "gpu" / "quantised.py"))
LORA = LearnSettings(algorithm="grpo", lr=1e-3, lora=Lora(rank=4, alpha=8))
TINY = models.folder("builtin:tiny")


def compressed(form="pack-quantized", **weights):
    """A ``quantization_config`` of compressed-tensors."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32} | weights
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"g": {"weights": weights}}}


@pytest.fixture(scope="module", params=SCRIPT["CODES"])
def coded(request, tmp_path_factory) -> tuple[str, Path]:
    target = tmp_path_factory.mktemp("coded") / request.param
    return request.param, SCRIPT["written"](TINY, target, request.param, torch.float32)


def test_numbers_are_those_of_the_format(coded):
    """Against each format's own rounding, written down again from how its numbers are made."""
    form, folder = coded
    policy, plain = Policy.load(folder, LORA), load_file(TINY / "model.safetensors")
    layers = {
        name.replace(".base_layer", ""): m for name, m in policy.model.named_modules() if isinstance(m, QuantisedLinear)
    }
    assert len(layers) == 7 * policy.model.config.num_hidden_layers
    for name, layer in layers.items():
        weight = plain[f"{name}.weight"].float()
        if form in ("awq", "int4"):
            groups = weight.view(len(weight), -1, 32)
            scale = groups.abs().amax(-1, keepdim=True) / 7
            expected, most = ((groups / scale).round().clamp(-8, 7) * scale).view(weight.shape), 0.5 * scale.max()
        elif form == "w8a8":
            scale = weight.abs().amax(1, keepdim=True) / 127
            expected, most = (weight / scale).round() * scale, 0.51 * scale.max()
        else:
            expected, most = weight, weight.abs().max() / 16
        assert (layer.weight - expected).abs().max() <= (most if form == "fp8" else 1e-6)
        assert (layer.weight - weight).abs().max() <= most * 1.01


def test_adapters_learn_and_are_merged_into_plain_numbers(coded, make_rows, on_policy, tmp_path):
    _, folder = coded
    trainer = Trainer(folder, LORA)
    assert trainer.policy.found.way == "trees" and trainer.policy.settings.quantise == "checkpoint"
    rows = on_policy(trainer, make_rows([30, 12, 21]))
    assert trainer.step(rows)["mismatch_max"] < 1e-5
    trainer.save(tmp_path / "c")
    resumed = Trainer(folder, LORA)
    resumed.restore(tmp_path / "c")
    ours = trainer.logprobs([rows[0].ids], 1.0)
    assert resumed.logprobs([rows[0].ids], 1.0) == ours
    adapter, _, _ = trainer.publish(tmp_path, "adapter")
    merge(folder, adapter, tmp_path / "merged", "fp32")
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    merged = Trainer(tmp_path / "merged", LORA).logprobs([rows[0].ids], 1.0)
    assert max(abs(a - b) for a, b in zip(merged[0], ours[0], strict=True)) < 1e-4


def test_codes_take_what_was_planned(coded):
    form, folder = coded
    shape, policy = Architecture.read(folder), Policy.load(folder, LORA)
    assert shape is not None
    layers = [module for module in policy.model.modules() if isinstance(module, QuantisedLinear)]
    taken = sum(p.nbytes for p in policy.model.parameters()) + sum(layer.nbytes for layer in layers)
    planned = learner_memory(shape, LORA, longest=1)
    assert taken == pytest.approx(planned.weights + planned.adapters, rel=0.08)  # scales are float32 here
    assert taken < 0.6 * 4 * shape.parameters + planned.adapters, form


def test_a_run_is_told_what_it_is_on(coded):
    _, folder = coded
    given = Config.model_validate(
        {
            "run": {"name": "x"},
            "model": {"path": str(folder)},
            "train": {"lora": True, "old_logprobs": "recomputed"},
        }
    )
    assert resolved(given).train.mismatch_correction == "token"
    assert settings_of(given).quantise == "checkpoint"
    for change, fix in (({"train": {}}, "train.lora=true"), ({"model": {"quantise": "int8"}}, "model.quantise=none")):
        wrong = given.model_dump() | {name: given.model_dump()[name] | part for name, part in change.items()}
        if "train" in change:
            wrong["train"]["lora"] = None
        wrong["model"]["path"] = str(folder)
        with pytest.raises(ConfigError) as refused:
            settings_of(Config.model_validate(wrong))
        assert fix in refused.value.fix


@pytest.mark.parametrize(
    ("about", "why"),
    [
        ({"quant_method": "gptq", "bits": 4}, "by gptq"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "another layout"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"symmetric": False}}}}, "zero"),
        ({"quant_method": "compressed-tensors"}, "without a group"),
        (compressed(actorder="group"), "actorder=group"),
        (compressed(actorder="dynamic"), "actorder=dynamic"),
        (compressed(strategy="tensor_group"), "strategy=tensor_group"),
        (compressed("float-quantized", type="float", num_bits=8, strategy="block"), "strategy=block"),
        (compressed("nvfp4-pack-quantized", type="float"), "format nvfp4-pack-quantized"),
        (compressed("pack-quantized", type="float"), "4 bits, float"),
        (compressed() | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    ],
)
def test_what_the_learner_does_not_read_is_refused(about, why, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "quantization_config": about}))
    with pytest.raises(UsageError, match=why) as refused:
        models.quantisation_config(tmp_path)
    assert "model.quantise=nf4" in refused.value.fix


@pytest.mark.parametrize(
    ("form", "change", "why"),
    [
        ("int4", {"weight_g_idx": torch.arange(64, dtype=torch.int32)}, "weight_g_idx is read by nothing"),
        ("int4", {"weight_shape": None}, "does not read"),
        ("int4", {"weight_shape": None, "weight_global_scale": torch.ones(1)}, "is read by nothing"),
        ("w8a8", {"weight_zero_point": torch.ones(64, 1)}, "weight_zero_point is read by nothing"),
        ("w8a8", {"weight_scale": torch.ones(2, 2)}, "do not fit"),
    ],
)
def test_what_no_reader_takes_of_a_layer_is_refused(form, change, why, tmp_path):
    folder = SCRIPT["written"](TINY, tmp_path / form, form, torch.float32)
    stored = load_file(folder / "model.safetensors")
    owner = next(name for name in stored if name.endswith("q_proj.weight_scale")).removesuffix("weight_scale")
    for part, value in change.items():
        stored.pop(owner + part, None)
        stored |= {} if value is None else {owner + part: value}
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(UsageError, match=why) as refused:
        Policy.load(folder, LORA)
    assert "model.quantise=nf4" in refused.value.fix


def test_how_activations_are_rounded_is_the_engines(tmp_path):
    folder = SCRIPT["written"](TINY, tmp_path / "w8a8", "w8a8", torch.float32)
    stored = load_file(folder / "model.safetensors")
    scales = {name.replace("weight_scale", "input_scale"): torch.ones(1) for name in stored if "weight_scale" in name}
    save_file(stored | scales, folder / "model.safetensors")
    assert any(isinstance(module, QuantisedLinear) for module in Policy.load(folder, LORA).model.modules())


def test_codes_that_are_missing_are_named(tmp_path):
    folder = SCRIPT["written"](TINY, tmp_path / "awq", "awq", torch.float32)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = SCRIPT["about"]("fp8")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="does not read"):
        Policy.load(folder, LORA)
