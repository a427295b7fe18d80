"""Verdict of SWE-smith on an instance's log, by its parsers and rules.

Run by a Python with ``swesmith`` and ``swebench``. Reads JSON lines: ``instance_id``, ``repo``, ``fail_to_pass``,
``pass_to_pass``, perhaps ``log``. Prints ``found``, ``resolved``, ``failed``, ``statuses`` for each; without a log
``command``, the test ``files`` of each list, and ``seconds``, the benchmark's limit.
"""

import importlib
import json
import sys
import tempfile
from typing import Any

from coderepairrl.grading.programs.absent import register_package, stub_modules


def describe_test_run(harness: Any, question: dict[str, Any]) -> dict[str, Any]:
    """Describe how an instance's tests are run."""
    instance = make_row(question)
    profile = harness.registry.get_from_inst(instance)
    command, _ = profile.get_test_cmd(instance)
    return {"command": command, "files": list(map(list, profile.get_test_files(instance))), "seconds": profile.timeout}


def make_row(question: dict[str, Any]) -> dict[str, Any]:
    """Needed part of an instance's row."""
    named = {"FAIL_TO_PASS": question["fail_to_pass"], "PASS_TO_PASS": question["pass_to_pass"]}
    return {"instance_id": question["instance_id"], **({"repo": question["repo"]} if question["repo"] else {}), **named}


def judge_log(harness: Any, question: dict[str, Any]) -> dict[str, Any]:
    """Judge one log."""
    instance = make_row(question)
    with tempfile.NamedTemporaryFile("w", suffix=".log", encoding="utf-8") as log:
        log.write(question["log"])
        log.flush()
        output, has_results = harness.read_test_output(log.name)
        report = harness.get_eval_report({"model_patch": ""}, instance, log.name)
    statuses = harness.registry.get_from_inst(instance).log_parser(output) if has_results else {}
    failed = question["fail_to_pass"] + question["pass_to_pass"]
    if has_results:
        tests = report.get("tests_status", {})
        failed = [name for kind in ("FAIL_TO_PASS", "PASS_TO_PASS") if kind in tests for name in tests[kind]["failure"]]
    return {"found": bool(statuses), "resolved": report["resolved"], "failed": failed, "statuses": statuses}


def main() -> None:
    """Answer questions."""
    stub_modules(
        "docker", "dotenv", "ghapi", "datasets", "modal", "git", "requests", "tqdm", "bs4", "chardet", "dockerfiles"
    )
    register_package("swebench")
    register_package("swebench.harness")
    harness = importlib.import_module("swesmith.harness.grading")
    answers, sys.stdout = sys.stdout, sys.stderr  # parsers print, too
    for line in sys.stdin:
        question = json.loads(line)
        print(
            json.dumps(judge_log(harness, question) if "log" in question else describe_test_run(harness, question)),
            file=answers,
            flush=True,
        )


main()
