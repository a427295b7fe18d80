"""What runners really printed (`runs`: of go 1.19, rustc 1.95 and Node 20) and what it means."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coderepairrl.grading import Outcome, lacking
from coderepairrl.grading.reports import PARSERS, Outcomes, worst

PASSED, SKIPPED, FAILED = Outcome
RUNS = Path(__file__).parent / "runs"
NODE = {
    "add > adds 2 and 3": FAILED,
    "add > adds # zero": PASSED,
    "add > later": SKIPPED,
    "add > some day": SKIPPED,
    "add": FAILED,
    "alone > inner": PASSED,
    "alone": PASSED,
}


def parse(kind: str, text: str) -> Outcomes:
    return PARSERS[kind](text)


def recorded(kind: str, name: str) -> Outcomes:
    return parse(kind, (RUNS / name).read_text())


@pytest.mark.parametrize("name", ["node.tap", "node.spec"])
def test_node_says_the_same_in_both_reporters_and_printed_lines_count_for_nothing(name: str) -> None:
    assert recorded("node", name) == NODE


def test_go_plain_and_json_say_the_same() -> None:
    plain, events = recorded("go", "go.txt"), recorded("go", "go.json")
    assert plain["TestAdd/2_and_3"] == plain["TestAdd"] == FAILED
    assert plain["TestAdd/1_and_0"] == plain["TestZero"] == PASSED
    assert plain["TestSkip"] == SKIPPED
    assert worst((name.rsplit(".", 1)[1], outcome) for name, outcome in events.items()) == plain
    assert events["example.com/m/sub.TestZero"] == PASSED
    assert "example.com/m.TestZero" not in events  # go lost it: the test had printed a line without its end


def test_cargo() -> None:
    assert recorded("cargo", "cargo.txt") == {
        "tests::panics": PASSED,
        "tests::slow": SKIPPED,
        "tests::adds": FAILED,
        "tests::zero": PASSED,
        "zero": PASSED,
        "/src/rs/src/lib.rs - add (line 3)": PASSED,
    }


def test_of_a_cargo_binary_whose_end_does_not_agree_nothing_counts() -> None:
    text = (RUNS / "cargo.txt").read_text()
    forged = text.replace("test tests::panics", "test tests::adds2 ... ok\ntest tests::panics", 1)
    assert set(parse("cargo", forged)) == {"zero", "/src/rs/src/lib.rs - add (line 3)"}
    assert parse("cargo", text.split("test result")[0]) == {}
    assert set(parse("cargo", text.replace("failures:\n\n----", "test more ... ok\nfailures:\n\n----", 1))) == {
        *("zero", "/src/rs/src/lib.rs - add (line 3)"),
    }


def test_junit_of_node_and_several_documents() -> None:
    text = (RUNS / "node.xml").read_text()
    assert parse("junit", text) == {
        "test.adds 2 and 3": FAILED,
        "test.adds # zero": PASSED,
        "test.later": SKIPPED,
        "test.some day": FAILED,
        "test.inner": PASSED,
    }
    other = '<?xml version="1.0"?><testsuite><testcase classname="a.B" name="c"/><testcase name="d"/></testsuite>'
    assert parse("junit", f"{other}\n{text}").keys() > {"a.B.c", "d", "test.inner"}


@pytest.mark.parametrize(
    "text",
    [
        "<testsuite><testcase name='x'/>",
        "<!DOCTYPE x [<!ENTITY a 'b'>]><testsuite><testcase name='x'/></testsuite>",
        "",
        "\0",
    ],
)
def test_xml_that_is_cut_or_hostile_says_nothing(text: str) -> None:
    assert parse("junit", text) == {}


OLD = """\
test_add (maths.Test) ... ok
test_one (maths.Test)
Adds one. ... FAIL
test_two (maths.Test.test_two) ... a line that the test prints
ok
test_three (maths.Test.test_three) ... skipped 'why'
test_four (maths.Test.test_four) ... expected failure
test_five (maths.Test.test_five) ... unexpected success
test_six (maths.Test.test_six) ... ERROR
test_seven (maths.Test.test_seven) ... a line and no end
test_eight (maths.Test.test_eight) ... ok
"""


def test_unittest_before_and_since_python_3_11() -> None:
    found = parse("unittest", OLD)
    assert found == {
        "maths.Test.test_add": PASSED,
        "maths.Test.test_one": FAILED,
        "Adds one.": FAILED,
        "maths.Test.test_two": PASSED,
        "maths.Test.test_three": SKIPPED,
        "maths.Test.test_four": PASSED,
        "maths.Test.test_five": FAILED,
        "maths.Test.test_six": FAILED,
        "maths.Test.test_eight": PASSED,
    }
    assert lacking(found, ["test_add (maths.Test)", "test_two (maths.Test.test_two)", "maths.Test.test_eight"]) == []


def test_a_name_that_fails_once_has_failed() -> None:
    claim, truth = "--- PASS: TestX (0.00s)", "--- FAIL: TestX (0.00s)"
    assert parse("go", f"{claim}\n{truth}\n") == parse("go", f"{truth}\n{claim}\n") == {"TestX": FAILED}


def test_names_that_lists_cut_at_the_first_space() -> None:
    outcomes = {"t.py::x[a b]": PASSED, "t.py::x[a c]": FAILED, "t.py::y[a b]": PASSED, "t.py::z": SKIPPED}
    assert lacking(outcomes, ["t.py::x[a b]", "t.py::y[a"]) == []
    assert lacking(outcomes, ["t.py::x[a", "t.py::z", "t.py::none"]) == ["t.py::x[a", "t.py::z", "t.py::none"]


LINES = st.sampled_from(
    ["TAP version 13", "ok 1 - a", "    not ok", "---", "{", '{"Action":"pass"}', "▶ x", "  ✔ y", OLD]
)


@given(st.sampled_from(sorted(PARSERS)), st.lists(LINES | st.text(max_size=40), max_size=20).map("\n".join))
def test_no_text_breaks_a_parser(kind: str, text: str) -> None:
    assert all(isinstance(outcome, Outcome) for outcome in parse(kind, text).values())
