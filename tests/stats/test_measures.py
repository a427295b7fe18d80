from __future__ import annotations

from dataclasses import replace

import pytest

from coderepairrl.stats.intervals import slice_episodes
from coderepairrl.stats.measures import measure_episode, pair_measures, summarise
from coderepairrl.types import Ending, Episode, Score, ToolCall
from intervals import compute_width


def make_episode(
    task: str, value: float, *, patch: bytes = b"diff", ending: Ending = Ending.DONE, ok: bool = True
) -> Episode:
    return Episode(
        f"{task}-{value}", task, "eval", 0, task, 0, ending,
        patch=patch, scores=(Score("tests", value),), tool_calls=(ToolCall(0, "shell", "{}", ok),),
    )  # fmt: skip


def test_an_empty_patch_counts_in_the_mean_and_not_per_patch() -> None:
    values = summarise([make_episode("a", 1.0), make_episode("b", 0.0, patch=b"\n")]).values
    assert values["tests"].value == 0.5
    assert values["tests_per_patch"].value == 1.0
    assert values["empty_patches"].value == 0.5
    assert "tests_per_patch" not in measure_episode(make_episode("b", 0.0, patch=b""))


def test_void_is_counted_and_never_a_zero() -> None:
    summary = summarise([make_episode("a", 1.0), make_episode("a", 0.0, ending=Ending.VOID)])
    assert (summary.episodes, summary.void, summary.values["tests"].value) == (1, 1, 1.0)
    assert summarise([make_episode("a", 0.0, ending=Ending.VOID)]).values == {}


def test_comparison_pairs_tasks() -> None:
    before = [make_episode("a", 0.0), make_episode("a", 1.0), make_episode("b", 0.0), make_episode("gone", 1.0)]
    after = [make_episode("a", 1.0), make_episode("b", 1.0, ok=False), make_episode("new", 0.0)]
    paired = pair_measures(before, after)
    change = paired["tests"].change
    assert change.value == pytest.approx((0.5 + 1.0) / 2)
    assert paired["tool_success"].change.value == pytest.approx(-0.5)
    assert change.low < change.value < change.high  # type: ignore[operator]


def test_what_is_clustered_is_what_the_task_says() -> None:
    """Mutants of one function are one cluster, in summaries and comparisons; any other task is its own."""
    bugs = [f"mutants/m.f{at % 3}/swap-{at:04x}-q" for at in range(30)]
    apart = [f"handmade/{at}" for at in range(30)]
    narrow, wide = (
        summarise([make_episode(task, float(at % 3 == 0)) for at, task in enumerate(tasks)]).values["tests"]
        for tasks in (apart, bugs)
    )
    assert narrow.value == wide.value and compute_width(wide) > 2 * compute_width(narrow)
    early, late = ([make_episode(task, float(at % 3 < many)) for at, task in enumerate(bugs)] for many in (1, 2))
    assert not pair_measures(early, late)["tests"].change.is_all_above(0), "one function of three has got better"


def test_tasks_of_one_repository_are_one_cluster_where_there_are_several() -> None:
    """With a single repository, each task is one observation."""

    def of(repositories: int) -> list[Episode]:
        made = [make_episode(f"t{at}", float(at % 3 == 0)) for at in range(24)]
        return [replace(each, repository=f"r{at % repositories}") for at, each in enumerate(made)]

    none = [replace(each, repository="") for each in of(3)]
    plain, one, three = (summarise(each).values["tests"] for each in (none, of(1), of(3)))
    assert plain == one and compute_width(three) > 2 * compute_width(one)
    paired = pair_measures(of(3), of(3))["tests"].early
    assert compute_width(paired) > 2 * compute_width(plain)
    assert slice_episodes(of(3)).keys() == {"repository r0", "repository r1", "repository r2"} and not slice_episodes(
        of(1)
    )


def test_measures_that_are_counts_are_no_shares() -> None:
    """Even where all of them are 0 or 1: their mean may be any number."""
    episodes = [
        replace(make_episode(f"handmade/{at}", 0.0), tool_calls=(ToolCall(0, "sh", "{}", True),) * (at % 2))
        for at in range(4)
    ]
    calls = summarise(episodes).values["calls"]
    assert calls.value == 0.5 and calls.low == 0 and calls.high is not None and calls.high > 1
    change = pair_measures(episodes, [replace(each, tool_calls=()) for each in episodes])["calls"].change
    assert change.low is not None and change.low < -0.5, "a change may be negative"
