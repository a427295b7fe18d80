"""Filters: each does what it is called, in any order of the attempts, and one that leaves nothing is named."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coderepairrl.config.sections.evaluation import Keep
from coderepairrl.errors import UsageError
from coderepairrl.stages.keep import keep
from coderepairrl.stages.select import Candidate, select


@st.composite
def attempts(draw: st.DrawFn) -> list[Candidate]:
    repositories = {"a/x": "python", "a/y": "python", "b/z": "go", "": "c"}
    made = []
    for number in range(draw(st.integers(1, 40))):
        repository = draw(st.sampled_from(sorted(repositories)))
        made.append(
            Candidate(
                draw(st.integers(0, 1)),
                f"e{number}",
                f"{repository}-{draw(st.integers(0, 3))}",
                repository,
                repositories[repository],
                reward=draw(st.sampled_from([0.0, 0.5, 1.0])),
                patch=draw(st.sampled_from(["", "p", "q"])),
                conversation=draw(st.sampled_from(["c", "d"])),
            )
        )
    return made


@given(
    attempts(),
    st.builds(
        Keep,
        above=st.just(-1.0),
        best=st.integers(0, 3),
        total=st.integers(0, 9),
    ),
    st.randoms(use_true_random=False),
)
def test_what_is_kept_depends_on_the_attempts_alone_and_is_within_every_limit(
    some: list[Candidate], keep: Keep, order: Random
) -> None:
    found = select(some, keep)
    shuffled = order.sample(some, len(some))
    assert select(shuffled, keep) == found
    assert select(found.kept, keep).kept == found.kept, "what is selected passes again"
    assert all(one in some for one in found.kept) and found.there == len(some)
    assert found.there - sum(step.dropped for step in found.steps) == len(found.kept) == found.steps[-1].left
    for most, fields in (
        (keep.best, ("task",)),
        (keep.total, ()),
    ):
        counts = Counter(tuple(getattr(one, name) for name in fields) for one in found.kept)
        assert not most or max(counts.values()) <= most
    assert len({(one.task, one.conversation) for one in found.kept}) == len(found.kept)
    patched = [(one.task, one.patch) for one in found.kept if one.patch]
    assert len(set(patched)) == len(patched)
    assert sum(found.as_json()["by_task"].values()) == len(found.kept)


def test_each_filter_drops_what_it_is_called_after() -> None:
    good = Candidate(
        0,
        "good",
        "t/1",
        "o/r",
        "go",
        reward=1.0,
        passed=True,
        patch="p",
    )
    others = [
        (replace(good, ending="limit"), {}),
        (replace(good, malformed="no JSON"), {}),
        (replace(good, reward=0.2), {"above": 0.2}),
        (replace(good, reward=None), {}),
        (replace(good, passed=False), {"passed": True}),
        (replace(good, passed=None), {"passed": True}),
        (replace(good, conversation="another way to it"), {}),
        (replace(good, reward=0.9, patch="q"), {"best": 1}),
    ]
    for other, filters in others:
        other = replace(other, episode="other")
        assert [one.episode for one in select([other, good], Keep(**filters)).kept] == ["good"], filters
        if not other.malformed:
            anything = Keep(endings=("done", "limit"), above=-1e9)
            assert len(select([replace(other, patch="another"), good], anything).kept) == 2
    assert (
        len(select([replace(good, patch=""), replace(good, patch="", episode="e", conversation="c")], Keep()).kept) == 2
    )


def test_a_selection_does_not_write_over_another_file(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UsageError, match="run.json is there, and would be written over"):
        keep([tmp_path], Keep(), tmp_path / "run.parquet")
    assert (tmp_path / "run.json").read_text() == "{}"
