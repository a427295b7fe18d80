"""Examples in docstrings give what they show."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

import coderepairrl

ROOT = Path(coderepairrl.__file__).parent
SHOWN = sorted(
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if "handmade" not in path.parts and re.search(r"^ *>>> ", path.read_text(errors="replace"), re.MULTILINE)
)


@pytest.mark.parametrize("name", SHOWN)
def test_examples(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted and not found.failed
