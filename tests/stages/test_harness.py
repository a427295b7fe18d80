"""SWE-bench's own harness: its reports and logs read back (tests/sandbox runs it)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from coderepairrl.errors import UsageError
from coderepairrl.stages import harness
from coderepairrl.stages.predictions import Prediction

ROW = dict.fromkeys(harness._FIELDS, "")


def logged(place: Path, model: str, log: str, report: Any = None) -> None:
    own = place / model / "crrl__mini-1"
    own.mkdir(parents=True)
    (own / "run_instance.log").write_text(log)
    if report is not None:
        (own / "report.json").write_text(json.dumps({"crrl__mini-1": report}))


def test_what_it_leaves_is_read_back(tmp_path: Path) -> None:
    tests = {"FAIL_TO_PASS": {"failure": ["a"]}, "PASS_TO_PASS": {"failure": ["b"]}}
    logged(tmp_path, "org__good", "Test runtime: 1_003.50 seconds\n", {"resolved": True})
    logged(tmp_path, "wrong", "", {"resolved": False, "tests_status": tests})
    logged(tmp_path, "infra", "", {"resolved": False, "infra_failure_reason": "disk full"})
    logged(tmp_path, "alien", "INFO - >>>>> Patch Apply Failed:\nerror: patch failed\n")
    logged(tmp_path, "slow", "Test timed out after 5 seconds.\n")
    logged(tmp_path, "lost", "INFO - begun\nERROR - Image crrl-test:swebench not found\n")
    (tmp_path / "lost/crrl__mini-1/report.json").write_text("{half")

    def read(model: str, patch: bytes = b"x") -> harness.Graded:
        return harness._harness_verdict(Prediction("crrl__mini-1", model, patch), ROW, tmp_path)

    assert (read("org/good").resolved, read("org/good").seconds) == (True, 1003.5)
    assert read("wrong").problem == "2 of its tests fail: a, b"
    assert read("infra").problem == "no result of its tests: disk full"
    assert read("alien").problem == "the patch does not apply, not even with fuzz"
    assert read("slow").problem == "the tests did not end in time"
    assert "not found" in read("lost").fault and "no log" in read("never").fault
    assert read("never", b" \n") == read("never", b" \n")._replace(empty=True, problem="empty patch", fault="")


async def test_reports_on_another_patch_are_not_taken_for_ours(tmp_path: Path) -> None:
    output = tmp_path / "graded.jsonl"
    made = [Prediction("crrl__mini-1", "m", b"x\n")]
    place = tmp_path / "graded.jsonl.harness"
    place.mkdir()
    with pytest.raises(UsageError, match="already exists"):
        await harness.grade(made, {"crrl__mini-1": ROW}, tmp_path, output)
    run_id = hashlib.sha256(str(place.resolve()).encode()).hexdigest()[:8]
    own = place / "logs/run_evaluation" / run_id / "m/crrl__mini-1"
    own.mkdir(parents=True)
    (own / "patch.diff").write_text("y\n")
    with pytest.raises(UsageError, match="another patch"):
        await harness.grade(made, {"crrl__mini-1": ROW}, tmp_path, output, resume=True)


@pytest.mark.parametrize("names", [("a/b", "a__b"), ("..",), ("",), ("m" * 300,)])
async def test_models_of_which_it_would_make_one_folder_or_none_are_refused(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    made = [Prediction("crrl__mini-1", name, b"x\n") for name in names]
    with pytest.raises(UsageError, match="one folder|not a name"):
        await harness.grade(made, {"crrl__mini-1": ROW}, tmp_path, tmp_path / "graded.jsonl")
    assert not list(tmp_path.iterdir())


async def test_a_model_called_rows_does_not_replace_the_rows(tmp_path: Path) -> None:
    made = [Prediction("crrl__mini-1", "rows", b"")]
    await harness.grade(made, {"crrl__mini-1": ROW}, tmp_path, tmp_path / "graded.jsonl")
    assert json.loads((tmp_path / "graded.jsonl.harness/rows.jsonl").read_text()) == ROW
