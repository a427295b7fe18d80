"""What is taken of a source, and what two sources share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coderepairrl.errors import ConfigError, TaskError, UsageError
from coderepairrl.protocols import TaskSource
from coderepairrl.tasks import make_source, select
from coderepairrl.tasks.catalog import recognise
from coderepairrl.tasks.overlap import overlap, report
from coderepairrl.tasks.select import Selected, Selection, is_held_out
from coderepairrl.types import Checks, Command, Task

LINES = "--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-a\n+b\n"


def task(number: int, **fields: Any) -> Task:
    reference = LINES.format("x.py").encode()
    made = Task(f"o__toy-{number}", f"issue {number}", "python", f"git:u@{number:040d}", reference, repository="o/toy")
    return replace(made, **{"created": f"2024-01-{number + 1:02d}", "difficulty": float(number), **fields})


TEN = [task(number) for number in range(10)]


def ids(selection: Selection, among: list[Task] = TEN) -> list[int]:
    return [int(each.id.rpartition("-")[2]) for each in selection.of(among)]


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({"after": "2024-01-09"}, [8, 9]),
        ({"before": "2024-01-03"}, [0, 1]),
        ({"after": "2024-01-03", "before": "2024-01-05"}, [2, 3]),
        ({"min_difficulty": 3.0, "max_difficulty": 4.0}, [3, 4]),
        ({"languages": ("python",), "n": 2}, [0, 1]),
        ({"languages": ("java",)}, []),
        ({"without": ("o/toy",)}, []),
        ({"leave_out": ("o__toy-[0-7]", "nothing")}, [8, 9]),
        ({"repositories": ("o/toy",), "skip": 8}, [8, 9]),
        ({"skip": 2, "n": 3}, [2, 3, 4]),
        ({"max_prompt": 6}, []),
        ({"max_lines": 1}, []),
        ({"max_lines": 2, "max_files": 1, "max_hunks": 1}, list(range(10))),
    ],
)
def test_filters_and_counts(options: dict[str, Any], taken: list[int]) -> None:
    assert ids(Selection(**options)) == taken


def test_what_a_task_has_not_is_not_taken() -> None:
    bare = [replace(TEN[0], created="", difficulty=None, reference=b"")]
    for options in ({"after": "2000-01-01"}, {"max_difficulty": 9.0}, {"max_files": 5}, {"before": "2100-01-01"}):
        assert ids(Selection(**options), bare) == []
    assert ids(Selection(max_prompt=100), bare) == [0]


def test_kinds_of_edit() -> None:
    two = replace(TEN[0], reference=(LINES.format("x.py") + LINES.format("y.py")).encode())
    apart = replace(TEN[1], reference=(LINES.format("x.py") + "@@ -9 +9 @@\n-a\n+b\n").encode())
    assert ids(Selection(max_files=1), [two, apart]) == [1]
    assert ids(Selection(max_hunks=1), [two, apart]) == []
    assert ids(Selection(max_hunks=2), [two, apart]) == [0, 1]


@given(seed=st.integers(0, 50), n=st.integers(0, 12), skip=st.integers(0, 12))
def test_a_seed_draws_an_order_and_parts_do_not_meet(seed: int, n: int, skip: int) -> None:
    whole = ids(Selection(seed=seed))
    assert sorted(whole) == list(range(10)) and whole == ids(Selection(seed=seed)) != ids(Selection(seed=seed + 100))
    part = ids(Selection(seed=seed, skip=skip, n=n))
    assert part == whole[skip:][: n or None]


def test_the_holdout_is_that_of_the_original() -> None:
    """``int(md5(id), 16) / 16 ** 32 < ratio``, so that it depends on nothing but the id."""
    many = [replace(TEN[0], id=f"o__toy-{number}") for number in range(2000)]
    found = Selection(holdout=0.25, seed=3).of(many)
    for each in found:
        expected = int(hashlib.md5(each.id.encode()).hexdigest(), 16) / 16**32 < 0.25
        assert (each.split == "test") is expected is is_held_out(each.id, 0.25)
    assert 0.2 < sum(each.split == "test" for each in found) / len(found) < 0.3
    few = {each.id: each.split for each in Selection(holdout=0.25).of(many[:100])}
    assert all(few[each.id] == each.split for each in found if each.id in few)
    more = {each.id for each in Selection(holdout=0.5).of(many) if each.split == "test"}
    assert {each.id for each in found if each.split == "test"} < more


def test_any_source_takes_a_selection(tmp_path: Path) -> None:
    whole = list(make_source("handmade"))
    made = make_source("handmade", select={"n": 2, "seed": 1})
    assert isinstance(made, Selected) and made.name == "handmade" and len(list(made)) == 2
    assert {each.id for each in made} < {each.id for each in whole}
    assert {each.split for each in make_source("mutants", split="test", n=3, select={"n": 2, "split": "held"})} == {
        "held"
    }
    own = f"{__name__}:Own"
    assert [each.id for each in make_source(own, select={"skip": 8})] == ["o__toy-8", "o__toy-9"]


class Own(TaskSource):
    """A user's source."""

    name = "own"

    def prepare(self) -> None: ...

    def __iter__(self) -> Iterator[Task]:
        return iter(TEN)


@pytest.mark.parametrize(
    ("select", "says"),
    [
        ({"langauges": ["python"]}, "did you mean 'languages'"),
        ({"n": "ten"}, "select"),
        ({"n": -1}, "0 or more"),
        ({"after": "soon"}, "YYYY-MM-DD"),
        ({"holdout": 2.0}, "from 0 to 1"),
        ({"holdout": 0.5, "split": "x"}, "leave one out"),
        ("all", "select.n=100"),
    ],
)
def test_a_selection_that_cannot_be_meant(select: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_source("handmade", select=select)
    assert says in f"{caught.value} {caught.value.fix}"


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(TaskError, match="no task of handmade is left of 8"):
        make_source("handmade", select={"languages": ["cobol"]}).prepare()


# -- overlap

ISSUE = "When the parser meets an empty line it stops without reading what comes after the line, see above"


def test_what_is_shared_is_found() -> None:
    first = [
        task(0),
        task(1, prompt=ISSUE + " and below."),
        task(
            2, reference=(LINES.format("x.py") + "@@ -9,2 +9,2 @@\n-def f():\n-    pass\n+def g():\n+    f\n").encode()
        ),
        task(3),
        task(4),
    ]
    second = [
        replace(task(0), workspace="git:v@" + "9" * 40, prompt="other words here", reference=b""),
        task(5, prompt=ISSUE + "!", reference=b"", created="2024-01-04"),
        replace(first[2], id="o__toy-6", prompt="no", workspace="dir:/x"),
        replace(task(3), id="o__toy-7", prompt="nothing alike at all", reference=b""),
    ]
    found = overlap(first, second)
    assert found.ids == ["o__toy-0"]
    assert found.issues == [("o__toy-1", "o__toy-5")]
    assert found.commits == [("o__toy-3", "o__toy-7")] and found.places == 1
    assert found.patches == [("o__toy-2", "o__toy-6")]
    assert not found.clean and found.counts == (5, 4)
    assert found.days == (("2024-01-01", "2024-01-05"), ("2024-01-01", "2024-01-04")) and found.later == 5
    assert "1 of the first have a near-duplicate issue" in report(found, ("a", "b"))
    assert overlap(first[4:], second[:1]).clean


def test_lite_and_verified_share_93_ids_and_98_commits(capsys: pytest.CaptureFixture[str]) -> None:
    from coderepairrl.cli import main
    from tasks.test_benchmarks import data

    paths = {side: data(f"swebench/swebench_{name}.jsonl.gz") for side, name in (("a", "lite"), ("b", "verified"))}
    words = ["tasks", "overlap", "swe_bench", "swe_bench", "--json", "a.name=lite"]
    with pytest.raises(SystemExit) as ended, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["crrl", *words, *(f"{side}.path={path}" for side, path in paths.items())])
        main()
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert (len(found["ids"]), found["places"], len(found["commits"])) == (93, 98, 100)
    assert len(found["issues"]) == len(found["patches"]) == 93 and not found["clean"]


def test_tests_that_do_not_hold_are_left_out_of_a_task_that_does(tmp_path: Path) -> None:
    checks = Checks((Command(("pytest",)),), {}, ("a", "b"), ("c", "d"))
    asked, other = replace(TEN[0], checks=checks), replace(TEN[1], checks=checks)
    held = replace(asked, checks=replace(checks, fail_to_pass=("a",), pass_to_pass=("d",)))
    file = tmp_path / "apart.jsonl"
    found = [select.Verified(asked, held, "2 runs say the same: no (b; c)"), select.Verified(other, other, "")]
    assert select.write_quarantine(found, file) == 1
    assert select.exclude_quarantined(file, [asked, other]) == [held, other]


def test_a_set_is_known_by_its_name_or_its_file(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"id": "a"}\n')
    (tmp_path / "rows.json").write_text('[{"instance_id": "a", "repo": "b/c"}]')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "none").mkdir()
    (tmp_path / "set/one").mkdir(parents=True)
    (tmp_path / "set/one/task.toml").write_text("")
    for name, source in (("own.jsonl", "jsonl"), ("rows.json", "swe_bench"), ("set", "harbor"), ("set/one", "harbor")):
        path = str(tmp_path / name)
        assert recognise(path, {"select": {"n": 1}}) == (source, {"path": path, "select": {"n": 1}})
    assert recognise("mutants", {"n": 2}) == ("mutants", {"n": 2})
    for name, said in (("absent.jsonl", "does not exist"), ("empty.jsonl", "has no tasks"), ("none", "no folder with")):
        with pytest.raises(UsageError, match=said):
            recognise(str(tmp_path / name), {})
    with pytest.raises(UsageError, match="another"):
        recognise(str(tmp_path / "own.jsonl"), {"path": "x"})
