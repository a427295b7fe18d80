"""benchmarks/rewards.py: its forms are those of the reward, and without data it says what is missing."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest

from coderepairrl.certify.data.spoil import spoiled
from coderepairrl.rewards import PatchEdits

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_the_first_form_is_the_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("rewards_benchmark", BENCHMARKS / "rewards.py")
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    choice = benchmark.choice
    rng = random.Random(0)
    values = set()
    for reference, other in benchmark.pairs(20):
        for patch in (other, *rng.sample(list(spoiled(reference).values()), 6)):
            found = choice.features(reference, patch, "python")
            value = PatchEdits().compare(reference, patch, "python")
            assert choice.value(found, choice.FORMS[0]) == pytest.approx(value)
            values.add(value)
    assert len(values) > 20


def test_without_data_it_says_so(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "rewards.py"), "--pairs", "5", "--data", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "patch_edits" in done.stdout
    assert f"no ranking: there are no patches with outcomes in {tmp_path / 'pairs'} (name the folder" in done.stdout
