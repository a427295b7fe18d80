"""A batch whose gradient is not finite: skipped, replayed as skipped, and too many of them in a row stop the run."""

from __future__ import annotations

import json
import shutil
from typing import Any

from coderepairrl import report
from coderepairrl.stages import gates
from e2e.conftest import Project
from e2e.e2e_engines import DOUBTED


def test_a_batch_without_a_finite_gradient_costs_the_run_nothing_else(project: Project) -> None:
    """With a real learner, whose importance ratios of some versions' tokens overflow."""
    doubted, folder = project.path / DOUBTED, str(project.run.path)

    def steps() -> dict[int, Any]:
        return {record["step"]: record for record in project.records() if record["type"] == "step"}

    doubted.write_text("[1, 3, 4, 5]")
    options = ["engine=e2e_engines:DoubtfulTiny", "run.steps=7", "rollout.group_size=2"]
    stopped = project.crrl("train", str(project.config), *options, check=False)
    assert "step 2 is skipped" in stopped.stderr and "non-finite" in stopped.stderr
    assert [bool(step["skipped"]) for step in steps().values()] == [False, True, False, True, True, True]
    assert len({steps()[step]["checksum"] for step in (1, 2)}) == 1, "the weights stand"
    assert len({steps()[step]["checksum"] for step in (1, 2, 3)}) == 2, "and the run goes on"
    assert stopped.returncode == 4 and "no finite gradient in 3 steps in a row" in stopped.stderr, stopped.stderr
    assert "--resume" in stopped.stderr and "train.lr" in stopped.stderr
    assert [(a.gate, a.first, a.last) for a in gates.replay(folder) if a.stops] == [("skipped", 4, 6)]

    shutil.rmtree(project.run.checkpoints)  # so that all steps are replayed, which compares the weights
    project.run.checkpoints.mkdir()
    done = project.crrl("train", folder, "--resume", "train.lr=1e-4", "--json")
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["steps"], summary["version"], summary["account"]["balanced"]) == (7, 7, True)
    assert [step for step, record in steps().items() if record["skipped"]] == [2, 4, 5, 6]
    assert len({steps()[step]["checksum"] for step in (3, 4, 5, 6)}) == 1
    assert "learn/lr" not in steps()[6]["metrics"] and steps()[7]["metrics"]["learn/lr"] == 1e-4
    assert report.Site([project.run.path]).reports()
