"""Adapters on weights in 4 or 8 bits: the numbers are those that an engine serves, and all else is as with any base."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import safetensors.torch
import torch
from peak import Peak

from coderepairrl import models
from coderepairrl.config.sections.train import Lora
from coderepairrl.errors import ConfigError, PrerequisiteError, UsageError
from coderepairrl.learn import LearnSettings, require_packages
from coderepairrl.learn.conversions import init_random, merge, rounded, survived
from coderepairrl.learn.pack import pack, scored
from coderepairrl.learn.policy import Policy
from coderepairrl.learn.quantised import QuantisedLinear
from coderepairrl.learn.trainer import Trainer

LENGTHS = [30, 12, 45, 8, 21, 33]
LORA = Lora(rank=4, alpha=8)
with_bitsandbytes = [
    pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes"),
]
FORMS = ["int8", pytest.param("nf4", marks=with_bitsandbytes)]


def settings(form="int8", **more):
    return LearnSettings(**{"algorithm": "grpo", "lr": 1e-3, "lora": LORA, "quantise": form} | more)


def tensors(folder):
    return safetensors.torch.load_file(folder / "model.safetensors")


def apart(ours, theirs):
    return max(abs(a - b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True))


@pytest.fixture
def plain(miniature, tmp_path):
    """The miniature with the numbers of its quantised weights, by form and precision."""

    def made(form, precision="fp32"):
        folder = tmp_path / f"{form}-{precision}"
        if not folder.exists():
            rounded(miniature, folder, form, precision)
        return folder

    return made


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("form", FORMS)
def test_a_learner_has_the_numbers_that_are_written_for_the_engine(form, precision, miniature, plain, make_rows):
    folder, rows = plain(form, precision), [row.ids for row in make_rows(LENGTHS)]
    assert models.quantised(folder) == form
    before, after = tensors(miniature), tensors(folder)
    changed = {name for name in before if not torch.equal(before[name].to(after[name].dtype), after[name])}
    assert changed == {name for name in before if "_proj" in name}
    logprobs = [
        Trainer(where, settings(kind, precision=precision)).logprobs(rows, 1.0)
        for where, kind in ((miniature, form), (folder, form), (folder, "none"))
    ]
    assert logprobs[0] == logprobs[1] == logprobs[2]  # bit for bit: quantising twice changes nothing
    exact = Trainer(miniature, settings("none", precision=precision)).logprobs(rows, 1.0)
    apart = max(
        abs(a - b) for one, other in zip(exact, logprobs[0], strict=True) for a, b in zip(one, other, strict=True)
    )
    assert 1e-4 < apart < 0.5


@pytest.mark.parametrize("form", FORMS)
def test_codes_take_the_memory_that_they_are_said_to(form, miniature):
    layers = [m for m in Policy.load(miniature, settings(form)).model.modules() if isinstance(m, QuantisedLinear)]
    count = sum(layer.in_features * layer.out_features for layer in layers)
    taken = sum(layer.nbytes for layer in layers)
    tables = len(layers) * 64 if form == "nf4" else 0  # what 4 bits mean
    assert taken - tables == count * {"nf4": 0.5 + 4 / 64, "int8": 1 + 1 / 32}[form]


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_plain_weights_with_the_same_numbers(form, miniature, plain, make_rows):
    batch = pack(make_rows(LENGTHS))

    def gradient(folder, **more):
        policy = Policy.load(folder, settings(**more))
        with Peak() as peak:
            policy.logprobs(batch, 0.9).square().sum().backward()
        return {name: p.grad for name, p in policy.parameters.items()}, peak.bytes

    plainly, _ = gradient(plain(form), form="none")
    for more in ({}, {"gradient_checkpointing": True}):
        ours, _ = gradient(miniature, form=form, **more)
        assert all((ours[name] - value).abs().max() <= 1e-6 for name, value in plainly.items())
    assert max(value.abs().max().item() for value in plainly.values()) > 1e-3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("form", FORMS)
def test_rows_in_a_tree_are_those_of_each_alone(form, precision, miniature, make_rows):
    policy = Policy.load(miniature, settings(form, precision=precision))
    assert policy.found.way == "trees"
    common = list(make_rows([20])[0].ids)
    rows = [common + list(row.ids) for row in make_rows([7, 12, 9], 1)]
    with torch.no_grad():
        together = policy.logprobs(pack(scored(rows)), 1.0)
        alone = torch.cat([policy.logprobs(pack(scored([row])), 1.0) for row in rows])
    assert (together - alone).abs().max() < (1e-5 if precision == "fp32" else 0.05)


@pytest.mark.parametrize("form", FORMS)
def test_a_step_learns_and_a_checkpoint_goes_on_bit_for_bit(form, miniature, make_rows, on_policy, tmp_path):
    trainer = Trainer(miniature, settings(form, beta=0.1))
    rows = on_policy(trainer, make_rows(LENGTHS))
    first = trainer.step(rows)
    assert first["mismatch_max"] < 1e-5
    assert first["kl"] == pytest.approx(0, abs=1e-6)  # the reference is the quantised base
    trainer.save(tmp_path / "c")
    resumed = Trainer(miniature, trainer.settings)
    resumed.restore(tmp_path / "c")
    for each in (trainer, resumed):
        each.step(rows)
    assert trainer.logprobs([rows[0].ids], 1.0) == resumed.logprobs([rows[0].ids], 1.0)
    assert trainer.logprobs([rows[0].ids], 1.0) != Trainer(miniature, settings(form)).logprobs([rows[0].ids], 1.0)


@pytest.mark.parametrize("form", FORMS)
def test_an_engine_with_other_numbers_is_seen(form, miniature, make_rows, on_policy):
    """Were the engine to serve the weights as they were, the recorded logprobs would not be the learner's."""
    rows = on_policy(Trainer(miniature, settings("none")), make_rows(LENGTHS))
    metrics = Trainer(miniature, settings(form)).step(rows)
    assert metrics["mismatch_max"] > 1e-4
    corrected = settings(form, old_logprobs="recomputed", mismatch_correction="token", mismatch_cap=1.0)
    metrics = Trainer(miniature, corrected).step(rows)
    assert metrics["mismatch_weight"] < 1.0


@pytest.mark.parametrize("form", FORMS)
def test_merged_weights_are_what_was_trained(form, miniature, plain, make_rows, tmp_path):
    trainer = Trainer(miniature, settings(form))
    trainer.step(make_rows(LENGTHS))
    rows = [row.ids for row in make_rows(LENGTHS)]
    path, _, _ = trainer.publish(tmp_path / "whole")
    adapters, _, _ = trainer.publish(tmp_path / "adapters", "adapter")
    merge(plain(form), adapters, tmp_path / "merged", "fp32")
    for folder in (path, tmp_path / "merged"):
        assert not models.quantised(folder)
        served = Trainer(folder, settings("none")).logprobs(rows, 1.0)
        assert apart(served, trainer.logprobs(rows, 1.0)) < 1e-5


@pytest.mark.parametrize(
    ("form", "precision", "std", "least", "most"),
    [
        ("int8", "fp32", 1e-5, -0.05, 0.05),
        ("int8", "fp32", 1e-4, 0.0, 0.5),
        ("int8", "fp32", 3e-4, 0.5, 1.0),
        ("int8", "fp32", 1e-3, 0.95, 1.05),
        ("none", "bf16", 1e-5, -0.05, 0.5),
        ("none", "bf16", 1e-4, 0.5, 1.0),
        ("none", "bf16", 1e-3, 0.95, 1.05),
        ("none", "fp32", 1e-5, 0.999, 1.001),
        *(pytest.param("nf4", "fp32", std, -0.05, 1.05, marks=with_bitsandbytes) for std in (1e-4, 1e-3, 3e-3, 1e-2)),
    ],
)
def test_what_is_left_of_adapters_after_rounding_is_measured(form, precision, std, least, most, miniature, tmp_path):
    """Products of `std` on the numbers of weights in codes, merged and rounded once more (`-s` prints it)."""
    base = miniature if form == "none" else tmp_path / "base"
    if form != "none":
        rounded(miniature, base, form, precision)
    policy = Policy.load(base, LearnSettings(lora=LORA, precision=precision))
    for name, parameter in policy.parameters.items():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
        if "lora_B" in name:  # the sum of `rank` products, times alpha/rank
            parameter.data *= std / (LORA.rank**0.5 * LORA.alpha / LORA.rank)
    (tmp_path / "adapters").mkdir()
    policy.save(tmp_path / "adapters")
    result = tmp_path / "merged"
    merge(base, tmp_path / "adapters", result, precision)
    if form != "none":
        rounded(result, tmp_path / "again", form, precision)
        result = tmp_path / "again"
    share = survived(base, tmp_path / "adapters", result, precision)
    weights = torch.cat([value.flatten() for name, value in tensors(base).items() if "_proj" in name])
    print(f"\n{form} {precision}: weights of std {weights.std():.3f}, adapters of std {std:g}: {share:.2f} is left")
    assert least <= share <= most


@pytest.mark.parametrize(
    ("more", "fix"),
    [({"lora": None}, "train.lora=true"), ({"strategy": "fsdp2", "processes": 2}, "strategy=ddp")],
)
def test_what_cannot_be_is_refused(more, fix):
    with pytest.raises(ConfigError) as refused:
        settings(**more)
    assert fix in refused.value.fix


def test_experts_are_refused(tmp_path):
    from transformers import Qwen3MoeConfig

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    Qwen3MoeConfig(vocab_size=64, num_key_value_heads=1, head_dim=16, **sizes, **experts).save_pretrained(tmp_path)
    init_random(tmp_path, tmp_path / "model", 0)
    with pytest.raises(UsageError, match="experts"):
        Policy.load(tmp_path / "model", settings())


def test_bitsandbytes_is_asked_for_by_its_extra(monkeypatch):
    monkeypatch.setattr("coderepairrl.learn.settings.find_spec", lambda name: None)
    with pytest.raises(PrerequisiteError, match=r"model.quantise=nf4") as missing:
        require_packages(settings("nf4"))
    assert "coderepairrl[bitsandbytes]" in missing.value.fix
    require_packages(settings("int8"))
