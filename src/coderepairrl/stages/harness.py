"""``crrl grade --harness swebench``: SWE-bench's own harness in its containers.

The unchanged package runs in a separate environment. Needs a Docker daemon, and rows of its version (``image``,
``eval_script``, ...).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from coderepairrl.errors import PrerequisiteError, RunError, UsageError
from coderepairrl.processes.children import NOT_FROM_HERE, read_log_end
from coderepairrl.processes.installs import install_tool
from coderepairrl.runs import codec, write_atomic
from coderepairrl.stages.grade import GradedPrediction, Say
from coderepairrl.stages.predictions import Prediction
from coderepairrl.types import Task

REQUIREMENT = "swebench==5.0.2"
_FIELDS = ("image", "eval_script", "log_parser", "eval_type", "FAIL_TO_PASS", "PASS_TO_PASS", "repo", "version")
_ROWS = """
import json, sys
from swebench.harness.utils import load_swebench_dataset
for row in load_swebench_dataset(sys.argv[1], sys.argv[2]):
    print(json.dumps(dict(row), default=str))
"""
SECONDS = 1_800
"""Seconds for an instance's tests, the harness' default."""
_POLL = 2.0
_STOPPING = 30.0
_LONGEST_NAME = 200
_RENAME = "name models apart, in model_name_or_path"
_RUNTIME = re.compile(r"Test runtime: ([\d_.]+) seconds")
# Log lines that explain a missing report without a fault of the machine.
_VERDICTS = {
    ">>>>> Patch Apply Failed": "the patch does not apply, not even with fuzz",
    "Test timed out after": "the tests did not end in time",
}


def prepare_harness() -> Path:
    """Install the harness if missing; return its environment. Raises `PrerequisiteError`."""
    if shutil.which("docker") is None:
        raise PrerequisiteError("the harness of SWE-bench needs Docker", fix="sudo apt-get install docker.io")
    docker = subprocess.run(["docker", "version"], capture_output=True, text=True, check=False)
    if docker.returncode != 0:
        reason = docker.stderr.strip().rpartition("\n")[2]
        raise PrerequisiteError(
            f"Docker does not answer: {reason}", fix="start its daemon, or say where it listens with DOCKER_HOST"
        )
    return install_tool("swebench-harness", (REQUIREMENT,), whole=True)


def read_harness_rows(inside: Path, dataset: str, split: str) -> dict[str, dict[str, Any]]:
    """Read instances by id, as the harness does.

    `dataset` is a file (``.json``, ``.jsonl``, ``.parquet``) or a Hugging Face name. Raises `UsageError`.
    """
    command = [str(inside / "bin/python"), "-c", _ROWS, dataset, split]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **NOT_FROM_HERE}, check=False)
    if done.returncode != 0:
        reason = done.stderr.strip().rpartition("\n")[2]
        raise UsageError(
            f"the harness cannot read {dataset}: {reason}",
            fix="name a file of rows, or a dataset such as SWE-bench_Lite",
        )
    instances = {row["instance_id"]: row for row in map(json.loads, done.stdout.splitlines())}
    lacking = sorted({field for row in instances.values() for field in _FIELDS if field not in row})
    if lacking or not instances:
        raise UsageError(
            f"{dataset} has no rows for {REQUIREMENT}" + (f": they lack {', '.join(lacking)}" if lacking else ""),
            fix="name the dataset as it is published for this version of the harness",
        )
    return instances


def make_tasks_from_rows(rows: Mapping[str, Mapping[str, Any]]) -> list[Task]:
    """Tasks with ids and repositories only, for totals."""
    return [Task(name, "", "", "", b"", repository=str(row["repo"])) for name, row in rows.items()]


async def grade_with_harness(
    predictions: Sequence[Prediction],
    rows: Mapping[str, Mapping[str, Any]],
    inside: Path,
    output: Path,
    *,
    resume: bool = False,
    jobs: int = 2,
    seconds: int = SECONDS,
    say: Say = lambda _: None,
) -> list[GradedPrediction]:
    """Grade `predictions` with the harness; return verdicts in order, also in `output`.

    Runs once per model, `jobs` instances at a time, each for at most `seconds`; ``OUTPUT.harness`` keeps logs and
    reports for `resume`. An instance without report and verdict in the log is a fault.

    Raises `UsageError` for a taken place, verdicts on other patches, and model names that share a folder; `RunError` if
    the harness breaks.
    """
    _check_model_names({each.model for each in predictions})
    place = output.with_name(f"{output.name}.harness")
    if not resume and (output.exists() or place.exists()):
        raise UsageError(f"{output} already exists", fix="continue it with --resume, or name another file with -o")
    place.mkdir(parents=True, exist_ok=True)
    run_id = hashlib.sha256(str(place.resolve()).encode()).hexdigest()[:8]  # in names of containers
    logs = place / "logs/run_evaluation" / run_id
    write_atomic(place / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows.values()))
    for model in dict.fromkeys(each.model for each in predictions):
        model_predictions = [each for each in predictions if each.model == model]
        model_logs = logs / _model_folder_name(model)
        _check_same_patches(model_logs, model_predictions)
        request_file = place / f"predictions-{_model_folder_name(model)}.jsonl"
        write_atomic(request_file, "".join(json.dumps(_prediction_row(each)) + "\n" for each in model_predictions))
        if any(not each.empty for each in model_predictions):
            arguments = ["--predictions_path", request_file.name, "--max_workers", str(jobs), "--timeout", str(seconds)]
            await _run_harness(inside, place, [*arguments, "--run_id", run_id], model_logs, say)
    verdicts = [_read_harness_verdict(each, rows[each.instance], logs) for each in predictions]
    write_atomic(output, "".join(json.dumps(each.as_json()) + "\n" for each in verdicts if not each.fault))
    return verdicts


def _model_folder_name(model: str) -> str:
    return model.replace("/", "__")


def _check_model_names(models: Collection[str]) -> None:
    model_by_folder: dict[str, str] = {}
    for model in sorted(models):
        folder = _model_folder_name(model)
        if not folder.strip(".") or "\0" in folder or len(folder.encode(errors="replace")) > _LONGEST_NAME:
            raise UsageError(f"{model[:80]!r} is not a name that the harness can keep reports under", fix=_RENAME)
        if model_by_folder.setdefault(folder, model) != model:
            raise UsageError(
                f"{model_by_folder[folder]!r} and {model!r} would be one folder of the harness", fix=_RENAME
            )


def _prediction_row(prediction: Prediction) -> dict[str, str]:
    patch = "" if prediction.empty else prediction.patch.decode("utf-8", "surrogateescape")
    return {"instance_id": prediction.instance, "model_name_or_path": prediction.model, "model_patch": patch}


def _check_same_patches(logs: Path, predictions: Sequence[Prediction]) -> None:
    # The harness would reuse a report on another patch.
    for each in predictions:
        patch = logs / each.instance / "patch.diff"
        if patch.is_file() and patch.read_bytes() != each.patch:
            raise UsageError(f"{patch} is another patch for {each.instance}", fix="name another file with -o")


async def _run_harness(inside: Path, place: Path, arguments: Sequence[str], logs: Path, say: Say) -> None:
    log = place / "harness.log"
    command = [str(inside / "bin/python"), "-m", "swebench.harness.run_evaluation", "--dataset_name", "rows.jsonl"]
    with log.open("ab") as sink:
        process = await asyncio.create_subprocess_exec(
            *command, *arguments, cwd=place, stdout=sink, stderr=sink, start_new_session=True,
            env={**os.environ, **NOT_FROM_HERE},
        )  # fmt: skip
        try:
            reported = 0
            while process.returncode is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), _POLL)
                if (count := len(list(logs.glob("*/report.json")))) != reported:
                    reported = count
                    say(f"{count} reports are written")
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGINT)  # it stops its containers
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), _STOPPING)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        raise RunError("the harness of SWE-bench broke:\n" + "\n".join(read_log_end(log)), fix=f"all of it: {log}")


def _read_harness_verdict(prediction: Prediction, row: Mapping[str, Any], logs: Path) -> GradedPrediction:
    task = hashlib.sha256(json.dumps([row[field] for field in _FIELDS]).encode()).hexdigest()
    patch = hashlib.sha256(prediction.patch).hexdigest()
    graded = GradedPrediction(prediction.instance, prediction.model, False, prediction.empty, patch=patch, task=task)
    if prediction.empty:
        return graded._replace(problem="empty patch")
    instance_logs = logs / _model_folder_name(prediction.model) / prediction.instance
    log = _read_log_text(instance_logs / "run_instance.log")
    seconds = float(match[1].replace("_", "")) if (match := _RUNTIME.search(log)) else 0.0
    graded = graded._replace(seconds=seconds)
    try:
        report = codec.parse_foreign_json(_read_log_text(instance_logs / "report.json"))[prediction.instance]
        return graded._replace(resolved=bool(report["resolved"]), problem=_explain_unresolved(report))
    except (ValueError, KeyError, TypeError):
        for phrase, problem in _VERDICTS.items():
            if phrase in log:
                return graded._replace(problem=problem)
    last = log.strip().rpartition("\n")[2] or "the harness left no log of it"
    return graded._replace(fault=f"{last} ({instance_logs})")


def _read_log_text(path: Path) -> str:
    return path.read_text("utf-8", "replace") if path.is_file() else ""


def _explain_unresolved(report: Mapping[str, Any]) -> str:
    if report["resolved"]:
        return ""
    if report.get("infra_failure_reason"):
        return f"no result of its tests: {report['infra_failure_reason']}"
    status = report.get("tests_status") or {}
    failed = [name for kind in ("FAIL_TO_PASS", "PASS_TO_PASS") for name in status.get(kind, {}).get("failure", ())]
    return f"{len(failed)} of its tests fail: {', '.join(failed[:3])}" if failed else "no result of its tests"
