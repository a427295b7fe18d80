"""CPU time of a step of `crrl hello`, by stage.

    python benchmarks/hello_step.py [--steps 6] [--rounds 3] [--against OTHER/.venv/bin/crrl] [KEY=VALUE ...]

Short runs without evaluations, each a process of its own. With `--against` runs of another version alternate with runs
of this one; with KEY=VALUE so do runs with these settings. Seconds are CPU seconds a step, from the end of the second
step, when everything is loaded and warm, to the end of the last: means over steps and rounds.

- ``controller``: gateway, agents, rewards and the log; its own threads.
- ``engine`` and ``learner``: their processes.
- ``sandbox``: everything else: bubblewrap, guests, what they run, git.

``wall`` is wall-clock seconds: on a busy machine they say little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

CRRL = str(Path(sys.executable).parent / "crrl")
SHORT = ("eval.before=false", "eval.after=false", "run.checkpoint_every=1000", "run.name=run")
STAGES = ("sandbox", "learner", "engine", "controller")
NAMED = {b"coderepairrl.engines.tiny.server": "engine", b"coderepairrl.learn.learner": "learner"}
FIRST = 2
"""Steps before the measured ones."""


def measured(command: Sequence[str], steps: int) -> dict[str, float]:
    """Run `command`: CPU seconds a step by stage, and wall-clock seconds."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"run.dir={folder}", f"run.steps={FIRST + steps}", *SHORT]
        with subprocess.Popen([*command, *settings], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as run:
            metrics = Path(folder, "run", "metrics.jsonl")
            begun = used_after(metrics, FIRST, run)
            ended = used_after(metrics, FIRST + steps, run)
            words = run.communicate()[1].decode()
        if run.returncode:
            sys.exit(words)
    return {name: (ended[name] - begun[name]) / steps for name in ended}


def used_after(metrics: Path, step: int, run: subprocess.Popen[bytes]) -> dict[str, float]:
    """Wait for the end of `step`; returns `used` there."""
    while run.poll() is None and not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
        time.sleep(0.02)
    return used(run.pid)


def used(root: int) -> dict[str, float]:
    """CPU seconds of `root` and its descendants (ended ones included) by stage, and the clock's time."""
    parents: dict[int, int] = {}
    own_ticks: dict[int, int] = {}
    child_ticks: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(") ")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(entry.name)
        parents[pid], own_ticks[pid], child_ticks[pid] = (
            int(fields[1]),
            sum(map(int, fields[11:13])),
            sum(map(int, fields[13:15])),
        )
    seconds = dict.fromkeys(STAGES, 0)
    for pid in parents:
        above = pid
        while above not in (0, 1, root):
            above = parents.get(above, 0)
        if above == root:
            seconds["controller" if pid == root else stage(pid)] += own_ticks[pid]
            seconds["sandbox"] += child_ticks[pid]
    return {name: ticks / os.sysconf("SC_CLK_TCK") for name, ticks in seconds.items()} | {"wall": time.monotonic()}


def stage(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "sandbox"
    return next((name for word, name in NAMED.items() if word in words), "sandbox")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", help="crrl of another version")
    parser.add_argument("--json", action="store_true", help="every round, on the last line")
    parser.add_argument("settings", nargs="*", help="KEY=VALUE of a second contestant")
    options = parser.parse_args()
    contestants = {"this": [CRRL, "hello"]}
    if options.against:
        contestants = {"other": [options.against, "hello"]} | contestants
    if options.settings:
        contestants[" ".join(options.settings)] = [CRRL, "hello", *options.settings]
    measurements: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
    for number in range(options.rounds):
        for name, command in contestants.items() if number % 2 == 0 else reversed(contestants.items()):
            measurements[name].append(measured(command, options.steps))
    first = next(iter(measurements))
    print("| CPU seconds a step |", *(f"{name} |" for name in STAGES), "all | of the first | wall |")
    totals = {name: [sum(one[each] for each in STAGES) for one in rounds] for name, rounds in measurements.items()}
    for name, rounds in measurements.items():
        cells = [f"{statistics.fmean(one[each] for one in rounds):.2f} |" for each in STAGES]
        ratios = [mine / theirs for mine, theirs in zip(totals[name], totals[first], strict=True)]
        shown = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        wall = statistics.fmean(one["wall"] for one in rounds)
        print(f"| {name} |", *cells, f"{statistics.fmean(totals[name]):.2f} | {shown} | {wall:.1f} |")
    print(f"{options.rounds} rounds, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if options.json:
        print(json.dumps(measurements))


if __name__ == "__main__":
    main()
