"""From episodes to gradient, against the formulas of the papers in float64.

The reference shares nothing with the learner but the `Episode`: it has its own advantages, finds what a fork trains by
itself, and scores every path alone through transformers' own attention, without packing, in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from gradient import gradient_of_step
from transformers import AutoModelForCausalLM

from coderepairrl.learn import LearnSettings, batch
from coderepairrl.learn.policy import Policy
from coderepairrl.learn.trainer import Trainer
from coderepairrl.types import Ending, Episode, Origin, Score, TokenSpan, Turn, VersionRange

CONSTANT = 64


@dataclass(frozen=True)
class Case:
    algorithm: str
    kind: str
    low: float
    high: float
    beta: float = 0.0
    temperature: float = 1.0

    @property
    def settings(self):
        constant = CONSTANT if self.algorithm == "dr_grpo" else None
        return LearnSettings(
            algorithm=self.algorithm,
            beta=self.beta,
            eps_low=self.low,
            eps_high=self.high,
            temperature=self.temperature,
            max_completion_tokens=constant,
            micro_tokens=90,
        )


CASES = {
    "gspo": Case("gspo", "zscore", 0.02, 0.05),
    "gspo, KL": Case("gspo", "zscore", 0.02, 0.05, beta=0.1),
    "grpo": Case("grpo", "zscore", 0.2, 0.2),
    "grpo, KL": Case("grpo", "zscore", 0.1, 0.3, beta=0.1, temperature=0.8),
    "dr_grpo": Case("dr_grpo", "mean", 0.2, 0.2),
    "dr_grpo, KL": Case("dr_grpo", "mean", 0.2, 0.28, beta=0.1),
}


def paths(turns):
    """Leaf by leaf, the turns from the root on."""
    for leaf in turns:
        if not any(turn.base == leaf.index for turn in turns):
            chain, at = [], leaf.index
            while at is not None:
                chain.insert(0, turns[at])
                at = turns[at].base
            yield chain


def scored(model, ids, temperature):
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0]


def loss64(case, model, initial, groups):
    """The loss of a batch, straight from the formulas."""
    total, valid = torch.zeros((), dtype=torch.float64), 0
    for group in groups:
        members = [episode for episode in group if episode.ending is not Ending.VOID]
        rewards = [sum(score.value * score.weight for score in episode.scores) for episode in members]
        mean = sum(rewards) / len(rewards)
        spread = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
        for episode, reward in zip(members, rewards, strict=True):
            advantage = reward - mean
            if case.kind == "zscore":
                advantage /= spread + 1e-4
            total = total + of_episode(case, model, initial, episode, advantage)
            valid += 1
    return total / valid


def of_episode(case, model, initial, episode, advantage):
    seen, rows = set(), []
    for chain in paths(episode.turns):
        ids = [token for turn in chain for token in (*turn.given.ids, *turn.output.ids)]
        new, old, at = [], [], 0
        for turn in chain:
            at += len(turn.given)
            if turn.index not in seen:
                new += range(at, at + len(turn.output))
                old += turn.output.logprobs
            seen.add(turn.index)
            at += len(turn.output)
        where = torch.tensor(new) - 1
        logp = scored(model, ids, case.temperature)[where]
        with torch.no_grad():
            start = scored(initial, ids, case.temperature)[where]
        rows.append((logp, torch.tensor(old, dtype=torch.float64), start))
    tokens = sum(len(logp) for logp, _, _ in rows)
    length = CONSTANT if case.algorithm == "dr_grpo" else tokens
    total = torch.zeros((), dtype=torch.float64)
    for logp, old, start in rows:
        if case.algorithm == "gspo":
            ratio = ((logp - old).sum() / len(logp)).exp()
            total = total - len(logp) / length * surrogate(case, ratio, advantage)
        else:
            total = total - surrogate(case, (logp - old).exp(), advantage).sum() / length
        if case.beta:
            total = total + case.beta * ((start - logp).exp() - (start - logp) - 1).sum() / length
    return total


def surrogate(case, ratio, advantage):
    return torch.min(ratio * advantage, ratio.clamp(1 - case.low, 1 + case.high) * advantage)


def make_groups(rewards, seed=0):
    """Episodes with these rewards, None for void; every other one forks."""
    generator = torch.Generator().manual_seed(seed)

    def span(n, origin):
        ids = tuple(torch.randint(0, 256, (n,), generator=generator).tolist())
        if origin is Origin.GIVEN:
            return TokenSpan(ids, origin)
        return TokenSpan(ids, origin, tuple((-5.6 + 0.3 * torch.randn(n, generator=generator)).tolist()))

    def turn(index, base, given, output):
        spans = span(given, Origin.GIVEN), span(output, Origin.POLICY)
        return Turn(index, base, *spans, versions=(VersionRange(0, 0, output),))

    groups = []
    for number, group in enumerate(rewards):
        groups.append([])
        for attempt, reward in enumerate(group):
            turns = [turn(0, None, 5, 7), turn(1, 0, 3, 4 + attempt)]
            if attempt % 2:
                turns += [turn(2, 0, 2, 9), turn(3, 2, 1, 3)]
            groups[-1].append(
                Episode(
                    f"e{number}-{attempt}",
                    "t",
                    "train",
                    1,
                    f"g{number}",
                    attempt,
                    Ending.VOID if reward is None else Ending.DONE,
                    turns=tuple(turns),
                    scores=() if reward is None else (Score("r", reward),),
                )
            )
    return groups


def our_gradient(folder, case, groups, monkeypatch, *, denominator="episodes"):
    """Metrics and gradient of the whole way: batch, trainer, as it reaches the optimiser."""
    trainer = Trainer(folder, case.settings)
    if trainer.reference is not None:
        perturb(trainer.reference.model)
    made = batch(
        [episode for group in groups for episode in group],
        case.kind,
        max_tokens=1000,
        denominator=denominator,
        kl=case.beta > 0,
    )
    return made, *gradient_of_step(trainer, made.samples, monkeypatch, made.episodes)


def perturb(model):
    """So that the KL term has a gradient: the initial weights are not the policy's."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


def exact_gradient(folder, case, groups):
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    initial = Policy.load(folder).model
    perturb(initial)
    initial = initial.double()
    initial.set_attn_implementation("eager")
    loss = loss64(case, policy, initial, groups)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in policy.named_parameters()}


MIXED = [[0.0, 1.0, 0.5, None], [0.4, 0.4, 0.4, 0.4], [0.0, 0.0], [None, 0.7], [0.2, 0.9]]
"""Two groups to learn from, one with a void episode; three flat ones, the last for want of a second episode."""


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_the_formulas(name, miniature, monkeypatch):
    case, groups = CASES[name], make_groups(MIXED)
    made, metrics, ours = our_gradient(miniature, case, groups, monkeypatch)
    loss, theirs = exact_gradient(miniature, case, groups)
    assert (made.episodes, metrics["denominator"]) == (12, 12)
    assert 0 < metrics["clip_low"] + metrics["clip_high"] < 1  # the clip acts, but not everywhere
    assert metrics["loss"] == pytest.approx(loss, abs=1e-6) and abs(loss) > 1e-4
    assert ours.keys() == theirs.keys()
    assert max(gradient.abs().max().item() for gradient in theirs.values()) > 1e-3
    for parameter, gradient in theirs.items():
        assert (ours[parameter] - gradient).abs().max().item() < 1e-6, parameter
    assert made.account.balanced
    assert ("flat_group" in made.account.dropped) == (case.beta == 0)  # with KL their tokens are trained


@pytest.mark.parametrize("algorithm", ["gspo", "grpo", "dr_grpo"])
def test_one_group_beside_seven_flat_ones_steps_an_eighth_as_hard(algorithm, miniature, monkeypatch):
    case = CASES[algorithm]
    alone = make_groups([[0.0, 1.0]])
    beside = alone + make_groups([[0.5, 0.5]] * 8, seed=1)[1:]
    _, _, expected = our_gradient(miniature, case, alone, monkeypatch)
    _, _, gradient = our_gradient(miniature, case, beside, monkeypatch)
    _, _, informative = our_gradient(miniature, case, beside, monkeypatch, denominator="informative")
    for parameter, value in expected.items():
        assert torch.allclose(8 * gradient[parameter], value, atol=1e-6), parameter
        assert torch.equal(informative[parameter], value), parameter


def test_the_kl_term_acts_where_every_group_is_flat(miniature, monkeypatch):
    groups = make_groups([[0.5, 0.5], [0.0, 0.0]])
    case = CASES["grpo, KL"]
    made, metrics, gradient = our_gradient(miniature, case, groups, monkeypatch)
    assert {row.advantage for row in made.samples} == {0.0} and metrics["kl"] > 0
    assert max(value.abs().max().item() for value in gradient.values()) > 1e-4
    episodes = [episode for group in groups for episode in group]
    for terms in ({"kl": False}, {"kl": True, "denominator": "informative"}):
        assert not batch(episodes, max_tokens=1000, **terms).samples


def test_the_average_is_over_at_least_the_episodes_that_have_rows(miniature):
    case = CASES["grpo"]
    made = batch(make_groups([[0.0, 1.0]])[0], max_tokens=1000)
    with pytest.raises(ValueError, match="2 episodes have rows, and the loss is to be averaged over 1"):
        Trainer(miniature, case.settings).step(made.samples, 1)
