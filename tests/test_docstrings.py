"""What docstrings show is what happens."""

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


def test_no_source_cites_notes_that_readers_do_not_have() -> None:
    """A reader of the repository has its docs and the papers: the reason or the paper is given instead."""
    notes = re.compile(r"\b(DESIGN|REQUIREMENTS|FINDINGS)\b")
    package = Path(coderepairrl.__file__).parent
    files = [path for path in package.rglob("*") if path.suffix in (".py", ".toml", ".md", ".sh", ".jinja")]
    assert len(files) > 200
    assert [str(path) for path in files if notes.search(path.read_text(encoding="utf-8"))] == []
