"""Every architecture is trained correctly: in prefix trees if these change nothing, else row by row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forest import ROWS, compare_runs, run_alone, run_batch, run_rows
from gradient import gradient_of_step

from architectures import ARCHITECTURES, SIZES
from coderepairrl.config.schema import Lora
from coderepairrl.errors import UsageError
from coderepairrl.learn import LearnSettings, attention, loading, probe, recurrence
from coderepairrl.learn.learner import extract_language_model, init_random
from coderepairrl.learn.pack import pack_samples
from coderepairrl.learn.policy import Policy, find_constants
from coderepairrl.learn.recurrence import TreePart, split_tree
from coderepairrl.learn.trainer import Trainer

EVERY = pytest.mark.parametrize("name", ARCHITECTURES)
TREES = pytest.mark.parametrize("name", [name for name, each in ARCHITECTURES.items() if each.way == "trees"])
ALONE = pytest.mark.parametrize("name", [name for name, each in ARCHITECTURES.items() if each.way == "rows"])
TINY = 1e-5
HALF = LearnSettings(precision="bf16", lora=Lora(rank=2, alpha=4, targets=("o_proj",)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the folder of a model with random weights, by architecture."""
    home, written = tmp_path_factory.mktemp("architectures"), dict[str, Path]()

    def folder(name: str) -> Path:
        if name not in written:
            target = home / str(len(written))
            init_random(ARCHITECTURES[name].write(home / "config" / str(len(written))), target, 0)
            written[name] = target  # once it is whole
        return written[name]

    return folder


@TREES
def test_rows_of_a_tree_have_the_logprobs_and_gradients_of_rows_alone(name, folders):
    policy = Policy.load(folders(name))
    assert (policy.probe_result.way, policy.probe_result.notice) == ("trees", "")
    assert policy.probe_result.chunked == ARCHITECTURES[name].chunked
    logprobs, gradients = compare_runs(run_batch(policy, pack_samples(ROWS)), run_alone(folders(name), torch.float32))
    assert max(logprobs, gradients) < ARCHITECTURES[name].rounding


@ALONE
def test_rows_are_trained_one_by_one_if_a_tree_would_be_wrong(name, folders, monkeypatch):
    folder = folders(name)
    expected = run_alone(folder, torch.float32)
    trainer = Trainer(folder, LearnSettings(algorithm="reinforce"))
    assert trainer.policy.probe_result.way == "rows" and not trainer.policy.can_chunk
    (notice,) = trainer.notices
    assert "row by row" in notice
    with pytest.raises(ValueError, match="one row at a time"):
        trainer.policy.logprobs(pack_samples(ROWS), 1.0)
    logprobs, gradients = compare_runs(run_rows(trainer.policy), expected)
    assert logprobs < TINY and gradients < TINY
    metrics, _ = gradient_of_step(trainer, ROWS, monkeypatch)
    assert metrics["micro_batches"] == len(ROWS)


@pytest.mark.parametrize("name", ["Qwen3.5", "gpt-oss", "Qwen3 MoE"])
@pytest.mark.parametrize("settings", [{"gradient_checkpointing": True}, {"lora": Lora(rank=4, alpha=8)}], ids=str)
def test_a_step_is_that_of_micro_batches_of_one_row(settings, name, folders, monkeypatch):
    """Loss and gradient, of the real learner."""
    settings = LearnSettings(algorithm="gspo", eps_low=0.3, eps_high=0.3, **settings)
    whole, gradient = gradient_of_step(Trainer(folders(name), settings), ROWS, monkeypatch)
    monkeypatch.setattr(Trainer, "_micro_tokens", 1)
    monkeypatch.setattr(Policy, "can_chunk", False)
    alone, summed = gradient_of_step(Trainer(folders(name), settings), ROWS, monkeypatch)
    assert (whole["micro_batches"], alone["micro_batches"]) == (1, len(ROWS))
    assert whole["loss"] == pytest.approx(alone["loss"], abs=1e-6)
    largest = max(value.abs().max().item() for value in summed.values())
    assert largest > 1e-4
    assert max((gradient[key] - value).abs().max().item() for key, value in summed.items()) < TINY * largest


def dropped_state(spans):
    return [TreePart(part.start, part.stop, None) for part in split_tree(spans)]


WRONG = {
    "dropped state": ("Qwen3.5", "split_tree", dropped_state),
    "state of the one before": (
        "Qwen3.5",
        "split_tree",
        lambda spans: [TreePart(*part[:2], part.start or None) for part in split_tree(spans)],
    ),
    "dropped state of Mamba-2": ("Nemotron-H", "split_tree", dropped_state),
    "no history": ("Qwen3.5", "_list_last_ancestors", lambda span, count: []),
    "history one off": (
        "LFM2",
        "_list_last_ancestors",
        lambda span, count, places=recurrence._list_last_ancestors: [max(0, at - 1) for at in places(span, count)],
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_recurrence_is_caught_by_test_and_probe(wrong, folders, monkeypatch):
    name, place, broken = WRONG[wrong]
    policy, expected = Policy.load(folders(name)), run_alone(folders(name), torch.float32)
    monkeypatch.setattr(recurrence, place, broken)
    logprobs, gradients = compare_runs(run_batch(policy, pack_samples(ROWS)), expected)
    assert logprobs > 1e-4 and gradients > 1e-4
    assert Policy.load(folders(name)).probe_result.way == "rows"


def test_a_detached_state_is_caught_by_gradients_alone(folders, monkeypatch):
    """Detach the states with which parts of a tree begin; the probe notices, too."""
    folder = folders("Nemotron-H")
    policy, expected = Policy.load(folder), run_alone(folder, torch.float32)

    class Detached(dict):
        def __setitem__(self, key, value):
            super().__setitem__(key, value.detach())

    monkeypatch.setattr(recurrence, "States", Detached)
    logprobs, gradients = compare_runs(run_batch(policy, pack_samples(ROWS)), expected)
    assert logprobs < TINY and gradients > 1e-3
    assert Policy.load(folder).probe_result.way == "rows"


@pytest.mark.parametrize("name", ["Qwen3.5", "Nemotron-H", "Granite 4", "Falcon-H1"])
def test_a_lost_state_is_caught_by_the_probe_in_16_bits_too(name, folders, monkeypatch):
    monkeypatch.setattr(recurrence, "split_tree", dropped_state)
    assert Policy.load(folders(name), HALF).probe_result.way == "rows"


def test_ignored_sinks_are_caught_by_the_probe(folders, monkeypatch):
    monkeypatch.setattr(attention, "_add_sink", lambda query, key, value, spans, _: (query, key, value, spans))
    result = Policy.load(folders("gpt-oss")).probe_result
    assert (result.way, result.attention) == ("rows", "eager")


def test_rounding_of_large_weights_is_no_mistake(folders, tmp_path, monkeypatch):
    """In float32 a tree differs from its rows by more than the probe allows, in float64 it does not."""
    model = Policy.load(folders("Llama")).model
    model.get_input_embeddings().weight.data[:, 0] = 2.0
    for seed in range(8):  # on some processors the first weights round alike
        draw = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if name.endswith("k_proj.weight"):  # what all keys share
                parameter.data[:, 0] = 300.0 * torch.randn(len(parameter), generator=draw)
        model.save_pretrained(tmp_path)
        assert Policy.load(tmp_path).probe_result.way == "trees"
        with monkeypatch.context() as patch:
            patch.setattr(probe, "ROUNDING", 0.0)
            if Policy.load(tmp_path).probe_result.way == "rows":
                return
    pytest.fail("no weights whose rounding is seen")


def test_a_head_that_is_not_linear_is_refused(folders, monkeypatch):
    monkeypatch.setattr("coderepairrl.learn.packed.finish_logits", lambda logits, config: logits)
    with pytest.raises(UsageError, match="not a linear function"):
        Policy.load(folders("Granite 3"))


@pytest.mark.parametrize("name", ["Qwen3.5", "Qwen3 MoE", "gpt-oss", "Nemotron-H", "MiniMax-M2"])
def test_the_probe_accepts_models_in_16_bits_and_restores_them(name, folders):
    policy = Policy.load(folders(name), HALF)
    assert policy.probe_result.way == "trees"
    with loading.TensorFiles(folders(name), loading.MODEL) as stored:
        theirs = stored[next(key for key in stored if "embed" in key)]
    ours = policy.model.get_input_embeddings().weight
    assert ours.dtype == torch.bfloat16 and torch.equal(ours, theirs.bfloat16())
    layers = [p for name, p in policy.model.named_parameters() if ".layers." in name and not p.requires_grad]
    assert {p.dtype for p in layers if p.ndim == 2} == {torch.bfloat16}


@EVERY
def test_exported_weights_equal_the_architectures_own_files(name, folders, tmp_path):
    """Names, shapes and values, such as each expert's own."""
    policy = Policy.load(folders(name))
    policy.model.save_pretrained(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    policy.export(tmp_path / "ours", "model")
    with (
        loading.TensorFiles(tmp_path / "ours", loading.MODEL) as ours,
        loading.TensorFiles(tmp_path / "theirs", "model") as theirs,
    ):
        assert set(ours) == set(theirs)
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3 MoE", "DeepSeek-V3"])
def test_an_exported_checkpoint_equals_the_architectures_own_files(name, folders, tmp_path):
    """The checkpoint itself has experts in one tensor."""
    Trainer(folders(name), LearnSettings()).save(tmp_path / "checkpoint")
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    extract_language_model(tmp_path / "checkpoint", tmp_path / "plain")
    with (
        loading.TensorFiles(tmp_path / "plain", loading.MODEL) as ours,
        loading.TensorFiles(folders(name), loading.MODEL) as theirs,
    ):
        assert set(ours) == set(theirs)
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("name", ["GLM-4.5", "DeepSeek-V3"])
def test_a_routers_bias_is_given_in_full(name, folders, tmp_path):
    """In bfloat16 it would send tokens to other experts than in the learner."""
    policy = Policy.load(folders(name), LearnSettings(precision="bf16"))
    for each in find_constants(policy.model).values():
        each.copy_(torch.linspace(0.1, 0.2, each.numel()))
    policy.export(tmp_path, "model")
    with loading.TensorFiles(tmp_path, loading.MODEL) as stored:
        buffers = find_constants(policy.model)
        assert buffers and all(torch.equal(stored[key], each) for key, each in buffers.items())
        assert stored["model.embed_tokens.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("Qwen3.5", {"in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "o_proj", "down_proj"}),
        ("Qwen3-Next", {"in_proj_qkvz", "out_proj", "q_proj", "o_proj"}),
        ("Qwen3 MoE", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("gpt-oss", {"q_proj", "k_proj", "v_proj", "o_proj"}),
    ],
)
def test_default_adapters_fit_the_architecture(name, targets, folders, tmp_path):
    policy = Policy.load(folders(name), LearnSettings(lora=Lora(rank=2, alpha=4)))
    assert targets <= {key.split(".lora_")[0].rpartition(".")[2] for key in policy.parameters}
    policy.save(tmp_path)
    assert targets <= set(json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"])


@EVERY
def test_the_page_lists_how_each_architecture_is_trained(name):
    page = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
    assert ARCHITECTURES[name].row(name) in page.read_text()


def test_the_language_model_of_a_multimodal_one_is_taken_out(tmp_path):
    """As Qwen3.5 is published."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = {**SIZES, **ARCHITECTURES["Qwen3.5"].config}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    torch.manual_seed(0)
    whole = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision))
    whole.save_pretrained(tmp_path / "whole")
    extract_language_model(tmp_path / "whole", tmp_path / "text")
    policy = Policy.load(tmp_path / "text")
    assert (policy.model.config.model_type, policy.probe_result.way) == ("qwen3_5_text", "trees")
    ids = torch.arange(9)[None]
    with torch.no_grad():
        ours, theirs = (model(input_ids=ids).logits for model in (policy.model, whole.eval()))
    assert (ours - theirs).abs().max().item() < 1e-5
    (tmp_path / "new").mkdir()
    policy.export(tmp_path / "new", "model")
    with loading.TensorFiles(tmp_path / "new", loading.MODEL) as stored:
        assert {key.partition(".")[0] for key in stored} == {"model", "lm_head"}
        assert not any(".language_model." in key or "visual" in key for key in stored)
