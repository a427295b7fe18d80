"""From episodes to gradient, against the formulas of the papers in float64.

The reference shares only `Episode` and the settings with the learner: it computes advantages, finds what a fork trains,
and scores every path alone through transformers' own attention, without packing, in float64.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from gradient import gradient_of_step
from scoring import perturb, score_row
from transformers import AutoModelForCausalLM

from coderepairrl.learn import LearnSettings, build_batch
from coderepairrl.learn.policy import Policy
from coderepairrl.learn.trainer import Trainer
from coderepairrl.types import Ending, Episode, Origin, Score, TokenSpan, Turn, VersionRange

CONSTANT = 64


class Case(NamedTuple):
    baseline: str
    settings: LearnSettings


def make_case(algorithm, baseline, **options):
    constant = CONSTANT if algorithm == "dr_grpo" else None
    options |= {"algorithm": algorithm, "max_completion_tokens": constant, "micro_tokens": 90}
    return Case(baseline, LearnSettings(**options))


CASES = {
    "gspo": make_case("gspo", "zscore", eps_low=0.02, eps_high=0.05),
    "gspo, KL": make_case("gspo", "zscore", eps_low=0.02, eps_high=0.05, beta=0.1),
    "grpo": make_case("grpo", "zscore", eps_low=0.2, eps_high=0.2),
    "grpo, KL": make_case("grpo", "zscore", eps_low=0.1, eps_high=0.3, beta=0.1, temperature=0.8),
    "dr_grpo": make_case("dr_grpo", "mean", eps_low=0.2, eps_high=0.2),
    "dr_grpo, KL": make_case("dr_grpo", "mean", eps_low=0.2, eps_high=0.28, beta=0.1),
    "grpo, two bounds above": make_case("grpo", "zscore", eps_low=0.2, eps_high=0.2, delta=1.25),
    "dapo, KL": make_case("dapo", "zscore", eps_low=0.2, eps_high=0.28, beta=0.1),
    "bnpo": make_case("bnpo", "zscore", eps_low=0.2, eps_high=0.2),
    "ppo": make_case("ppo", "batch", eps_low=0.2, eps_high=0.2),
    "cispo": make_case("cispo", "zscore", eps_high=0.1),
    "rloo, KL": make_case("rloo", "leave_one_out", eps_low=0.2, eps_high=0.4, beta=0.02),
    "dapo, entropy": make_case("dapo", "zscore", eps_low=0.2, eps_high=0.28, temperature=0.8, entropy=0.1),
    "reinforce": make_case("reinforce", "none"),
}


def paths(turns):
    """Yield the turns from the root to each leaf."""
    for leaf in turns:
        if not any(turn.base == leaf.index for turn in turns):
            chain, at = [], leaf.index
            while at is not None:
                chain.insert(0, turns[at])
                at = turns[at].base
            yield chain


def score_with_entropy(model, ids, temperature):
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1] / temperature
    every = logits.log_softmax(-1)
    return every.gather(1, torch.tensor(ids)[1:, None])[:, 0], torch.special.entr(every.exp()).sum(-1)


def loss64(case, model, initial, groups):
    """The loss of a batch, straight from the formulas."""
    settings = case.settings
    members = [[episode for episode in group if episode.ending is not Ending.VOID] for group in groups]
    rows_of = {each.id: score_episode(settings, model, initial, each) for group in members for each in group}
    tokens = sum(len(logp) for rows in rows_of.values() for logp, *_ in rows)
    pairs = [pair for group in members for pair in zip(group, advantages(case, group, members), strict=True)]
    total = torch.zeros((), dtype=torch.float64)
    for episode, advantage in pairs:
        rows = rows_of[episode.id]
        length = sum(len(logp) for logp, *_ in rows)
        for logp, old, start, spread in rows:
            total = total - settings.entropy * spread.sum() / tokens
            if settings.algorithm == "rloo":
                share = 1 / len(logp) / len(pairs)
            elif settings.algorithm in ("dapo", "bnpo", "cispo", "ppo"):
                share = 1 / tokens
            else:
                share = 1 / {"dr_grpo": CONSTANT, "reinforce": 1}.get(settings.algorithm, length)
                share /= len(pairs)
            total = total - share * objective(settings, logp, old, advantage).sum()
            d = logp - start
            total = total + share * settings.beta * ((-d).exp() + d - 1).sum()
    return total


def advantages(case, group, groups):
    def reward(episode):
        return sum(score.value * score.weight for score in episode.scores)

    compared = [reward(episode) for each in (groups if case.baseline == "batch" else [group]) for episode in each]
    mean = sum(compared) / len(compared)
    spread = math.sqrt(sum((value - mean) ** 2 for value in compared) / len(compared))
    for value in map(reward, group):
        if case.baseline == "leave_one_out":
            yield value - (sum(compared) - value) / (len(compared) - 1) if len(compared) > 1 else 0.0
        elif case.baseline == "none":
            yield value
        else:
            yield (value - mean) / (1 if case.baseline == "mean" else spread + 1e-4)


def score_episode(settings, model, initial, episode):
    """For each row, of its trained tokens: logprobs by the model, as recorded, and by the initial model; entropies."""
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
        logp, spread = (column[where] for column in score_with_entropy(model, ids, settings.temperature))
        with torch.no_grad():
            start = score_row(initial, ids, settings.temperature)[where]
        rows.append((logp, torch.tensor(old, dtype=torch.float64), start, spread))
    return rows


def objective(settings, logp, old, advantage):
    """Objective of each token of a row."""
    ratio, algorithm, low, high = (logp - old).exp(), settings.algorithm, settings.eps_low, settings.eps_high
    if algorithm == "reinforce":
        return advantage * logp
    if algorithm == "cispo":
        return torch.tensor([min(each, 1 + high) for each in ratio.tolist()]) * advantage * logp
    if algorithm == "gspo":
        ratio = ((logp - old).sum() / len(logp)).exp().expand(len(logp))
    if algorithm == "rloo":
        ratio = ratio.prod().expand(len(logp))
    value = torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    return value.clamp(min=settings.delta * advantage) if settings.delta and advantage < 0 else value


def make_groups(rewards, seed=0):
    """Groups of episodes with these rewards, None for void ones; every second episode forks."""
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
            ending, scores = (Ending.VOID, ()) if reward is None else (Ending.DONE, (Score("r", reward),))
            place = f"e{number}-{attempt}", "t", "train", 1, f"g{number}", attempt
            groups[-1].append(Episode(*place, ending, turns=tuple(turns), scores=scores))
    return groups


def our_gradient(folder, case, groups, monkeypatch):
    """Batch, metrics of the trainer's step, and gradient as it reaches the optimiser."""
    trainer = Trainer(folder, case.settings)
    if trainer.reference is not None:
        perturb(trainer.reference.model)
    episodes, kl = (
        [episode for group in groups for episode in group],
        case.settings.beta > 0 or case.settings.entropy > 0,
    )
    batch = build_batch(episodes, case.baseline, max_tokens=1000, kl=kl)
    return batch, *gradient_of_step(trainer, batch.samples, monkeypatch, batch.episodes, batch.tokens)


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
"""Two groups to learn from, one with a void episode; three flat ones, the last with one episode only."""


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_the_formulas(name, miniature, monkeypatch):
    case, groups = CASES[name], make_groups(MIXED)
    batch, metrics, ours = our_gradient(miniature, case, groups, monkeypatch)
    loss, theirs = exact_gradient(miniature, case, groups)
    assert (batch.episodes, metrics["denominator"]) == (12, 12) and metrics["micro_batches"] > 1  # which add up
    clipped = metrics["clip_low"] + metrics["clip_high"]
    assert (
        clipped == 0 if case.settings.algorithm == "reinforce" else 0 < clipped < 1
    )  # the clip acts, but not everywhere
    assert metrics["loss"] == pytest.approx(loss, rel=1e-6, abs=1e-6) and abs(loss) > 1e-4
    assert ours.keys() == theirs.keys()
    assert max(gradient.abs().max().item() for gradient in theirs.values()) > 1e-3
    for parameter, gradient in theirs.items():
        assert torch.allclose(ours[parameter].double(), gradient, rtol=1e-5, atol=1e-6), parameter
    assert batch.account.is_balanced
    # with a KL term, tokens of flat groups are trained
    trains_flat = case.settings.beta > 0 or case.settings.entropy > 0 or case.baseline in ("batch", "none")
    assert ("flat_group" in batch.account.dropped) != trains_flat or case.baseline == "none"


def test_the_average_is_over_at_least_the_episodes_that_have_rows(miniature):
    batch = build_batch(make_groups([[0.0, 1.0]])[0], max_tokens=1000)
    with pytest.raises(ValueError, match="2 episodes have rows, and the loss is to be averaged over 1"):
        Trainer(miniature, CASES["grpo"].settings).step(batch.samples, 1)
