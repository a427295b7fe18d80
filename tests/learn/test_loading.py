"""A model is loaded if names and shapes of its weights are those of its config.json."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from coderepairrl.config.schema import Lora
from coderepairrl.errors import UsageError
from coderepairrl.learn import LearnSettings
from coderepairrl.learn.learner import init_random, merge_adapter
from coderepairrl.learn.loading import check_weights
from coderepairrl.learn.policy import Policy

NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
SMALL = {"vocab_size": 265, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture
def folder(miniature: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(miniature, tmp_path / "model"))


def rewrite(folder: Path, change) -> None:
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def renamed(old: str, new: str):
    return lambda tensors: {name.replace(old, new, 1): value for name, value in tensors.items()}


def without_norm(tensors):
    return {name: value for name, value in tensors.items() if name != NORM}


def configure(folder: Path, **options: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | options))


@pytest.mark.parametrize(
    ("change", "says", "fix"),
    [
        (renamed("", "_orig_mod."), f"lacks lm_head.weight, {EMBEDDING}", "left by torch.compile"),
        (
            renamed("q_proj.", "q_proj.base_layer."),
            "has no place for model.layers.0.self_attn.q_proj.base_layer.weight",
            "merge_and_unload",
        ),
        (without_norm, f"lacks {NORM}", "all *.safetensors"),
        (lambda t: t | {"model.extra.weight": torch.zeros(1)}, "no place for model.extra.weight", "remove tensors"),
        (lambda t: t | {NORM: torch.ones(7)}, f"has {NORM} \\(7,\\) instead of \\(64,\\)", "one model"),
    ],
)
def test_weights_of_another_model_are_refused(change, says, fix, folder):
    rewrite(folder, change)
    with pytest.raises(UsageError, match=says) as refused:
        Policy.load(folder)
    assert refused.match("not those of its config.json")
    assert fix in refused.value.fix


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"config\.json is missing"):
        Policy.load(tmp_path)
    with pytest.raises(UsageError, match="cannot read the model configuration"):
        init_random(tmp_path, tmp_path / "out", 0)


def test_random_weights_follow_the_seed(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]  # as one writes it by hand
    (folder / "config.json").write_text(json.dumps(config))
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        init_random(folder, tmp_path / name, seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert model.config.architectures == ["Qwen3ForCausalLM"] and model.config.use_cache
    assert AutoTokenizer.from_pretrained(tmp_path / "a").decode([65, 66])
    assert Policy.load(tmp_path / "a").model.config.model_type == "qwen3"


def test_quantised_weights_are_not_checked(folder):
    rewrite(folder, lambda t: {f"{name}_packed": v for name, v in t.items()})
    configure(folder, quantization_config={"quant_method": "awq"})
    check_weights(folder)  # test_quantised.py: the learner refuses them


def test_a_config_that_contradicts_itself_is_named(folder, tmp_path):
    configure(folder, num_hidden_layers=1)  # its layer_types are two
    for load in (lambda: Policy.load(folder), lambda: init_random(folder, tmp_path / "made", 0)):
        with pytest.raises(UsageError, match="must be equal to the number of `layer_types`"):
            load()


def test_two_different_copies_of_a_shared_weight_are_refused(folder):
    rewrite(folder, lambda t: t | {"lm_head.weight": t[EMBEDDING].clone()})
    Policy.load(folder)
    rewrite(folder, lambda t: t | {"lm_head.weight": t[EMBEDDING] + 1})
    with pytest.raises(UsageError, match="different values for lm_head.weight and model.embed_tokens.weight"):
        Policy.load(folder)


def test_a_file_that_is_left_beside_shards_is_refused(folder):
    """Transformers would load the one, engines the others."""
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="100KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    Policy.load(folder)
    save_file({NORM: torch.ones(64)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match="has model.safetensors beside the shards") as refused:
        Policy.load(folder)
    assert refused.value.fix == f"remove {folder / 'model.safetensors'}"


async def test_the_exam_and_an_export_refuse_what_the_learner_refuses(folder, tmp_path):
    from coderepairrl.checks.model import examine_model
    from coderepairrl.stages.export import export_model

    assert all(check.ok for check in await examine_model(folder))
    rewrite(folder, without_norm)
    checks = {check.name: check for check in await examine_model(folder)}
    assert not checks["its weights fit"].ok and f"lacks {NORM}" in checks["its weights fit"].detail
    with pytest.raises(UsageError, match=f"lacks {NORM}"):
        await export_model(str(folder), tmp_path / "exported")


def write(folder: Path, kind: str, **more: object) -> Path:
    """Random weights of the architecture `kind`."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **more)).save_pretrained(folder)
    return folder


def test_an_architecture_with_its_own_attention_is_trained_row_by_row(tmp_path):
    assert Policy.load(write(tmp_path, "falcon")).probe_result.way == "rows"


def test_an_architecture_that_fails_is_named(tmp_path):
    """StableLM without a rotary dimension."""
    with pytest.raises(UsageError, match="StableLmForCausalLM fails on a row of . tokens: RuntimeError") as refused:
        Policy.load(write(tmp_path, "stablelm", intermediate_size=48))
    assert "docs/reference/models.md" in refused.value.fix


def test_checkpointed_layers_apply_no_dropout(tmp_path, make_rows):
    """OPT applies it in the layer itself, not in a module."""
    from coderepairrl.learn.pack import pack_samples

    sizes = {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64, "dropout": 0.5}
    write(tmp_path, "opt", **sizes)
    batch = pack_samples(make_rows([9, 6]))
    plain, checkpointed = (Policy.load(tmp_path, LearnSettings(gradient_checkpointing=on)) for on in (False, True))
    assert torch.equal(plain.logprobs(batch, 1.0), checkpointed.logprobs(batch, 1.0))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_config_names_the_type_of_the_weights_beside_it(precision, folder, tmp_path):
    configure(folder, dtype="bfloat16")
    policy = Policy.load(folder, LearnSettings(precision=precision))
    for name in ("exported", "checkpoint"):
        (tmp_path / name).mkdir()
    policy.export(tmp_path / "exported", "model")
    policy.save(tmp_path / "checkpoint")
    init_random(folder, tmp_path / "random", 0)
    for name in ("exported", "checkpoint", "random"):
        (kind,) = {each.dtype for each in load_file(tmp_path / name / "model.safetensors").values()}
        assert f"torch.{json.loads((tmp_path / name / 'config.json').read_text())['dtype']}" == str(kind)


@pytest.fixture(scope="module")
def adapter(miniature: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters that add something, in peft's layout."""
    target = tmp_path_factory.mktemp("adapter")
    policy = Policy.load(miniature, LearnSettings(lora=Lora(rank=2, alpha=4)))
    for parameter in policy.parameters.values():
        parameter.data.fill_(0.1)
    policy.save(target)
    return target


@pytest.mark.parametrize(
    "option",
    [
        {"use_rslora": True},
        {"modules_to_save": ["lm_head"]},
        {"init_lora_weights": "pissa"},
        {"of_next_year": 3},
    ],
)
def test_an_unsupported_option_of_peft_is_refused(option, adapter, miniature, tmp_path):
    copy = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    file, (name,) = copy / "adapter_config.json", option
    file.write_text(json.dumps(json.loads(file.read_text()) | option))
    with pytest.raises(UsageError, match=f"adapter_config.json has {name}=") as refused:
        merge_adapter(miniature, copy, tmp_path / "merged", "fp32")
    assert "merge_and_unload" in refused.value.fix


@pytest.mark.parametrize(
    ("pattern", "part"), [("all-linear", ""), (r".*\.0\.self_attn\.[qk]_proj", r"\.0\.self_attn\.[qk]_proj")]
)
def test_a_target_pattern_stands_for_the_layers_in_the_file(pattern, part, adapter, miniature, tmp_path):
    """As peft merges them."""
    from peft import PeftModel

    copy = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    tensors = {n: v for n, v in load_file(copy / "adapter_model.safetensors").items() if re.search(part, n)}
    save_file(tensors, copy / "adapter_model.safetensors")
    (copy / "adapter_model.safetensors.index.json").unlink(missing_ok=True)
    file = copy / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_modules": pattern}))
    merge_adapter(miniature, copy, tmp_path / "merged", "fp32")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(miniature), copy).merge_and_unload()
    ours, before = (load_file(each / "model.safetensors") for each in (tmp_path / "merged", miniature))
    assert all(torch.allclose(value, theirs.state_dict()[name], atol=1e-7) for name, value in ours.items())
    changed = {name for name, value in ours.items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if "_proj" in name and re.search(part, name)}


def test_an_adapter_on_a_weight_that_two_layers_share_is_refused(miniature):
    with pytest.raises(UsageError, match="lm_head shares its weight with another layer") as refused:
        Policy.load(miniature, LearnSettings(lora=Lora(targets=("q_proj", "lm_head"))))
    assert refused.value.fix == "leave lm_head out of the targets"
