"""Verdict of SWE-bench's harness on an instance's log, by its parsers and rules.

Run by a Python with ``swebench``. Reads JSON lines: ``log``, ``parser``, ``eval_type``, ``instance_id``, ``version``,
``fail_to_pass``, ``pass_to_pass``. Prints for each ``found`` (whether the log has results), ``resolved``, ``failed``
(tests that did not pass), ``statuses`` by test.
"""

import importlib
import json
import sys
import tempfile
from typing import Any

from coderepairrl.grading.programs.absent import register_package

MARKS = ">>>>> Start Test Output\n", "\n>>>>> End Test Output\n"


def judge_log(harness: Any, question: dict[str, Any]) -> dict[str, Any]:
    """Judge one log."""
    TestSpec = importlib.import_module("swebench.types").TestSpec

    spec = TestSpec(
        instance_id=question["instance_id"],
        image="",
        eval_script_list=[],
        repo="",
        version=question["version"],
        FAIL_TO_PASS=question["fail_to_pass"],
        PASS_TO_PASS=question["pass_to_pass"],
        log_parser=question["parser"],
        eval_type=question["eval_type"],
    )
    with tempfile.NamedTemporaryFile("w", suffix=".log", encoding="utf-8") as log:
        log.write(question["log"] if MARKS[0].strip() in question["log"] else question["log"].join(MARKS))
        log.flush()
        statuses, has_results = harness.get_logs_eval(spec, log.name)
    expected = {"FAIL_TO_PASS": spec.FAIL_TO_PASS, "PASS_TO_PASS": spec.PASS_TO_PASS}
    report = harness.get_eval_tests_report(statuses, expected, eval_type=harness.EvalType(spec.eval_type))
    resolved = has_results and harness.get_resolution_status(report) == harness.ResolvedStatus.FULL.value
    failed = [name for kind in expected for name in report[kind]["failure"]]
    return {"found": has_results, "resolved": resolved, "failed": failed, "statuses": statuses}


def main() -> None:
    """Answer questions with verdicts."""
    register_package("swebench.harness")  # which imports docker, modal and datasets
    harness = importlib.import_module("swebench.harness.grading")
    answers, sys.stdout = sys.stdout, sys.stderr  # parsers print, too
    for line in sys.stdin:
        print(json.dumps(judge_log(harness, json.loads(line))), file=answers, flush=True)


main()
