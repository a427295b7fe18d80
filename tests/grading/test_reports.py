"""Parsing of reports: recorded output of go 1.19, rustc 1.95 and Node 20 (`runs`), and forged or damaged text."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from coderepairrl.grading import Outcome, find_failed_tests
from coderepairrl.grading.reports import PARSERS, Outcomes, merge_outcomes

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


def parse_recorded(kind: str, name: str) -> Outcomes:
    return parse(kind, (RUNS / name).read_text())


JUNIT = {
    "test.adds 2 and 3": FAILED,
    "test.adds # zero": PASSED,
    "test.later": SKIPPED,
    "test.some day": FAILED,
    "test.inner": PASSED,
}
CARGO = {
    "tests::panics": PASSED,
    "tests::slow": SKIPPED,
    "tests::adds": FAILED,
    "tests::zero": PASSED,
    "zero": PASSED,
    "/src/rs/src/lib.rs - add (line 3)": PASSED,
}


def test_recorded_reports_are_parsed() -> None:
    """Node says the same in both reporters; printed lines count for nothing."""
    assert parse_recorded("node", "node.tap") == parse_recorded("node", "node.spec") == NODE
    assert (parse_recorded("cargo", "cargo.txt"), parse_recorded("junit", "node.xml")) == (CARGO, JUNIT)


def test_go_gives_the_same_outcomes_as_text_and_as_json() -> None:
    plain, events = parse_recorded("go", "go.txt"), parse_recorded("go", "go.json")
    assert plain["TestAdd/2_and_3"] == plain["TestAdd"] == FAILED
    assert plain["TestAdd/1_and_0"] == plain["TestZero"] == PASSED
    assert plain["TestSkip"] == SKIPPED
    assert merge_outcomes((name.rsplit(".", 1)[1], outcome) for name, outcome in events.items()) == plain
    assert events["example.com/m/sub.TestZero"] == PASSED
    assert "example.com/m.TestZero" not in events  # go lost it: the test had printed a line without its end


def test_only_failures_count_of_a_cargo_binary_whose_summary_disagrees() -> None:
    text = (RUNS / "cargo.txt").read_text()
    assert parse("cargo", text.split("test result")[0]) == {"tests::adds": FAILED}
    others = {"zero": PASSED, "/src/rs/src/lib.rs - add (line 3)": PASSED, "tests::adds": FAILED}
    for old in ("test tests::panics", "failures:\n\n----"):
        forged = text.replace(old, f"test tests::more ... ok\n{old}", 1)
        assert parse("cargo", forged) == others, old
    run = "running 1 test\ntest tests::adds ... ok\ntest result: ok. 1 passed; 0 failed; 0 ignored; 0 measured\n"
    printed = text.replace("thread 'tests::adds'", f"{run}thread 'tests::adds'", 1)
    assert printed != text and parse("cargo", printed) == others


def test_junit_documents_may_follow_each_other() -> None:
    other = '<?xml version="1.0"?><testsuite><testcase classname="a.B" name="c"/><testcase name="d"/></testsuite>'
    assert parse("junit", f"{other}\n{(RUNS / 'node.xml').read_text()}").keys() > {"a.B.c", "d", "test.inner"}


def test_cut_or_hostile_xml_gives_no_outcomes() -> None:
    entity = "<!DOCTYPE x [<!ENTITY a 'b'>]><testsuite><testcase name='x'/></testsuite>"
    for text in ("<testsuite><testcase name='x'/>", entity, "", "\0"):
        assert parse("junit", text) == {}, text


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


def test_names_of_unittest_before_and_since_python_3_11_are_read() -> None:
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
    assert (
        find_failed_tests(found, ["test_add (maths.Test)", "test_two (maths.Test.test_two)", "maths.Test.test_eight"])
        == []
    )


def test_a_name_that_fails_once_has_failed() -> None:
    claim, truth = "--- PASS: TestX (0.00s)", "--- FAIL: TestX (0.00s)"
    assert parse("go", f"{claim}\n{truth}\n") == parse("go", f"{truth}\n{claim}\n") == {"TestX": FAILED}
    for name in ("maths.Test", "maths.Test.test_add"):  # before and since Python 3.11
        printed = f"test_add ({name}) ... ok\nFAIL\n\n======\nFAIL: test_add ({name}) (i=1)\n------\n"
        assert parse("unittest", printed) == {"maths.Test.test_add": FAILED}, "it prints ok while it runs"


def test_names_cut_by_lists_and_names_with_groups_of_xdist_are_matched() -> None:
    outcomes = {"t.py::x[a b]": PASSED, "t.py::x[a c]": FAILED, "t.py::y[a b]": PASSED, "t.py::z": SKIPPED}
    assert find_failed_tests(outcomes, ["t.py::x[a b]", "t.py::y[a"]) == []
    assert find_failed_tests(outcomes, ["t.py::x[a", "t.py::z", "t.py::none"]) == ["t.py::x[a", "t.py::z", "t.py::none"]
    outcomes = {"t.py::x@db": PASSED, "t.py::y[a@b]@db": PASSED, "t.py::z": PASSED, "t.py::w[a@b]": FAILED}
    assert find_failed_tests(outcomes, ["t.py::x", "t.py::x@db", "t.py::x@other", "t.py::y[a@b]", "t.py::z@db"]) == []
    assert find_failed_tests(outcomes, ["t.py::w[a@b]", "t.py::w[a"]) == ["t.py::w[a@b]", "t.py::w[a"]


CASE = '<testcase classname="a" name="{}"{}'
OK = '<testsuite><testcase classname="a" name="ok"/>{}</testsuite>'


def test_junit_loses_no_test() -> None:
    for text in (
        OK.format("<system-out>\x1b[32mcolour\x1b[0m \x00\x08</system-out>".replace("\x00", "\x01")),
        OK.format("<system-out><![CDATA[<!DOCTYPE html><?xml version='1.0'?>]]></system-out>"),
        OK.format("") + "\0" + OK.format("") + "\0",
        OK.format("") + OK.format(""),
        "\ufeff<?xml version='1.0'?>\n" + OK.format("") + "\ufeff<?xml version='1.0'?>" + OK.format("") + "\n",
        "<testsuite><testcase name='cut'/>\0" + OK.format("") + "\0",
        OK.format("").replace("<testsuite>", "<testsuite xmlns='urn:x'>"),
    ):
        assert parse("junit", text) == {"a.ok": PASSED}, text


FORGED = f"<![CDATA[<?xml version='1.0'?>{OK.format('')}]]>"


def test_only_a_stated_pass_of_junit_is_a_pass() -> None:
    for rest, outcome in (
        (' status="run" result="completed"/>', PASSED),
        (' status="Passed"/>', PASSED),
        (' status="notrun" result="suppressed"/>', SKIPPED),
        (' status="run" result="skipped"/>', SKIPPED),
        (' status="disabled"/>', SKIPPED),
        (' status="untested"/>', SKIPPED),
        (' executed="false"/>', SKIPPED),
        (' status="failed"/>', FAILED),
        ("><disabled/></testcase>", SKIPPED),
        ("><properties/><system-out/></testcase>", PASSED),
        ("><skipped/><error/></testcase>", FAILED),
        (f"><failure/><system-out>{FORGED}</system-out></testcase>", FAILED),  # what a test prints counts for nothing
    ):
        assert parse("junit", f"<testsuite>{CASE.format('t', rest)}</testsuite>") == {"a.t": outcome}, rest


def test_tap_is_read_with_and_without_version_durations_and_colours() -> None:
    for text, outcomes in (
        ("1..2\nok 1 addition works\nnot ok 2 y\n", {"addition works": PASSED, "y": FAILED}),
        ("TAP version 14\nok 1 - adds # time=3.1ms\n1..1\n", {"adds": PASSED}),
        ("TAP version 14\nok 1 - adds # time=3.1ms {\n}\n1..1\n", {"adds": PASSED}),
        ("1..2\nok 1 adds in 3ms\nok 2 ends in 12ms # skip\n", {"adds": PASSED, "ends": SKIPPED}),
        ("1..2\nok 1 adds\nok 2 ends in 12ms\n", {"adds": PASSED, "ends in 12ms": PASSED}),
        ("\x1b[32mok\x1b[0m 1 - adds\n\x1b[31mnot ok\x1b[0m 2 - b\n1..2\n", {"adds": PASSED, "b": FAILED}),
        ("TAP version 13\nok 1 - a\n1..1\n✖ a (1ms)\n", {"a": FAILED}),
        ("\x1b[32m✔ adds \x1b[90m(1.5ms)\x1b[39m\x1b[39m\n", {"adds": PASSED}),
    ):
        assert parse("node", text) == outcomes, text


def test_colours_hide_no_test() -> None:
    text = (RUNS / "cargo.txt").read_text()
    coloured = text.replace("... ok", "... \x1b[32mok\x1b[m").replace("FAILED", "\x1b[31mFAILED\x1b(B\x1b[m")
    assert parse("cargo", coloured) == parse("cargo", text)
    assert parse("unittest", "test_a (m.T.test_a) ... \x1b[32mok\x1b[0m\n") == {"m.T.test_a": PASSED}
    assert parse("go", "\x1b[32m--- PASS: TestA (0.00s)\x1b[0m\r\n") == {"TestA": PASSED}


LINES = st.sampled_from(
    ["TAP version 13", "ok 1 - a", "    not ok", "---", "{", '{"Action":"pass"}', "▶ x", "  ✔ y", OLD]
)


@given(st.sampled_from(sorted(PARSERS)), st.lists(LINES | st.text(max_size=40), max_size=20).map("\n".join))
def test_no_text_breaks_a_parser(kind: str, text: str) -> None:
    assert all(isinstance(outcome, Outcome) for outcome in parse(kind, text).values())
