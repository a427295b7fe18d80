"""The verdict of SWE-smith on the log of an instance's tests, by its own parsers and rules.

Run by the interpreter of an environment that has the packages ``swesmith`` and ``swebench``. Reads JSON objects from
standard input, one a line: ``instance_id``, ``repo``, ``fail_to_pass`` and ``pass_to_pass``, and perhaps ``log``.
Prints one for each: ``found``, ``resolved``, ``failed``, ``statuses``; without a log ``command``, that which runs the
tests, ``files``, those of tests of each list, and ``seconds``, the benchmark's limit.
"""

import importlib
import json
import sys
import tempfile
from typing import Any

from coderepairrl.grading.programs.absent import absent, bare


def asking(harness: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """How the tests of an instance are run."""
    instance = row(asked)
    profile = harness.registry.get_from_inst(instance)
    command, _ = profile.get_test_cmd(instance)
    return {"command": command, "files": list(map(list, profile.get_test_files(instance))), "seconds": profile.timeout}


def row(asked: dict[str, Any]) -> dict[str, Any]:
    """The row of an instance, as far as it matters."""
    named = {"FAIL_TO_PASS": asked["fail_to_pass"], "PASS_TO_PASS": asked["pass_to_pass"]}
    return {"instance_id": asked["instance_id"], **({"repo": asked["repo"]} if asked["repo"] else {}), **named}


def verdict(harness: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """What the benchmark makes of one log."""
    instance = row(asked)
    with tempfile.NamedTemporaryFile("w", suffix=".log", encoding="utf-8") as log:
        log.write(asked["log"])
        log.flush()
        output, found = harness.read_test_output(log.name)
        report = harness.get_eval_report({"model_patch": ""}, instance, log.name)
    statuses = harness.registry.get_from_inst(instance).log_parser(output) if found else {}
    named = asked["fail_to_pass"] + asked["pass_to_pass"]
    sorted_ = report.get("tests_status", {kind: {"failure": []} for kind in ("FAIL_TO_PASS", "PASS_TO_PASS")})
    failed = [name for kind in ("FAIL_TO_PASS", "PASS_TO_PASS") for name in sorted_[kind]["failure"]]
    failed = failed if found else named
    return {"found": bool(statuses), "resolved": report["resolved"], "failed": failed, "statuses": statuses}


def main() -> None:
    """Read what is asked, and print the answers."""
    absent("docker", "dotenv", "ghapi", "datasets", "modal", "git", "requests", "tqdm", "bs4", "chardet", "dockerfiles")
    bare("swebench")
    bare("swebench.harness")
    harness = importlib.import_module("swesmith.harness.grading")
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(verdict(harness, asked) if "log" in asked else asking(harness, asked)), flush=True)


main()
