"""The programs in examples/ do what they say, as their users start them."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from coderepairrl.config import load_config
from coderepairrl.rewards import make_patched_episode
from coderepairrl.tasks import make_source, sources
from needs import need

EXAMPLES = Path(__file__).parents[1] / "examples"
TRL = EXAMPLES / "trl_reward"
DATA = Path(__file__).parents[2] / "shared" / "data" / "swebench"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reward_for_trl_and_verl_pays_repairs_and_no_junk() -> None:
    reward = load(TRL / "reward.py")
    references = [task.reference.decode() for task in make_source("mutants", split="train", n=8)]
    answers = [f"Repaired:\n\n```diff\n{diff}```\n" for diff in references]
    assert reward.repair(answers, reference=references, prompts=answers, trainer_state=None) == [1.0] * 8
    assert reward.repair(["I do not know.", ""], reference=references[:2]) == [0.0, 0.0]
    assert reward.compute_score("mutants", answers[0], references[0]) == 1.0
    assert reward.compute_score("mutants", "No.", references[0], {"split": "train"}) == 0.0


def test_a_reward_of_ones_own_scores_an_episode_without_a_reply() -> None:
    task = next(iter(make_source("handmade")))
    brief = load(EXAMPLES / "own_reward" / "brief.py").Brief()
    assert asyncio.run(brief(task, make_patched_episode(task, b""), None)).value == 1


def test_trl_trains_on_our_tasks_with_our_reward(tmp_path: Path) -> None:
    """Its answers complete diffs, whose rewards differ within a group: the gradient is not zero."""
    pytest.importorskip("trl")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(TRL / "train.py"), "--output", str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [ast.literal_eval(line) for line in done.stdout.splitlines() if line.startswith("{'loss'")]
    assert len(steps) == 2, done.stdout
    for step in steps:
        assert 0 < float(step["rewards/repair_line/mean"]) < 1 and float(step["grad_norm"]) > 0


def test_the_small_benchmark_is_ten_instances_of_each_that_run_without_docker() -> None:
    need(DATA.is_dir(), "the rows of SWE-bench are not here")
    config = load_config(EXAMPLES / "nano_benchmark" / "benchmark.toml")
    native = (Path(sources.__file__).parent / "swe_bench_native.txt").read_text().split()
    for name, evaluation in config.eval.each.items():
        rows = DATA / f"swebench_{'verified' if name == 'eval' else name}.jsonl.gz"
        tasks = list(make_source(config.tasks.source, path=str(rows), **evaluation.options))
        assert len(tasks) == 10 and {task.id for task in tasks} <= set(native)
