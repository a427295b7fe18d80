"""The examples of the two pages run as they are printed, and the table of fields is that of the code."""

from __future__ import annotations

import doctest
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from coderepairrl.rewards import PRESETS, SHIPPED
from coderepairrl.tasks import jsonl
from coderepairrl.types import Task

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["guides/rewards.md", "guides/tasks.md"])
def test_examples(page: str) -> None:
    result = doctest.testfile(str(DOCS / page), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert result.attempted >= 5
    assert result.failed == 0


def test_every_shipped_reward_has_a_row() -> None:
    table = (DOCS / "guides" / "rewards.md").read_text().partition("## All rewards")[2].partition("\n\nFormula")[0]
    assert {*re.findall(r"`(\w+)`", table)} >= {*SHIPPED, *PRESETS}


def test_the_table_of_fields_is_that_of_the_code() -> None:
    page = (DOCS / "guides" / "tasks.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", page.partition("## The schema of `jsonl`")[2], re.MULTILINE)
    known = jsonl._Task.model_fields
    documented = dict(rows[: len(known)])
    assert list(documented) == list(known)
    for name, default in documented.items():
        value = "required" if known[name].is_required() else known[name].default
        assert default.startswith("required" if name == "workspace" else default_text(value)), name


def default_text(value: object) -> str:
    if value == "required":
        return "required"
    return f"`{json.dumps(value)}`" if isinstance(value, str) else "none"


def test_a_line_has_the_fields_of_a_task() -> None:
    assert {field.name for field in fields(Task)} - set(jsonl._Task.model_fields) == {"verified"}
