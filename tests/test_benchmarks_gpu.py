"""The GPU benchmark runs, on a miniature: every contestant gives a time, and model FLOPs are those counted by hand."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coderepairrl.plan.sizing.architecture import Architecture

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu" / "learner.py"
KINDS = ("step", "group", "loss", "sync")
# Of stdout the last line counts, or those that are JSON: DeepSpeed, where it is installed, says something before.
CPU = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def test_every_contestant_runs() -> None:
    command = [sys.executable, str(SCRIPT), "--toy", "--rows", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=CPU)
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(done.stdout)["results"]
    assert done.stderr.count('{"seconds"') == sum(len(entry[kind]) for kind in KINDS)
    assert set(entry["step"]) == {"packed", "plain, padded", "plain, one by one"}
    assert set(entry["group"]) == {"apart", "shared"}
    assert set(entry["loss"]) == {"chunked", "whole", "plain"}
    assert set(entry["sync"]) == {"adapter", "model", "peft", "peft, merged"}
    assert entry["step"]["packed"]["planned_gib"] > 0  # beside the peak, which only a GPU gives
    for kind in KINDS:
        assert all(found["seconds"] > 0 for found in entry[kind].values())
    sizes = {name: found["bytes"] for name, found in entry["sync"].items()}
    assert sizes["adapter"] == sizes["peft"] < sizes["model"] < sizes["peft, merged"]  # which has adapters in it, too
    shape = Architecture.from_config(runpy.run_path(str(SCRIPT))["TOY"])
    assert shape is not None and sizes["model"] == pytest.approx(4 * shape.parameters, rel=0.05)


def test_what_fits_a_card(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The documented tables are what is printed."""
    docs, printed = SCRIPT.parents[2] / "docs", []
    script = runpy.run_path(str(SCRIPT.with_name("cards.py")))
    for page, more in (("measurements/performance.md", ["--each"]), ("guides/memory.md", [])):
        monkeypatch.setattr(sys, "argv", ["cards.py", "--tokens", "8192", *more])
        script["main"]()
        printed.append(capsys.readouterr().out)
        assert printed[-1] in (docs / page).read_text()
    lines = [line.split("|") for line in printed[-1].splitlines()]
    rows = {tuple(row[1:3]): row[5:8] for row in lines}
    found = {(model.strip(), base.strip()): [cell.strip() for cell in cells] for (model, base), cells in rows.items()}
    assert found["Qwen3-14B", "bf16"][0] == found["Qwen3-32B", "bf16"][1] == "2+4"
    assert found["Qwen3-32B", "bf16"][0] == "-"


def test_flops_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # the script would set it, for everybody here
    script = runpy.run_path(str(SCRIPT))
    config = script["setting"]("14B", 8192, 1).config
    (row,) = script["rows"](1, 1000, config.vocab_size)
    linear = 40 * (5120 * 128 * (40 + 8 + 8 + 40) + 3 * 5120 * 17_408)  # q k v o, gate up down
    assert linear + 2 * 5120 * 151_936 == pytest.approx(14.77e9, rel=1e-3)  # with both embeddings: a 14B model
    products = 2 * (1000 * linear + 500 * 5120 * 151_936)  # a multiplication and an addition; half is trained
    square = 2 * 2 * (1000 * 1000 / 2) * 40 * 128 * 40  # scores and values, below the diagonal
    assert script["flops"](config, [row]) == pytest.approx(2 * products + 3 * square)


def test_the_first_day_reports_every_step(tmp_path: Path) -> None:
    """Steps without vLLM run on a miniature; the others report that vLLM is missing."""
    out = tmp_path / "found.jsonl"
    command = [sys.executable, str(SCRIPT.with_name("first_day.py")), "--toy", "--python", sys.executable]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, env=CPU, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    found = {line["step"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert [name for name, line in found.items() if line.get("exit") == 0] == ["trees", "learner"]
    assert json.loads(found["trees"]["output"].splitlines()[-1])["held"]
    left_out = [line["left_out"] for line in found.values() if "left_out" in line]
    assert len(left_out) == len(found) - 2 and all("there is no vLLM" in why for why in left_out)
