"""PPO's value head: estimates and losses against their definitions in float64; it is saved, not published."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from gradient import gradient_of_step
from test_reference import MIXED, make_groups, paths

from coderepairrl.config import load_config
from coderepairrl.config.schema import Lora
from coderepairrl.errors import ConfigError
from coderepairrl.learn import LearnSettings, build_batch
from coderepairrl.learn.trainer import Trainer
from coderepairrl.learn.values import value_loss
from coderepairrl.plan.learner import make_learn_settings
from coderepairrl.stages.policy import make_batch
from coderepairrl.types import Ending

LENGTHS = [30, 12, 45, 8, 21, 33]
PPO = LearnSettings(algorithm="ppo", value_head=True, lr=1e-2, micro_tokens=90)


def set_value_head(trainer, seed=0):
    """Set the value head to random numbers: from zeros no gradient would reach the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainer.policy.values.values():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return trainer


def with_fork(rows):
    """The first two rows are branches of one episode."""
    first = replace(rows[0], weight=0.7)
    return [first, replace(rows[1], episode_id="e0", advantage=first.advantage, weight=0.3), *rows[2:]]


def test_the_value_loss_is_the_worse_of_two_and_its_gradient_that_of_finite_differences():
    generator = torch.Generator().manual_seed(0)
    value, before, target = torch.randn(3, 200, generator=generator, dtype=torch.float64)
    value.requires_grad_()
    loss, cut = value_loss(value, before, target, 0.5)
    for v, old, aim, ours, stopped in zip(
        value.tolist(), before.tolist(), target.tolist(), loss.tolist(), cut, strict=True
    ):
        near = min(max(v, old - 0.5), old + 0.5)
        assert ours == pytest.approx(max((v - aim) ** 2, (near - aim) ** 2) / 2)
        assert bool(stopped) == ((near - aim) ** 2 > (v - aim) ** 2)
    (gradient,) = torch.autograd.grad(loss.sum(), value)
    with torch.no_grad():
        up, down = (value_loss(value + step, before, target, 0.5)[0] for step in (1e-6, -1e-6))
    assert torch.allclose(gradient, (up - down) / 2e-6, atol=1e-6)
    assert 0 < cut.sum() < 200 and not gradient[cut].any()


def loss64(model, head, episodes, terms):
    """PPO's clipped objective, with advantages from the values, plus the value loss, over all trained tokens."""
    (weight, bias), tokens = head, []
    for episode in episodes:
        columns, seen = [], set()
        for chain in paths(episode.turns):
            ids = torch.tensor([[token for turn in chain for token in (*turn.given.ids, *turn.output.ids)]])
            out = model(input_ids=ids, output_hidden_states=True)
            logp = out.logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            value, at = (out.hidden_states[-1][0] @ weight.T)[:, 0] + bias, 0
            for turn in chain:
                at += len(turn.given)
                for number, old in enumerate(turn.output.logprobs if turn.index not in seen else ()):
                    columns.append((logp[at + number - 1], old, value[at + number - 1]))
                seen.add(turn.index)
                at += len(turn.output)
        reward = sum(score.value * score.weight for score in episode.scores)
        tokens += [(logp, old, value, reward - value.item()) for logp, old, value in columns]
    mean = sum(each[3] for each in tokens) / len(tokens)
    spread = math.sqrt(sum((each[3] - mean) ** 2 for each in tokens) / len(tokens)) + 1e-4
    total = 0.0
    for logp, old, value, advantage in tokens:
        scaled = (advantage - mean) / spread if terms.baseline == "batch" else advantage
        ratio = (logp - old).exp()
        gain = torch.min(ratio * scaled, ratio.clamp(0.8, 1.2) * scaled)
        error = (value - (advantage + value.item())) ** 2 / 2
        total = total + (0.1 * error - gain) / len(tokens)
    return total


@pytest.mark.parametrize("options", [{}, {"advantage": "none"}], ids=["whitened", "as they are"])
def test_loss_and_gradient_are_those_of_the_formulas(options, miniature, monkeypatch):
    """Episodes of several rows, a void one, and groups of equal rewards, which are trained, too."""
    from transformers import AutoModelForCausalLM

    terms = PPO.with_changes(**options)
    trainer = set_value_head(Trainer(miniature, terms))
    head = [p.detach().double().requires_grad_() for p in trainer.policy.values.values()]
    episodes = [episode for group in make_groups(MIXED) for episode in group]
    batch = build_batch(episodes, "none", max_tokens=1000, kl=True)
    assert {row.episode_id for row in batch.samples} == {e.id for e in episodes if e.ending is not Ending.VOID}
    metrics, ours = gradient_of_step(trainer, batch.samples, monkeypatch, batch.episodes, batch.tokens)
    model = AutoModelForCausalLM.from_pretrained(miniature, dtype=torch.float64, attn_implementation="eager")
    loss = loss64(model, head, [e for e in episodes if e.ending is not Ending.VOID], terms)
    loss.backward()
    theirs = {name: p.grad for name, p in model.named_parameters()}
    theirs |= {name: p.grad for name, p in zip(trainer.policy.values, head, strict=True)}
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5) and metrics["micro_batches"] > 2
    assert ours.keys() == theirs.keys() and theirs["value_head.weight"].abs().max() > 1e-3
    for name, gradient in theirs.items():
        assert torch.allclose(ours[name].double(), gradient, rtol=1e-4, atol=2e-6), name
    moved = [(p - old).abs().max() for p, old in zip(trainer.policy.values.values(), head, strict=True)]
    assert min(moved) > terms.lr / 2, "the step is of the head too"


def test_micro_batches_and_minibatches_have_the_targets_of_the_whole_batch(miniature, make_rows, monkeypatch):
    rows = with_fork(make_rows(LENGTHS))
    terms = PPO.with_changes(entropy=0.01)
    (one, big), (many, small) = (
        gradient_of_step(set_value_head(Trainer(miniature, terms.with_changes(micro_tokens=n))), rows, monkeypatch)
        for n in (4096, 40)
    )
    assert (one["micro_batches"], many["micro_batches"] > 3) == (1, True)
    assert one["explained_variance"] == pytest.approx(many["explained_variance"], abs=1e-5)
    assert one["value_loss"] == pytest.approx(many["value_loss"], rel=1e-5)
    assert max((small[name] - value).abs().max().item() for name, value in big.items()) < 2e-6
    parts = set_value_head(Trainer(miniature, terms.with_changes(minibatches=3, updates_per_batch=2))).step(rows)
    assert parts["explained_variance"] == pytest.approx(one["explained_variance"], abs=1e-5)


@pytest.mark.parametrize("lora", [None, Lora(rank=4, alpha=8)])
def test_published_weights_have_no_value_head(lora, miniature, tmp_path):
    trainer, plain = Trainer(miniature, PPO.with_changes(lora=lora)), Trainer(miniature, LearnSettings(lora=lora))
    trainer.save(tmp_path / "c")
    for form in ("model", "adapter") if lora else ("model",):
        ours, theirs = (each.publish(tmp_path / str(at), form)[0] for at, each in enumerate((trainer, plain)))
        assert {f.name for f in ours.iterdir()} == {f.name for f in theirs.iterdir()}
        (file,) = (f.name for f in ours.iterdir() if f.suffix == ".safetensors")
        tensors = safetensors.torch.load_file(ours / file), safetensors.torch.load_file(theirs / file)
        assert tensors[0].keys() == tensors[1].keys()
    index = json.loads((tmp_path / "c" / f"{trainer.policy.stem}.safetensors.index.json").read_text())
    assert not any("value" in name and "head" in name for name in index["weight_map"])


def test_a_run_trains_every_episode_on_its_reward():
    config = load_config("hello", ["train.algorithm=ppo", "train.value_head=true"])
    episodes = [episode for group in make_groups(MIXED) for episode in group]
    rewards = {e.id: sum(s.value for s in e.scores) for e in episodes if e.ending is not Ending.VOID}
    assert {row.episode_id: row.advantage for row in make_batch(episodes, config).samples} == rewards
    assert make_learn_settings(config).value_head
    with pytest.raises(ConfigError, match=r"curriculum\.refill .* every episode: leave one of them out"):
        load_config("hello", ["train.algorithm=ppo", "train.value_head=true", "curriculum.refill=2"])
    with pytest.raises(ConfigError, match=r"train\.balance_kinds .* from batch to batch: leave one of them out"):
        load_config("hello", ["train.algorithm=ppo", "train.value_head=true", "train.balance_kinds=true"])
