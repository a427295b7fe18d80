"""Packing changes nothing but speed: rows score, and pull, as they would alone or padded."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from coderepairrl.errors import UsageError
from coderepairrl.learn.learner import init_random
from coderepairrl.learn.losses import LOSSES, Scale, Trained
from coderepairrl.learn.pack import cut_rows, micro_batches, pack_samples
from coderepairrl.learn.policy import Policy

LENGTHS = [17, 40, 2, 9, 33]


def gradients(policy):
    found = {name: p.grad.clone() for name, p in policy.model.named_parameters()}
    policy.model.zero_grad()
    return found


def loss_of(logp_N, batch):
    trained = Trained(logp_N, batch.recorded_N, None, batch.row_N, batch.advantage_R, batch.weight_R, batch.count_R)
    return LOSSES["gspo"](trained, Scale(len(LENGTHS), 0.3, 0.3)).value


def test_packed_equals_padded(miniature, make_rows):
    """Against transformers' own padded forward with its SDPA attention: loss and gradients to 1e-5."""
    from transformers import AutoModelForCausalLM

    rows, temperature = make_rows(LENGTHS), 0.6
    policy = Policy.load(miniature)
    batch = pack_samples(rows)
    packed = policy.logprobs(batch, temperature)
    loss = loss_of(packed, batch)
    loss.backward()
    ours = gradients(policy)

    model = AutoModelForCausalLM.from_pretrained(miniature, dtype=torch.float32, attn_implementation="sdpa")
    ids = pad_sequence([torch.tensor(row.ids) for row in rows], batch_first=True)
    mask = pad_sequence([torch.ones(len(row.ids)) for row in rows], batch_first=True)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1] / temperature
    logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    on = pad_sequence([torch.tensor(row.trained) for row in rows], batch_first=True)[:, 1:]
    padded = logprobs[on]
    padded_loss = loss_of(padded, batch)
    padded_loss.backward()

    assert (packed - padded).abs().max().item() < 1e-5
    assert loss.item() == pytest.approx(padded_loss.item(), abs=1e-5)
    assert max(g.abs().max().item() for g in ours.values()) > 1e-3
    for name, parameter in model.named_parameters():
        assert (ours[name] - parameter.grad).abs().max().item() < 1e-5, name


def test_there_is_no_padding(make_rows):
    rows = make_rows(LENGTHS)
    batches = micro_batches(rows, micro_tokens=48)
    assert sum(len(batch.ids_T) for batch in batches) == sum(LENGTHS)  # a padding factor of exactly 1
    assert all(len(batch.ids_T) <= 48 for batch in batches)


def test_a_row_longer_than_the_budget_goes_alone():
    rows = [(n,) * n for n in (5, 50, 6, 4)]
    assert sorted(cut_rows(rows, micro_tokens=11)) in ([[0, 2], [1], [3]], [[0, 3], [1], [2]], [[0], [1], [2, 3]])
    assert cut_rows([], micro_tokens=10) == []


def test_masked_tokens_pull_on_nothing(miniature, make_rows):
    """The embedding and the logit of a token that only occurs after the last trained one get no gradient at all."""
    (row,) = make_rows([24], seed=2)
    trained = tuple(3 <= i < 12 for i in range(24))
    ids = (*(i % 50 for i in range(12)), *(200 + i for i in range(12)))
    row = type(row)("e", ids, trained, row.logprobs, row.versions, 1.0)
    policy = Policy.load(miniature)
    hidden = []
    hook = policy.model.base_model.register_forward_hook(lambda _m, _i, out: hidden.append(out.last_hidden_state))
    batch = pack_samples([row])
    logp_N = policy.logprobs(batch, 1.0)
    hook.remove()
    hidden[0].retain_grad()
    loss_of(logp_N, batch).backward()
    pulled = hidden[0].grad[0].abs().sum(1) > 0
    assert pulled.tolist() == [2 <= i < 11 for i in range(24)]  # exactly the positions that predict a trained token


@pytest.mark.parametrize("broken, message", [("first", "first token"), ("none", "no token to train"), ("long", "diff")])
def test_refuses_rows_that_cannot_be_trained(make_rows, broken, message):
    from dataclasses import replace

    (row,) = make_rows([8])
    bad = {
        "first": replace(row, trained=(True,) * 8),
        "none": replace(row, trained=(False,) * 8),
        "long": replace(row, logprobs=(0.0,) * 9),
    }[broken]
    with pytest.raises(ValueError, match=message):
        micro_batches([bad], 100)


def test_random_weights_follow_the_seed(miniature, tmp_path):
    source = tmp_path / "bare"
    source.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(miniature / name, source / name)
    config = json.loads((source / "config.json").read_text())
    del config["architectures"]  # as one writes it by hand
    (source / "config.json").write_text(json.dumps(config))
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        init_random(source, tmp_path / name, seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert model.config.architectures == ["Qwen3ForCausalLM"] and model.config.use_cache
    assert AutoTokenizer.from_pretrained(tmp_path / "a").decode([65, 66])
    assert Policy.load(tmp_path / "a").model.config.model_type == "qwen3"


def test_refuses_a_folder_without_a_model(tmp_path):
    with pytest.raises(UsageError, match=r"config\.json is missing"):
        Policy.load(tmp_path)
    with pytest.raises(UsageError, match="cannot read the model configuration"):
        init_random(tmp_path, tmp_path / "out", 0)
