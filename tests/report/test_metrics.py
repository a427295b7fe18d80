"""Metrics of attempts against values computed by hand, and properties that hold for any attempt."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coderepairrl.report import localisation, metrics
from coderepairrl.report.metrics import (
    METRICS,
    PER_PATCH,
    AttemptData,
    measure_attempt,
    measure_attempts,
    slice_tasks,
    summarise_metrics,
)
from coderepairrl.sandbox.contents import read_local_files
from coderepairrl.types import Ending, Episode, Origin, Score, Task, TokenSpan, ToolCall, Turn

SOURCE = b"""import os

class Till:
    def add(self, n):
        self.total += n

    def take(self, n):
        self.total -= n
        return n

LIMIT = 3
"""


def make_diff(*changes: tuple[str, int, str, str]) -> bytes:
    """A diff without context: (file, first old line, removed lines, added lines)."""
    text = ""
    for path, first, removed, added in changes:
        old, new = removed.splitlines(), added.splitlines()
        at = first if old else first - 1
        text += f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n"
        text += f"@@ -{at},{len(old)} +{first},{len(new)} @@\n"
        text += "".join(f"-{line}\n" for line in old) + "".join(f"+{line}\n" for line in new)
    return text.encode()


AFTER_EDITS = {"edit_applied", "resolved_if_applied"}
REFERENCE = make_diff(
    ("till.py", 5, "        self.total += n", "        self.total += abs(n)"), ("rates.py", 1, "A = 1", "A = 2")
)
TASK = Task("t/1", "p", "python", "dir:/nowhere", REFERENCE, created="2023-05-01")


def make_attempt(patch: bytes = b"", **fields: Any) -> AttemptData:
    episode = Episode("e", "t/1", "eval", 0, "g", 0, Ending.DONE, patch=patch, **fields)
    return AttemptData(episode, TASK, {"till.py": SOURCE, "rates.py": b"A = 1\nB = 2\n"})


def test_the_reference_itself_is_right_in_everything() -> None:
    found = measure_attempt(made := make_attempt(REFERENCE))
    per_tool = {name for name in found if name.startswith(metrics.PER_TOOL)}
    assert found.keys() - per_tool <= metrics.list_metric_names(score.name for score in made.episode.scores)
    wrong = {"empty", "empty_patches", "partial", "partial_per_patch", "limit", "crash", "reward"}
    shares = {metric.name for metric in METRICS if metric.unit == "share"} - {"resolved", *AFTER_EDITS} - wrong
    assert {name: found[name] for name in shares} == dict.fromkeys(shares, 1.0)
    assert found["partial"] == found["empty"] == 0 and (found["changed_files"], found["changed_lines"]) == (2, 4)


def test_localisation_of_a_patch_worked_out_by_hand() -> None:
    """The patch changes one of the reference's two files, functions and lines, another function of that file, and a
    script. Its test does not count."""
    patch = (
        make_diff(
            ("till.py", 5, "        self.total += n", "        self.total = n"),
            ("till.py", 8, "        self.total -= n", "        pass"),
            ("show.py", 1, "", "print(1)"),
            ("tests/test_till.py", 1, "", "assert True"),
        )
        .replace(b"--- a/show.py", b"--- /dev/null")
        .replace(b"--- a/tests/test_till.py", b"--- /dev/null")
    )
    given, wanted = localisation.find_compared_lines(patch, REFERENCE)
    assert given == {("till.py", 5), ("till.py", 8), ("show.py", 0)} and wanted == {("till.py", 5), ("rates.py", 1)}
    made = make_attempt(patch)
    found = measure_attempt(AttemptData(made.episode, TASK, {**(made.sources or {}), "show.py": None}))
    assert {name: found[name] for name in found if name.endswith(("_recall", "_precision"))} == pytest.approx({
        "file_recall": 1 / 2, "file_precision": 1 / 2, "line_recall": 1 / 2, "line_precision": 1 / 3,
        "function_recall": 1 / 2, "function_precision": 1 / 3,  # Till.add of Till.add, Till.take, show.py itself
    })  # fmt: skip
    assert found["exact"] == found["partial"] == 0, "right places, wrong changes"
    half = measure_attempt(
        make_attempt(make_diff(("till.py", 5, "        self.total += n", "        self.total += abs(n)")))
    )
    assert half["exact"] == 0 and half["partial"] == half["file_precision"] == 1 and half["file_recall"] == 0.5
    assert "function_recall" not in measure_attempt(made), "whether show.py was there before is not known"


@pytest.mark.parametrize(
    ("line", "name"), [(1, ""), (4, "Till.add"), (5, "Till.add"), (3, "Till"), (6, "Till"), (9, "Till.take"), (11, "")]
)
def test_functions_are_the_innermost_around_a_line(line: int, name: str) -> None:
    assert localisation.find_changed_functions({("till.py", line)}, {"till.py": SOURCE}) == {("till.py", name)}


def test_what_is_not_known_is_absent_and_what_is_empty_is_no_hit() -> None:
    """Functions of missing files and unreported tools have no metric, rather than 0."""
    found = measure_attempt(replace(make_attempt(calls_known=False), sources=None))
    unknown = {"calls", "actions", *AFTER_EDITS, "repeated_failures", "files_viewed", "commands", "tool_success"}
    assert not unknown & found.keys() and "function_recall" not in found and "resolved" not in found
    assert found["file_recall"] == found["line_recall"] == found["exact"] == found["patch_edits"] == 0
    assert not [name for name in found if name.endswith("precision") or name.endswith(PER_PATCH)]
    bare = measure_attempt(AttemptData(make_attempt(REFERENCE).episode))
    assert not {"exact", "partial", "patch_edits", "file_recall"} & bare.keys(), "without its task, no reference"
    assert measure_attempts([AttemptData(replace(make_attempt().episode, ending=Ending.VOID), TASK)]) == {}
    java = replace(TASK, reference=make_diff(("A.java", 1, "a", "b")))
    assert "function_recall" not in measure_attempt(AttemptData(make_attempt(REFERENCE).episode, java, {}))
    nonsense = measure_attempt(make_attempt(b"no diff at all"))
    assert nonsense["file_recall"] == nonsense["patch_lines"] == 0 and "file_precision" not in nonsense


def make_call(name: str, arguments: str, ok: bool, command: str = "") -> ToolCall:
    return ToolCall(0, name, arguments, ok, command=command)


def test_tools_worked_out_by_hand() -> None:
    calls = (
        make_call("shell", '{"cmd": "cat src/a.py ./b.py | head -5"}', True, "cat head"),
        make_call("shell", '{"cmd": "grep -rn x src/a.py *.py"}', True, "grep"),
        make_call("shell", '{"cmd": "sed -n 1,5p gone.py"}', False, "sed"),
        make_call("shell", '{"cmd": "python x.py"}', True, "python"),
        make_call("shell", '{"cmd": "sed -n 1,5p gone.py"}', False, "sed"),
        make_call("apply_patch", '{"file_path": "a.py"}', False),
        make_call("apply_patch", '{"file_path": "a.py"}', False),
        make_call("apply_patch", '{"file_path": "b.py"}', True),
        make_call("shell", '{"cmd": "cat \'unclosed"}', True, "cat"),
        make_call("shell", "no JSON", False),
    )
    found = measure_attempt(make_attempt(tool_calls=calls))
    assert {name: found[name] for name in ("actions", "commands", "files_viewed", "repeated_failures")} == {
        "actions": 10, "commands": 7, "files_viewed": 2, "repeated_failures": 2,
    }  # fmt: skip
    assert found["edit_applied"] == found["tool_success/apply_patch"] == pytest.approx(1 / 3)
    repaired = (Score("tests", 1.0, passed=True),)
    assert "resolved_if_applied" not in measure_attempt(make_attempt(tool_calls=calls, scores=repaired)), (
        "some edits were not made"
    )
    assert measure_attempt(make_attempt(tool_calls=calls[7:8], scores=repaired))["resolved_if_applied"] == 1
    assert found["tool_success/shell"] == pytest.approx(4 / 7) and found["tool_success"] == 0.5


def test_actions_of_a_program_are_those_that_its_model_asked_for() -> None:
    def turn(index: int, asked: int, tools: tuple[str, ...]) -> Turn:
        nothing = TokenSpan((), Origin.GIVEN)
        reply = {"role": "assistant", "content": "", "tool_calls": [{"id": str(n)} for n in range(asked)]}
        return Turn(index, None, nothing, TokenSpan((), Origin.POLICY), messages=(reply,), tools=tools)

    turns = (turn(0, 2, ("bash",)), turn(1, 1, ("bash",)), turn(2, 5, ()))
    asked = measure_attempt(make_attempt(turns=turns, side=(2,), calls_known=False))
    assert asked["actions"] == 3 and "calls" not in asked
    assert "actions" not in measure_attempt(make_attempt(turns=(turn(0, 0, ()),), calls_known=False)), "it acts on text"


def test_what_it_took_to_resolve_is_of_the_resolved_and_a_median() -> None:
    made = []
    for at, (passed, calls) in enumerate([(True, 2), (True, 4), (True, 30), (False, 1), (True, 3)]):
        score = (Score("tests", float(passed), passed=passed),)
        own = (make_call("shell", "{}", True),) * calls
        base = make_attempt(REFERENCE, scores=score, tool_calls=own, timings={"total": float(10 * calls)}).episode
        made.append(replace(base, id=f"e{at}", task_id=f"t/{at}"))
    known = measure_attempts(AttemptData(each, TASK) for each in made)
    found = summarise_metrics(made, known)
    assert "actions_to_resolve" not in known["e3"]
    assert found["actions_to_resolve"].value == 3.5 and found["seconds_to_resolve"].value == 35
    assert found["actions"].value == 8 and found["resolved"].value == 0.8 == found["resolved_per_patch"].value


def test_files_are_read_where_they_are_at_hand_and_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "work" / "src").mkdir(parents=True)
    (tmp_path / "work" / "src" / "a.py").write_bytes(SOURCE)
    (tmp_path / "secret.py").write_bytes(b"key")
    (tmp_path / "work" / "link.py").symlink_to(tmp_path / "secret.py")
    asked = ["src/a.py", "gone.py", "../secret.py", "link.py", "/etc/passwd", "src/../../secret.py"]
    assert read_local_files(f"dir:{tmp_path / 'work'}", asked) == {"src/a.py": SOURCE, "gone.py": None}
    for workspace in ("dir:/nowhere", "git:https://example.invalid/x@" + "0" * 40, "image:x@sha256:1", ""):
        assert read_local_files(workspace, ["src/a.py"]) == {}


def test_every_metric_is_listed_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()
    assert not [metric.name for metric in METRICS if f"`{metric.name}`" not in page]


PATHS = st.sampled_from(["till.py", "rates.py", "show.py", "tests/test_till.py", "a.c", "b c.py"])
LINES = st.text("ab \t#'\"é\\", max_size=6).map(lambda text: text.replace("\n", ""))
PATCHES = st.one_of(
    st.binary(max_size=40),
    st.lists(st.tuples(PATHS, st.integers(1, 12), LINES, LINES), max_size=4).map(lambda own: make_diff(*own)),
)
CALLS = st.builds(
    make_call,
    st.sampled_from(["shell", "apply_patch", "x"]),
    st.text(max_size=20),
    st.booleans(),
    st.sampled_from(["", "cat ls"]),
)


@settings(max_examples=150, deadline=None)
@given(
    patch=PATCHES,
    reference=PATCHES,
    calls=st.lists(CALLS, max_size=5),
    passed=st.sampled_from([None, True, False]),
    total=st.floats(0, 1e6),
)
def test_every_number_is_finite_and_in_its_range(
    patch: bytes, reference: bytes, calls: list[ToolCall], passed: bool | None, total: float
) -> None:
    """The interval of a mean contains it and has some width, or is missing."""
    scores = () if passed is None else (Score("tests", float(passed), passed=passed),)
    task = replace(TASK, reference=reference)
    first = replace(make_attempt(patch, tool_calls=tuple(calls), scores=scores).episode, timings={"total": total})
    second = replace(first, id="e2", task_id="t/2", patch=b"", tool_calls=())
    known = measure_attempts([AttemptData(first, task, {"till.py": SOURCE}), AttemptData(second, task)])
    for name, value in {**known["e"], **known["e2"]}.items():
        assert math.isfinite(value) and value >= 0, name
        assert name in metrics.COUNTS or value <= 1 + 1e-12, name
    for name, found in summarise_metrics([first, second], known).items():
        assert (found.low is None) == (found.high is None)
        if found.low is not None and found.high is not None:
            assert found.low <= found.value + 1e-12 and found.value - 1e-12 <= found.high and found.low < found.high
            assert found.low >= 0 and (name in metrics.COUNTS or found.high <= 1)


def test_a_patch_too_long_to_be_a_repair_keeps_nobody_waiting_and_changes_few_files_of_none() -> None:
    huge = REFERENCE + make_diff(("big.txt", 1, "", "x\n" * (16 << 20)))
    found = measure_attempt(make_attempt(huge))
    assert found["exact"] == found["file_recall"] == found["patch_edits"] == 0 and found["completed"] == 1
    assert not {"changed_files", "changed_lines", "changed_lines_per_patch"} & found.keys()


def test_tools_that_a_policy_makes_up_are_one_metric() -> None:
    given, said = TokenSpan((1,), Origin.GIVEN), TokenSpan((2,), Origin.POLICY, (-0.1,))
    calls = [ToolCall(0, "shell", "{}", True), *(ToolCall(0, f"made\nup/{n}", "{}", False) for n in range(50))]
    turns = (Turn(0, None, given, said, tools=("shell",)),)
    found = measure_attempt(make_attempt(turns=turns, tool_calls=tuple(calls), calls_known=True))
    rates = {name: value for name, value in found.items() if name.startswith("tool_success/")}
    assert rates == {"tool_success/shell": 1.0, "tool_success/not_offered": 0.0}


def test_parts_by_year_edit_and_agent() -> None:
    names = {"t/a": REFERENCE, "t/b": make_diff(("x.py", 1, "a", "b")), "t/c": make_diff(("x.py", 1, "a\nb", "c"))}
    tasks = {
        name: replace(TASK, id=name, reference=own, created="" if name == "t/c" else f"202{at}-01-01")
        for at, (name, own) in enumerate(names.items())
    }
    episodes = [replace(make_attempt().episode, task_id=name, kind="x" if name == "t/a" else "") for name in names]
    assert slice_tasks(episodes, tasks, {"": "nano", "x": "aider"}) == {
        "kind x": {"t/a"}, "year 2020": {"t/a"}, "year 2021": {"t/b"},
        "edit of several files": {"t/a"}, "edit of one line": {"t/b"}, "edit of one hunk": {"t/c"},
        "agent aider": {"t/a"}, "agent nano": {"t/b", "t/c"},
    }  # fmt: skip
