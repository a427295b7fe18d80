"""Value of verified repairs as further references (docs/measurements/rewards.md).

    python benchmarks/references.py --pairs shared/data/pairs/swebench_pairs.jsonl.gz --golds shared/data/swebench
    python benchmarks/references.py --with runs/a runs/b runs/c --without runs/d runs/e runs/f
    PYTHONPATH=benchmarks crrl hello tasks.source=references:Refactored 'tasks.options={n=80}' eval.source=mutants ...

`--pairs`: on real predictions with known test outcomes, how well does similarity to the nearest of an issue's own
reference and *other* systems' passing repairs rank right above wrong attempts, against similarity to the reference
alone? Lines are JSON objects with ``instance_id``, ``system``, ``model_patch``, ``resolved`` and ``dataset``, whose
references are in ``--golds``.

`--with` and `--without`: finished runs with ``tasks.verified_references`` and without. Prints, for every evaluation,
the means of each side before and after training, all seeds pooled, and how much larger the change is with references:
paired by task, intervals clustered by function as for `make hello-bar`.

`Refactored` has the training tasks of `crrl hello` with references that also rename the function's variables. On the
unchanged tasks nearly all repairs of its policy equal the reference, so there would be no further references.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import gzip
import io
import json
import shutil
import subprocess
import tempfile
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from coderepairrl import config as configs
from coderepairrl import rewards, tasks
from coderepairrl.errors import UsageError, exit_on_error
from coderepairrl.rewards.text import TextReward
from coderepairrl.rewards.verified import Identity, compute_identity, explain_unfit
from coderepairrl.runs import open_run
from coderepairrl.stats.intervals import cluster_episodes, mean_interval, paired_difference
from coderepairrl.stats.measures import pair_measures
from coderepairrl.types import Task
from workshop.tiny.bar import SHOWN, Episodes, evaluations, pooled

GOLDS = {"lite": "swebench_lite", "verified": "swebench_verified", "full": "swebench_full_devin_sample"}
MOST = {0: "its reference", 1: "the nearest of it and one repair", 4: "of it and up to 4", 64: "of it and all"}
"""Table label by the most further references of an issue that are kept."""


class Attempt(NamedTuple):
    """A prediction whose outcome is known."""

    issue: str
    system: str
    patch: bytes
    resolved: bool


class Refactored:
    """Mutants whose reference repairs the bug and gives the function's parameters and variables other names.

    Raises what the source ``mutants`` raises.
    """

    name = "refactored"

    def __init__(self, n: int = 80, split: str = "train", quoted: float = 1.0) -> None:
        self._source = tasks.make_source("mutants", split=split, n=n, quoted=quoted)

    def prepare(self) -> None:
        """See `TaskSource.prepare`."""
        self._source.prepare()

    def __iter__(self) -> Iterator[Task]:
        for task in self._source:
            yield replace(task, reference=make_refactored_reference(task))


def make_refactored_reference(task: Task) -> bytes:
    """The reference of a mutant with all parameters and variables of the function renamed."""
    [file] = rewards.parse_patch(task.reference)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "repo", file.new)
        shutil.copytree(task.workspace.removeprefix("dir:"), Path(folder, "repo"))
        old = path.read_text("utf-8")
        subprocess.run(["git", "apply", "-"], input=task.reference, cwd=Path(folder, "repo"), check=True)
        new = rename_variables(path.read_text("utf-8"), file.blocks[0].at + 1)
    diff = difflib.unified_diff(old.splitlines(True), new.splitlines(True), f"a/{file.new}", f"b/{file.new}")
    return f"diff --git a/{file.new} b/{file.new}\n{''.join(diff)}".encode()


def rename_variables(source: str, line: int) -> str:
    """Rename parameters and variables of the function around `line`.

    >>> rename_variables("def f(x):\\n    y = x\\n    return y.x\\n", 2)
    'def f(x_1):\\n    y_1 = x_1\\n    return y_1.x\\n'
    """
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    [function] = [node for node in functions if node.lineno <= line <= (node.end_lineno or 0)]
    names = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    names |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    lines = source.splitlines(True)
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    for before, token in reversed(list(pairwise(tokens))):
        row, end = token.end
        inside = function.lineno <= row <= (function.end_lineno or 0)
        if inside and token.type == tokenize.NAME and token.string in names and before.string != ".":
            lines[row - 1] = f"{lines[row - 1][:end]}_1{lines[row - 1][end:]}"
    return "".join(lines)


def main() -> None:
    """Print the requested tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, nargs="+", default=[])
    parser.add_argument("--golds", type=Path, help="folder of the data sets that have the references")
    parser.add_argument("--reward", default="patch_edits")
    parser.add_argument("--with", dest="further", type=Path, nargs="+", default=[], metavar="RUN")
    parser.add_argument("--without", dest="alone", type=Path, nargs="+", default=[], metavar="RUN")
    options = parser.parse_args()
    if options.pairs:
        if options.golds is None:
            parser.error("--pairs needs --golds")
        print(ranking(*read(options.pairs, options.golds), options.reward))
    if options.further or options.alone:
        print(ablation(options.further, options.alone))


def read(paths: Sequence[Path], golds: Path) -> tuple[list[Attempt], dict[str, bytes]]:
    """Read the attempts, without duplicates, and the references of their issues."""
    references = {
        (name, row["instance_id"]): row["patch"].encode()
        for name, file in GOLDS.items()
        for row in _rows(golds / f"{file}.jsonl.gz")
    }
    attempts: dict[Attempt, None] = {}
    golds_by_issue: dict[str, bytes] = {}
    for row in (row for path in paths for row in _rows(path)):
        if row["resolved"] is None or not row["model_patch"]:
            continue
        golds_by_issue.setdefault(row["instance_id"], references[row["dataset"], row["instance_id"]])
        attempts[Attempt(row["instance_id"], row["system"], row["model_patch"].encode(), row["resolved"])] = None
    return list(attempts), golds_by_issue


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            yield from map(json.loads, file)
    except OSError as error:
        raise UsageError(f"{path}: {error}", fix="name a gzipped file of JSON lines") from error


def ranking(attempts: Sequence[Attempt], golds: Mapping[str, bytes], name: str) -> str:
    """Markdown: AUC within an issue by the references that attempts are compared with. Intervals resample issues."""
    [(reward, _)] = rewards.make_rewards(name)
    if not isinstance(reward, TextReward):
        raise UsageError(f"reward {name} does not compare two diffs", fix="name patch_edits or patch_lines")
    groups: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        groups.setdefault(attempt.issue, []).append(attempt)
    mixed = {issue: group for issue, group in groups.items() if len({each.resolved for each in group}) == 2}
    rankings = [within(reward, golds[issue], group) for issue, group in mixed.items()]
    lines = [
        f"`{name}`: {sum(map(len, mixed.values()))} patches for {len(mixed)} issues with right and wrong ones",
        "",
        "| compared with | issues | AUC within an issue | gain over the reference alone |",
        "|---|---|---|---|",
    ]
    for title, chosen in (("", rankings), ("; issues with any", [each for each in rankings if each.has_further])):
        names = [str(number) for number in range(len(chosen))]
        alone = [each.auc[0] for each in chosen]
        for most in MOST:
            values = [each.auc[most] for each in chosen]
            gain = str(paired_difference(alone, values, names, share=True)) if most else ""
            lines.append(
                f"| {MOST[most]}{title} | {len(chosen)} | {mean_interval(values, names, share=True)} | {gain} |"
            )
    return "\n".join(lines)


class Within(NamedTuple):
    """Ranking of the attempts at one issue."""

    auc: Mapping[int, float]
    """By the most further references: the share of (right, wrong) pairs ranked correctly, ties counting half."""
    has_further: bool
    """Whether any of these pairs has a further reference."""


def within(reward: TextReward, gold: bytes, group: Sequence[Attempt]) -> Within:
    """Rank the attempts at one issue. Both of a pair are compared with the same references, as in a training group: the
    issue's own, and passing repairs by systems of neither."""
    task = Task(group[0].issue, "", "python", "", gold)
    repairs: dict[Identity, Attempt] = {}
    by: dict[Identity, set[str]] = {}
    for each in group:
        if (
            each.resolved
            and not explain_unfit(task, each.patch)
            and (what := compute_identity(each.patch)) != compute_identity(gold)
        ):
            repairs.setdefault(what, each)
            by.setdefault(what, set()).add(each.system)
    to_repairs = {
        each: {what: similarity(reward, repair.patch, each.patch) for what, repair in repairs.items()} for each in group
    }
    to_reference = {each: similarity(reward, gold, each.patch) for each in group}
    won: dict[int, list[float]] = {most: [] for most in MOST}
    has_further = False
    for right, wrong in product([e for e in group if e.resolved], [e for e in group if not e.resolved]):
        others = [what for what in repairs if by[what] - {right.system, wrong.system}]
        has_further |= bool(others)
        for most in MOST:
            a, b = (
                max([to_reference[each], *(to_repairs[each][what] for what in others[:most])])
                for each in (right, wrong)
            )
            won[most].append((a > b) + (a == b) / 2)
    return Within({most: fmean(each) for most, each in won.items()}, has_further)


def similarity(reward: TextReward, reference: bytes, patch: bytes) -> float:
    """The reward of `patch`; 0 as in training if it is no diff."""
    try:
        return reward.compare(reference, patch, "python")
    except rewards.MalformedPatch:
        return 0.0


def ablation(further: Sequence[Path], alone: Sequence[Path]) -> str:
    """Markdown: by evaluation and measure, both sides' change and the difference of the changes.

    Raises `UsageError` for runs that do not compare.
    """
    sides = [_pool(paths) for paths in (further, alone)]
    _check_alike(further, alone)
    lines = [
        f"with further references: {', '.join(map(str, further))}; without: {', '.join(map(str, alone))}",
        "",
        *(_describe_references(path) for path in further),
        "",
        "| evaluation | measure | tasks | with: before, after | without: before, after | more with references [95 %] |",
        "|---|---|---|---|---|---|",
    ]
    for name in sides[0]:
        if name not in sides[1]:
            continue
        changed = [pair_measures(*side[name]) for side in sides]
        clusters = cluster_episodes(episode for side in sides for part in side[name] for episode in part)
        for measure in SHOWN:
            if measure not in changed[0] or measure not in changed[1]:
                continue
            a, b = (each[measure] for each in changed)
            rows = [{task: (before, each.after[task]) for task, before in each.before.items()} for each in (a, b)]
            both = [task for task in rows[0] if task in rows[1]]
            gains = [[after - before for before, after in (row[task] for task in both)] for row in rows]
            value = paired_difference(gains[1], gains[0], [clusters[task] for task in both], share=False)
            means = [f"{fmean(r[t][0] for t in both):.3f}, {fmean(r[t][1] for t in both):.3f}" for r in rows]
            lines.append(f"| {name} | {measure} | {len(both)} | {means[0]} | {means[1]} | {value.text('+.3f')} |")
    return "\n".join(lines)


def _pool(paths: Sequence[Path]) -> Mapping[str, Episodes]:
    if not paths:
        raise UsageError("one side has no runs", fix="name runs behind --with and behind --without")
    return pooled([evaluations(path, path) for path in paths])


def _check_alike(further: Sequence[Path], alone: Sequence[Path]) -> None:
    """Raise `UsageError` unless both sides have the same seeds and otherwise equal settings."""

    def settings(path: Path) -> dict[str, Any]:
        data = configs.load_config(path).model_dump()
        data["run"] = {key: value for key, value in data["run"].items() if key not in ("name", "dir")}
        most = data["tasks"].pop("verified_references")
        if bool(most) != (path in further):
            raise UsageError(f"{path} has tasks.verified_references={most}", fix="name it on the other side")
        return data

    left, right = (
        sorted((settings(path) for path in paths), key=lambda c: c["run"]["seed"]) for paths in (further, alone)
    )
    if left != right:
        raise UsageError(
            "the runs of both sides differ in more than tasks.verified_references",
            fix="run both sides with the same seeds and settings",
        )


def _describe_references(path: Path) -> str:
    """A line on the further references of a run."""
    run = open_run(path)
    steps = [step for step in run.metrics() if "references/nearest" in step]
    count = len((run.path / "references.jsonl").read_text().splitlines()) if steps else 0
    nearest = fmean(step["references/nearest"] for step in steps) if steps else 0.0
    task_count = steps[-1]["references/tasks"] if steps else 0
    return f"{path}: {count} references for {task_count:.0f} tasks, nearest to {nearest:.1%} of the training attempts"


if __name__ == "__main__":
    with exit_on_error():
        main()
