"""Settings that change when a run is resumed: logged, and taken back where earlier steps are replayed."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal

import pytest

from coderepairrl import config as configs
from coderepairrl.errors import ConfigError, ExitCode
from coderepairrl.train.changes import check_resumed
from e2e.conftest import Project, frozen


async def killed_after(project: Project, steps: int, *arguments: str) -> None:
    """Run `crrl train` with `arguments`, and kill it (SIGKILL) in the step after the `steps`-th."""

    def reached() -> bool:
        kinds = [record["type"] for record in project.records()]
        return kinds.count("step") == steps and "verdict" in kinds[len(kinds) - kinds[::-1].index("step") :]

    with project.started("train", *arguments, "run.steps=50", "run.checkpoint_every=100") as process:
        await frozen(process, reached)
        process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(process.wait)


async def test_a_changed_learning_rate_is_replayed_bit_for_bit(project: Project) -> None:
    """Killed, resumed with another learning rate, killed, resumed: the log's weights come out, from any checkpoint."""
    folder = str(project.run.path)
    await killed_after(project, 2, str(project.config))
    await killed_after(project, 4, folder, "--resume", "train.lr=5e-3", "rollout.seconds=20")
    assert configs.load(folder).train.lr == 5e-3
    for lost in (False, True):
        if lost:  # then the steps before the change are replayed once more
            shutil.rmtree(project.run.checkpoints)
            project.run.checkpoints.mkdir()
        done = project.crrl("train", folder, "--resume", f"run.steps={6 if lost else 5}", "--json")
        assert json.loads(done.stdout.splitlines()[-1])["account"]["balanced"]
    rates = [step["metrics"]["learn/lr"] for step in project.records() if step["type"] == "step"]
    assert rates == [1e-3, 1e-3, 5e-3, 5e-3, 5e-3, 5e-3]
    changes = [[r["step"], r["key"], r["old"], r["new"]] for r in project.records() if r["type"] == "change"]
    assert changes[:2] == [
        *([2, "rollout.seconds", 30.0, 20.0], [2, "train.lr", 1e-3, 5e-3]),
    ]
    assert {key for _, key, _, _ in changes[2:]} == {"run.steps"}


def test_what_would_make_it_another_run_is_refused_with_the_reason(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.train("run.steps=1")
    monkeypatch.chdir(project.path)
    for override, why in (
        ("train.algorithm=grpo", "another method"),
        ("run.seed=1", "randomness"),
        ("agent.options.tools=full", "another program's"),
    ):
        with pytest.raises(ConfigError, match=why):
            check_resumed(project.run, configs.load(project.run.path, [override]))
    before = project.run.config.read_text()
    assert 'tools = "compact"\n' in before
    project.run.config.write_text(before.replace('tools = "compact"\n', ""))  # by hand, and by leaving it out
    with pytest.raises(ConfigError, match=r"agent\.options\.tools"):
        check_resumed(project.run, configs.load(project.run.path))


def test_values_of_two_versions_of_a_reward_are_not_mixed(project: Project) -> None:
    project.train("run.steps=1")
    about = json.loads((project.run.path / "run.json").read_text())
    [name] = about["rewards"]
    assert about["rewards"] == {name: 1}
    (project.run.path / "run.json").write_text(json.dumps(about | {"rewards": {name: 2}}))
    done = project.crrl("train", str(project.run.path), "--resume", "run.steps=2", check=False)
    assert done.returncode == ExitCode.USAGE
    assert f"{name} version 2, and this installation computes version 1" in done.stderr
