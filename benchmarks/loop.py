"""The simulated loop beside the measured one: short runs of ``crrl hello`` on the tiny engine.

Each run is simulated twice on its own attempts: at its own speeds, which asks whether the model of the loop is right,
and at the first run's, which asks what a plan by a pilot run is worth (`plan.run`). Speeds are fitted to the replies
and steps of a run's log. Fails where a run simulated at its own speeds takes more than `FAR` times as long as it took,
or less than one over that, or where its learner's share of waiting is off by more than `OFF`. The first run's speeds
are a forecast for other numbers of episodes at once, and for a run that may use one core; below the table is each run
by the speeds of each.

Run: ``python benchmarks/loop.py [--steps 3] [--keep FOLDER]``; with `--keep`, runs that are there are read, not made.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from coderepairrl.assembly.learner import settings
from coderepairrl.assembly.sizing import Estimate, estimate
from coderepairrl.assembly.sizing.loop import Planned
from coderepairrl.assembly.sizing.simulation import WAITING, simulate
from coderepairrl.config import load
from coderepairrl.runs import open_run

FAR, OFF = 1.5, 0.2
RUNS = {
    "as shipped": (),
    "on one core": (),
    "8 at once": ("rollout.concurrency=8",),
    "16 at once": ("rollout.concurrency=16",),
    "groups of 4": ("rollout.group_size=4",),
    "staleness 1": ("rollout.max_staleness=1", "train.old_logprobs=recomputed"),
}
"""Overrides by what is said of them; the first is the pilot. Two and two are made at a time."""
ALONE = "on one core"
OF_ALL = ("eval.before=false", "eval.after=false", "tasks.verify=false")


def measured(path: Path) -> tuple[float, float]:
    """Seconds of a step, and the share of it that the learner waited, over all steps of a run."""
    steps = [record["metrics"] for record in open_run(path).records() if record["type"] == "step"]
    waited, learned = (sum(step[name] for step in steps) for name in ("rollout_seconds", "learn_seconds"))
    return (waited + learned) / len(steps), waited / (waited + learned)


def simulated(path: Path, pilot: Path) -> tuple[float, float]:
    """The same of the attempts in `path`, at the speeds of `pilot`."""
    own, speeds = (_planned(path, run) for run in (path, pilot))
    assert own.pilot is not None
    steps = sum(record["type"] == "step" for record in open_run(path).records())
    groups = itertools.cycle(own.pilot.groups)
    spent = simulate(replace(speeds.loop, steps=steps, later=0), groups)
    return spent.wall / steps, spent.share(spent.learner, WAITING)


def _planned(path: Path, pilot: Path) -> Planned:
    run = open_run(path)
    config = load(run.config, [f"plan.run={pilot}", f"plan.cores={run.about()['cpus']}"])
    found = estimate(config, settings(config))
    assert isinstance(found, Estimate)
    planned = Planned.of(found)
    assert planned is not None
    return planned


def rows(home: Path) -> Iterator[tuple[str, bool]]:
    """The table, and whether the model is near enough."""
    pilot = _folder(home, next(iter(RUNS)))
    for name in RUNS:
        path = _folder(home, name)
        seconds, waiting = measured(path)
        cells, near = [f"{name:>15} {seconds:10.1f} {waiting:8.0%}"], True
        for speeds in (path, pilot):
            found, share = simulated(path, speeds)
            cells.append(f"{found:10.1f} {found / seconds:6.2f} {share:8.0%}")
            if speeds == path:
                near = 1 / FAR < found / seconds < FAR and abs(share - waiting) < OFF
        yield " |".join(cells), near


def forecasts(home: Path) -> Iterator[str]:
    """Of each run, seconds of a step by the speeds of each over those it took."""
    folders = {name: _folder(home, name) for name in RUNS}
    yield " ".join([" " * 15, *(f"{name:>11}" for name in RUNS)])
    for name, path in folders.items():
        seconds, _ = measured(path)
        ratios = (simulated(path, pilot)[0] / seconds for pilot in folders.values())
        yield " ".join([f"{name:>15}", *(f"{ratio:11.2f}" for ratio in ratios)])


def make(home: Path, steps: int) -> None:
    """The runs that are not there, two at a time: on a busy machine, whose speed changes, a forecast is for the next
    minute at best."""
    missing = [name for name in RUNS if not _folder(home, name).is_dir()]
    cores = sorted(os.sched_getaffinity(0))
    for first in range(0, len(missing), 2):
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        begun = []
        for name in missing[first : first + 2]:
            os.sched_setaffinity(0, cores[-1:] if name == ALONE else cores)  # of what is started, too
            begun.append(subprocess.Popen(_command(home, name, steps), **quiet))
        os.sched_setaffinity(0, cores)
        codes = [each.wait() for each in begun]
        if any(codes):
            sys.exit("a run failed")


def _command(home: Path, name: str, steps: int) -> list[str]:
    where = (f"run.dir={home}", f"run.name={_folder(home, name).name}", f"run.steps={steps}")
    return [sys.executable, "-m", "coderepairrl.cli", "hello", *where, *OF_ALL, *RUNS[name]]


def _folder(home: Path, name: str) -> Path:
    return home / name.replace(" ", "-")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="a folder for the runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        home = options.keep or Path(scratch)
        make(home, options.steps)
        print("                  measured          | by its own speeds         | by the first run's")
        print("            run     s/step  waiting |    s/step  ratio  waiting |    s/step  ratio  waiting")
        found = list(rows(home))
        print(*(row for row, _ in found), "", "forecast over measured, by the speeds of", *forecasts(home), sep="\n")
    if not all(near for _, near in found):
        sys.exit("the model of the loop is far off")


if __name__ == "__main__":
    main()
