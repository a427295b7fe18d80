"""Episodes on a real Ray equal those on one machine, also if one of two nodes is killed."""

from __future__ import annotations

import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import test_slurm as slurm
from coderepairrl.errors import ExitCode
from coderepairrl.runs import RunFolder, logged_episodes
from coderepairrl.types import Ending, Episode
from e2e.conftest import Project, freeze_when, wait_until

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
FEW = ("rollout.ray.episodes=2",)  # what a small machine has the memory for
ON_RAY = ("rollout.executor=ray", *FEW)


@pytest.fixture
def project(project: Project, isolating: None) -> Project:
    pytest.importorskip("ray")
    return project


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two nodes with one actor each, besides the run's own."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    made.workers = [made.add_node(num_cpus=1), made.add_node(num_cpus=1)]
    yield made
    made.shutdown()


def essence(episode: Episode) -> tuple[Any, ...]:
    """An episode without times."""
    turns = [replace(turn, started=0.0, ended=0.0, digest="") for turn in episode.turns]
    scores = [(score.name, score.value) for score in episode.scores]
    return episode.id, episode.task_id, episode.ending, turns, episode.patch, scores, episode.side


def result(project: Project) -> tuple[list[Any], list[Any]]:
    """A run's valid episodes without retry numbers, and the weights of its steps."""
    records = project.records()
    made = [each for each in logged_episodes(iter(records)) if each.ending is not Ending.VOID]
    plain = sorted(essence(replace(each, id=each.id.partition("-retry")[0])) for each in made)
    return plain, [record["checksum"] for record in records if record["type"] == "step"]


def trained(project: Project, name: str, *overrides: str) -> Project:
    """Train in a separate folder."""
    home = project.path / name
    home.mkdir()
    made = replace(project, path=home)
    made.train(*overrides)
    return made


def test_results_are_those_of_one_machine(project: Project) -> None:
    evaluated = ("eval.before=true", "eval.after=true")
    there = trained(project, "ray", *ON_RAY, "rollout.ray.address=local", *evaluated)
    here = trained(project, "local", *evaluated)
    assert result(there) == result(here)
    assert len(result(here)[1]) == 3


def count_turns_under_way(project: Project) -> list[int]:
    """Number of turns of each unfinished episode."""
    turns: dict[str, int] = {}
    for each in project.records():
        if each["type"] == "episode":
            turns[each["id"]] = 0
        elif each["type"] == "turn":
            turns[each["episode"]] += 1
        elif each["type"] == "verdict":
            del turns[each["verdict"]["id"]]
    return list(turns.values())


async def test_a_node_that_is_killed_costs_its_attempts_and_nothing_else(project: Project, cluster: Any) -> None:
    here = trained(project, "local", "run.steps=6")
    there = replace(project, path=project.path / "two")
    there.path.mkdir()
    settings = (*ON_RAY, f"rollout.ray.address={cluster.address}", "rollout.concurrency=4", "run.steps=6")
    with there.started("train", str(project.config), *settings) as process:
        await wait_until(
            process, lambda: sum(map(bool, count_turns_under_way(there))) > 2
        )  # more than one actor takes, so both work
        # episodes without a turn are on both nodes, and wait while the run is stopped
        await freeze_when(process, lambda: count_turns_under_way(there) == [0, 0, 0, 0])
        cluster.remove_node(cluster.workers[0], allow_graceful=False)
        process.send_signal(signal.SIGCONT)
        printed = "".join(map(str, process.communicate(timeout=300)))
        assert process.returncode == ExitCode.DONE, printed
    lost = [each for each in logged_episodes(iter(there.records())) if each.ending is Ending.VOID]
    assert {each.reason for each in lost} == {"worker"}, printed
    assert all(each.fault.startswith("WorkerFault: actor ") and "was lost: Actor" in each.fault for each in lost)
    assert f"; its {len(lost)} open episodes are void" in printed
    assert result(there) == result(here), "the same seeds gave the same episodes, wherever they were made"


@pytest.mark.parametrize(
    ("sent", "message"), [(signal.SIGKILL, "is gone"), (signal.SIGSTOP, "does not answer")], ids=["dies", "hangs"]
)
@pytest.mark.by_hand
async def test_a_head_that_ends_ends_the_run_which_goes_on_without_ray(
    sent: signal.Signals, message: str, project: Project, cluster: Any
) -> None:
    there = replace(project, path=project.path / "headless")
    there.path.mkdir()
    settings = (*ON_RAY, f"rollout.ray.address={cluster.address}", "run.steps=99")
    [head] = [each.process for each in cluster.head_node.all_processes["gcs_server"]]

    try:
        with there.started("train", str(project.config), *settings) as process:
            await wait_until(process, lambda: bool(there.steps()))
            head.send_signal(sent)
            printed = "".join(map(str, process.communicate(timeout=150)))
    finally:
        head.send_signal(signal.SIGCONT)
    assert process.returncode == ExitCode.RUN_FAILED, printed
    assert f"error: the head of the Ray cluster at {cluster.address} {message}" in printed and "--resume" in printed
    wanted = f"run.steps={len(there.steps()) + 1}"
    there.train("rollout.executor=local", wanted, "--resume")
    assert result(there) == result(trained(project, "local", wanted))


def test_the_slurm_job_starts_a_real_ray(project: Project, tmp_path: Path) -> None:
    """Both nodes are this machine, and Slurm is a fake."""
    jobs, here = slurm.Cluster(tmp_path), socket.gethostname()
    (tmp_path / "bin" / "scontrol").write_text(f"#!/bin/sh\nprintf '{here}\\n{here}\\n'\n")
    shutil.copy(project.config, tmp_path / "a.toml")
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    ray, crrl = Path(sys.executable).with_name("ray"), f"{sys.executable} -m coderepairrl.cli"
    more = {"RAY": str(ray), "CRRL": crrl, "PORT": port, "PYTHONPATH": project.environment()["PYTHONPATH"]}
    done = jobs.submit("ray.sh", "a.toml", "run.steps=1", *FEW, SLURMD_NODENAME=here, **more)
    assert done.returncode == 0, done.stdout + done.stderr + "".join(map(str, (tmp_path / "logs").glob("*")))
    assert "actor 0 on" not in done.stderr, "none was lost"
    assert [each["type"] for each in RunFolder(tmp_path / "runs" / "e2e").records()].count("step") == 1
