from __future__ import annotations

import pytest

from coderepairrl.evaluate import compare, measures, summarise
from coderepairrl.types import Ending, Episode, Score, ToolCall


def episode(
    task: str, value: float, *, patch: bytes = b"diff", ending: Ending = Ending.DONE, ok: bool = True
) -> Episode:
    return Episode(
        f"{task}-{value}", task, "eval", 0, task, 0, ending,
        patch=patch, scores=(Score("tests", value),), tool_calls=(ToolCall(0, "shell", "{}", ok),),
    )  # fmt: skip


def test_an_empty_patch_counts_in_the_mean_and_not_per_patch() -> None:
    values = summarise([episode("a", 1.0), episode("b", 0.0, patch=b"\n")]).values
    assert values["tests"].value == 0.5
    assert values["tests_per_patch"].value == 1.0
    assert values["empty_patches"].value == 0.5
    assert "tests_per_patch" not in measures(episode("b", 0.0, patch=b""))


def test_void_is_counted_and_never_a_zero() -> None:
    summary = summarise([episode("a", 1.0), episode("a", 0.0, ending=Ending.VOID)])
    assert (summary.episodes, summary.void, summary.values["tests"].value) == (1, 1, 1.0)
    assert summarise([episode("a", 0.0, ending=Ending.VOID)]).values == {}


def test_comparison_pairs_tasks() -> None:
    before = [episode("a", 0.0), episode("a", 1.0), episode("b", 0.0), episode("gone", 1.0)]
    after = [episode("a", 1.0), episode("b", 1.0, ok=False), episode("new", 0.0)]
    change = compare(before, after)
    assert change["tests"].value == pytest.approx((0.5 + 1.0) / 2)
    assert change["tool_success"].value == pytest.approx(-0.5)
    assert change["tests"].low <= change["tests"].value <= change["tests"].high
    one_cluster = compare(before, after, cluster=lambda task: "all")["tests"]
    assert one_cluster.low == one_cluster.high == pytest.approx(0.75)
