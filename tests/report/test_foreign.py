"""Logs of other programs in `crrl compare`: it reproduces their means, and names missing data."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from coderepairrl.errors import UsageError
from coderepairrl.report.comparison import ComparisonOptions
from coderepairrl.report.outcomes import Outcomes, read_outcomes
from coderepairrl.report.verdict import answer_comparison

if sys.version_info >= (3, 14):
    import zipfile
else:
    from backports.zstd import zipfile

LOGS: dict[str, Any] = json.loads(Path(__file__).with_name("foreign.json").read_text())
"""Made by the programs themselves, and cut; its first line names their versions."""


def write_logs(folder: Path, change: Callable[[dict[str, Any]], object] = lambda logs: None) -> Path:
    """The logs as files, after `change`; those set to None are left out."""
    logs = json.loads(json.dumps(LOGS))
    change(logs)
    for name, content in logs.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_text(content)
        elif name.endswith(".eval") and content:
            with zipfile.ZipFile(path, "w", zipfile.ZIP_ZSTANDARD) as log:
                for member, part in content.items():
                    log.writestr(member, json.dumps(part))
        elif content is not None:
            rows = content if name.endswith(".jsonl") else [content]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def read_policy(source: str, metric: str = "resolved") -> Outcomes:
    outcomes = read_outcomes(source, metric)
    assert isinstance(outcomes, Outcomes)
    return outcomes


def get_inspect_mean(name: str, scorer: int = 0) -> float:
    metrics = LOGS[name].get("header.json", LOGS[name])["results"]["scores"][scorer]["metrics"]
    return float(next(iter(metrics.values()))["value"])


def get_harbor_mean(job: str, agent: str) -> float:
    [metric] = LOGS[f"harbor/{job}/result.json"]["stats"]["evals"][f"{agent}__adhoc"]["metrics"]
    return float(metric["mean"])


@pytest.mark.parametrize(
    ("source", "metric", "policy", "mean", "tasks", "void"),
    [
        ("inspect/half.eval", "resolved", "mockllm/model", get_inspect_mean("inspect/half.eval"), 6, 0),
        ("inspect/half.json", "resolved", "mockllm/model", get_inspect_mean("inspect/half.json"), 6, 0),
        ("inspect/graded.eval", "graded", "mockllm/model", get_inspect_mean("inspect/graded.eval"), 6, 0),
        ("inspect/two.eval", "length", "mockllm/model", get_inspect_mean("inspect/two.eval", 1), 6, 0),
        ("inspect/crash.eval", "resolved", "mockllm/model", get_inspect_mean("inspect/crash.eval"), 6, 1),
        ("harbor/oracle", "resolved", "oracle", get_harbor_mean("oracle", "oracle"), 4, 0),
        ("harbor/sometimes", "reward", "sometimes", get_harbor_mean("sometimes", "sometimes"), 3, 1),
        ("harbor/both@nop", "resolved", "nop", get_harbor_mean("both", "nop"), 2, 0),
        ("verifiers-0.1/half", "resolved", "half", LOGS["verifiers-0.1/half/metadata.json"]["avg_reward"], 6, 0),
        ("verifiers-0.1/broken", "reward", "broken", LOGS["verifiers-0.1/broken/metadata.json"]["avg_reward"], 6, 0),
        ("verifiers-0.4/half", "correct", "half", 0.5, 6, 0),
        ("verifiers-0.4/broken/traces.jsonl", "resolved", "broken", 1.0, 5, 2),
        ("rllm/half", "resolved", "solver__half", LOGS["rllm/half/results.json"]["score"], 6, 0),
    ],
)
def test_a_log_has_the_mean_that_its_program_printed(
    tmp_path: Path, source: str, metric: str, policy: str, mean: float, tasks: int, void: int
) -> None:
    outcomes = read_policy(f"{write_logs(tmp_path)}/{source}", metric)
    assert (outcomes.name, len(outcomes.values), outcomes.void) == (policy, tasks, void)
    assert fmean(map(fmean, outcomes.values.values())) == pytest.approx(mean)


def test_logs_of_different_programs_are_compared_by_the_ids_of_their_tasks(tmp_path: Path) -> None:
    folder = write_logs(tmp_path)
    sources = ["inspect/half.eval", "inspect/half.json", "verifiers-0.4/half", "rllm/half"]
    ids = {f"me__r{at // 2}-{at}": (float(at % 2 == 0),) * 2 for at in range(6)}
    assert [dict(sorted(read_policy(f"{folder}/{source}").values.items())) for source in sources] == [ids] * 4
    found = answer_comparison([f"{folder}/{source}" for source in sources], ComparisonOptions()).numbers["comparisons"]
    assert [each["change"]["value"] for each in found] == [0, 0, 0] and found[0]["clusters"] == 3


HALF, ORACLE = "inspect/half.eval", "harbor/oracle/t0__QKEyWKq/result.json"


@pytest.mark.parametrize(
    ("source", "change", "message"),
    [
        (
            "inspect/error.eval",
            lambda logs: None,
            "the status 'error', not 'success': RuntimeError('sandbox went away')",
        ),
        (HALF, lambda logs: logs[HALF].pop("header.json"), "the status 'started'"),
        (HALF, lambda logs: logs[HALF]["header.json"].update(invalidated=True), "has invalidated samples"),
        (HALF, lambda logs: logs[HALF]["summaries.json"].pop(), "has 11 of 12 samples"),
        (HALF, lambda logs: logs[HALF]["summaries.json"][0].pop("id"), "has no field 'id'"),
        (HALF, lambda logs: logs.update({HALF: "PK"}), "cannot be read"),
        (HALF, lambda logs: logs.update({HALF: None}), "does not exist"),
        (
            "inspect/half.json",
            lambda logs: logs.update({"inspect/half.json": '{\n"version": 2,'}),
            "is not read as JSON",
        ),
        ("inspect/graded.eval", lambda logs: None, "sample me__r0-1, epoch 1 has no 'resolved' that is true or false"),
        ("inspect/two.eval", lambda logs: None, "no 'resolved' that is true or false: it is null"),
        ("harbor/both", lambda logs: None, "holds 2 policies"),
        ("harbor/oracle", lambda logs: logs.update({ORACLE: None}), "has 7 of 8 trials"),
        ("harbor/oracle", lambda logs: logs[ORACLE].update(verifier_result=None), "neither reward nor exception"),
        ("verifiers-0.1/half", lambda logs: logs["verifiers-0.1/half/results.jsonl"].pop(), "has 11 of 12 rollouts"),
        (
            "verifiers-0.4/half",
            lambda logs: logs["verifiers-0.4/half/traces.jsonl"].pop(),
            "has 1 of 2 rollouts of me__r2-",
        ),
        (
            "verifiers-0.4/half",
            lambda logs: logs["verifiers-0.4/half/traces.jsonl"][0].update(traces=[1]),
            "is not as its",
        ),
        ("rllm/half", lambda logs: logs["rllm/half/results.json"]["items"].pop(), "has 11 of 12 items"),
        ("rllm/half", lambda logs: logs["rllm/half/results.json"]["items"][3].pop("reward"), "no field 'reward'"),
    ],
)
def test_incomplete_logs_are_refused(
    tmp_path: Path, source: str, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        read_policy(f"{write_logs(tmp_path, change)}/{source}")
    assert caught.value.fix


def test_tasks_of_a_log_without_a_score_leave_the_others_unresolved(tmp_path: Path) -> None:
    def change(logs: dict[str, Any]) -> None:
        for sample in logs[HALF]["summaries.json"]:
            sample["scores"]["includes"]["value"] = float("nan")

    folder = write_logs(tmp_path, change)
    (folder / "ids.txt").write_text("other")
    outcomes = read_outcomes(f"{folder}/{HALF}", tasks_file=folder / "ids.txt")
    assert isinstance(outcomes, Outcomes) and outcomes.void and outcomes.values == {"other": (0.0,)}


def test_an_unscored_sample_is_void_and_other_data_sets_are_refused(tmp_path: Path) -> None:
    def change(logs: dict[str, Any]) -> None:
        logs[HALF]["summaries.json"][1]["scores"]["includes"]["value"] = float("nan")
        logs["inspect/half.json"]["eval"]["dataset"]["name"] = "other"

    folder = write_logs(tmp_path, change)
    outcomes = read_policy(f"{folder}/{HALF}")
    assert outcomes.void == 1 and [*outcomes.values["me__r0-1"]] == [0.0]
    with pytest.raises(UsageError, match=re.escape("inspect_ai.dataset tiny against other")):
        answer_comparison([f"{folder}/{HALF}", f"{folder}/inspect/half.json"], ComparisonOptions())


def test_systems_in_the_folders_of_swe_bench(tmp_path: Path) -> None:
    """One of several that the harness ran, and one of the leaderboard, with the other files of its folder."""
    ids = [f"django__django-{at}" for at in range(4)]
    for system, solved in (("one", 1), ("two", 2)):
        for at, task in enumerate(ids):
            report = tmp_path / "logs" / system / task / "report.json"
            report.parent.mkdir(parents=True)
            report.write_text(json.dumps({task: {"resolved": at < solved}}))
    board = tmp_path / "evaluation/verified/three"
    (board / "results").mkdir(parents=True)
    (board / "results/results.json").write_text(json.dumps({"no_generation": [ids[3]], "resolved": ids[:3]}))
    (board / "results/resolved_by_repo.json").write_text(json.dumps({"django/django": {"resolved": 3, "total": 4}}))
    (tmp_path / "ids.txt").write_text("\n".join(ids))
    with pytest.raises(UsageError, match="holds 2 policies"):
        read_policy(f"{tmp_path}/logs")
    sides = [read_outcomes(each, tasks_file=tmp_path / "ids.txt") for each in (f"{tmp_path}/logs@two", str(board))]
    assert [each.name for each in sides] == ["two", "three"]
    assert [sum(v for (v,) in each.values.values()) for each in sides if isinstance(each, Outcomes)] == [2, 3]
    (tmp_path / "logs/two" / ids[0] / "report.json").rename(tmp_path / "logs/two" / ids[0] / "run_instance.log")
    with pytest.raises(UsageError, match="lists only resolved tasks"):
        read_policy(f"{tmp_path}/logs@two")
