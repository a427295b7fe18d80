"""Configurations that the guides print whole, with the name of a file, are taken as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from coderepairrl.config import load
from coderepairrl.stages import pipeline, study

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```toml title=\"([^\"]+)\"\n(.*?)^```", re.MULTILINE | re.DOTALL)
PRINTED = [
    (str(page.relative_to(DOCS)), body)
    for page in sorted(DOCS.rglob("*.md"))
    for title, body in BLOCK.findall(page.read_text())
    if title not in ("agent.toml", "study.toml", "recipe.toml")  # a recipe of an agent, a study, a pipeline
]


@pytest.mark.parametrize(("page", "body"), PRINTED, ids=[page for page, _ in PRINTED])
def test_a_configuration_in_the_documentation_can_be_loaded(page: str, body: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(body)
    assert load(file).run.name == "mine", page


def test_the_study_in_the_documentation_is_sound(tmp_path: Path) -> None:
    [(_, body)] = BLOCK.findall((DOCS / "guides" / "study.md").read_text())
    (tmp_path / "study.toml").write_text(body)
    made = study.read(str(tmp_path / "study.toml"))
    assert [job.config().run.name for job in made.jobs()] and len(made.questions) == 2


def test_the_pipelines_in_the_documentation_and_the_examples_are_sound(tmp_path: Path) -> None:
    [(_, body)] = BLOCK.findall((DOCS / "guides" / "pipeline.md").read_text())
    (tmp_path / "recipe.toml").write_text(body)
    for path in (tmp_path / "recipe.toml", *(DOCS.parent / "examples" / "pipeline").glob("*.toml")):
        assert [step.config().run.seed for step in pipeline.read(str(path)).steps]
