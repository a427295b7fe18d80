"""Configurations that the guides print whole, with the name of a file, are taken as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from coderepairrl.config import load

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```toml title=\"([^\"]+)\"\n(.*?)^```", re.MULTILINE | re.DOTALL)
PRINTED = [
    (str(page.relative_to(DOCS)), body)
    for page in sorted(DOCS.rglob("*.md"))
    for title, body in BLOCK.findall(page.read_text())
    if title != "agent.toml"  # a recipe
]


@pytest.mark.parametrize(("page", "body"), PRINTED, ids=[page for page, _ in PRINTED])
def test_a_configuration_in_the_documentation_can_be_loaded(page: str, body: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(body)
    assert load(file).run.name == "mine", page
