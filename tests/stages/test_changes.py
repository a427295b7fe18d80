"""What changes when a run is resumed is refused or logged, and each step is replayed as it was made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from coderepairrl.config import Config, to_toml
from coderepairrl.errors import ConfigError
from coderepairrl.runs import RunFolder
from coderepairrl.stages.changes import MAY_CHANGE, WHY_NOT, Change, config_at_step, explain_refusal, list_changes
from coderepairrl.stages.history import History

CONFIG = Config.model_validate({"run": {"name": "changing"}})


def settings() -> set[str]:
    """Every setting, by dotted key."""
    keys = {"reward"}
    for name in Config.model_fields:
        section = getattr(CONFIG, name)
        keys |= {f"{name}.{key}" for key in type(section).model_fields} if isinstance(section, BaseModel) else set()
    return keys


def test_every_setting_may_change_or_has_a_reason_why_not() -> None:
    known = settings()
    may = {key for key in known if any(key == name or key.startswith(f"{name}.") for name in MAY_CHANGE)}
    assert all(explain_refusal(key) for key in known - may)
    assert {name for name in (*MAY_CHANGE, *WHY_NOT) if "." in name} <= known, "what the two lists name exists"
    assert not {"train.algorithm", "run.seed", "model.path", "rollout.temperature"} & may


VALUES: dict[str, list[Any]] = {
    "train.lr": [1e-3, 2e-3, 3e-3],
    "train.betas": [[0.9, 0.99], [0.8, 0.95]],
    "train.eps_low": [None, 0.1],
    "rollout.tokens": [5000, 6000],
    "rollout.concurrency": [2, 3],
    "train.patience": [10.0, 20.0],
}


@given(st.lists(st.tuples(st.integers(0, 6), st.sampled_from(sorted(VALUES)), st.integers(0, 2)), max_size=12))
def test_each_step_has_the_settings_it_was_made_with(drawn: list[tuple[int, str, int]]) -> None:
    """Against a run that is played forward: several changes of one setting, at one step too, and back again."""
    now: dict[str, Any] = {key: values[0] for key, values in VALUES.items()}
    made: dict[int, dict[str, Any]] = {}
    changes = []
    for step in range(1, 9):
        for at, key, number in drawn:
            new = VALUES[key][number % len(VALUES[key])]
            if at == step - 1 and new != now[key]:
                changes.append(Change(step - 1, key, now[key], new)._asdict())
                now = {**now, key: new}
        made[step] = now
    config = _with(now)
    for step, settings in made.items():
        machine = {key: now[key] for key in ("rollout.concurrency", "train.patience")}
        assert config_at_step(config, changes, step) == _with(settings | machine), f"step {step}"


def _with(settings: dict[str, Any]) -> Config:
    data: dict[str, Any] = {"run": {"name": "changing"}}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        data.setdefault(section, {})[name] = value
    return Config.model_validate(data)


def test_values_of_two_versions_of_a_reward_are_not_mixed_and_steps_stay_made(tmp_path: Path) -> None:
    folder, own = RunFolder(tmp_path / "run"), Config.model_validate({"run": {"name": "changing", "steps": 1}})
    folder.create(to_toml(own), {"config": own.model_dump(mode="json"), "rewards": {"patch_edits": 1}})
    assert list_changes(folder, History(), own, {"patch_edits": 1}, ()) == []
    with pytest.raises(ConfigError, match="patch_edits version 1, and this installation computes version 2"):
        list_changes(folder, History(), own, {"patch_edits": 2}, ())
    two = History(steps=[{"step": 1}, {"step": 2}])
    with pytest.raises(ConfigError, match="already has 2 steps, more than run.steps=1"):
        list_changes(folder, two, own, {"patch_edits": 1}, ())
