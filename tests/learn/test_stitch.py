"""Trees of turns become rows: each sampled token trains at most once, and all are accounted for."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coderepairrl.learn import TokenAccount, build_batch, stitch_episode
from coderepairrl.learn.stitch import list_fates
from coderepairrl.types import (
    Ending,
    Episode,
    Finish,
    Fork,
    Origin,
    Sampling,
    Score,
    TokenSpan,
    Turn,
    VersionRange,
    sequence,
)

fresh = itertools.count(1000)


def turn(index, base, given=1, output=1, *, tail=0, masked="", version=0, sampling=None, finish=Finish.STOP, fork=None):
    """A turn with ids that no other turn has, which show where a row's tokens come from."""

    def sample(n):
        ids = tuple(itertools.islice(fresh, n))
        return TokenSpan(ids, Origin.POLICY, tuple(-token / 1e5 for token in ids))

    return Turn(
        index,
        base,
        TokenSpan(tuple(itertools.islice(fresh, given)), Origin.GIVEN),
        sample(output),
        sample(tail),
        versions=(VersionRange(version, 0, output + tail),),
        sampling=sampling or Sampling(),
        masked=masked,
        finish=finish,
        fork=fork,
    )


def episode(*turns, id="e", group="g", ending=Ending.DONE, reward=0.0):
    scores = (Score("r", reward),)
    return Episode(id, "t", "train", 0, group, 0, ending, turns=turns, scores=scores)


def trained_ids(samples):
    return [i for sample in samples for i, trained in zip(sample.ids, sample.trained, strict=True) if trained]


def test_a_straight_episode_is_one_row_with_exactly_what_the_engine_saw():
    turns = (turn(0, None, 3, 2, version=4), turn(1, 0, 2, 3, tail=2, version=5))
    (row,), account = stitch_episode(episode(*turns), 0.5, max_tokens=100)
    assert row.ids == sequence(turns, 1)
    assert row.trained == (False,) * 3 + (True,) * 2 + (False,) * 2 + (True,) * 3
    assert row.versions == (-1, -1, -1, 4, 4, -1, -1, 5, 5, 5)
    assert row.logprobs == (0, 0, 0, *turns[0].output.logprobs, 0, 0, *turns[1].output.logprobs)
    assert (row.advantage, row.weight, row.episode_id) == (0.5, 1.0, "e")
    assert account == TokenAccount(7, 5, {}, {"stop_string": 2}, row_tokens=10, distinct_tokens=10)


def test_a_fork_inside_a_turn_keeps_its_prefix_as_context_and_trains_earlier_turns():
    turns = (
        turn(0, None, 3, 2),
        turn(1, 0, 4, 5),
        turn(2, 1, 1, 3, masked="aborted", finish=Finish.ABORT),
        turn(3, None, 1, 6, fork=Fork(2, tokens=14 + 2, messages=0)),  # inside what the client never got
        turn(4, None, 1, 7, fork=Fork(1, tokens=5 + 4 + 2, messages=0)),  # inside what turn 1 said
    )
    rows, account = stitch_episode(episode(*turns), 1.0, max_tokens=100)
    whole = [sequence(turns, index) for index in range(5)]
    assert [row.ids for row in rows] == [(*whole[2][:16], *whole[3][16:]), (*whole[1][:11], *whole[4][11:])]
    outputs = [turn.output.ids for turn in turns]
    assert trained_ids(rows[:1]) == [*outputs[0], *outputs[1], *outputs[3]]
    assert trained_ids(rows[1:]) == [*outputs[4]]
    assert rows[1].logprobs[3:5] == turns[0].output.logprobs and rows[1].logprobs[9:11] == (0, 0)
    assert rows[1].versions == (-1, -1, -1, 0, 0, *[-1] * 7, *[0] * 7)
    assert account == TokenAccount(23, 20, {}, {"aborted": 3}, row_tokens=23 + 19, distinct_tokens=23 + 8)


def test_a_turn_may_have_tokens_of_two_versions():
    mixed = Turn(
        0,
        None,
        TokenSpan((1,), Origin.GIVEN),
        TokenSpan((2, 3, 4), Origin.POLICY, (-1.0, -1.0, -1.0)),
        versions=(VersionRange(7, 0, 1), VersionRange(8, 1, 3)),
    )
    (row,), _ = stitch_episode(episode(mixed), 1.0, max_tokens=10)
    assert row.versions == (-1, 7, 8, 8)


def test_untrained_leaves_are_dropped_and_untrained_links_masked():
    turns = (
        turn(0, None, 2, 3),
        turn(1, 0, 1, 4, masked="aborted", finish=Finish.ABORT),  # a leaf: in no row
        turn(2, 0, 1, 5, masked="injected"),  # on the way to a trained turn
        turn(3, 2, 1, 6),
        turn(4, 3, 1, 7, sampling=Sampling(top_p=0.9)),
    )
    (row,), account = stitch_episode(episode(*turns), 1.0, max_tokens=100)
    assert row.ids == sequence(turns, 3)
    assert trained_ids([row]) == [*turns[0].output.ids, *turns[3].output.ids]
    assert (account.sampled, account.trained) == (25, 9)
    assert account.masked == {"injected": 5}
    assert account.dropped == {"aborted": 4, "sampling": 7}


def test_overlong_paths_end_before_the_turn_that_does_not_fit():
    turns = (turn(0, None, 2, 2), turn(1, 0, 1, 2), turn(2, 1, 1, 2), turn(3, 0, 1, 3))
    rows, account = stitch_episode(episode(*turns), 1.0, max_tokens=8)
    assert [row.ids for row in rows] == [sequence(turns, 1), sequence(turns, 3)]
    assert account.dropped == {"overlong": 2}
    none, account = stitch_episode(episode(*turns), 1.0, max_tokens=3)
    assert none == () and account.dropped == {"overlong": 9} and account.is_balanced


def test_refuses_tokens_without_a_prompt_or_a_version():
    with pytest.raises(ValueError, match="empty prompt"):
        stitch_episode(episode(turn(0, None, 0, 1)), 1.0, max_tokens=9)
    output = TokenSpan((5, 6), Origin.POLICY, (-1.0, -1.0))
    half = Turn(0, None, TokenSpan((1,), Origin.GIVEN), output, versions=(VersionRange(0, 0, 1),))
    with pytest.raises(ValueError, match="which version sampled its token 1"):
        stitch_episode(episode(half), 1.0, max_tokens=9)


def test_common_prefixes_of_a_group_count_once():
    turns = [turn(0, None, 4, 2), turn(0, None, 1, 3), turn(0, None, 1, 5)]
    turns = [turns[0], *(replace(each, given=turns[0].given) for each in turns[1:])]
    attempts = [episode(each, id=f"a{n}", reward=n % 2) for n, each in enumerate(turns)]
    others = [replace(attempt, id=attempt.id + "b", group="b") for attempt in attempts]
    account = build_batch([*attempts, *others], "mean", max_tokens=100).account
    assert (account.row_tokens, account.distinct_tokens) == (2 * (6 + 7 + 9), 2 * (4 + 2 + 3 + 5))


def test_a_batch_joins_groups_and_counts_the_flat_ones():
    attempts = [
        episode(turn(0, None, 1, 2), id="a0", group="a", reward=0.0),
        episode(turn(0, None, 1, 3), id="b0", group="b", reward=1.0),
        episode(turn(0, None, 1, 4), id="a1", group="a", reward=1.0),
        episode(turn(0, None, 1, 5), id="b1", group="b", reward=1.0),
        episode(turn(0, None, 1, 6), id="a2", group="a", ending=Ending.VOID),
        episode(turn(0, None, 1, 7), id="a3", group="a", reward=0.5),
    ]
    result = build_batch(attempts, "mean", max_tokens=100)
    assert [(row.episode_id, row.advantage) for row in result.samples] == [("a0", -0.5), ("a1", 0.5), ("a3", 0.0)]
    assert result.groups["b"].flat and not result.groups["a"].flat
    assert result.account.dropped == {"flat_group": 8, "void": 6}
    assert (result.account.sampled, result.account.trained) == (27, 13)
    assert result.episodes == 5  # all but the void one

    informative = build_batch(attempts, "mean", max_tokens=100, informative=True, kl=True)
    assert (informative.samples, informative.account, informative.episodes) == (result.samples, result.account, 3)

    with_kl = build_batch(attempts, "mean", max_tokens=100, kl=True)
    assert [(row.episode_id, row.advantage) for row in with_kl.samples if row.episode_id in ("b0", "b1")] == [
        ("b0", 0.0),
        ("b1", 0.0),
    ]
    assert with_kl.account.dropped == {"void": 6} and with_kl.account.trained == 21
    assert with_kl.episodes == 5
    with pytest.raises(ValueError, match="share an id"):
        build_batch([attempts[0], attempts[0]], max_tokens=100)


@st.composite
def trees(draw):
    turns = []
    for index in range(draw(st.integers(0, 9))):
        base = draw(st.one_of(st.none(), st.integers(0, index - 1))) if index else None
        sampling = Sampling(temperature=draw(st.sampled_from([1.0, 1.0, 1.0, 0.0])))
        fork = None
        if base is not None and draw(st.booleans()):
            fork = Fork(base, draw(st.integers(0, len(sequence(turns, base)))), 0)
            base = None
        turns.append(
            turn(
                index,
                base,
                draw(st.integers(1 if base is None else 0, 4)),
                draw(st.integers(0, 4)),
                tail=draw(st.sampled_from([0, 0, 2])),
                masked=draw(st.sampled_from(["", "", "", "aborted", "injected"])),
                sampling=sampling,
                version=draw(st.integers(0, 3)),
                fork=fork,
            )
        )
    return episode(*turns, ending=draw(st.sampled_from([Ending.DONE, Ending.LIMIT, Ending.DONE, Ending.VOID])))


@settings(max_examples=300, deadline=None)
@given(trees(), st.one_of(st.none(), st.floats(-2, 2)), st.integers(1, 30))
def test_every_sampled_token_is_accounted_for_and_trains_at_most_once(tree, advantage, max_tokens):
    rows, account = stitch_episode(tree, advantage, max_tokens=max_tokens)
    assert account.is_balanced
    assert account.sampled == tree.sampled
    ids = trained_ids(rows)
    assert len(ids) == len(set(ids)) == account.trained  # ids are unique, so no token trains twice
    outputs = {token: turn for turn in tree.turns for token in turn.output.ids}
    assert all(not outputs[token].masked and outputs[token].sampling.trainable for token in ids)
    seen = {sequence(tree.turns, turn.index) for turn in tree.turns}
    for row in rows:
        assert row.ids in seen  # a row is a path, token for token
        assert row.trained[-1] and not row.trained[0] and len(row.ids) <= max_tokens
    distinct = {row.ids[:length] for row in rows for length in range(1, len(row.ids) + 1)}
    assert (account.row_tokens, account.distinct_tokens) == (sum(len(row.ids) for row in rows), len(distinct))
    if rows:
        assert sum(row.weight for row in rows) == pytest.approx(1)
        assert account.expansion >= 1
    if advantage is not None:
        for each, (fate, _) in zip(tree.turns, list_fates(tree, max_tokens=max_tokens), strict=True):
            held = any(set(each.output.ids) <= set(row.ids) for row in rows)
            assert not each.output or held == (fate != "dropped")
            assert (fate == "trained") == (bool(each.output) and set(each.output.ids) <= set(ids))
