"""Verdict of Multi-SWE-bench on an instance's log, by its parsers and rules.

Run by a Python with ``multi-swe-bench``. Reads JSON lines: ``log`` (of ``fix-run.sh``), ``org``, ``repo``, ``tag``,
``number_interval``; ``run`` and ``test``, recorded statuses (PASS, FAIL, SKIP) without any patch and with that of the
tests; ``named``, the tests that must end as recorded. Prints ``found``, ``resolved``, ``failed``, ``statuses`` for
each.
"""

import importlib
import json
import re
import sys
from typing import Any

from coderepairrl.grading.programs.absent import register_package, stub_modules


def load_modules(root: Any, org: str) -> None:
    """Import the modules of `org` alone, not the two thousand others."""
    registers = re.compile(rf"Instance\.register\(\s*[\"']{re.escape(org)}[\"']")
    folders = set()
    for path in sorted(root.rglob("*.py")):
        if registers.search(path.read_text(encoding="utf-8", errors="replace")):
            parts = path.relative_to(root.parents[1].parent).with_suffix("").parts
            for end in range(2, len(parts)):
                name = ".".join(parts[:end])
                if name not in folders:
                    folders.add(name)
                    register_package(name)
            importlib.import_module(".".join(parts))


def make_test_result(kind: Any, statuses: dict[str, str]) -> Any:
    """Benchmark's record of `statuses`."""
    sets = [{name for name, status in statuses.items() if status == each} for each in ("PASS", "FAIL", "SKIP")]
    return kind(*map(len, sets), *sets)


def judge_log(harness: Any, question: dict[str, Any]) -> dict[str, Any]:
    """Judge one log as ``gen_report.py`` does (``gen_eval_reports``)."""
    numbered = {"org": question["org"], "repo": question["repo"], "number": 0}
    details = {"state": "", "title": "", "body": "", "resolved_issues": [], "fix_patch": "", "test_patch": ""}
    details |= {
        "base": harness["Base"]("", "", ""),
        "tag": question["tag"],
        "number_interval": question["number_interval"],
    }
    config = harness["Config"](need_clone=False, global_env=None, clear_env=False)
    instance = harness["Instance"].create(harness["PullRequest"](**numbered, **details), config)
    fixed = instance.parse_log(question["log"])
    kind = harness["TestResult"]
    report = harness["Report"](
        **numbered,
        run_result=make_test_result(kind, question["run"]),
        test_patch_result=make_test_result(kind, question["test"]),
        fix_patch_result=fixed,
    )
    statuses = {name: status.value for name, status in fixed._tests.items()}
    by_status = {"PASS": report.p2p_tests, "FAIL": report.f2p_tests, "SKIP": report.s2p_tests, "NONE": report.n2p_tests}
    failed = [name for name in question["named"] if name not in by_status[question["test"].get(name, "NONE")]]
    if not report.valid:  # an invalid report has sorted no tests
        failed = [name for name in question["named"] if statuses.get(name) != "PASS"]
        failed += [name for name, status in statuses.items() if status == "FAIL" and name not in failed]
    has_results = fixed.all_count > 0
    return {"found": has_results, "resolved": bool(report.valid) and not failed, "failed": failed, "statuses": statuses}


def main() -> None:
    """Answer questions with verdicts."""
    stub_modules("docker", "git", "github", "swerex", "toml", "tqdm", "yaml")
    root = register_package("multi_swe_bench.harness")
    harness: dict[str, Any] = {}
    for module in ("image", "instance", "pull_request", "report", "test_result"):
        harness |= vars(importlib.import_module(f"multi_swe_bench.harness.{module}"))
    loaded = set()
    answers, sys.stdout = sys.stdout, sys.stderr  # parsers print, too
    for line in sys.stdin:
        question = json.loads(line)
        if question["org"] not in loaded:
            load_modules(root / "repos", question["org"])
            loaded.add(question["org"])
        print(json.dumps(judge_log(harness, question)), file=answers, flush=True)


main()
