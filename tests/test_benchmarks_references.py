"""`benchmarks/references.py`: what it counts, and which runs it compares."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from coderepairrl import config as configs
from coderepairrl import tasks
from coderepairrl.errors import UsageError
from coderepairrl.rewards import PatchEdits, TestsReward, with_patch
from coderepairrl.runs import RunFolder
from coderepairrl.types import Ending, Episode, Score, Verified
from rewards.folder import Local

FILE = Path(__file__).parents[1] / "benchmarks" / "references.py"
TRAINED = 'tasks.options={split="train", quoted=1, n=80}'


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("references_benchmark", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def diff(new: str) -> bytes:
    head = "diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n"
    return f"{head}-    return a - b\n+    return {new}\n".encode()


def test_a_pair_is_compared_with_repairs_of_other_systems_alone(benchmark: ModuleType) -> None:
    gold, other, wrong = diff("a + b"), diff("sum([a, b])"), diff("a + c")

    def made(system: str, patch: bytes) -> tuple[str, str, bytes, bool]:
        return benchmark.Attempt("i", system, patch, patch != wrong)  # type: ignore[no-any-return]

    judged = benchmark.within(PatchEdits(), gold, [made("one", other), made("two", wrong)])
    assert (judged.auc[0], judged.auc[64], judged.known) == (0.0, 0.0, False), "its own repair would be its reference"
    twin = [made("one", other), made("two", wrong), made("three", other)]
    judged = benchmark.within(PatchEdits(), gold, twin)
    assert (judged.auc[0], judged.auc[1], judged.known) == (0.0, 1.0, True)
    assert not benchmark.within(PatchEdits(), gold, [made("one", gold), made("two", wrong), made("three", gold)]).known


def run(folder: Path, seed: int, most: int, gain: int, *more: str) -> Path:
    """A finished run of 8 held-out tasks, `gain` of which its policy repairs after training and not before."""
    overrides = [f"run.name=r{seed}", f"run.dir={folder}", f"run.seed={seed}", TRAINED, *more]
    config = configs.load("hello", [*overrides, f"tasks.verified_references={most}"])
    made = RunFolder(folder / config.run.name)
    made.create(configs.to_toml(config), {})
    for step, right in ((0, 0), (config.run.steps, gain)):
        made.write_episodes(
            f"eval-{step:05d}",
            [
                Episode(
                    f"eval-{step}-{at}", f"mutants/m.f{at}/swap-{at:04x}-q", "eval", step, str(at), 0, Ending.DONE,
                    patch=b"+x\n", scores=(Score("tests", float(at < right)),),
                )
                for at in range(8)
            ],
        )  # fmt: skip
    made.write_metrics([{"step": 1, **({"references/nearest": 0.25, "references/tasks": 1.0} if most else {})}])
    if most:
        made.write_references({"t": [Verified(b"", "e", 1)]})
    return made.path


def test_the_difference_of_changes_is_paired_and_pooled(benchmark: ModuleType, tmp_path: Path) -> None:
    further = [run(tmp_path / "with", seed, 4, gain) for seed, gain in ((0, 6), (1, 8))]
    alone = [run(tmp_path / "without", seed, 0, gain) for seed, gain in ((0, 3), (1, 3))]
    text = benchmark.ablation(further, alone)
    [row] = [line for line in text.splitlines() if line.startswith("| sampled | tests |")]
    assert "| 8 | 0.000, 0.875 | 0.000, 0.375 | +0.500 [" in row
    assert "1 references for 1 tasks, nearest to 25.0% of the training attempts" in text
    done = subprocess.run(
        [sys.executable, str(FILE), "--with", *map(str, further), "--without", *map(str, alone)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == text


def test_runs_that_differ_otherwise_do_not_compare(benchmark: ModuleType, tmp_path: Path) -> None:
    further, alone = run(tmp_path / "with", 0, 4, 6), run(tmp_path / "without", 0, 0, 3)
    with pytest.raises(UsageError, match="on the other side|has tasks.verified_references=0"):
        benchmark.ablation([alone], [further])
    with pytest.raises(UsageError, match="differ in more"):
        benchmark.ablation([further], [run(tmp_path / "seed", 1, 0, 3)])
    with pytest.raises(UsageError, match="differ in more"):
        benchmark.ablation([further], [run(tmp_path / "rate", 0, 0, 3, "train.lr=1e-3")])
    with pytest.raises(UsageError, match="no runs"):
        benchmark.ablation([further], [])


async def test_refactored_references_repair_and_are_not_what_a_repair_looks_like(benchmark: ModuleType) -> None:
    own = {task.id: task for task in tasks.make("mutants", split="train", quoted=1, n=6)}
    judge, compare, backend = TestsReward(), PatchEdits().compare, Local()
    for task in benchmark.Refactored(n=6):
        assert (await judge(task, with_patch(task, task.reference), backend)).passed
        assert compare(task.reference, own[task.id].reference, "python") < 0.5
        assert replace(task, reference=b"") == replace(own[task.id], reference=b"")
