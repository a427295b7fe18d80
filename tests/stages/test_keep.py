"""Filters of attempts, in any order of them, and shards that are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coderepairrl.config.schema import Keep
from coderepairrl.errors import ConfigError, UsageError
from coderepairrl.rollout.groups import group_name
from coderepairrl.runs import RunFolder
from coderepairrl.stages.arguments import plan_evaluations
from coderepairrl.stages.collect import keep_attempts, select_candidates
from coderepairrl.stages.conversations import Candidate
from coderepairrl.stages.shards import _merge_episodes, _ShardRun, merge_shards
from coderepairrl.types import Ending, Episode, Task


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
    st.builds(Keep, above=st.just(-1.0), best=st.integers(0, 3), total=st.integers(0, 9)),
    st.randoms(use_true_random=False),
)
def test_what_is_kept_depends_on_the_attempts_alone_and_is_within_every_limit(
    some: list[Candidate], keep: Keep, order: Random
) -> None:
    found = select_candidates(some, keep)
    shuffled = order.sample(some, len(some))
    assert select_candidates(shuffled, keep) == found
    assert select_candidates(found.kept, keep).kept == found.kept, "what is selected passes again"
    assert all(one in some for one in found.kept) and found.candidates == len(some)
    assert found.candidates - sum(step.dropped for step in found.steps) == len(found.kept) == found.steps[-1].left
    assert not keep.best or max(Counter(one.task for one in found.kept).values()) <= keep.best
    assert not keep.total or len(found.kept) <= keep.total
    assert len({(one.task, one.conversation) for one in found.kept}) == len(found.kept)
    patched = [(one.task, one.patch) for one in found.kept if one.patch]
    assert len(set(patched)) == len(patched)
    assert sum(found.as_json()["by_task"].values()) == len(found.kept)


def test_each_filter_drops_what_its_name_says() -> None:
    good = Candidate(0, "good", "t/1", "o/r", "go", reward=1.0, passed=True, patch="p")
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
        assert [one.episode for one in select_candidates([other, good], Keep(**filters)).kept] == ["good"], filters
        if not other.malformed:
            anything = Keep(endings=("done", "limit"), above=-1e9)
            assert len(select_candidates([replace(other, patch="another"), good], anything).kept) == 2
    assert (
        len(
            select_candidates(
                [replace(good, patch=""), replace(good, patch="", episode="e", conversation="c")], Keep()
            ).kept
        )
        == 2
    )


def test_a_selection_does_not_write_over_another_file(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UsageError, match="run.json already exists and would be overwritten"):
        keep_attempts([tmp_path], Keep(), tmp_path / "run.parquet")
    assert (tmp_path / "run.json").read_text() == "{}"


@given(attempts(), st.integers(1, 12))
def test_a_total_is_shared_by_languages_as_evenly_as_they_allow(some: list[Candidate], total: int) -> None:
    there = Counter(one.language for one in select_candidates(some, Keep(above=-1)).kept)
    left = Counter(one.language for one in select_candidates(some, Keep(above=-1, total=total)).kept)
    fewest = min(left[language] for language in there)
    assert all(count <= fewest + 1 or left[other] == there[other]
               for language, count in left.items() for other in there if left[other] == fewest)  # fmt: skip
    assert left.total() == min(total, there.total())


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({"endings": ("crash",)}, "keep.endings=crash leaves none of 2 attempts"),
        ({"above": 0.7}, "keep.above=0.7 leaves none"),
    ],
)
def test_a_filter_that_leaves_nothing_is_named(filters: dict[str, Any], message: str) -> None:
    one = Candidate(0, "e", "t", reward=0.5)
    with pytest.raises(UsageError, match=message):
        select_candidates([one, replace(one, episode="f")], Keep(**filters))
    with pytest.raises(UsageError, match="no attempt has a verdict"):
        select_candidates([], Keep())


@pytest.mark.parametrize("damage", ["nowhere", "empty", "bytes"])
def test_an_unreadable_source_is_named(damage: str, tmp_path: Path) -> None:
    path = tmp_path / damage
    if damage == "empty":
        path.mkdir()
    elif damage == "bytes":
        path.write_bytes(b"PAR1 and no more")
    with pytest.raises(UsageError, match=damage):
        keep_attempts([path], Keep(), tmp_path / "x.parquet")
    assert not (tmp_path / "x.parquet").exists()


def test_attempts_at_an_evaluation_set_are_refused(tmp_path: Path) -> None:
    source = 'source = "swe_bench"\noptions = {name = "verified"}\nsplit = "test"\n'
    RunFolder(tmp_path / "measured").create(f'[run]\nname = "x"\n[eval]\n{source}', {"policy": "builtin:tiny"})
    with pytest.raises(ConfigError, match="is an evaluation set"):
        keep_attempts([tmp_path / "measured"], Keep(above=-1), tmp_path / "x.parquet")


def shard(path: Path, number: int, tasks: Sequence[str]) -> Path:
    folder = RunFolder(path)
    folder.create("", {"policy": "builtin:tiny", "shard": f"{number}/2", "config": {"run": {"seed": 0}}})
    folder.add_tasks(Task(name, "p", "python", "", b"") for name in tasks)
    log = folder.writer()
    log.append("end", step=0)
    log.close()
    return path


def test_shards_of_a_source_that_changed_are_of_different_evaluations(tmp_path: Path) -> None:
    """With one more task before the others, the second shard has what the first has, and the rest is in none."""
    parts = [shard(tmp_path / "1", 1, "abcd"), shard(tmp_path / "2", 2, "xabcd")]
    with pytest.raises(UsageError, match="they differ in tasks"):
        merge_shards(parts, tmp_path / "merged")


def test_episodes_of_shards_come_in_the_order_of_one_run(tmp_path: Path) -> None:
    places = [(at, attempt) for at in (0, 998, 999, 1000, 1001, 10_000) for attempt in range(2)]
    whole = [
        Episode(f"{name}-{attempt}", str(at), "eval", 0, name, attempt, Ending.DONE)
        for at, attempt in places
        for name in [group_name("eval", 0, at)]
    ]
    parts = [_ShardRun(RunFolder(shard(tmp_path / str(number), number, "ab")), {}, {}) for number in (1, 2)]
    for number, part in enumerate(parts):
        part.folder.write_episodes("eval-00000", [each for each in whole if int(each.task_id) % 2 == number])
    assert _merge_episodes(parts, "eval-00000")[0] == whole


@pytest.mark.parametrize("collects", [False, True])
def test_a_damaged_run_is_refused(tmp_path: Path, collects: bool) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UsageError, match="is not a run folder"):
        plan_evaluations(str(tmp_path), resume=True, collects=collects)
