"""Runs of two seeds on one learner: the weights of runs with learners of their own, whoever is killed meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

from coderepairrl.errors import ExitCode
from coderepairrl.runs import RunFolder
from e2e.conftest import Project, until

STEPS = 3
TERMS = ("train.lora={rank=4, alpha=8}", f"run.steps={STEPS}", "tasks.verify=false")


def weights(run: Path) -> list[str]:
    return [record["checksum"] for record in RunFolder(run).records() if record["type"] == "step"]


def last(run: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (run / "checkpoints" / f"{STEPS:05d}").iterdir()}


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    said = process.communicate(timeout=120)[1]
    return process.returncode, said


async def test_seeds_on_one_learner(project: Project) -> None:
    socket, runs = project.path / "learner.sock", {seed: project.path / "runs" / f"seed-{seed}" for seed in (1, 2)}

    def command(seed: int, name: str = "seed") -> tuple[str, ...]:
        return "train", str(project.config), f"run.name={name}-{seed}", f"run.seed={seed}", *TERMS

    shared = f"train.learner={socket}"
    with ExitStack() as stack:
        server = stack.enter_context(project.started("learner", str(socket), "--share"))
        await until(server, socket.exists)
        both = [stack.enter_context(project.started(*command(seed), shared)) for seed in runs]
        for run, process in zip(runs.values(), both, strict=True):
            await until(process, lambda run=run: run.exists() and len(weights(run)) >= 1)  # type: ignore[misc]
        assert not [run for run in runs.values() if (run / "logs" / "learner.log").exists()]  # none of their own
        both[0].kill()  # one run, and then, when it comes back, the server with all that it holds
        await until(both[1], lambda: len(weights(runs[2])) >= 2)
        again = stack.enter_context(project.started(*command(1), shared, "--resume"))
        server.send_signal(signal.SIGSTOP)
        server.kill()
        for process in (both[1], again):
            code, said = ended(process)
            if code:  # it was not at its end already
                assert code == ExitCode.RUN_FAILED
                assert f"start it: crrl learner {socket} --share" in said, said
    with project.started("learner", str(socket), "--share") as server:
        await until(server, lambda: _listens(socket))
        project.crrl(*command(1), shared, "--resume")
        server.send_signal(signal.SIGINT)
        assert ended(server)[0] == 0
    project.crrl(*command(2), "train.learner=", "--resume")  # with a learner of its own
    assert not (runs[1] / "logs" / "learner.log").exists()
    for seed, run in runs.items():
        done = project.crrl(*command(seed, "alone"), "--json")
        alone = project.path / json.loads(done.stdout.splitlines()[-1])["run"]
        assert weights(run) == weights(alone) and len(weights(run)) == STEPS
        mine, other = last(run), last(alone)
        assert mine == other
    assert weights(runs[1]) != weights(runs[2])


def _listens(path: Path) -> bool:
    import socket

    with socket.socket(socket.AF_UNIX) as asking:
        return not asking.connect_ex(os.fspath(path))
