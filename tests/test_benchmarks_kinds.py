"""Kinds of tasks on the tiny policy: the runs that are compared, and the table of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.kinds import TASKS, arms, recipe, table
from coderepairrl.config import load
from workshop.tiny import kinds


def test_each_arm_has_as_many_groups_of_a_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "DRAWS", dict.fromkeys(kinds.KINDS, 1))
    kinds.make(tmp_path)
    for name, own in arms(kinds.KINDS).items():
        config = load(recipe(tmp_path, own), [f"run.name={name}"])
        assert [each.options["path"] for each in config.tasks.sources] == [f"{tmp_path}/{kind}.jsonl" for kind in own]
        assert config.rollout.tasks_per_step == TASKS * len(own), name
        assert len({each.weight for each in config.tasks.sources}) == 1
        assert config.kinds.keys() == set(own)
    assert len(list(table(tmp_path, kinds.KINDS))) == 7, "headers alone where nothing is finished"
