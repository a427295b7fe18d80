"""An order that goes by difficulty: the tasks' own, or what a probe says; and what is refused before a run begins."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from coderepairrl.config import Config, load_config, to_toml
from coderepairrl.errors import CodeRepairError, ConfigError, UsageError
from coderepairrl.plan.curriculum import make_curriculum, read_probe
from coderepairrl.rollout import Band, EasyFirst, WeightedTasks
from coderepairrl.runs import RunFolder
from coderepairrl.types import Ending, Episode, Score, Task

TASKS = tuple(Task(f"toy/{at}", "p", "python", "dir:x", b"") for at in range(4))


def config(**section: object) -> Config:
    return Config.model_validate({"run": {"name": "c"}, "curriculum": section})


def probe(path: Path, *rows: dict[str, object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_probe_gives_difficulties_and_first_rates(tmp_path: Path) -> None:
    rows = [{"task": task.id, "attempts": 4, "solved": at, "reward": 0.5} for at, task in enumerate(TASKS)]
    named = probe(tmp_path / "probe.jsonl", *rows, {"task": "other", "attempts": 1, "reward": 2.0, "more": 1})
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
    some = probe(tmp_path / "some.jsonl", {"task": "toy/1", "attempts": 2, "solved": 1})
    with pytest.raises(ConfigError, match=r"3 of 4 training tasks have no difficulty in .*some\.jsonl \(toy/0"):
        make_curriculum(config(easy_first=True, probe=some), [WeightedTasks(TASKS)])
    other = probe(tmp_path / "other.jsonl", {"task": "elsewhere", "attempts": 2, "solved": 1})
    for order in ("easy_first", "band"):
        with pytest.raises(ConfigError, match=r"has none of the 4 training tasks"):
            make_curriculum(config(**{order: True, "probe": other}), [WeightedTasks(TASKS)])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"task": "a", "attempts": 2}', "line 2: Value error, neither solved nor reward"),
        ('{"task": "a", "attempts": 2, "solved": 3}', "line 2: Value error, 3 of 2 attempts cannot"),
        ('{"task": "a", "attempts": 0, "solved": 0}', "line 2: attempts: "),
        ('{"task": "a", "attempts": 2, "solved": "1"}', "line 2: solved: "),
        ('{"task": "b", "attempts": 2, "solved": 1}', "line 2: task b has a line already"),
        ("[1]", "line 2: "),
        ("{", "line 2: not read as JSON"),
    ],
)
def test_a_probe_that_is_wrong_is_named_by_its_line(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "probe.jsonl"
    path.write_text('{"task": "b", "attempts": 1, "solved": 1}\n' + line + "\n")
    with pytest.raises(UsageError, match=said) as wrong:
        read_probe(path)
    assert wrong.value.fix
    with pytest.raises(UsageError, match="is not read: No such file"):
        read_probe(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["curriculum.probe=a.jsonl"], "read by easy_first and band alone"),
        (["curriculum.band=true", "curriculum.easy_first=true"], "two orders"),
        (["curriculum.band.low=0.9"], "low=0.9 exceeds high=0.85"),
        (["curriculum.order=band"], "order"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(CodeRepairError, match=said):
        load_config("hello", overrides)


def test_the_band_is_a_setting_of_its_own_and_may_change_in_a_run() -> None:
    wide = load_config("hello", ["curriculum.band.low=0.05", "curriculum.refill=8"])
    assert wide.curriculum.band is not None and wide.curriculum.band.low == 0.05 and wide.curriculum.refill == 8
    assert load_config("hello").curriculum == Config.model_validate({"run": {"name": "c"}}).curriculum


def test_an_evaluation_is_a_probe(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "probe")
    run.create(to_toml(config()), {"name": "probe"})
    made = Episode("", "", "eval", 0, "", 0, Ending.DONE)
    run.write_episodes(
        "eval-00000",
        [
            replace(made, id=f"e{number}", task_id=task, scores=(Score(name, reward, passed=passed),), ending=ending)
            for number, (task, name, reward, passed, ending) in enumerate(
                [
                    ("toy/1", "tests", 1.0, True, Ending.DONE),
                    ("toy/1", "tests", 0.5, False, Ending.LIMIT),
                    ("toy/1", "tests", 0.0, False, Ending.VOID),
                    ("toy/2", "edits", 0.25, None, Ending.DONE),
                ]
            )
        ],
    )
    found = read_probe(run.path)
    assert {name: (each.attempts, each.solved, each.rate) for name, each in found.items()} == {
        "toy/1": (2, 1, 0.5),
        "toy/2": (1, None, 0.25),
    }
    (run.path / "episodes" / "eval-00000.jsonl").unlink()
    with pytest.raises(UsageError, match="has no evaluation"):
        read_probe(run.path)
