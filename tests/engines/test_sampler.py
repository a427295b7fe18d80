"""Tokens are drawn from the right distribution; truncation never changes their logprobs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coderepairrl.engines.tiny.sampler import draw_uniforms, sample_tokens
from coderepairrl.types import Sampling

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -30.0])


def draw_shares(sampling: Sampling, count: int = 20_000) -> torch.Tensor:
    """Share of each token among `count` draws from `LOGITS`."""
    ids, _ = sample_tokens(LOGITS.expand(count, -1), [sampling] * count, draw_uniforms(11, count))
    return torch.bincount(torch.tensor(ids), minlength=len(LOGITS)) / count


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_tokens_are_drawn_with_the_probabilities_of_the_softmax(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(-1)
    error = (expected * (1 - expected) / 20_000).sqrt()
    assert (draw_shares(Sampling(temperature=temperature)) - expected).abs().le(5 * error + 1e-9).all()


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=2), 2),
        (Sampling(top_k=99), 5),
        (Sampling(top_p=0.01), 1),
        (Sampling(top_p=0.75), 2),
        (Sampling(min_p=0.3), 2),
        (Sampling(min_p=1.0), 1),
        (Sampling(top_k=3, top_p=0.75), 2),
    ],
)
def test_truncation_keeps_the_top(sampling: Sampling, kept: int) -> None:
    probabilities = LOGITS.softmax(-1)  # .56 .21 .12 .08 .03 and almost 0
    drawn = draw_shares(sampling)
    assert (drawn[:kept] > 0).all() and (drawn[kept:] == 0).all()
    expected = probabilities[:kept] / probabilities[:kept].sum()
    assert (drawn[:kept] - expected).abs().max() < 0.02


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(-(2**70), 2**140),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.2, 1.0]),
    top_k=st.sampled_from([0, 1, 3]),
    logits=st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=40),
)
def test_logprobs_are_untruncated_and_rows_independent(
    seed: int, temperature: float, top_p: float, top_k: int, logits: list[float]
) -> None:
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    row = torch.tensor([logits])
    draw = draw_uniforms(seed, 3)[2]
    (token,), (logprob,) = sample_tokens(row, [sampling], [draw])
    truth = (row / (temperature or 1.0)).log_softmax(-1)[0]
    assert logprob == pytest.approx(truth[token].item(), abs=1e-5)
    if temperature == 0.0 or top_k == 1:
        assert truth[token] == truth.max()  # logits that part by less than rounding are a tie
    company = torch.cat([torch.randn(2, row.shape[1]), row, torch.randn(1, row.shape[1])])
    others = [Sampling(), Sampling(temperature=0.0), sampling, Sampling(temperature=3.0, min_p=0.1)]
    ids, logprobs = sample_tokens(company, others, [0.1, 0.2, draw, 0.9])
    assert (ids[2], logprobs[2]) == (token, logprob)


def test_a_truncated_row_changes_no_other_of_a_large_vocabulary() -> None:
    row, many = torch.randn(1, 100_000, generator=torch.Generator().manual_seed(0)), draw_uniforms(3, 200)
    both = row.expand(2, -1)
    for draw in many:
        alone, _ = sample_tokens(row, [Sampling()], [draw])
        (first, _), _ = sample_tokens(both, [Sampling(), Sampling(top_k=5)], [draw, 0.5])
        assert first == alone[0]


def test_the_smallest_and_largest_draw_select_possible_tokens() -> None:
    impossible = torch.tensor([[float("-inf"), 0.0, 0.0, float("-inf")]])
    assert sample_tokens(impossible, [Sampling()], [0.0])[0] == [1]
    assert sample_tokens(impossible, [Sampling()], [1.0 - 2.0**-52])[0] == [2]


@pytest.mark.parametrize("size", [9000, 9216])
def test_a_large_vocabulary_is_drawn_from_by_blocks(size: int) -> None:
    """The token is where the cumulative distribution passes the draw, and never one without weight."""
    logits = 3 * torch.randn(64, size, generator=torch.Generator().manual_seed(0))
    logits[:, size // 2 :: 2] = float("-inf")
    logits[:8, 512:] = float("-inf")
    draws = [0.0, 1.0 - 2.0**-52, *draw_uniforms(5, 62)]
    ids, _ = sample_tokens(logits, [Sampling()] * 64, draws)
    weights = logits.double().softmax(-1)
    above = weights.cumsum(-1)[range(64), ids]
    chosen = weights[range(64), ids]
    assert (chosen > 0).all()
    assert ((above - chosen - 1e-6 <= torch.tensor(draws)) & (torch.tensor(draws) <= above + 1e-6)).all()
    assert sample_tokens(logits[5:6], [Sampling()], draws[5:6])[0] == ids[5:6]
    logits[0, 0] = float("nan")
    assert not torch.isfinite(torch.tensor(sample_tokens(logits[:1], [Sampling()], [0.5])[1])).any()


def test_broken_logits_show_in_the_logprob() -> None:
    for broken in (float("nan"), float("inf")):
        row = torch.tensor([[0.0, broken, 1.0]])
        for sampling in (Sampling(), Sampling(temperature=0.0), Sampling(top_k=2)):
            assert not torch.isfinite(torch.tensor(sample_tokens(row, [sampling], [0.5])[1])).any()
