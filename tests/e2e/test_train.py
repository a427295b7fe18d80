"""`crrl train` from end to end: the properties that a whole run must have."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from coderepairrl import config as configs
from coderepairrl import stages
from coderepairrl.errors import ConfigError
from coderepairrl.learn import stitch
from coderepairrl.learn.account import run_account
from coderepairrl.runs import RunFolder, logged_episodes
from coderepairrl.sync.weights import shared_path
from coderepairrl.types import Ending, sequence
from commands import CRRL
from e2e.conftest import Project, frozen, until


def test_a_run_accounts_for_every_token(finished: Project) -> None:
    project, summary = finished, finished.summary()
    assert summary["steps"] == 3
    assert summary["version"] == 3
    assert set(summary["evaluations"]["eval"]) == {"0", "3"}

    assert set(summary["evaluations"]["greedy"]) == {"0", "3"}
    for step in (0, 3):
        twins = list(project.run.episodes(f"greedy-{step:05d}"))
        assert len({tuple(turn.output.ids for turn in twin.turns) for twin in twins}) == 1, "greedy has no chance in it"
        assert len(twins) == 2

    records = project.records()
    turns = [record["turn"] for record in records if record["type"] == "turn"]
    sampled = sum(len(turn["output"]["ids"]) + len(turn["tail"]["ids"]) for turn in turns)
    account = run_account(records)
    assert account.balanced
    assert account.sampled == sampled == summary["account"]["sampled"] > 0
    assert set(account.dropped) <= {"evaluation", "flat_group"}

    assert next(record for record in records if record["type"] == "start")["clip"].startswith("never: with one update")

    # Property 2: engine and trainer logprobs agree, in every step of the run itself.
    steps = [record for record in records if record["type"] == "step"]
    assert max(step["metrics"]["learn/mismatch_max"] for step in steps) < 1e-4
    # On-policy: every trained token was sampled by the weights that the step improves.
    assert all(step["metrics"]["learn/staleness_max"] == 0 for step in steps)
    versions = {(v["version"], r["episode"].split("-")[1]) for r in records if r["type"] == "turn"
                for v in r["turn"]["versions"] if r["episode"].startswith("train")}  # fmt: skip
    assert versions == {(0, "00001"), (1, "00002"), (2, "00003")}

    # The exports are the log.
    assert sorted(e.id for e in project.run.episodes()) == sorted(e.id for e in logged_episodes(records))
    assert [line["step"] for line in project.run.metrics()] == [1, 2, 3]


def test_a_second_run_of_the_same_name_is_refused_and_resuming_a_finished_one_does_nothing(
    project: Project, miniature: Path
) -> None:
    """And what is resumed is the folder that is named, wherever it was made; if its files are as they were."""
    shutil.copytree(miniature, project.path / "model")
    project.train("run.steps=1", "model.path=model")
    refused = project.crrl("train", str(project.config), check=False)
    assert refused.returncode == 2
    assert "--resume" in refused.stderr
    changed = project.crrl(
        "train", str(project.config), "model.path=model", "train.algorithm=grpo", "--resume", check=False
    )
    assert changed.returncode == 2
    assert "train.algorithm" in changed.stderr

    copy, before = RunFolder(project.path / "elsewhere" / "a copy"), project.records()
    shutil.copytree(project.run.path, copy.path)
    for source in (copy.path, copy.config):
        assert stages.resumed_folder(str(source), configs.load_config(source)).path == copy.path
        with pytest.raises(ConfigError, match=r"run\.dir=runs names another place"):
            stages.resumed_folder(str(source), configs.load_config(source, ["run.dir=runs"]))
    again = project.crrl("train", str(copy.path), "run.steps=1", "--resume", "--json")
    assert json.loads(again.stdout.splitlines()[-1])["steps"] == 1
    assert project.records() == before
    there = list(copy.records())
    assert there[: len(before)] == before
    assert [record["type"] for record in there[len(before) :]] == ["start", "used", "end"]

    damaged = copy.checkpoints / "00001"
    for file, said in (
        (project.path / "model" / "model.safetensors", "it began from another model"),
        (damaged / "optimizer.safetensors", f"rm -r {damaged}; --resume then replays the log from the first step"),
    ):
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        refused = project.crrl("train", str(copy.path), "--resume", check=False)
        assert refused.returncode == 2
        assert file.name in refused.stderr and said in refused.stderr
        file.write_bytes(whole)


def test_a_huge_learning_rate_breaks_the_served_model_at_once(project: Project) -> None:
    """Property 4: the update is live in the engine before the next episode."""
    project.train("train.lr=1e3", "train.max_grad_norm=1e9", "run.steps=2", "run.checkpoint_every=1")
    episodes = list(logged_episodes(project.records()))
    surprise = {
        step: [-p for e in episodes if e.step == step for turn in e.turns for p in turn.output.logprobs]
        for step in (1, 2)
    }
    entropy = {step: sum(values) / len(values) for step, values in surprise.items()}
    assert entropy[1] > 4.0, "a random miniature is near uniform over its vocabulary (log 265 = 5.6)"
    assert abs(entropy[2] - entropy[1]) > 1.0, entropy


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
async def test_a_signal_finishes_the_log(project: Project, number: signal.Signals) -> None:
    with project.started("train", str(project.config), "run.steps=50") as process:
        await until(process, lambda: any(record["type"] == "step" for record in project.records()))
        process.send_signal(number)
        _, errors = await asyncio.to_thread(process.communicate)
    assert process.returncode == 130, errors
    assert "--resume" in errors
    records = project.records()
    assert records[-1]["type"] == "stop"
    assert records[-1]["reason"] == number.name
    assert run_account(records).balanced
    assert not shared_path(project.run).exists(), "weights on their way to the engine are cleared away"
    steps = records[-1]["step"]
    done = project.crrl("train", str(project.run.path), f"run.steps={steps + 1}", "--resume", "--json")
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == steps + 1


@pytest.mark.parametrize("victim", ["engine", "learner"])
async def test_a_killed_child_loses_nothing(project: Project, victim: str) -> None:
    """Property 5: the episodes it spoilt are void and made again; the means are those of valid episodes."""

    def in_the_first_episodes() -> bool:
        kinds = [record["type"] for record in project.records()]
        return kinds.count("turn") >= 4 and kinds.count("verdict") < 6

    module = {"engine": "coderepairrl.engines.tiny", "learner": "coderepairrl.learn.learner"}[victim]
    with project.started("train", str(project.config), "run.steps=2", "--json") as process:
        await frozen(process, in_the_first_episodes)
        children = [pid for pid in children_of(process.pid) if module in command_of(pid)]
        assert len(children) == 1, [command_of(pid) for pid in children_of(process.pid)]
        os.kill(children[0], signal.SIGKILL)
        process.send_signal(signal.SIGCONT)
        output, errors = await asyncio.to_thread(process.communicate)
    assert process.returncode == 0, errors
    summary = json.loads(output.splitlines()[-1])
    assert summary["steps"] == 2
    assert summary["account"]["balanced"]
    for step in (record for record in project.records() if record["type"] == "step"):
        valid = [e for e in logged_episodes(project.records()) if e.id in step["episodes"]]
        assert all(e.ending is not Ending.VOID for e in valid)
        mean = sum(e.reward for e in valid) / len(valid)
        assert step["metrics"]["reward"] == pytest.approx(mean)
    if victim == "engine":
        void = [e for e in logged_episodes(project.records()) if e.ending is Ending.VOID]
        assert void
        assert {e.reason for e in void} == {"engine"}
        assert "void" in summary["account"]["dropped"] or not any(e.sampled for e in void)


def test_trained_ids_are_served_ids(finished: Project) -> None:
    """Property 1, over a whole run: a row is its turns end to end, and trains what they sampled and nothing else."""
    for episode in finished.run.episodes("train-*"):
        assert [turn.base for turn in episode.turns] == [None, *range(len(episode.turns) - 1)], "Nano only appends"
        [row], account = stitch(episode, 1.0, max_tokens=3000)
        assert row.ids == sequence(episode.turns, len(episode.turns) - 1)
        outputs = [turn.output for turn in episode.turns]
        sampled = [pair for said in outputs for pair in zip(said.ids, said.logprobs, strict=True)]
        columns = zip(row.ids, row.logprobs, row.trained, strict=True)
        assert [(token, p) for token, p, trained in columns if trained] == sampled
        assert account.trained == account.sampled == len(sampled) > 0


def children_of(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task")
    return [int(child) for task in path.iterdir() for child in (task / "children").read_text().split()]


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


@pytest.mark.parametrize("seed", [0, 1])
def test_a_random_policy_learns_what_the_reward_asks_for(tmp_path: Path, seed: int) -> None:
    """Property 3 on the shipped example: held-out reward rises, from random weights, for several seeds."""
    example = Path(__file__).parents[2] / "examples" / "own_reward"
    environment = {**os.environ, "PYTHONPATH": str(example)}
    command = [*CRRL, "train", str(example / "brief.toml"), "--json"]
    command += ["run.steps=4", "train.lr=2e-3", "rollout.tasks_per_step=2", "eval.attempts=4", "tasks.verify=false"]
    command += [f"run.seed={seed}", f"run.dir={tmp_path}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    evaluations = json.loads(done.stdout.splitlines()[-1])["evaluations"]["eval"]
    before, after = (evaluations[step]["values"]["reward"]["value"] for step in ("0", "4"))
    assert before < 0.4
    assert after > before + 0.5
