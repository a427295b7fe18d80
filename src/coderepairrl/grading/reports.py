"""Outcomes of single tests, parsed from output or files of test runners.

Parsers take hostile text and return outcomes by test name. A repeated name gets its worst outcome, so that a forged
success cannot outweigh a failure. Formats: JUnit XML (Surefire), `cargo test`, `go test` plain and ``-json``
(test2json), TAP 13 and ``spec`` of Node's runner, verbose unittest, Harbor's reward file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from xml.parsers import expat

JOIN = " > "
"""Separator between a suite and its test, where a runner nests them."""
# longest line that is parsed, in characters
_LONGEST_LINE = 2_000
# suffix that pytest-xdist adds to names with ``--dist=loadgroup``
_XDIST_GROUP = re.compile(r"(?<=[\w\]])@[^\[\]:/]+$")
_COLOUR = re.compile(r"\x1b(\[[\d;]*[mK]|\(B)")


class Outcome(IntEnum):
    """Outcome of a test, worst last."""

    PASSED = 0
    SKIPPED = 1
    FAILED = 2


Outcomes = dict[str, Outcome]
_Results = Iterator[tuple[str, Outcome]]


def merge_outcomes(*parts: Iterable[tuple[str, Outcome]]) -> Outcomes:
    """Merge `parts`, keeping each test's worst outcome.

    >>> merge_outcomes([("a", Outcome.FAILED)], [("a", Outcome.PASSED)])
    {'a': <Outcome.FAILED: 2>}
    """
    outcomes: Outcomes = {}
    for part in parts:
        for name, outcome in part:
            outcomes[name] = max(outcome, outcomes.get(name, outcome))
    return outcomes


def find_failed_tests(outcomes: Mapping[str, Outcome], names: Sequence[str]) -> list[str]:
    """Return tests of `names` that did not pass, missing and skipped ones included.

    Published lists cut pytest's names at the first space and write unittest's as ``test (module.Class)``: such a name
    stands for all tests that match. Either side may lack pytest-xdist's ``@group``.

    >>> find_failed_tests({"t.py::test[a b]": Outcome.PASSED}, ["t.py::test[a b]", "t.py::test[a", "t.py::other"])
    ['t.py::other']
    """
    by_cut_name = merge_outcomes((name.split(" ", 1)[0], outcome) for name, outcome in outcomes.items() if " " in name)
    by_ungrouped_name = merge_outcomes(
        (_XDIST_GROUP.sub("", name), outcome) for name, outcome in outcomes.items() if "::" in name
    )

    def find_outcome(name: str) -> Outcome | None:
        ungrouped = by_ungrouped_name.get(_XDIST_GROUP.sub("", name))
        return outcomes.get(name, outcomes.get(parse_unittest_id(name), by_cut_name.get(name, ungrouped)))

    return [name for name in names if find_outcome(name) is not Outcome.PASSED]


def parse_unittest_id(printed: str) -> str:
    """Convert unittest's output, before and since Python 3.11, to a test id; leave other text unchanged.

    >>> parse_unittest_id("test_add (maths.Test)"), parse_unittest_id("test_add (maths.Test.test_add)")
    ('maths.Test.test_add', 'maths.Test.test_add')
    """
    match = _UNITTEST_NAME.fullmatch(printed)
    if match is None:
        return printed
    test, inside = match.groups()
    return inside if inside.endswith(f".{test}") else f"{inside}.{test}"


def _clean_lines(text: str) -> Iterator[str]:
    return (_COLOUR.sub("", line).rstrip() for line in text.split("\n") if len(line) <= _LONGEST_LINE)


# -- JUnit XML

# characters that tests may print, but XML may not contain
_NOT_IN_XML = re.compile(r"[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
# Expat's error for a document that begins within a truncated one
_SECOND_DECLARATION = expat.errors.codes[expat.errors.XML_ERROR_MISPLACED_XML_PI]
_FAILED_TAGS = {"failure", "error"}
_SKIPPED_TAGS = {"skipped", "disabled", "ignored", "pending", "notrun"}
# values of a passed test's attributes ``status``, ``result`` and ``executed``
_PASSED_VALUES = {"run", "completed", "passed", "pass", "success", "successful", "succeeded", "ok", "true"}
_FAILED_VALUES = {"failed", "fail", "failure", "error"}


def parse_junit(text: str) -> Outcomes:
    """Parse JUnit XML, concatenated documents included. A test is ``classname.name``, or its name alone."""
    return merge_outcomes(
        (f"{class_name}.{name}" if class_name else name, outcome)
        for class_name, name, outcome in read_junit_cases(text)
    )


def read_junit_cases(text: str) -> Iterator[tuple[str, str, Outcome]]:
    """Yield class, name and outcome of all test cases, repetitions included.

    `text` holds NUL-terminated files, or one; each has one document or more.
    """
    for file in text.split("\0"):
        rest = _NOT_IN_XML.sub("", file).encode()
        while (at := rest.find(b"<")) >= 0:
            cases, size = _parse_junit_document(rest[at:])
            yield from cases
            rest = rest[at + size :]


def _parse_junit_document(data: bytes) -> tuple[list[tuple[str, str, Outcome]], int]:
    """Test cases of the first document, none if it is truncated or hostile, and its size."""
    cases: list[tuple[str, str, Outcome]] = []
    open_tags: list[str] = []

    def start(tag: str, attributes: dict[str, str]) -> None:
        if tag == "testcase":
            values = {attributes[key].lower() for key in ("status", "result", "executed") if key in attributes}
            outcome = Outcome.PASSED if values <= _PASSED_VALUES else Outcome.SKIPPED
            outcome = Outcome.FAILED if values & _FAILED_VALUES else outcome
            cases.append((attributes.get("classname", ""), attributes.get("name", ""), outcome))
        elif open_tags[-1:] == ["testcase"] and tag in _FAILED_TAGS | _SKIPPED_TAGS:
            class_name, name, outcome = cases[-1]
            cases[-1] = class_name, name, max(outcome, Outcome.FAILED if tag in _FAILED_TAGS else Outcome.SKIPPED)
        open_tags.append(tag)

    def refuse_doctype(*_: object) -> None:
        raise ValueError("a document type: no runner writes one, and its entities may grow without bound")

    parser = expat.ParserCreate("utf-8")
    parser.StartElementHandler, parser.EndElementHandler = start, lambda _: open_tags.pop()
    parser.StartDoctypeDeclHandler = refuse_doctype
    try:
        parser.Parse(data, True)
    except ValueError:
        return [], len(data)
    except expat.ExpatError as error:
        if open_tags or not parser.ErrorByteIndex:
            return [], parser.ErrorByteIndex if error.code == _SECOND_DECLARATION else len(data)
        return cases, parser.ErrorByteIndex  # where text after the document begins
    return cases, len(data)


# -- cargo test

_CARGO_OUTCOMES = {"ok": Outcome.PASSED, "FAILED": Outcome.FAILED}
_CARGO_TEST = re.compile(r"test (?P<name>.+?)(?: - should panic)? \.\.\. (?P<outcome>ok|FAILED|ignored.*)")
_CARGO_END = re.compile(r"test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored; .*")
_CARGO_ORDER = (Outcome.PASSED, Outcome.FAILED, Outcome.SKIPPED)  # of the counts in `_CARGO_END`


def _parse_cargo_sections(text: str) -> Iterator[list[tuple[str, Outcome]]]:
    """Yield the tests of each binary; only those that failed, unless the counts in its last line agree."""
    section: list[tuple[str, Outcome]] = []
    for line in (*_clean_lines(text), "running 0 tests"):  # added to end the last binary's section
        if test := _CARGO_TEST.fullmatch(line):
            section.append((test["name"], _CARGO_OUTCOMES.get(test["outcome"], Outcome.SKIPPED)))
            continue
        end = _CARGO_END.fullmatch(line)
        if end or re.fullmatch(r"running \d+ tests?", line):
            counted = [sum(outcome is kind for _, outcome in section) for kind in _CARGO_ORDER]
            agrees = end is not None and counted == [int(count) for count in end.groups()]
            yield section if agrees else [(name, outcome) for name, outcome in section if outcome is Outcome.FAILED]
            section = []


# -- go test

_GO_OUTCOMES = {"PASS": Outcome.PASSED, "FAIL": Outcome.FAILED, "SKIP": Outcome.SKIPPED}
_GO_TEST = re.compile(r" *--- (PASS|FAIL|SKIP): (\S+) \([\d.]+s\)")


def _parse_go(text: str) -> _Results:
    """Parse `go test -json` (tests are ``package.Test/sub``) or `go test -v` (``Test/sub``)."""
    for line in _clean_lines(text):
        if line.startswith("{"):
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            outcome = _GO_OUTCOMES.get(str(event.get("Action")).upper())
            if outcome is not None and event.get("Test"):
                yield f"{event.get('Package')}.{event['Test']}", outcome
        elif test := _GO_TEST.fullmatch(line):
            yield test[2], _GO_OUTCOMES[test[1]]


# -- Node, TAP

_TAP_BEGINS = re.compile(r"^(TAP version \d+|1\.\.\d+)\b", re.MULTILINE)
_TAP_TIME = re.compile(r" # time=[\d.]+m?s( \{)?$")
_BATS_TIME = re.compile(r" in \d+ms$")
_TAP_TEST = re.compile(r"(?P<indent> *)(?P<no>not )?ok\b(?: \d+)?(?: -)? ?(?P<rest>.*)")
_TAP_DIRECTIVE = re.compile(r"(?<!\\)#\s*(skip|todo)\b.*", re.IGNORECASE)
_SPEC_TEST = re.compile(r"(?P<indent> *)(?P<mark>[✔✖﹣▶]) (?P<name>.+?)(?: \([\d.]+ms\))?(?: # (?P<todo>SKIP|TODO).*)?")
_SPEC_OUTCOMES = {"✔": Outcome.PASSED, "✖": Outcome.FAILED, "﹣": Outcome.SKIPPED}


def parse_node(text: str) -> Outcomes:
    """Parse Node's reporters `tap` and `spec`, and other TAP. A nested test is ``suite > test``.

    Both are read, since code under test can print TAP among `spec` output.
    """
    return merge_outcomes(_parse_spec(text), _parse_tap(text) if _TAP_BEGINS.search(_COLOUR.sub("", text)) else ())


def _parse_tap(text: str) -> _Results:
    """Parse TAP: a test follows its subtests, which are indented by four more spaces."""
    tests_by_depth: dict[int, list[tuple[list[str], Outcome]]] = {}
    end_of_block = ""
    for line in _clean_lines(text):
        if end_of_block:  # lines of an error's YAML block are no results
            end_of_block = "" if line == end_of_block else end_of_block
            continue
        if line.strip() == "---":
            end_of_block = line[: len(line) - 3] + "..."
            continue
        test = _TAP_TEST.fullmatch(line)
        if test is None:
            continue
        depth = len(test["indent"]) // 4
        name, outcome = test["rest"], Outcome.FAILED if test["no"] else Outcome.PASSED
        if directive := _TAP_DIRECTIVE.search(name):
            name, outcome = name[: directive.start()], Outcome.SKIPPED
        name = re.sub(r"\\(.)", r"\1", _TAP_TIME.sub("", name)).strip()
        nested = [([name, *path], each) for path, each in tests_by_depth.pop(depth + 1, [])]
        tests_by_depth.setdefault(depth, []).extend([*nested, ([name], outcome)])
    tests = [(JOIN.join(path), outcome) for paths in tests_by_depth.values() for path, outcome in paths]
    timed = all(_BATS_TIME.search(name) for name, _ in tests)  # if only some have a time, it may be part of the name
    return ((_BATS_TIME.sub("", name) if timed else name, outcome) for name, outcome in tests)


def _parse_spec(text: str) -> _Results:
    """Parse `spec`: a suite is a line of its own, its tests are indented by two more spaces."""
    suites: list[str] = []
    for line in _clean_lines(text):
        test = _SPEC_TEST.fullmatch(line)
        if test is None:
            continue
        if test["name"] == "failing tests:":  # lists failures again, without their suites
            return
        depth = len(test["indent"]) // 2
        del suites[depth:]
        if test["mark"] == "▶" and "ms)" not in line:  # a line with the duration ends the suite
            suites += [""] * (depth - len(suites)) + [test["name"]]
        elif test["mark"] != "▶":
            outcome = Outcome.SKIPPED if test["todo"] else _SPEC_OUTCOMES[test["mark"]]
            yield JOIN.join([*suites, test["name"]]), outcome


# -- unittest's text

_UNITTEST_NAME = re.compile(r"(\w+) \(([\w.]+)\)")
# line of a failed or skipped subtest, which decides its test's outcome
_UNITTEST_SUBTEST = re.compile(r"  (\w+ \([\w.]+\)) .+ \.\.\. (.*)")
# line of a failed test after all have run: code under test may have printed ``ok`` in its own line
_UNITTEST_SUMMARY = re.compile(r"(?:FAIL|ERROR): (\w+ \([\w.]+\)).*")
_UNITTEST_TEST = re.compile(r"(?P<name>.+?) \.\.\. ?(?P<outcome>.*)")


def _parse_unittest(text: str) -> _Results:
    """Parse verbose unittest (``-v``, Django's too): ``module.Class.test``, and docstrings if shown."""
    names: list[str] = []  # id and docstring of the test that has begun
    for line in _clean_lines(text):
        if subtest := _UNITTEST_SUBTEST.fullmatch(line):
            if outcome := _parse_unittest_outcome(subtest[2]):
                yield parse_unittest_id(subtest[1]), outcome
            continue
        if failed := _UNITTEST_SUMMARY.fullmatch(line):
            yield parse_unittest_id(failed[1]), Outcome.FAILED
            continue
        text_of_outcome: str | None = line
        if start := _UNITTEST_TEST.fullmatch(line):
            is_docstring = bool(names) and not _UNITTEST_NAME.fullmatch(start["name"])
            names = [*names[:1], start["name"]] if is_docstring else [parse_unittest_id(start["name"])]
            text_of_outcome = start["outcome"]
        elif _UNITTEST_NAME.fullmatch(line):
            names, text_of_outcome = [parse_unittest_id(line)], None
        outcome = _parse_unittest_outcome(text_of_outcome) if text_of_outcome and names else None
        if outcome is not None:
            yield from ((name, outcome) for name in names)
            names = []


def _parse_unittest_outcome(text: str) -> Outcome | None:
    if text in ("ok", "expected failure"):
        return Outcome.PASSED
    if text.startswith("skipped"):
        return Outcome.SKIPPED
    return Outcome.FAILED if text in ("FAIL", "ERROR", "unexpected success") else None


# -- Harbor


def parse_harbor(text: str) -> Outcomes:
    """Parse Harbor's reward file: a number, or an object of numbers with optional ``reward``.

    Rewards of at least 1 pass; a file that Harbor could not read has no result.

    >>> parse_harbor("1.0\\n"), parse_harbor('{"reward": 0.5, "style": 1}')
    ({'reward': <Outcome.PASSED: 0>}, {'reward': <Outcome.FAILED: 2>})
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = text
    try:
        rewards = content if isinstance(content, dict) else {"reward": float(content)}
        if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in rewards.values()):
            return {}
    except (TypeError, ValueError, OverflowError):
        return {}
    if "reward" in rewards:
        rewards = {"reward": rewards["reward"]}
    return {str(name): Outcome.PASSED if value >= 1 else Outcome.FAILED for name, value in rewards.items()}


PARSERS: Mapping[str, Callable[[str], Outcomes]] = {
    "unittest": lambda text: merge_outcomes(_parse_unittest(text)),
    "junit": parse_junit,
    "cargo": lambda text: merge_outcomes(*_parse_cargo_sections(text)),
    "go": lambda text: merge_outcomes(_parse_go(text)),
    "node": parse_node,
    "harbor": parse_harbor,
}
"""Parsers by name. A plugin reports the outcomes of `pytest` (`witness`)."""
RESULTS = ("pytest", *PARSERS)
"""Values of `Command.results`."""
