"""`crrl compare` and the questions of arms: inputs, refused comparisons, claims, and output formats."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from scipy import stats as scipy_stats
from statsmodels.stats.contingency_tables import mcnemar as reference_mcnemar
from typer.testing import CliRunner, Result

from coderepairrl.cli import app
from coderepairrl.config import Config, to_toml
from coderepairrl.errors import UsageError
from coderepairrl.report import published
from coderepairrl.report.arms import ArmQuestion, Runs, answer_question, answer_questions
from coderepairrl.report.comparison import ComparisonOptions
from coderepairrl.report.outcomes import Outcomes, read_outcomes
from coderepairrl.report.verdict import Table, answer_comparison, orient_gain
from coderepairrl.runs import RunFolder
from coderepairrl.stats.intervals import Interval
from coderepairrl.stats.replicates import replicated_difference
from coderepairrl.types import Ending, Episode, Score, Task
from needs import need

PAIRS = Path(__file__).parents[2].parent / "shared" / "data" / "pairs" / "swebench_pairs.jsonl.gz"
NAMES = [f"task{at}" for at in range(40)]


def write_chosen_pairs(tmp_path: Path) -> Path:
    """Write the pairs of the part ``choose``, the only ones that tests may use."""
    need(PAIRS.exists(), f"{PAIRS} is missing")
    lines = gzip.decompress(PAIRS.read_bytes()).splitlines()
    rows = [line for line in lines if json.loads(line)["part"] == "choose"]
    path = tmp_path / "chosen.jsonl"
    path.write_bytes(b"\n".join(rows))
    return path


def crrl(*words: object) -> Result:
    return CliRunner().invoke(app, ["compare", *map(str, words)])


def compare_as_json(*words: object) -> dict[str, Any]:
    done = crrl(*words, "--json")
    assert done.exit_code == 0, done
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1], parse_constant=pytest.fail)
    return found


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_outcomes(path: Path, solved: Sequence[object], **more: Any) -> Path:
    """A task for each of `solved`, four in a repository."""
    rows = ({"instance_id": f"me__r{at // 4}-{at}", "resolved": bool(own), **more} for at, own in enumerate(solved))
    return write_rows(path, rows)


class Run:
    """A run folder with evaluations, through the real `RunFolder`."""

    def __init__(
        self,
        path: Path,
        *,
        tasks: Iterable[Task] = (),
        rewards: Mapping[str, int] | None = None,
        conditions: Mapping[str, Any] | None = None,
        **sections: Any,
    ) -> None:
        config = Config.model_validate({"run": {"name": path.name}, "reward": {"tests": 1.0}, **sections})
        self.folder = RunFolder(path)
        about = {"name": path.name, "rewards": rewards or {"tests": 1}, "conditions": conditions}
        self.folder.create(to_toml(config), about)
        self.folder.add_tasks(tasks or [Task(name, "p", "python", "git:u@1", b"") for name in NAMES])

    def evaluated(self, name: str, solved: Mapping[str, Sequence[float | None]], score: str = "tests") -> Run:
        """Attempts by task; None is a void one."""
        step = int(name.rpartition("-")[2])
        self.folder.write_episodes(
            name,
            [
                Episode(
                    f"{task}-{attempt}", task, "eval", step, task, attempt,
                    Ending.VOID if value is None else Ending.DONE,
                    scores=() if value is None else (Score(score, value),), repository=f"own/r{task[-1]}",
                )
                for task, values in solved.items()
                for attempt, value in enumerate(values)
            ],
        )  # fmt: skip
        return self

    @property
    def path(self) -> Path:
        return self.folder.path


def repeat_value(value: float) -> dict[str, Sequence[float | None]]:
    return {name: [value] for name in NAMES}


# -- real systems on the same issues


def test_real_systems_are_compared_as_scipy_and_statsmodels_do(tmp_path: Path) -> None:
    file = write_chosen_pairs(tmp_path)
    names = "sweagent-gpt4_cost_2_1", "20241117_moatless_claude_3_5_sonnet_20241022"
    done = crrl(*(f"{file}@{name}" for name in names))
    assert done.exit_code != 0 and isinstance(done.exception, UsageError)
    assert "lacks" in str(done.exception) and "--common" in done.exception.fix
    found = compare_as_json(*(f"{file}@{name}" for name in names), "--common")
    [pair] = found["comparisons"]
    sides: list[dict[str, bool]] = [{}, {}]
    for line in file.read_text().splitlines():
        row = json.loads(line)
        if row["system"] in names:
            sides[names.index(row["system"])][row["instance_id"]] = row["resolved"]
    tasks = sides[0].keys() & sides[1].keys()
    table = [[sum(sides[0][t] == a and sides[1][t] == b for t in tasks) for b in (True, False)] for a in (True, False)]
    assert pair["mcnemar"]["exact"] == pytest.approx(reference_mcnemar(table).pvalue, rel=1e-9)
    assert pair["tasks"] == len(tasks) and pair["clusters"] == len({task.rpartition("-")[0] for task in tasks})
    gains = np.array([float(sides[1][task]) - sides[0][task] for task in tasks])
    assert pair["change"]["value"] == pytest.approx(gains.mean(), rel=1e-9)
    alone = compare_as_json(*(f"{file}@{name}" for name in names), "--common", "--cluster", "task")["comparisons"][0]
    assert alone["clusters"] == len(tasks)
    assert alone["p"] == pytest.approx(alone["mcnemar"]["exact"], abs=0.002) and pair["claimed"] and alone["claimed"]
    plain = scipy_stats.bootstrap((gains,), np.mean, rng=1, method="percentile").confidence_interval
    assert (alone["bootstrap"]["low"], alone["bootstrap"]["high"]) == pytest.approx(tuple(plain), abs=0.01)


def test_one_system_run_twice_is_no_difference_and_three_times_is_three_attempts(tmp_path: Path) -> None:
    file = write_chosen_pairs(tmp_path)
    runs = [f"{file}@autocoderover-gpt4_acr-run-{at}" for at in (1, 2, 3)]
    found = compare_as_json(*runs, "--common")
    assert [pair["claimed"] for pair in found["comparisons"]] == [False, False]
    assert all(pair["comparisons"] == 2 and pair["adjusted"] >= pair["p"] for pair in found["comparisons"])
    assert all(verdict.startswith("No difference can be claimed") for verdict in found["verdicts"])


# -- what is claimed


def test_a_difference_is_claimed_by_interval_and_test_together(tmp_path: Path) -> None:
    worse, better = write_outcomes(tmp_path / "a.jsonl", [0] * 40), write_outcomes(tmp_path / "b.jsonl", [1, 0] * 20)
    found = compare_as_json(worse, better)
    assert found["verdicts"][0].startswith("b is above a on resolved: +50.0 points [")
    assert compare_as_json(better, worse)["verdicts"][0].startswith("a is below b on resolved: -50.0 points [")
    [pair] = found["comparisons"]
    assert pair["claimed"] and pair["unit"] == "repositories" and pair["clusters"] == 10
    assert pair["mcnemar"]["only_after"] == 20


def test_what_holds_for_these_tasks_need_not_hold_for_other_repositories(tmp_path: Path) -> None:
    """All gains are in one of ten repositories."""
    worse, better = (
        write_outcomes(tmp_path / "a.jsonl", [0] * 80),
        write_outcomes(tmp_path / "b.jsonl", [1] * 8 + [0] * 72),
    )
    [verdict] = compare_as_json(worse, better)["verdicts"]
    assert verdict.startswith("No difference can be claimed beyond these 80 tasks, for other repositories")
    assert "on these tasks themselves there is one (sign flips of tasks, p = 0.0" in verdict
    assert compare_as_json(worse, better, "--cluster", "task")["verdicts"][0].startswith("b is above a")


@pytest.mark.parametrize(("least", "state"), [(0, "shown"), (5, "shown"), (9, "not shown"), (50, "ruled out")])
def test_a_gain_with_a_margin_is_shown_by_the_whole_interval(tmp_path: Path, least: float, state: str) -> None:
    first = [at % 4 == 0 for at in range(400)]
    files = (
        write_outcomes(tmp_path / "a.jsonl", first),
        write_outcomes(tmp_path / "b.jsonl", [x or at % 10 == 1 for at, x in enumerate(first)]),
    )
    [verdict] = compare_as_json(*files, "--at-least", least)["verdicts"]
    assert verdict.endswith(f"A gain of more than {least} points is {state}.")
    for impossible in ("nan", "inf", "-1"):
        assert "a gain of" in str(crrl(*files, f"--at-least={impossible}").exception)


def test_a_gain_is_a_decrease_where_less_is_better_and_pairs_have_one_unit(tmp_path: Path) -> None:
    solved = {"a": 0.0, "b": 1.0, "c": -1.0}
    runs = [Run(tmp_path / name).evaluated("eval-00000", {t: [v] for t in NAMES}) for name, v in solved.items()]
    paths = [run.folder.path for run in runs]
    found = compare_as_json(*paths, "--metric", "reward", "--at-least", 0.5, "--all-pairs")
    assert {(each["share"], each["at_least"]) for each in found["comparisons"]} == {(False, 0.5)}
    before, after = Interval(0.2, 0.1, 0.3), Interval(-0.2, -0.3, -0.1)
    assert orient_gain("crash_per_patch", before) == after and orient_gain("resolved", before) == before


@pytest.mark.parametrize("count", [1, 2, 30])
@pytest.mark.parametrize(("a", "b"), [(1, 1), (0, 1)])
def test_outcomes_that_never_vary_have_intervals_of_some_width_or_none(
    tmp_path: Path, a: int, b: int, count: int
) -> None:
    files = write_outcomes(tmp_path / "a.jsonl", [a] * count), write_outcomes(tmp_path / "b.jsonl", [b] * count)
    for options in ((), ("--cluster", "task")):
        [pair] = compare_as_json(*files, *options)["comparisons"]  # parsing rejects NaN
        for name in ("early", "late", "change", "bootstrap", "d", "smallest_shown"):
            if found := pair[name]:
                assert (found["low"] is None and found["high"] is None) or found["low"] < found["high"]
        assert pair["claimed"] == (a != b and pair["clusters"] >= 6)
        text = crrl(*files, *options).stdout
        assert "nan" not in text and (count > 1 or "Nothing can be claimed" in text)


def test_parts_of_the_tasks_and_all_pairs_of_policies(tmp_path: Path) -> None:
    """Gains in one repository and losses in another cancel, and the parts show both; p-values are corrected."""
    sides = [[0, 0, 0, 0, 1, 1, 1, 1] * 2, [1, 1, 1, 1, 0, 0, 0, 0] * 2, [0] * 16]
    files = [
        write_rows(
            tmp_path / f"{name}.jsonl",
            (
                {"instance_id": f"t{at}", "resolved": bool(own), "repository": f"r{at // 4 % 2}", "language": "c"}
                for at, own in enumerate(solved)
            ),
        )
        for name, solved in zip("abc", sides, strict=True)
    ]
    [pair] = compare_as_json(*files[:2])["comparisons"]
    assert pair["change"]["value"] == 0 and not pair["claimed"]
    assert [(part["name"], part["tasks"], part["change"]["value"]) for part in pair["parts"]] == [
        ("repository r0", 8, 1.0), ("repository r1", 8, -1.0),
    ]  # fmt: skip
    assert [part["p"] for part in pair["parts"]] == [2 * 2 / 2**8] * 2, "eight flips, corrected for two parts"
    assert "parts of the tasks; p of sign flips, corrected for 2 parts (Holm)" in crrl(*files[:2]).stdout
    found = compare_as_json(*files, "--all-pairs")["comparisons"]
    assert [(each["before"], each["after"], each["comparisons"]) for each in found] == [
        ("a", "b", 3), ("a", "c", 3), ("b", "c", 3),
    ]  # fmt: skip
    assert len(compare_as_json(*files)["comparisons"]) == 2
    with pytest.raises(UsageError, match="a count holds only the number"):
        answer_comparison(["1/2", "1/2"], ComparisonOptions(pairs=True))


def test_curves_go_as_far_as_the_attempts(tmp_path: Path) -> None:
    """The trained policy always solves half of the tasks, the base each at every third attempt."""
    base = Run(tmp_path / "base").evaluated("eval-00000", {n: [1.0, 0.0, 0.0, 0.0, 1.0, 0.0] for n in NAMES})
    mine = Run(tmp_path / "mine").evaluated("eval-00000", {n: [float(at % 2)] * 6 for at, n in enumerate(NAMES)})
    found = compare_as_json(base.path, mine.path, "--cluster", "task")
    points = found["comparisons"][0]["pass_at"]
    assert [point["k"] for point in points] == [1, 2, 4, 6]
    assert [point["before"]["value"] for point in points] == pytest.approx([1 / 3, 1 - 6 / 15, 1 - 1 / 15, 1])
    assert {point["after"]["value"] for point in points} == {0.5}
    assert found["verdicts"][1].startswith("pass@k: base solves within 6 attempts what mine does not: +16.7 points")
    steady = Run(tmp_path / "steady").evaluated("eval-00000", {n: [1.0] * 5 + [0.0] for n in NAMES})
    verdict = compare_as_json(base.path, steady.path, "--cluster", "task")["verdicts"][1]
    assert verdict.startswith("pass@k: steady is more reliable in a single attempt, and no new skill is shown")
    single = Run(tmp_path / "single").evaluated("eval-00000", repeat_value(0))
    assert compare_as_json(base.path, single.path)["comparisons"][0]["pass_at"] == []


# -- what is read


def test_the_last_evaluation_of_a_run_or_the_one_that_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    for step, name in ((0, "eval"), (10, "eval"), (10, "greedy")):
        run.evaluated(f"{name}-{step:05d}", repeat_value(step / 10))
    values = {
        which: read_outcomes(f"{run.path}{which}") for which in ("", "@0", "@eval-00000", "@eval", "@greedy", "@10")
    }
    assert all(isinstance(each, Outcomes) for each in values.values())
    first = {which: each.values["task0"] for which, each in values.items() if isinstance(each, Outcomes)}
    assert first == {"": (1,), "@0": (0,), "@eval-00000": (0,), "@eval": (1,), "@greedy": (1,), "@10": (1,)}
    assert compare_as_json(f"{run.path}@0", run.path)["comparisons"][0]["claimed"]
    for which, fix in (("@5", "eval-00000"), ("@greedy-0010", "did you mean 'greedy-00010'?")):
        with pytest.raises(UsageError) as caught:
            read_outcomes(f"{run.path}{which}")
        assert fix in caught.value.fix


def test_repeated_runs_with_commas_are_attempts_of_one_policy(tmp_path: Path) -> None:
    files = [write_outcomes(tmp_path / f"{name}.jsonl", [at == 0, 1, 0, 1] * 4) for at, name in enumerate("abc")]
    found = read_outcomes(",".join(map(str, files)))
    assert isinstance(found, Outcomes) and found.values["me__r0-0"] == (1, 0, 0)
    write_outcomes(files[2], [1])
    with pytest.raises(UsageError, match="not attempts of one evaluation"):
        read_outcomes(",".join(map(str, files)))


def test_reports_of_the_harness(tmp_path: Path) -> None:
    """Its summary, its reports on single instances, and a leaderboard's list of those that were resolved."""
    ids = [f"django__django-{at}" for at in range(8)]
    summary = tmp_path / "summary.json"
    summary.write_text(json.dumps({
        "total_instances": 8, "submitted_ids": ids[:7], "incomplete_ids": ids[7:], "resolved_ids": ids[:3],
        "unresolved_ids": ids[3:6], "empty_patch_ids": [ids[6]], "schema_version": 2,
    }))  # fmt: skip
    single = tmp_path / "single"
    for at, task in enumerate(ids):
        (single / task).mkdir(parents=True)
        (single / task / "report.json").write_text(json.dumps({task: {"patch_is_None": False, "resolved": at < 3}}))
    board = tmp_path / "results.json"
    board.write_text(json.dumps({"no_generation": [], "no_logs": [], "resolved": ids[:3]}))
    asked = tmp_path / "ids.txt"
    asked.write_text("\n".join(ids))
    sides = [read_outcomes(str(summary)), read_outcomes(str(single)), read_outcomes(str(board), tasks_file=asked)]
    expected = {task: (float(at < 3),) for at, task in enumerate(ids)}
    for side in sides:
        assert isinstance(side, Outcomes)
        assert dict(side.values) == expected and set(side.repositories.values()) == {"django/django"}
    with pytest.raises(UsageError, match="lists only resolved tasks") as caught:
        read_outcomes(str(board))
    assert "--tasks" in caught.value.fix


# -- what is refused


def test_other_tasks_limits_contents_and_versions_are_refused_with_the_difference(tmp_path: Path) -> None:
    base = Run(tmp_path / "base").evaluated("eval-00000", repeat_value(0))
    fewer = Run(tmp_path / "fewer").evaluated("eval-00000", {name: [1.0] for name in NAMES[:30]})
    void = Run(tmp_path / "void").evaluated("eval-00000", repeat_value(1) | {"task3": [None]})
    longer = Run(tmp_path / "longer", rollout={"calls": 99}).evaluated("eval-00000", repeat_value(1))
    newer = Run(tmp_path / "newer", rewards={"tests": 2}).evaluated("eval-00000", repeat_value(1))
    changed = [Task(name, "p" if name != "task7" else "q", "python", "git:u@1", b"") for name in NAMES]
    edited = Run(tmp_path / "edited", tasks=changed).evaluated("eval-00000", repeat_value(1))
    for other, message, fix in (
        (
            fewer,
            "fewer lacks 10 tasks: task30, task31, task32, task33 and 6 more",
            "compare the 30 that all have: --common",
        ),
        (void, "void lacks 1 task: task3 (no attempt has resolved)", "compare the 39 that all have: --common"),
        (edited, "1 tasks are not the same in all: task7", "compare the 39 that all have: --common"),
        (longer, "different limits: rollout.calls 30 against 99", "--other-conditions"),
        (newer, "different versions of a reward: tests 1 against 2", "same version"),
    ):
        with pytest.raises(UsageError) as caught:
            answer_comparison([str(base.path), str(other.path)], ComparisonOptions())
        assert message in str(caught.value)
        assert fix in caught.value.fix
    assert compare_as_json(base.path, fewer.path, "--common")["comparisons"][0]["tasks"] == 30
    assert compare_as_json(base.path, edited.path, "--common")["comparisons"][0]["tasks"] == 39
    found = compare_as_json(base.path, longer.path, "--other-conditions")
    assert found["settings"]["rollout.calls"] == [30, 99]
    assert "1 attempt void" in compare_as_json(base.path, void.path, "--common")["notes"][0]


def test_environments_and_sandboxes_of_other_kinds_digests_and_limits_are_refused(tmp_path: Path) -> None:
    def run(name: str, kind: str = "image", digest: str = "1", memory: int = 1) -> Path:
        environments = [{"kind": kind, "name": "django", "digest": digest, "tasks": 40}]
        about = {"eval": {"environments": environments, "sandboxes": [{"name": "bwrap", "memory": memory}]}}
        return Run(tmp_path / name, conditions=about).evaluated("eval-00000", repeat_value(1)).path

    base = run("base")
    for other, message in (
        (run("kind", kind="venv"), "different environments: kinds of environment image against venv"),
        (run("digest", digest="2"), "different environments: environment django 1 against 2"),
        (run("memory", memory=2), "different limits: sandbox memory 1 against 2"),
    ):
        with pytest.raises(UsageError, match=message):
            answer_comparison([str(base), str(other)], ComparisonOptions())
        assert len(compare_as_json(base, other, "--other-conditions")["settings"]) == 1
    assert compare_as_json(base, run("same"))["comparisons"][0]["tasks"] == 40


def test_limits_are_those_that_an_evaluation_had_and_not_those_of_a_later_resume(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", rollout={"calls": 50})
    run.evaluated("eval-00000", repeat_value(0)).evaluated("eval-00010", repeat_value(1))
    log = run.folder.writer()
    log.append("change", step=5, key="rollout.calls", old=30, new=50)
    log.close()
    limits = {}
    for step in (0, 10):
        found = read_outcomes(f"{run.path}@{step}")
        assert isinstance(found, Outcomes) and found.limits is not None
        limits[step] = found.limits["rollout.calls"]
    assert limits == {0: 30, 10: 50}
    with pytest.raises(UsageError, match=r"rollout.calls 30 against 50"):
        answer_comparison([f"{run.path}@0", str(run.path)], ComparisonOptions())


def test_where_a_task_lies_on_this_machine_makes_it_no_other_task(tmp_path: Path) -> None:
    task = Task("task0", "p", "python", "dir:/here", b"", environment="venv:/here")
    sides = [
        Run(tmp_path / name, tasks=[replace(task, workspace=f"dir:/{name}", environment=f"venv:/{name}")])
        .evaluated("eval-00000", {"task0": [1.0]})
        for name in "ab"
    ]  # fmt: skip
    assert compare_as_json(*(side.path for side in sides))["comparisons"][0]["tasks"] == 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "is empty"),
        ('{"instance_id": "a", "resolved": true}\n{"instance_id": "b", "res', "bad.jsonl, line 2: not read as JSON"),
        ('{"resolved": true}\n', "bad.jsonl:1 names no task"),
        ('{"instance_id": "a"}\n', "has no 'resolved' that is true or false: it is null"),
        ('{"instance_id": "a", "resolved": NaN}\n', "has no 'resolved'"),
        ('{"instance_id": "a", "resolved": 0.5}\n', "has no 'resolved'"),
        ('{"id": "a", "resolved": true}\n{"id": "a", "resolved": false}\n', "bad.jsonl:2 repeats a"),
        ('{"id": "a", "model": "x", "resolved": 1}\n{"id": "a", "model": "y", "resolved": 1}\n', "holds 2 policies"),
        ('{"instance_id": "a", "resolved": true, "resolved": false}\n', "'resolved' twice in one object"),
        ("[" * 200_000, "nested too deep"),
        ('{"resolved_ids": ["a"], "unresolved_ids": 5}', "unresolved_ids is not a list of ids"),
        ('{"resolved_ids": ["a"], "unresolved_ids": ["a", "b"]}', "a is among those resolved and those unresolved"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, lines: str, message: str) -> None:
    (tmp_path / "bad.jsonl").write_text(lines)
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        read_outcomes(str(tmp_path / "bad.jsonl"))
    assert caught.value.fix


def test_impossible_questions_are_refused(tmp_path: Path) -> None:
    counts = ["31/500", "36/500"]
    files = [
        str(write_outcomes(tmp_path / f"{name}.jsonl", [0, 1] * 10, cost=at + 0.5)) for at, name in enumerate("ab")
    ]
    other = str(write_rows(tmp_path / "other.jsonl", [{"id": "x", "resolved": 1}]))
    for policies, question, message in (
        (counts[:1], ComparisonOptions(), "takes two policies"),
        ([], ComparisonOptions(), "takes two policies"),
        (["31/500", "36/400"], ComparisonOptions(), "not of the same tasks"),
        (["31/0", "36/500"], ComparisonOptions(), "not a number of solved tasks"),
        (["501/500", "36/500"], ComparisonOptions(), "not a number of solved tasks"),
        (counts, ComparisonOptions(pass_at="1"), "only the number of resolved tasks"),
        (counts, ComparisonOptions(power=1.0), "power of 1"),
        (["36/500", "published:swe-rle"], ComparisonOptions(), "swe-rle"),
        (files, ComparisonOptions(pass_at="1,2"), "pass@2 cannot be estimated: a task has 1 attempt"),
        (files, ComparisonOptions(pass_at="0"), "pass@0 cannot be estimated"),
        (files, ComparisonOptions(pass_at="two"), "not a list of numbers"),
        (files, ComparisonOptions(metric="cost", pass_at="1"), "pass@k needs values of 0 or 1"),
        (files, ComparisonOptions(metric="speed"), "has no 'speed' that is a number"),
        ([files[0], other], ComparisonOptions(common=True), "no task in common"),
    ):
        with pytest.raises(UsageError, match=re.escape(message)) as caught:
            answer_comparison(policies, question)
        assert caught.value.fix


# -- scores that are not shares, and counts without tasks


def test_any_score_is_a_metric(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    sides = [
        Run(tmp_path / name)
        .evaluated("eval-00000", {task: [float(rng.normal(c, 1))] for task in NAMES}, "cost")
        .path
        for name, c in (("a", -1.0), ("b", 1.0))
    ]  # fmt: skip
    found = compare_as_json(*sides, "--metric", "cost")
    assert found["verdicts"][0].startswith("b is above a on cost: +") and "points" not in found["verdicts"][0]
    assert not found["comparisons"][0]["share"]
    with pytest.raises(UsageError, match="no checks were run"):
        read_outcomes(str(sides[0]))


def test_counts_alone_are_compared_by_what_could_be() -> None:
    [verdict] = compare_as_json("31/500", "36/500")["verdicts"]
    assert verdict.startswith("No difference can be claimed: 36/500 - 31/500 = +1.0 points [-2.3, 4.3]")
    assert "p from 0.0625 to 0.625" in verdict and "could have shown is [1.6, 4.6] points" in verdict
    assert compare_as_json("31/500", "131/500")["comparisons"][0]["claimed"]
    [depends] = compare_as_json("31/500", "45/500")["verdicts"]
    assert depends.startswith("Whether there is a difference depends on which tasks were solved")


def test_published_numbers_are_those_of_their_counts() -> None:
    for each in published.read_published().values():
        assert (each.percent is None) != (each.similarity is None) and each.source, each.name
        if each.percent is not None:
            assert each.solved is not None and abs(100 * each.solved / each.tasks - each.percent) < 0.06, each.name
    said = crrl("36/500", "published:swe-rl").stdout
    assert f"({published.MARK})" in said and "compare neither with each other nor with ours" in said


# -- how it is printed


def test_every_number_has_an_interval_and_a_method_in_every_format(tmp_path: Path) -> None:
    files = (
        write_outcomes(tmp_path / "my_a.jsonl", [0, 1] * 20),
        write_outcomes(tmp_path / "b.jsonl", [1, 0, 0, 1] * 10),
    )
    text = crrl(*files).stdout
    assert text.startswith("No difference can be claimed: b - my_a = +0.0 points [-")
    rows = text.split("\n\n")[1].splitlines()[2:]
    for row in rows:
        name, value, method = re.split(r"  +", row.strip(), maxsplit=2)
        assert method and ("[" in value or name.startswith("p")), row
    markdown = crrl(*files, "--format", "markdown").stdout
    assert markdown.count("\n|---|---|---|\n") == 1 and "| difference | +0.0 points [" in markdown
    latex = crrl(*files, "--format", "latex").stdout
    assert (latex.count(r"\begin{tabular}{lll}"), latex.count(r"\end{tabular}")) == (1, 2), (
        "the second: parts of the tasks"
    )
    assert "points [$-$" in latex and re.search(r"[ \[]-\d", latex) is None, "a minus, no hyphen"
    assert r"my\_a" in latex and re.search(r"(?<!\\)[%_#]", latex.replace(r"\begin", "")) is None
    assert json.loads(crrl(*files, "--format", "json").stdout) == compare_as_json(*files)
    assert crrl(*files, "--format", "html").exception is not None


TASKS = [f"mutants/f{at // 2}/swap-{at}-q" for at in range(24)]
QUESTION = ArmQuestion("RQ2", "Are more bugs repaired?", ("base", "rl", "other"), "resolved", "eval")
ARMS = Table("arms", ("arm",), [("base",), ("rl",), ("other",)])
Solves = Callable[[int, int], float]


def write_evaluation(path: Path, solves: Solves, seed: int, *, version: int = 1, tasks: int = 24) -> Path:
    """Write a finished evaluation; `solves` gets seed and task number."""
    run = Run(path, run={"name": path.name, "seed": seed}, rewards={"tests": version})
    episode = Episode("", "", "eval", 0, "", 0, Ending.DONE, patch=b"diff")
    run.folder.write_episodes(
        "eval-00000",
        [
            replace(episode, id=f"e{at}", task_id=task, group=f"g{at}", scores=(Score("tests", solves(seed, at)),))
            for at, task in enumerate(TASKS[:tasks])
        ],
    )
    return path


def write_grid(tmp_path: Path, seeds: int = 3) -> dict[str, dict[int, Path]]:
    """A baseline that repairs a quarter of the tasks, an arm that repairs nearly all, and one that is no better."""
    random = Random(0)
    arms: dict[str, Solves] = {
        "base": lambda seed, at: float(at % 4 == 0),
        "rl": lambda seed, at: float(at % 8 != 1),
        "other": lambda seed, at: float(random.random() < 0.25),
    }
    return {
        arm: {seed: write_evaluation(tmp_path / f"{arm}-{seed}", solves, seed) for seed in range(seeds)}
        for arm, solves in arms.items()
    }


def describe_answer(runs: Runs, seeds: int = 3, question: ArmQuestion = QUESTION) -> str:
    return "\n".join(answer_questions([question], runs, range(seeds), ARMS).verdicts)


def test_a_difference_is_claimed_or_has_the_smallest_that_could_be_shown(tmp_path: Path) -> None:
    runs = write_grid(tmp_path)
    found = answer_question(QUESTION, runs)
    assert {arm: mean.interval.value for arm, mean in found.means.items()} == {
        "base": 0.25,
        "rl": 0.875,
        "other": pytest.approx(0.25, abs=0.15),
    }
    rows = [[float(at % 4 == 0) for at in range(24)]] * 3, [[float(at % 8 != 1) for at in range(24)]] * 3
    order = sorted(range(24), key=lambda at: TASKS[at])
    sides = [[[row[at] for at in order] for row in side] for side in rows]
    clusters = [TASKS[at].rpartition("/")[0] for at in order]
    expected = replicated_difference(sides[0], sides[1], clusters, share=True)
    rl, other = found.contrasts
    assert rl.change == expected and rl.claimed and not other.claimed
    assert rl.adjusted == pytest.approx(2 * expected.p), "Holm, of two"
    text = describe_answer(runs)
    assert text.startswith("RQ2: Are more bugs repaired? rl is above base on resolved: +62.5 points [")
    assert "3 seeds x 24 tasks. Too small to tell: other - base" in text
    assert "the smallest difference that 3 seeds x 24 tasks could have shown is" in text


def test_a_criterion_is_met_if_each_of_its_gains_is_shown(tmp_path: Path) -> None:
    runs = write_grid(tmp_path)
    repairs = replace(QUESTION, name="repairs", arms=("base", "rl"), at_least=5.0)
    anything = replace(QUESTION, name="anything", arms=("base", "other"), at_least=0.0)
    late = replace(QUESTION, name="late", arms=("base", "missing"), at_least=0.0)
    criteria = {"one": ["repairs"], "both": ["repairs", "anything"], "all": ["repairs", "late"]}
    verdicts = answer_questions([repairs, anything, late], runs, range(3), ARMS, (), criteria).verdicts
    assert "A gain of more than 5 points is shown." in verdicts[0]
    assert verdicts[-3:] == [
        "one: the criterion is met: repairs shown.",
        "both: the criterion is not met: repairs shown, anything not shown.",
        "all: the criterion is not known yet: repairs shown, late not known yet.",
    ]
    criteria = {"never": ["anything", "late"]}
    assert (
        "the criterion is not met"
        in answer_questions([anything, late], runs, range(3), ARMS, (), criteria).verdicts[-1]
    )
    fewer = answer_questions([repairs], runs, range(4), ARMS, (), {"one": ["repairs"]})
    assert fewer.verdicts[-1] == "one: the criterion is not known yet: repairs not known yet."
    waste = replace(repairs, metric="empty_patches", at_least=0.0)
    assert (
        "A decrease of more than 0 points is not shown." in answer_questions([waste], runs, range(3), ARMS).verdicts[0]
    )


def test_a_count_between_0_and_1_is_no_share(tmp_path: Path) -> None:
    assert not answer_question(replace(QUESTION, metric="changed_files"), write_grid(tmp_path, seeds=1)).share


def test_missing_runs_are_named_and_make_no_other_difference_more_certain(tmp_path: Path) -> None:
    runs = write_grid(tmp_path)
    runs["rl"][2] = write_evaluation(tmp_path / "short", lambda seed, at: 1.0, 2, tasks=20)
    found = answer_question(QUESTION, runs)
    assert (found.means["base"].tasks, found.notes) == (20, ["RQ2: 4 tasks left out: some run has no value for them."])
    assert "Not known yet" in describe_answer({"rl": runs["rl"]}), "nothing without the baseline"
    del runs["rl"][1], runs["other"]
    text = describe_answer(runs)
    assert "2 seeds x 20 tasks (of 3 seeds)" in text
    assert text.endswith("Not known yet: no seed of base and other is finished.")
    [rl] = answer_question(QUESTION, runs).contrasts
    assert rl.adjusted == pytest.approx(2 * (rl.change.p or 0)), "an arm that failed makes no other one more certain"


def test_incomparable_arms_get_a_reason_instead_of_an_answer(tmp_path: Path) -> None:
    runs = write_grid(tmp_path)
    runs["rl"][0] = write_evaluation(tmp_path / "judged", lambda seed, at: 1.0, 0, version=2)
    assert (
        "cannot be answered: base, seed 0 and rl, seed 0 were judged by different versions of a reward"
        in describe_answer(runs)
    )
    assert "does not measure 'speed'" in describe_answer(runs, question=replace(QUESTION, metric="speed"))
    assert "no single evaluation 'greedy'" in describe_answer(runs, question=replace(QUESTION, evaluation="greedy"))
