"""What a model was fine-tuned on is not trained on again unknowingly: the shares of both stages are disjoint."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from coderepairrl import config as configs
from coderepairrl.config import Config
from coderepairrl.errors import CodeRepairError, RunError, TaskError
from coderepairrl.plan.tasks import TaskReader, check_learned, read_tasks_learned_by_model, sample_sources
from coderepairrl.rollout.curriculum import WeightedTasks
from coderepairrl.runs import LEARNED_FILE, read_learned, write_learned
from coderepairrl.types import Task


def config(tmp_path: Path, **more: object) -> Config:
    rows = [{"id": f"q/{at}", "prompt": f"{at}?", "language": "c", "answer": "yes"} for at in range(60)]
    (tmp_path / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"source": "jsonl", "options": {"path": str(tmp_path / "labels.jsonl")}, **more}
    return configs.validate_config({"run": {"name": "x"}, "tasks": source, "eval": {"tasks": 0}}, "test")


def trained(resolved: Config) -> list[Task]:
    return [task for share in TaskReader(resolved).training_tasks() for task in share.tasks]


def collected(resolved: Config) -> list[Task]:
    return list(TaskReader(resolved).collected_tasks()["eval"])


def fine_tuned(tmp_path: Path, miniature: Path, tasks: list[Task]) -> Path:
    """A folder with the model of a run that learned from trajectories of `tasks`."""
    folder = tmp_path / "sft"
    folder.mkdir()
    for file in miniature.iterdir():
        (folder / file.name).symlink_to(file)
    write_learned(folder, (task.id for task in tasks))
    return folder


@pytest.mark.parametrize("share", [None, 0.6])
def test_collecting_and_training_share_the_tasks_and_have_none_in_common(share: float | None, tmp_path: Path) -> None:
    ours = {task.id for task in collected(config(tmp_path, holdout=share))}
    theirs = {task.id for task in trained(config(tmp_path, holdout=0.25 if share is None else share))}
    assert ours and theirs and not ours & theirs
    assert ours | theirs == {f"q/{at}" for at in range(60)}


def test_several_sources_are_collected_from_by_their_weights() -> None:
    def source(name: str, count: int, weight: float) -> WeightedTasks:
        return WeightedTasks([Task(f"{name}/{at}", "?", "c", "", b"") for at in range(count)], weight)

    def drawn(n: int, *sources: WeightedTasks) -> dict[str, int]:
        tasks = sample_sources(sources, n, seed=0)
        assert len({task.id for task in tasks}) == len(tasks)
        return dict(Counter(task.id.partition("/")[0] for task in tasks))

    assert drawn(8, source("a", 20, 3.0), source("b", 20, 1.0)) == {"a": 6, "b": 2}
    assert drawn(8, source("a", 4, 3.0), source("b", 20, 1.0)) == {"a": 4, "b": 4}, (
        "a source that ends leaves its places"
    )
    assert drawn(0, source("a", 4, 3.0), source("b", 5, 1.0)) == drawn(9, source("a", 4, 1.0), source("b", 5, 1.0))
    both = [source("a", 9, 1.0), source("b", 9, 2.0)]
    few, more = ({task.id for task in sample_sources(both, n, seed=3)} for n in (4, 9))
    assert few < more, "a larger sample extends a smaller one"


def test_training_on_what_was_learned_is_refused_unless_it_is_asked_for(tmp_path: Path, miniature: Path) -> None:
    """A ratio of 0 on the side of RL, beside 0.25 on that of SFT, once trained both on the same tasks."""
    learned = collected(config(tmp_path))
    model = {"path": str(fine_tuned(tmp_path, miniature, learned))}
    assert read_tasks_learned_by_model(model["path"]) == {task.id for task in learned}

    def check(**more: object) -> None:
        resolved = config(tmp_path, **more)
        resolved = resolved.model_copy(update={"model": resolved.model.model_copy(update=model)})
        check_learned(resolved, trained(resolved))

    for holdout in (None, 0.0, 0.1):
        with pytest.raises(TaskError, match="was fine-tuned on trajectories of") as caught:
            check(holdout=holdout)
        assert "tasks.learned=train" in caught.value.fix
    with pytest.raises(TaskError) as caught:
        check()
    assert "tasks.holdout=0.25" in caught.value.fix
    check(holdout=0.25)
    check(holdout=0.5)
    check(learned="train")


def test_two_tasks_of_one_id_are_neither_trained_on_nor_collected_from(tmp_path: Path) -> None:
    rows = [{"before": "x\n", "after": after, "id": "q"} for after in ("y\n", "z\n")]
    (tmp_path / "twice.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"source": "repair", "options": {"path": str(tmp_path / "twice.jsonl"), "cache": str(tmp_path)}}
    data: dict[str, Any] = {"run": {"name": "x"}, "tasks": {**source, "holdout": 0.0}, "eval": {"tasks": 0}}
    with pytest.raises(CodeRepairError, match="there are 2 tasks repair/q"):
        trained(configs.validate_config(data, "test"))
    data["tasks"]["holdout"] = 1.0
    with pytest.raises(CodeRepairError, match="there are 2 tasks repair/q"):
        collected(configs.validate_config(data, "test"))


def test_a_share_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"tasks.holdout=1 leaves none of the 60 tasks"):
        trained(config(tmp_path, holdout=1.0))
    with pytest.raises(TaskError, match="none of the 60 tasks is in the share of 0 that crrl collect attempts"):
        collected(config(tmp_path, holdout=0.0))
    assert len(collected(config(tmp_path, holdout=1.0))) == 60


def test_learned_tasks_are_read_back_and_damage_is_named(tmp_path: Path) -> None:
    write_learned(tmp_path, [])
    assert not (tmp_path / LEARNED_FILE).exists() and read_learned(tmp_path) == frozenset()
    write_learned(tmp_path, ["b", "a", "b"])
    assert read_learned(tmp_path) == {"a", "b"}
    for damage in ("{", "[]", '{"tasks": 1}', '{"tasks": [1]}'):
        (tmp_path / LEARNED_FILE).write_text(damage)
        with pytest.raises(RunError, match="does not say which tasks"):
            read_learned(tmp_path)
