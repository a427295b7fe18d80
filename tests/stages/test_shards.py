"""Shards and runs by name: what `crrl eval` refuses of them before it reads their attempts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from coderepairrl.errors import UsageError
from coderepairrl.runs import RunFolder
from coderepairrl.stages.arguments import plan_evaluations
from coderepairrl.stages.shards import merge_shards
from coderepairrl.types import Task


def shard(path: Path, number: int, tasks: Sequence[str]) -> Path:
    folder = RunFolder(path)
    folder.create("", {"policy": "builtin:tiny", "shard": f"{number}/2", "config": {"run": {"seed": 0}}})
    folder.add_tasks(Task(name, "p", "python", "", b"") for name in tasks)
    log = folder.writer()
    log.append("end", step=0)
    log.close()
    return path


def test_shards_of_a_source_that_changed_are_of_different_evaluations(tmp_path: Path) -> None:
    """With one more task before the others, the second shard has what the first has, and the rest is in none."""
    parts = [shard(tmp_path / "1", 1, "abcd"), shard(tmp_path / "2", 2, "xabcd")]
    with pytest.raises(UsageError, match="they differ in tasks"):
        merge_shards(parts, tmp_path / "merged")


@pytest.mark.parametrize("collects", [False, True])
def test_a_damaged_run_is_a_message(tmp_path: Path, collects: bool) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UsageError, match="is not a run folder"):
        plan_evaluations(str(tmp_path), resume=True, collects=collects)
