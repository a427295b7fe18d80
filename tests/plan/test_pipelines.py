"""The presets `full` and `simplified`: builds and tests decide, or nothing is executed to reward an attempt."""

from __future__ import annotations

from pathlib import Path

import pytest

from coderepairrl.config import load_config, shipped
from coderepairrl.errors import TaskError
from coderepairrl.plan import plan_run
from coderepairrl.tasks import make_source
from coderepairrl.tasks.select import Verified, write_quarantine

OTHER_TASKS = ("tasks.source=handmade", 'eval.options={split="test"}')
KEPT = "quarantine.jsonl"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_full_starts_on_tasks_that_were_verified_and_on_no_others() -> None:
    options = f'tasks.options={{split="train", select={{quarantine="{KEPT}"}}}}'
    with pytest.raises(TaskError) as raised:  # nothing was verified
        plan_run(load_config("full", [*OTHER_TASKS, options]))
    assert KEPT in str(raised.value) and "tasks verify SOURCE --quarantine" in raised.value.fix
    tasks = list(make_source("handmade", split="train"))
    assert (
        write_quarantine(
            [Verified(tasks[0], None, "flaky"), *(Verified(task, task, "") for task in tasks[1:])], Path(KEPT)
        )
        == 1
    )
    plan = plan_run(load_config("full", [*OTHER_TASKS, options]))
    assert {task.id for task in plan.train_tasks} == {task.id for task in tasks[1:]}
    assert plan.config.tasks.verify


def test_in_full_tests_alone_are_paid_for_and_in_simplified_nothing_is_executed() -> None:
    def executes(preset: str) -> list[bool]:
        plan = plan_run(load_config(preset, OTHER_TASKS))
        return [reward.runs_checks for reward, weight in plan.kinds[""].rewards["train"] if weight]

    assert executes("full") == [True]
    assert executes("simplified") == [False]


def test_both_are_measured_alike_and_are_the_same_run_but_for_what_pays() -> None:
    full, simplified = (load_config(name).model_dump(mode="json") for name in ("full", "simplified"))
    assert full["eval"] == simplified["eval"] and full["eval"]["reward"]["tests"] > 0
    assert {key for key in full if full[key] != simplified[key]} == {"run", "tasks", "reward"}
    # what the preset asks for is what its first lines say how to make
    said = shipped()["full"].read_text("utf-8")
    assert f"--quarantine {full['tasks']['options']['select']['quarantine']}" in said
