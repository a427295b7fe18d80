"""Pairs of vulnerable and repaired functions: SVEN's real records, and rows of PrimeVul's published layouts."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from pathlib import Path
from random import Random
from typing import Any

import pytest

from coderepairrl.checks.task_source import examine_task_source
from coderepairrl.errors import ConfigError, TaskError
from coderepairrl.stats.intervals import cluster_tasks
from coderepairrl.tasks import make_source
from coderepairrl.tasks.vulnerabilities import (
    SAFE,
    VULNERABLE,
    WEAKNESSES,
    FunctionPair,
    group_connected,
    separate_pairs,
)
from coderepairrl.types import Task
from rewards.folder import DATA, bwrap

SVEN = DATA / "vuln_sven" / "sven_pairs.jsonl.gz"
real = pytest.mark.skipif(not SVEN.exists(), reason=f"{SVEN} is missing")


def load_sven(path: Path = SVEN, **options: Any) -> list[Task]:
    return list(make_source("sven", path=str(path), **options))


def pair_of(task: Task) -> str:
    return task.id.rpartition("/")[0]


# -- SVEN


@real
def test_sven_asks_the_same_pairs_in_three_ways(tmp_path: Path) -> None:
    """799 of 803 pairs, since four have equal sides; a pair, commit, function or text is in one split only."""
    weakness = load_sven()
    either = load_sven(ask="vulnerable")
    repair = load_sven(ask="repair", cache=str(tmp_path))
    assert len(weakness) == len(repair) == 799 and len(either) == 2 * 799
    assert Counter(task.split for task in weakness) == {"train": 570, "test": 229}
    assert len({task.answer for task in weakness}) == 9 and {task.answer for task in weakness} <= WEAKNESSES.keys()
    assert Counter(task.answer for task in either) == {VULNERABLE: 799, SAFE: 799}
    splits: defaultdict[str, set[str]] = defaultdict(set)
    for task in (*weakness, *either, *repair):
        splits[pair_of(task)].add(task.split)
    assert len(splits) == 799 and all(len(found) == 1 for found in splits.values())
    assert len({task.id for task in (*weakness, *either, *repair)}) == 4 * 799

    rows = {row["pair_id"]: row for row in map(json.loads, gzip.decompress(SVEN.read_bytes()).splitlines())}
    for column in ("commit_url", "func_vulnerable", "func_fixed"):
        where: defaultdict[str, set[str]] = defaultdict(set)
        for task in weakness:
            row = rows["sven-" + pair_of(task).removeprefix("sven/")]
            where[row[column]].add(task.split)
            assert row["split"] == "train" or task.split == "test"  # what was published as held out is
        assert all(len(found) == 1 for found in where.values()), column


@real
def test_answers_need_no_workspace_and_repairs_have_one(tmp_path: Path) -> None:
    for task in load_sven()[:40]:
        assert (task.kind, task.workspace, task.reference) == ("detect", "", b"")
        assert all(f"- {label}: " in task.prompt for label in ("CWE-22", "CWE-89", "CWE-125", "CWE-787"))
        assert "<answer>" in task.prompt and "<think>" in task.prompt
    assert "<think>" not in load_sven(form="answer")[0].prompt and "<answer>" not in load_sven(form="plain")[0].prompt
    for task in load_sven(ask="repair", cache=str(tmp_path))[:40]:
        assert task.kind == "vul_repair" and task.workspace.startswith("dir:") and task.reference and not task.answer
        assert "CWE-22 (path traversal" in task.prompt


@real
async def test_the_exam_of_task_sources(tmp_path: Path) -> None:
    for ask, limit in (("weakness", 0), ("vulnerable", 0), ("repair", 12)):
        source = make_source("sven", path=str(SVEN), ask=ask, cache=str(tmp_path))
        findings = await examine_task_source(source, bwrap(), limit=limit)
        assert len(findings) > 12 and [each for each in findings if not each.ok] == []


@real
def test_only_pairs_of_the_chosen_classes_are_tasks() -> None:
    found = load_sven(classes="CWE-125, CWE-0416")
    assert Counter(task.answer for task in found) == {"CWE-125": 144, "CWE-416": 61}
    assert "CWE-89" not in found[0].prompt
    with pytest.raises(ConfigError, match="'CWE-417' is not a known weakness") as unknown:
        load_sven(classes="CWE-125,CWE-417")
    assert "did you mean 'CWE-4" in unknown.value.fix
    with pytest.raises(TaskError, match="no pair has a weakness of CWE-362") as raised:
        load_sven(classes="CWE-362")
    assert "CWE-89 (204)" in raised.value.fix


# -- related pairs


def test_pairs_that_share_a_commit_or_a_function_are_held_out_together() -> None:
    assert group_connected(["ab", "c", "bd", "e", "dc"]) == [0, 0, 0, 3, 0]

    def pair(key: str, commit: str, function: str, split: str) -> FunctionPair:
        return FunctionPair(key, f"v{key}", f"f{key}", "CWE-20", "c", "a/b", commit, function, "a.c", split)

    linked = [pair("1", "x", "f", "train"), pair("2", "x", "g", "train"), pair("3", "y", "g", "valid")]
    other = pair("4", "z", "h", "train")
    assert [each.split for each in separate_pairs([*linked, other])] == ["valid"] * 3 + ["train"]
    assert [each.split for each in separate_pairs([pair("5", "z", "k", "test"), *linked, other])] == [
        *("test", "valid", "valid", "valid"),
        "test",
    ]


def test_both_versions_of_a_pair_are_one_observation() -> None:
    ids = ["sven/train-1/vulnerable", "sven/train-1/safe", "sven/train-2/safe", "other/train-1/safe"]
    assert len(set(cluster_tasks(dict.fromkeys(ids, "a/b")).values())) == 3


def test_a_held_out_share_splits_no_pair(tmp_path: Path) -> None:
    """The versions of a pair share most lines: training on one would give the other's answer away."""
    options = {"cache": str(tmp_path / "cache"), "select": {"holdout": 0.5}}
    splits = defaultdict[str, set[str]](set)
    for ask in ("vulnerable", "weakness", "repair"):
        for task in load_primevul(tmp_path / "rows", make_primevul_rows("hub"), ask=ask, **options):
            splits[task.id.rpartition("/")[0]].add(task.split)
    assert all(len(split) == 1 for split in splits.values())
    assert set.union(*splits.values()) == {"train", "test"}


# -- PrimeVul

CLASSES = ("CWE-20", "CWE-125", "CWE-416", "CWE-787")


def make_function(at: int, *, fixed: bool) -> str:
    check = f"  if (n > {at})\n    return 0;\n" if fixed else ""
    return f"static int read_{at}(const char *p, int n)\n{{\n  int i = {at};\n{check}  return p[n + i];\n}}"


def make_primevul_rows(layout: str, number: int = 24) -> list[dict[str, Any]]:
    """Rows as the layouts have them, the versions of a pair one after the other; two pairs are of one commit."""
    rows = []
    for at in range(number):
        for fixed in (False, True):
            row: dict[str, Any] = {"func": make_function(at, fixed=fixed), "cwe": [CLASSES[at % 4]]}
            if layout == "hub":
                row |= {"is_vulnerable": not fixed, "hash": f"h{at}", "cwe_description": "what it is"}
            else:
                row |= {"target": int(not fixed), "project": "gpac", "commit_id": f"c{at // 2}", "idx": 2 * at + fixed}
            if layout == "v0.1":
                row |= {"func_hash": str(1000 * at + fixed), "file_name": "read.cpp", "cve_desc": "..."}
            elif layout == "original":
                row |= {"hash": 1000 * at + fixed, "size": 7, "message": "fix"}
            rows.append(row)
    return rows


def write_splits(folder: Path, **splits: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    for split, rows in splits.items():
        file = folder / f"primevul_{split}_paired.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def load_primevul(folder: Path, rows: Any = None, **options: Any) -> list[Task]:
    """Load the pairs in `folder`, after writing `rows` of split ``train`` into it."""
    if rows is not None:
        write_splits(folder, train=rows)
    return list(make_source("primevul", path=str(folder), **options))


def list_contents(tasks: list[Task]) -> list[tuple[str, bytes, str]]:
    return sorted((task.prompt, task.reference, task.answer) for task in tasks)


@pytest.mark.parametrize(
    ("layout", "ask"), [("hub", "weakness"), ("original", "vulnerable"), ("v0.1", "repair"), ("hub", "repair")]
)
def test_pairs_stay_pairs_when_rows_are_shuffled(tmp_path: Path, layout: str, ask: str) -> None:
    """The original shuffled the rows and paired neighbours."""
    rows = make_primevul_rows(layout)
    options = {"ask": ask, "cache": str(tmp_path / "cache")}
    ordered = load_primevul(tmp_path / "a", rows, **options)
    for seed in range(3):
        shuffled = Random(seed).sample(rows, len(rows))
        assert any(one["func"].split("(")[0] != two["func"].split("(")[0]
                   for one, two in zip(shuffled[::2], shuffled[1::2], strict=True))  # fmt: skip
        found = load_primevul(tmp_path / "b", shuffled, **options)
        assert list_contents(found) == list_contents(ordered)
        assert {task.id for task in found} == {task.id for task in ordered}
    if ask == "repair":
        assert len(ordered) == 24
        for task in ordered:
            added = [line for line in task.reference.decode().splitlines()[3:] if line[:1] in "+-"]
            assert len(added) == 2 and all(line.startswith("+") for line in added)  # its own repair, no other's
    elif ask == "vulnerable":
        assert Counter(task.answer for task in ordered) == {VULNERABLE: 24, SAFE: 24}
        assert all(("if (n >" in task.prompt) == (task.answer == SAFE) for task in ordered)
    else:
        assert Counter(task.answer for task in ordered) == {"CWE-20": 6, "CWE-125": 6, "CWE-416": 6}
        assert all("if (n >" not in task.prompt and "- CWE-362: " in task.prompt for task in ordered)


def test_swapped_labels_are_refused_unless_inverted(tmp_path: Path) -> None:
    rows = [row | {"is_vulnerable": not row["is_vulnerable"]} for row in make_primevul_rows("hub")]
    folder = write_splits(tmp_path / "a", train=rows)
    with pytest.raises(TaskError, match="24 of 24 pairs the repaired function is the shorter one") as raised:
        load_primevul(folder)
    assert "inverted=true" in raised.value.fix
    right = load_primevul(tmp_path / "b", make_primevul_rows("hub"))
    assert list_contents(load_primevul(folder, inverted=True)) == list_contents(right)
    assert len(load_primevul(folder, inverted=False)) == len(right)


def test_splits_are_those_of_the_files_except_for_related_pairs(tmp_path: Path) -> None:
    rows = make_primevul_rows("v0.1")
    parts = {"train": rows[:30], "valid": rows[30:36], "test": rows[36:]}  # pairs 14 and 15 are of one commit
    found = load_primevul(write_splits(tmp_path / "a", **parts), ask="vulnerable")
    splits = {int(task.id.split("/")[1].rpartition("-")[2]) // 2: task.split for task in found}
    assert [splits[at] for at in range(24)] == ["train"] * 14 + ["valid"] * 4 + ["test"] * 6
    assert {task.language for task in found} == {"cpp"} and {task.repository for task in found} == {"gpac"}


def test_rows_without_a_label_are_left_out_and_unknown_ones_refused(tmp_path: Path) -> None:
    rows = make_primevul_rows("original", 4)
    for row, cwe in zip(rows, (["Other"], ["Other"], [], [], ["CWE-020", "CWE-787"], ["CWE-020"]), strict=False):
        row["cwe"] = cwe
    found = load_primevul(tmp_path / "a", rows)
    assert [task.answer for task in found] == ["CWE-20"]
    rows[0]["cwe"] = ["overflow"]
    with pytest.raises(TaskError, match=r"row 1 of .*'overflow' is not a label of a weakness"):
        load_primevul(tmp_path / "b", rows)


def test_rows_that_are_not_pairs_are_refused(tmp_path: Path) -> None:
    for layout in ("hub", "original"):
        with pytest.raises(TaskError, match="(1 vulnerable and 0|2 vulnerable and 1) repaired functions belong"):
            load_primevul(tmp_path / layout, make_primevul_rows(layout)[:-1])
    with pytest.raises(TaskError, match="neither 0 nor 1"):
        load_primevul(tmp_path / "a", [{"func": "f()", "target": 2, "hash": 1}])
    with pytest.raises(TaskError, match="no file of pairs"):
        load_primevul(tmp_path / "empty")
