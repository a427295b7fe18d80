"""An order that goes by difficulty: the tasks' own, or what a probe says; and what is refused before a run begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from coderepairrl.config import Config, load_config, to_toml
from coderepairrl.errors import CodeRepairError, ConfigError, UsageError
from coderepairrl.plan.curriculum import make_curriculum, read_probe
from coderepairrl.rollout.curriculum import Band, EasyFirst, WeightedTasks
from coderepairrl.runs import RunFolder
from coderepairrl.types import Ending, Episode, Score, Task

TASKS = tuple(Task(f"toy/{at}", "p", "python", "dir:x", b"") for at in range(4))


def config(**section: object) -> Config:
    return Config.model_validate({"run": {"name": "c"}, "curriculum": section})


def probe(folder: Path, **rewards: Sequence[float]) -> str:
    """The run of an evaluation with an attempt for each of `rewards` by task, solved where it is 1."""
    run = RunFolder(folder)
    run.create(to_toml(config()), {"name": "probe"})
    made = Episode("", "", "eval", 0, "", 0, Ending.DONE)
    run.write_episodes(
        "eval-00000",
        (
            replace(made, id=f"{task}-{at}", task_id=task, scores=(Score("tests", reward, passed=reward == 1),))
            for task, several in rewards.items()
            for at, reward in enumerate(several)
        ),
    )
    return str(folder)


def test_a_probe_gives_difficulties_and_first_rates(tmp_path: Path) -> None:
    solved = {task.id: [1.0] * at + [0.5] * (4 - at) for at, task in enumerate(TASKS)}
    named = probe(tmp_path / "probe", **solved, other=[1.0])
    easy = make_curriculum(config(easy_first={"steps": 7}, probe=named), [WeightedTasks(TASKS, 2.0)])
    assert easy.order == EasyFirst(7)
    [share] = easy.sources
    assert [task.difficulty for task in share.tasks] == [1.0, 0.75, 0.5, 0.25] and share.weight == 2.0

    band = make_curriculum(config(band=True, probe=named), [WeightedTasks(TASKS)]).order
    assert isinstance(band, Band) and band.before == {f"toy/{at}": (4, at / 4) for at in range(4)}
    assert make_curriculum(config(band=True), [WeightedTasks(TASKS)]).order == Band(0.15, 0.85)
    assert make_curriculum(config(), [WeightedTasks(TASKS)]).order is None
    assert read_probe(Path(named))["other"].rate == 1.0


def test_tasks_that_an_order_cannot_go_by_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"4 of 4 training tasks have no difficulty \(toy/0") as refused:
        make_curriculum(config(easy_first=True), [WeightedTasks(TASKS)])
    assert "curriculum.probe=RUN" in refused.value.fix
    some = probe(tmp_path / "some", **{"toy/1": [1.0, 0.0]})
    with pytest.raises(ConfigError, match=r"3 of 4 training tasks have no difficulty in .*some \(toy/0"):
        make_curriculum(config(easy_first=True, probe=some), [WeightedTasks(TASKS)])
    other = probe(tmp_path / "other", elsewhere=[1.0, 0.0])
    for order in ("easy_first", "band"):
        with pytest.raises(ConfigError, match=r"has none of the 4 training tasks"):
            make_curriculum(config(**{order: True, "probe": other}), [WeightedTasks(TASKS)])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["curriculum.probe=runs/a"], "read by easy_first and band alone"),
        (["curriculum.band=true", "curriculum.easy_first=true"], "two orders"),
        (["curriculum.band.low=0.9"], "low=0.9 exceeds high=0.85"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(CodeRepairError, match=said):
        load_config("hello", overrides)


def test_void_attempts_say_nothing_of_a_task_and_without_checks_rewards_count(tmp_path: Path) -> None:
    run = RunFolder(Path(probe(tmp_path / "probe", **{"toy/1": [1.0, 0.5]})))
    solved, failed = run.episodes()
    void = replace(solved, id="void", ending=Ending.VOID)
    untested = replace(solved, id="untested", task_id="toy/2", scores=(Score("edits", 0.25),))
    run.write_episodes("eval-00000", [solved, failed, void, untested])
    assert read_probe(run.path) == {"toy/1": (2, 0.5), "toy/2": (1, 0.25)}
    (run.path / "episodes" / "eval-00000.jsonl").unlink()
    with pytest.raises(UsageError, match="has no evaluation"):
        read_probe(run.path)
