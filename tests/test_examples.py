"""Every worked example of every docstring is true."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

import coderepairrl

ROOT = Path(coderepairrl.__file__).parent
EXAMPLE = re.compile(r"^ *>>> ", re.MULTILINE)


def with_examples() -> list[str]:
    names = []
    for path in sorted(ROOT.rglob("*.py")):
        if EXAMPLE.search(path.read_text(errors="replace")) and "handmade/" not in str(path.relative_to(ROOT)):
            module = ".".join(("coderepairrl", *path.relative_to(ROOT).with_suffix("").parts))
            names.append(module.removesuffix(".__init__"))
    return names


@pytest.mark.parametrize("name", with_examples())
def test_worked_examples(name: str) -> None:
    done = doctest.testmod(importlib.import_module(name))
    assert done.attempted > 0
    assert done.failed == 0
