"""crrl train from end to end: the properties that a whole run must have, and what is reported of one."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from statistics import mean

import psutil
import pytest

from coderepairrl import config as configs
from coderepairrl.errors import ConfigError
from coderepairrl.learn import stitch_episode
from coderepairrl.learn.account import count_run_tokens
from coderepairrl.runs import RunFolder, logged_episodes
from coderepairrl.stages import command, export, life_cycle
from coderepairrl.stats.intervals import Interval, cluster_episodes
from coderepairrl.sync import weights
from coderepairrl.sync.weights import find_shared_path
from coderepairrl.types import Ending, sequence
from commands import CRRL
from e2e.conftest import Project, freeze_when, wait_until
from pages import Page


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
    account = count_run_tokens(records)
    assert account.is_balanced
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
    """A copied folder is resumed where it lies, unless a file of it or of its model has changed."""
    shutil.copytree(miniature, project.path / "model")
    project.train("run.steps=1", "model.path=model")
    refused = project.crrl("train", str(project.config), check=False)
    assert refused.returncode == 2
    assert "--resume" in refused.stderr

    copy, before = RunFolder(project.path / "elsewhere" / "a copy"), project.records()
    shutil.copytree(project.run.path, copy.path)
    for source in (copy.path, copy.config):
        assert life_cycle.find_resumed_folder(str(source), configs.load_config(source)).path == copy.path
        with pytest.raises(ConfigError, match=r"run\.dir=runs names another folder"):
            life_cycle.find_resumed_folder(str(source), configs.load_config(source, ["run.dir=runs"]))
    assert project.train("run.steps=1", "--resume", source=copy.path)["steps"] == 1
    assert project.records() == before
    copied = list(copy.records())
    assert copied[: len(before)] == before
    assert [record["type"] for record in copied[len(before) :]] == ["start", "used", "end"]

    damaged = copy.checkpoints / "00001"
    for file, message in (
        (project.path / "model" / "model.safetensors", "it began from another model"),
        (damaged / "optimizer.safetensors", f"rm -r {damaged}; --resume then replays the log from the first step"),
    ):
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        refused = project.crrl("train", str(copy.path), "--resume", check=False)
        assert refused.returncode == 2
        assert file.name in refused.stderr and message in refused.stderr
        file.write_bytes(whole)


def test_a_huge_learning_rate_breaks_the_served_model_at_once(project: Project) -> None:
    """Property 4: the update is live in the engine before the next episode."""
    project.train("train.lr=1e3", "train.max_grad_norm=1e9", "run.steps=2", "run.checkpoint_every=1")
    episodes = list(logged_episodes(project.records()))
    entropy = {
        step: -mean(p for e in episodes if e.step == step for turn in e.turns for p in turn.output.logprobs)
        for step in (1, 2)
    }
    assert entropy[1] > 4.0, "a random miniature is near uniform over its vocabulary (log 265 = 5.6)"
    assert abs(entropy[2] - entropy[1]) > 1.0, entropy


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
async def test_a_signal_finishes_the_log(project: Project, number: signal.Signals) -> None:
    with project.started("train", str(project.config), "run.steps=50") as process:
        await wait_until(process, lambda: bool(project.steps()))
        process.send_signal(number)
        _, errors = await asyncio.to_thread(process.communicate)
    assert process.returncode == 130, errors
    assert "--resume" in errors
    records = project.records()
    assert records[-1]["type"] == "stop"
    assert records[-1]["reason"] == number.name
    assert count_run_tokens(records).is_balanced
    assert not find_shared_path(project.run).exists(), "weights on their way to the engine are cleared away"
    steps = records[-1]["step"]
    assert project.resume(f"run.steps={steps + 1}")["steps"] == steps + 1


@pytest.mark.parametrize("victim", ["engine", "learner"])
async def test_a_killed_child_loses_nothing(project: Project, victim: str) -> None:
    """Property 5: its unfinished episodes are void and attempted again; means are those of valid episodes."""

    def in_the_first_episodes() -> bool:
        kinds = [record["type"] for record in project.records()]
        return kinds.count("turn") >= 4 and kinds.count("verdict") < 6

    module = {"engine": "coderepairrl.engines.tiny.server", "learner": "coderepairrl.learn.learner"}[victim]
    with project.started("train", str(project.config), "run.steps=2", "--json") as process:
        await freeze_when(process, in_the_first_episodes)
        [child] = [each for each in psutil.Process(process.pid).children() if module in each.cmdline()]
        child.kill()
        process.send_signal(signal.SIGCONT)
        output, errors = await asyncio.to_thread(process.communicate)
    assert process.returncode == 0, errors
    summary = json.loads(output.splitlines()[-1])
    assert summary["steps"] == 2
    assert summary["account"]["balanced"]
    for step in project.steps():
        valid = [e for e in logged_episodes(project.records()) if e.id in step["episodes"]]
        assert all(e.ending is not Ending.VOID for e in valid)
        assert step["metrics"]["reward"] == pytest.approx(mean(e.reward for e in valid))
    if victim == "engine":
        void = [e for e in logged_episodes(project.records()) if e.ending is Ending.VOID]
        assert void
        assert {e.reason for e in void} == {"engine"}
        assert "void" in summary["account"]["dropped"] or not any(e.sampled for e in void)


def test_trained_ids_are_served_ids(finished: Project) -> None:
    """Property 1, over a whole run: a row is its turns end to end, and trains exactly the tokens that they sampled."""
    for episode in finished.run.episodes("train-*"):
        assert [turn.base for turn in episode.turns] == [None, *range(len(episode.turns) - 1)], "Nano only appends"
        [row], account = stitch_episode(episode, 1.0, max_tokens=3000)
        assert row.ids == sequence(episode.turns, len(episode.turns) - 1)
        outputs = [turn.output for turn in episode.turns]
        sampled = [pair for said in outputs for pair in zip(said.ids, said.logprobs, strict=True)]
        columns = zip(row.ids, row.logprobs, row.trained, strict=True)
        assert [(token, p) for token, p, trained in columns if trained] == sampled
        assert account.trained == account.sampled == len(sampled) > 0


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


def test_a_real_run_is_reported(finished: Project) -> None:
    project, summary = finished, finished.summary()
    data = json.loads(project.crrl("report", str(project.run.path), "--json").stdout.splitlines()[-1])
    (run,) = data["runs"]
    assert run["status"] == "finished" and [step["step"] for step in run["steps"]] == [1, 2, 3]
    assert {name: run["account"][name] for name in summary["account"]} == summary["account"]
    metrics = project.run.metrics()[-1]
    assert {name: run["steps"][-1][name] for name in metrics} == metrics
    for step in run["steps"]:
        assert sum(step["ledger"].values()) == pytest.approx(step["rollout_seconds"] + step["learn_seconds"])
        assert step["ledger"]["generation"] > 0 and step["ledger"]["sandbox"] > 0
    assert run["ledger"]["evaluation"] > 0 and sum(run["ledger"].values()) == pytest.approx(run["wall_seconds"])
    page = project.run.path / "report" / "index.html"
    assert project.crrl("report", str(project.run.path)).stdout.strip() == str(page)
    assert "Held-out tasks, before and after" in page.read_text()


def test_episodes_are_exported_as_trajectories_and_as_a_table(finished: Project) -> None:
    project, episodes = finished, len(list(logged_episodes(finished.run.records())))
    done = project.crrl("export", str(project.run.path), "out", "--to", "atif")
    assert done.stdout == "out\n" and len(list((project.path / "out").iterdir())) == episodes
    done = project.crrl("export", str(project.run.path), "out.parquet", "--to", "parquet")
    assert f"{episodes} episodes" in done.stderr and (project.path / "out.parquet").is_file()


def test_a_bundle_evaluates_again_as_the_run_did(finished: Project) -> None:
    project = finished
    done = project.crrl("export", str(project.run.path), "bundle", "--to", "bundle")
    assert done.stdout == "bundle\n" and done.stderr.endswith("1 run\n")
    bundle = project.path / "bundle"
    files = {str(path.relative_to(bundle)) for path in bundle.rglob("*") if path.is_file()}
    assert not {name for name in files if "optimizer" in name or "episodes" in name or name.endswith("log.jsonl")}
    subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=bundle, check=True)
    subprocess.run(["sha256sum", "-c", "--quiet", str(bundle / "LOGS.sha256")], cwd=project.run.path, check=True)
    command = "crrl eval config.toml --policy ."
    assert command in (bundle / "README.md").read_text()
    results = []
    for number, folder in enumerate((project.run.path, bundle)):
        source, output = str(folder / "config.toml"), f"again-{number}"
        project.crrl("eval", source, "--policy", str(folder), "-o", output, "eval.temperature=0")
        results.append(json.loads((project.path / output / "eval/eval-00000/summary.json").read_text()))
    assert results[0]["values"] == results[1]["values"]
    assert "already exists" in project.crrl("export", str(bundle), "bundle", "--to", "bundle", check=False).stderr
    empty = project.crrl("export", str(project.path / "nowhere"), "other", "--to", "bundle", check=False)
    assert empty.returncode == 2 and not (project.path / "other").exists()


async def test_full_weights_are_exported_without_the_learners_state(finished: Project, tmp_path: Path) -> None:
    plain, checkpoint = tmp_path / "plain", max(finished.run.list_checkpoints().items())[1]
    await export.export_model(str(finished.run.path), plain)
    assert weights.compute_checksum(plain) == weights.compute_checksum(checkpoint)
    assert (checkpoint / "learner.json").exists()
    assert not [file.name for file in plain.iterdir() if file.name.startswith(("learner.", "optimizer"))]


def test_differing_conditions_are_reported_once_and_recorded(finished: Project) -> None:
    assert (finished.path / "stderr").read_text().count("evaluation greedy has temperature 0, and training 1") == 1
    kept = {(each["evaluation"], each["condition"]) for each in finished.run.about()["differences"]}
    assert ("greedy", "temperature") in kept


def test_the_memory_plan_is_recorded_at_the_start(finished: Project) -> None:
    needs = command.compute_needs(configs.load_config(finished.run.path))
    assert finished.run.about()["needs"] == needs and needs["learner_gb_with"]


def test_an_interval_is_the_same_in_file_log_screen_and_report(finished: Project) -> None:
    """Tasks are held-out mutants, clustered by their function."""
    project, screen = finished, (finished.path / "stderr").read_text()
    data = json.loads(project.crrl("report", str(project.run.path), "--json").stdout.splitlines()[-1])
    project.crrl("report", str(project.run.path))
    page = Page((project.run.path / "report" / "index.html").read_text()).text
    for step, reported, side in zip(
        (0, 3),
        [entry for entry in data["runs"][0]["evaluations"] if entry["name"] == "eval"],
        (data["runs"][0]["comparisons"][0][s] for s in ("early", "late")),
        strict=True,
    ):
        written = json.loads((project.run.path / "eval" / f"eval-{step:05d}" / "summary.json").read_text())
        logs = [record for record in project.records() if record["type"] == "eval" and record["name"] == "eval"]
        [logged] = [record["summary"] for record in logs if record["step"] == step]
        assert written["values"] == logged["values"] == reported["values"]
        same = side.keys() - {"tool_success"}  # a comparison's is of tasks with calls on both sides
        assert {name: side[name] for name in same} == {name: written["values"][name] for name in same}
        clusters = cluster_episodes(project.run.episodes(f"eval-{step:05d}"))
        assert len(set(clusters.values())) < written["tasks"]
        for value in written["values"].values():
            assert value["low"] is None or value["low"] < value["high"]
        reward = Interval(**written["values"]["reward"])
        assert f"eval after step {step}: reward {reward}" in screen
        assert str(reward).replace("-", "\N{MINUS SIGN}") in " ".join(page.split())
