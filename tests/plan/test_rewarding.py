"""A run that names no reward: what its tasks have decides, and a resumed one keeps what it had."""

from __future__ import annotations

from pathlib import Path

import pytest

from coderepairrl.config import Config, to_toml
from coderepairrl.errors import ConfigError
from coderepairrl.plan.tasks import reward_for, settle_rewards
from coderepairrl.runs import RunFolder
from coderepairrl.stages.changes import fill_rewards
from coderepairrl.types import Checks, Command, Task

DIFF = b"--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-1\n+2\n"
CHECKS = Checks((Command(("python3", "check.py")),))
BOTH = Task("both", "", "python", "dir:/w", DIFF, CHECKS)
TESTED = Task("tested", "", "python", "dir:/w", b"", CHECKS)
ALIKE = Task("alike", "", "python", "dir:/w", DIFF)
ASKED = Task("asked", "", "python", "", b"", answer="CWE-79", kind="detect")


def settle(config: Config, *tasks: Task) -> Config:
    return settle_rewards(config, tasks, tasks)[0]


def configured(**sections: object) -> Config:
    return Config.model_validate({"run": {"name": "a", "steps": 9}, **sections})


@pytest.mark.parametrize(
    ("tasks", "paid", "measured"),
    [
        ([BOTH], {"hybrid": 1.0}, {"tests": 1.0, "patch_edits": 0.0}),
        ([BOTH, ALIKE], {"patch_edits": 1.0}, {"patch_edits": 1.0}),
        ([BOTH, TESTED], {"tests": 1.0}, {"tests": 1.0}),
        ([ASKED], {"label": 1.0}, {"label": 1.0}),
    ],
)
def test_one_rule_holds_for_all_tasks(tasks: list[Task], paid: dict[str, float], measured: dict[str, float]) -> None:
    settled = settle(configured(), *tasks)
    assert (settled.reward, settled.eval.reward) == (paid, measured)
    assert "temperature" not in settled.eval.model_fields_set, "nobody gave it"
    assert settled.tasks.verified_references == (4 if "hybrid" in paid else 0)


def test_tasks_that_have_nothing_in_common_are_refused_with_the_setting_that_helps() -> None:
    with pytest.raises(ConfigError, match="no one measure") as caught:
        reward_for([TESTED, ALIKE], pays=True)
    assert caught.value.fix == "name it: reward=NAME"


def test_what_is_named_stays_and_kinds_with_a_reward_do_not_count() -> None:
    named = settle(configured(reward="patch_lines"), BOTH)
    assert (named.reward, named.eval.reward, named.tasks.verified_references) == ({"patch_lines": 1.0}, {}, 0)
    mixed = configured(kinds={"detect": {"reward": "label"}}, tasks={"verified_references": 2})
    assert settle(mixed, BOTH, ASKED).reward == {"hybrid": 1.0}
    assert settle(mixed, BOTH, ASKED).tasks.verified_references == 2
    assert settle(configured(run={"name": "a", "steps": 1}), *[BOTH] * 8).tasks.verified_references == 0
    with pytest.raises(ConfigError, match="file_match is not measured"):
        settle(configured(train={"tie_break": {"file_match": 0.1}}), BOTH)


def test_a_run_of_an_older_version_resumes_with_the_default_that_it_began_with(tmp_path: Path) -> None:
    older = configured(reward={"patch_edits": 1.0}, tasks={"verified_references": 0})
    (tmp_path / "config.toml").write_text(to_toml(older))
    resumed = fill_rewards(RunFolder(tmp_path), configured())
    assert (resumed.reward, resumed.eval.reward, resumed.tasks.verified_references) == ({"patch_edits": 1.0}, {}, 0)
    asked = fill_rewards(RunFolder(tmp_path), configured(reward="hybrid"))
    assert asked.reward == {"hybrid": 1.0}, "a change of it is seen, and refused"
