"""Adapters on the experts of a mixture: computed as the merged weights are, and given to files and engines whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES
from coderepairrl.learn.experts import Adapted
from forest import ROWS, alone, apart, found

from coderepairrl.assembly import replying
from coderepairrl.config.sections.train import Lora
from coderepairrl.errors import ConfigError, UsageError
from coderepairrl.learn import LearnSettings, adapters, shards
from coderepairrl.learn.conversions import engine_form, init_random, merge, survived
from coderepairrl.learn.pack import pack
from coderepairrl.learn.policy import Policy
from coderepairrl.learn.trainer import Trainer
from coderepairrl.sync import weights

LORA = Lora(rank=3, alpha=6, experts=True)
SETTINGS = LearnSettings(algorithm="grpo", lr=1e-2, lora=LORA)
FAMILIES = [
    *("Qwen3 MoE", "Qwen3-Next", "Qwen3.5 MoE", "GLM-4.5", "GLM-4.7 Flash", "DeepSeek-V3", "gpt-oss", "Mixtral"),
    *("Kimi Linear", "MiniMax-M1", "MiniMax-M2", "Jamba", "LFM2 MoE"),
]
ROUNDING = {"Kimi Linear": 3e-5}
"""Along its recurrence transformers' own gradients in float32 differ by as much from those in float64."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Random weights of an architecture."""
    home, made = tmp_path_factory.mktemp("experts"), dict[str, Path]()

    def folder(name: str) -> Path:
        if name not in made:
            target = home / str(len(made))
            init_random(ARCHITECTURES[name].write(home / "config" / str(len(made))), target, 0)
            made[name] = target
        return made[name]

    return folder


def moved(folder: Path, settings: LearnSettings = SETTINGS) -> Policy:
    """A policy whose adapters have an effect."""
    policy = Policy.load(folder, settings)
    draw = torch.Generator().manual_seed(3)
    for parameter in policy.parameters.values():
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=draw)
    return policy


def of_adapters(policy: Policy, dense: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What gradients of the merged weights are for the adapters: of ``s B A``, ``s B^T G`` and ``s G A^T``."""
    result = {}
    for name, layer in policy.model.named_modules():
        if not isinstance(layer, adapters.LoraLayer):
            continue
        scale, matrices = (
            layer.scaling["default"],
            {part: getattr(layer, part)["default"] for part in ("lora_A", "lora_B")},
        )
        a, b = (each.weight.detach().double() for each in matrices.values())
        key = name.removesuffix(".base_layer")
        if isinstance(layer, Adapted):
            g = dense[f"{key}.{layer.parameter_name}"]
            g = g.transpose(1, 2) if layer.get_base_layer().is_transposed else g
            rank = layer.r["default"]
            # peft's layouts: ranks of an expert after one another in A, experts of a rank after one another in B
            of_a = torch.stack([b.view(len(b), rank, -1)[:, :, n].T @ g[n] for n in range(len(g))]).view(a.shape)
            of_b = torch.stack([g[n] @ a.view(len(g), rank, -1)[n].T for n in range(len(g))], dim=-1).view(b.shape)
        else:
            g = dense[f"{key}.weight"]
            of_a, of_b = b.T @ g, g @ a.T
        for part, gradient in zip(matrices, (of_a, of_b), strict=True):
            result[f"{name}.{part}.default.weight"] = scale * gradient
    return result


@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_score_and_pull_as_merged_weights_do(name, folders, tmp_path):
    """Of a packed tree, against transformers' own experts in float64, row by row, with the product in the weights."""
    policy = moved(folders(name))
    policy.export(tmp_path, "model")
    logp_N, dense = alone(tmp_path)
    if ARCHITECTURES[name].way == "trees":
        ours = found(policy, pack(ROWS))
    else:
        parts = []
        weights = torch.linspace(0.5, 1.5, len(logp_N)).split([sum(row.trained) for row in ROWS])
        for row, weight in zip(ROWS, weights, strict=True):
            parts.append(policy.logprobs(pack([row]), 1.0))
            (parts[-1] * weight).sum().backward()
        ours = torch.cat(parts).detach().double(), {n: p.grad.double() for n, p in policy.parameters.items()}
    logprobs, gradients = apart(ours, (logp_N, of_adapters(policy, dense)))
    assert max(logprobs, gradients) < ROUNDING.get(name, ARCHITECTURES[name].rounding)
    assert sum("experts" in key for key in policy.parameters) >= 4


@pytest.mark.parametrize("more", [{"gradient_checkpointing": True}, {"chunk_tokens": 8}], ids=str)
def test_checkpointed_and_in_chunks_they_are_the_same(more, folders):
    whole = found(moved(folders("Qwen3 MoE")), pack(ROWS))
    if "chunk_tokens" in more:
        parts = found(moved(folders("Qwen3 MoE")), replace(pack(ROWS), **more))
    else:
        parts = found(moved(folders("Qwen3 MoE"), SETTINGS.but(**more)), pack(ROWS))
    assert max(apart(parts, whole)) < 1e-5


@pytest.mark.parametrize("name", ["Qwen3 MoE", "gpt-oss"])
def test_they_begin_as_nothing_and_are_all_that_is_trained(name, folders):
    plain, trainer = Policy.load(folders(name)), Trainer(folders(name), SETTINGS)
    batch = pack(ROWS)
    expected = plain.logprobs(batch, 1.0)
    assert torch.equal(trainer.policy.logprobs(batch, 1.0), expected)
    before = {key: p.clone() for key, p in trainer.policy.model.named_parameters()}
    trainer.step(ROWS)
    trainer.step(ROWS)  # the first matrices have no gradient before the second ones are something
    after = dict(trainer.policy.model.named_parameters())
    assert {key for key, p in after.items() if not torch.equal(p, before[key])} == set(trainer.policy.parameters)
    assert not torch.equal(trainer.policy.logprobs(batch, 1.0), expected)
    with trainer.policy.initial():
        assert torch.equal(trainer.policy.logprobs(batch, 1.0), expected)


def test_a_checkpoint_continues_bit_for_bit(folders, tmp_path):
    straight = Trainer(folders("Qwen3 MoE"), SETTINGS)
    straight.step(ROWS)
    straight.save(tmp_path / "c")
    expected = straight.step(ROWS)
    resumed = Trainer(folders("Qwen3 MoE"), SETTINGS)
    resumed.restore(tmp_path / "c")
    assert resumed.step(ROWS) == expected
    again = dict(resumed.policy.state())
    assert all(torch.equal(tensor, again[key]) for key, tensor in straight.policy.state())
    with pytest.raises(UsageError, match="another model"):
        Trainer(folders("Qwen3 MoE"), SETTINGS.but(lora=Lora(rank=3, alpha=6))).restore(tmp_path / "c")


@pytest.mark.parametrize("name", ["Qwen3 MoE", "gpt-oss", "Mixtral"])
def test_peft_and_transformers_read_a_checkpoint(name, folders, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    policy = moved(folders(name))
    policy.save(tmp_path)
    about = json.loads((tmp_path / "adapter_config.json").read_text())
    assert sorted(about["target_parameters"]) == ["experts.down_proj", "experts.gate_up_proj"]
    model = AutoModelForCausalLM.from_pretrained(folders(name), dtype=torch.float32)
    model = PeftModel.from_pretrained(model, tmp_path).eval()
    row = pack([ROWS[0]])
    with torch.no_grad():
        theirs = model(input_ids=row.ids_T[None]).logits[0].log_softmax(-1)[row.at_N, row.target_N]
        assert (theirs - policy.logprobs(row, 1.0)).abs().max().item() < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_an_engine_is_given_two_matrices_for_each_weight_of_an_expert(name, folders, tmp_path):
    """Their products are what merging adds to the files of the architecture."""
    policy = moved(folders(name))
    policy.export(tmp_path, "adapter")
    merged = dict(policy.exported("model"))
    scale, at = LORA.alpha / LORA.rank, "base_model.model."
    with (
        shards.TensorFiles(tmp_path, adapters.FILE) as stored,
        shards.TensorFiles(folders(name), shards.MODEL) as base,
    ):
        left = set(stored)
        for key, tensor in merged.items():
            owner = key.removesuffix(".weight")
            stacked = {"experts.gate_up_proj": "experts.base_layer", "experts.down_proj": "experts"}
            ending = ".".join(key.split(".")[-2:])
            if ending in stacked:
                owner = owner.removesuffix(ending) + stacked[ending]
            pair = [f"{at}{owner}.{part}.weight" for part in ("lora_A", "lora_B")]
            if not left.issuperset(pair):
                assert torch.equal(tensor, base[key])
                continue
            left -= set(pair)
            a, b = (stored[each] for each in pair)
            if ending in stacked:
                count = len(tensor)
                a, b = a.view(count, LORA.rank, -1), b.view(len(b), LORA.rank, count).permute(2, 0, 1)
                product = (b @ a).transpose(1, 2)  # gpt-oss has its weights the other way round
            else:
                product = b @ a
            assert (tensor - base[key] - scale * product).abs().max().item() < 1e-5
        assert not left


@pytest.mark.parametrize("name", ["Mixtral", "gpt-oss"])
def test_a_checkpoint_is_put_in_the_form_for_engines_without_its_model(name, folders, tmp_path):
    """As the run itself gave it to its engine."""
    policy = moved(folders(name))
    for part in ("c", "given", "again"):
        (tmp_path / part).mkdir()
    policy.save(tmp_path / "c")
    policy.export(tmp_path / "given", "adapter")
    engine_form(folders(name), tmp_path / "c", tmp_path / "again")
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "given" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()


@pytest.mark.parametrize(("precision", "least"), [("fp32", 0.999), ("bf16", 0.9)])
@pytest.mark.parametrize("name", ["Qwen3 MoE", "gpt-oss"])
def test_they_are_merged_and_what_is_left_of_them_is_known(name, precision, least, folders, tmp_path):
    policy = moved(folders(name), SETTINGS.but(precision=precision))
    for part in ("c", "given"):
        (tmp_path / part).mkdir()
    policy.save(tmp_path / "c")
    policy.export(tmp_path / "given", "model")
    merge(folders(name), tmp_path / "c", tmp_path / "merged", precision)
    with (
        shards.TensorFiles(tmp_path / "given", "model") as ours,
        shards.TensorFiles(tmp_path / "merged", "model") as theirs,
    ):
        assert set(ours) == set(theirs) and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert least < survived(folders(name), tmp_path / "c", tmp_path / "merged", precision) < 1.01


def test_in_16_bits_they_are_float32_and_computed_as_the_rest(folders):
    policy = moved(folders("Qwen3 MoE"), SETTINGS.but(precision="bf16"))
    assert {p.dtype for p in policy.parameters.values()} == {torch.float32}
    logprobs, gradients = found(policy, pack(ROWS))
    assert logprobs.isfinite().all() and all(value.isfinite().all() for value in gradients.values())


def test_no_product_of_two_matrices_is_made(folders, monkeypatch):
    """In the passes of a step there is no tensor of the size of a layer's experts but these themselves."""
    from torch.utils._python_dispatch import TorchDispatchMode

    policy = moved(folders("Qwen3 MoE"))
    size = max(p.numel() for p in policy.model.parameters() if p.ndim == 3)
    made = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.ndim == 3 and result.numel() == size:
                made.append((func, result.shape))
            return result

    row = pack([replace(ROWS[0], ids=ROWS[0].ids[:9], trained=(*ROWS[0].trained[:8], True))])
    with Watch():
        policy.logprobs(row, 1.0).sum().backward()
    assert {str(func) for func, _ in made} <= {"aten.transpose.int", "aten.detach.default", "aten.view.default"}


@pytest.mark.parametrize(
    ("name", "why"),
    [("Qwen2", "has no experts"), ("Llama 4", "a way of their own"), ("Granite 4", "input_linear")],
)
def test_what_cannot_get_them_is_refused(name, why, folders):
    with pytest.raises(UsageError, match=why) as caught:
        Policy.load(folders(name), SETTINGS)
    assert "train.lora.experts" in caught.value.fix


@pytest.mark.parametrize("name", ["GLM-4.5", "DeepSeek-V3"])
def test_other_feed_forward_blocks_get_theirs_and_experts_none_unasked(name, folders):
    """peft by itself would take a dense layer's targets for the experts', with twice the rank."""
    names = {key for key in Policy.load(folders(name), LearnSettings(lora=Lora(rank=2))).parameters if ".mlp." in key}
    assert any(".mlp.gate_proj." in key for key in names) and any(".shared_experts." in key for key in names)
    assert not any(".mlp.experts." in key for key in names)


def test_weights_that_are_divided_where_modules_compute_are_refused():
    with pytest.raises(ConfigError, match="zero3") as caught:
        SETTINGS.but(strategy="zero3", processes=2)
    assert "fsdp2" in caught.value.fix


def test_adapters_are_one_file_however_large(folders, tmp_path, monkeypatch):
    """peft and vLLM read one."""
    monkeypatch.setattr(shards, "SHARD", 1000)
    moved(folders("Qwen3 MoE")).export(tmp_path, "adapter")
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["adapter_model.safetensors"]


async def test_an_engine_is_never_given_a_checkpoint_of_them_as_it_lies(folders, tmp_path):
    """vLLM would look for other names, and serve the model without adapters."""
    seen = []

    class Engine:
        async def load(self, path, version, checksum):
            seen.append((sorted(file.name for file in path.iterdir()), version, checksum))
            assert checksum == weights.checksum(path)
            with shards.TensorFiles(path, adapters.FILE) as files:
                assert "base_model.model.model.layers.0.block_sparse_moe.experts.3.w1.lora_A.weight" in set(files)

    (tmp_path / "c").mkdir()
    moved(folders("Mixtral")).save(tmp_path / "c")
    async with AsyncExitStack() as parts:
        await replying._load(Engine(), tmp_path / "c", 3, folders("Mixtral"), parts, tmp_path)
    assert seen and seen[0][1] == 3
