"""The bar of `make hello-bar`: what meets it, what misses it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from coderepairrl import config as configs
from coderepairrl import models, stages
from coderepairrl.assembly.imitation import ImitationPlan
from coderepairrl.runs import RunFolder
from coderepairrl.types import Ending, Episode, Score
from workshop.tiny import bar, warmstart


def episodes(seed: int, fixed: float, step: int, *, tried: float = 0.8) -> list[Episode]:
    """256 tasks over 32 functions; a share `tried` has a patch, and `fixed` of these is right."""
    rng = Random(f"{seed}/{step}")
    made = []
    for at in range(256):
        patched = rng.random() < tried
        right = float(patched and rng.random() < fixed)
        made.append(
            Episode(
                f"eval-{step:05d}-{at}",
                f"mutants/m.f{at % 32}/swap-{at:04x}-{'qu'[at % 2]}",
                "eval",
                step,
                str(at),
                0,
                Ending.DONE,
                patch=b"+x\n" if patched else b"",
                scores=(Score("patch_lines", right, 0.5), Score("tests", right, 0.5)),
            )
        )
    return made


def found(gain: float, greedy: float = 0.2, unquoted: float = 0.3) -> dict[str, dict[str, bar.Episodes]]:
    seeds = {
        f"seed {seed}": {
            "sampled": (episodes(seed, 0.2, 0), episodes(seed, 0.2 + gain, 1)),
            "sampled, unquoted issues": (episodes(seed + 6, 0.1, 0), episodes(seed + 6, 0.1 + unquoted, 1)),
            "greedy": (episodes(seed + 9, 0.3, 0), episodes(seed + 9, 0.3 + greedy, 1)),
        }
        for seed in range(3)
    }
    return {**seeds, "pooled": bar.pooled(list(seeds.values()))}


def missed(gain: float, greedy: float = 0.2, unquoted: float = 0.3) -> set[str]:
    return {verdict.demand for verdict in bar.judge(found(gain, greedy, unquoted)) if not verdict.met}


def test_a_large_gain_in_every_seed_meets_the_bar() -> None:
    assert missed(0.5) == set()


def test_no_gain_misses_all_of_it_but_the_size() -> None:
    demands = {verdict.demand for verdict in bar.judge(found(0.0))}
    assert missed(0.0, 0.0, 0.0) == demands - {"held-out tasks"}


def test_a_small_gain_is_not_enough() -> None:
    assert "pooled patch_lines +0.20" in missed(0.15)


def test_greedy_must_rise_and_beyond_chance() -> None:
    assert missed(0.5, 0.0) == {"pooled tests, greedy, +0.05", "pooled tests, greedy, above zero"}


def test_issues_without_the_line_have_a_demand_of_their_own() -> None:
    assert missed(0.5, unquoted=0.05) == {"pooled tests of unquoted issues +0.10"}


def test_the_short_bar_asks_for_any_gain() -> None:
    assert [all(verdict.met for verdict in bar.judge_short(found(gain))) for gain in (0.0, 0.3)] == [False, True]


def test_too_few_tasks_are_no_evidence() -> None:
    few = {run: {name: (a[:100], b[:100]) for name, (a, b) in each.items()} for run, each in found(0.5).items()}
    assert not bar.judge(few)[0].met


def test_the_table_has_every_run_and_the_mean_of_the_pool() -> None:
    runs = found(0.5)
    rows = [line.split(" | ") for line in bar.table(runs).splitlines()[2:]]
    assert {row[0].strip("| ") for row in rows} == set(runs)
    values = {row[0].strip("| "): float(row[5]) for row in rows if row[1] == "sampled" and row[2] == "tests"}
    seeds = [value for run, value in values.items() if run != "pooled"]
    assert abs(values["pooled"] - sum(seeds) / 3) < 2e-3


def test_only_what_is_missing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished run starts no engine; an interrupted one, or one that is asked for more, goes on."""
    asked: list[tuple[int, bool]] = []

    async def run(config: configs.Config, *, resume: bool = False) -> dict[str, Any]:
        folder = RunFolder(Path(config.run.dir) / config.run.name)
        if not resume:
            folder.create(configs.to_toml(config), {})
        folder.write_config(configs.to_toml(config))
        log = folder.writer()
        log.append("end" if asked else "stop", step=config.run.steps)
        log.close()
        asked.append((config.run.steps, resume))
        return {}

    monkeypatch.setattr(stages, "run", run)
    for steps in (1, 1, 1, 2, 2):
        bar.finished([f"run.dir={tmp_path}", f"run.steps={steps}", *bar.FULL])
    assert asked == [(1, False), (1, True), (2, True)]


def test_the_control_learns_more_examples_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    async def sft(plan: ImitationPlan, folder: RunFolder, *, resume: bool) -> None:
        asked.append((len(plan.examples.train), plan.config.run.steps))
        folder.create(configs.to_toml(plan.config), {})
        log = folder.writer()
        log.append("end", step=plan.config.run.steps)
        log.close()

    monkeypatch.setattr(bar, "sft", sft)
    monkeypatch.setitem(warmstart.LESSONS, "control", replace(warmstart.LESSONS["control"], examples=16))
    for _ in range(2):
        assert bar.more_demonstrations(models.folder("builtin:tiny"), tmp_path).parent == tmp_path
    assert asked == [(16, 2)]


def test_mistakes_are_told_as_by_crrl(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "workshop.tiny.bar", "engine=tinny"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: unknown engine 'tinny'\n  fix: did you mean 'tiny'?")
