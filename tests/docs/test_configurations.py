"""Configurations and agents that the guides print whole, with the name of a file, are taken as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from coderepairrl.agents import make_agent
from coderepairrl.checks.agent import examine_agent
from coderepairrl.config import load_config
from coderepairrl.stages import jobs_file

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```toml title=\"([^\"]+)\"\n(.*?)^```", re.MULTILINE | re.DOTALL)
PRINTED = [
    (str(page.relative_to(DOCS)), body)
    for page in sorted(DOCS.rglob("*.md"))
    for title, body in BLOCK.findall(page.read_text())
    if title not in ("agent.toml", "study.toml", "recipe.toml")  # a recipe of an agent, jobs
]


@pytest.mark.parametrize(("page", "body"), PRINTED, ids=[page for page, _ in PRINTED])
def test_a_configuration_in_the_documentation_can_be_loaded(page: str, body: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(body)
    assert load_config(file).run.name == "mine", page


def test_the_jobs_in_the_documentation_and_the_examples_are_sound(tmp_path: Path) -> None:
    blocks = BLOCK.findall((DOCS / "guides" / "jobs.md").read_text())
    for title, body in blocks:
        (tmp_path / title).write_text(body)
    assert [title for title, _ in blocks] == ["recipe.toml", "study.toml"]
    for path in (*tmp_path.glob("*.toml"), *(DOCS.parent / "examples" / "jobs").glob("*.toml")):
        assert [job.config().run.seed for job in jobs_file.read_jobs_file(str(path)).jobs if job.kind != "command"]


async def test_the_agent_in_the_documentation_passes_its_exam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (DOCS / "guides" / "agents.md").read_text()
    [code] = re.findall(r"^```python title=\"one_shell.py\"\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "one_shell.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    findings = await examine_agent(make_agent("one_shell:OneShell"))
    assert len(findings) > 10 and [finding for finding in findings if not finding.ok] == []


def test_where_things_are() -> None:
    table = (DOCS / "guides" / "concepts.md").read_text().partition("## Where things are")[2]
    named = re.findall(r"`([a-z_]+/(?:[a-z_]+/)?(?:[a-z_]+\.py)?)`", table)
    assert len(named) > 12
    roots = (DOCS.parent, DOCS.parent / "src" / "coderepairrl")
    assert [path for path in named if not any((root / path).exists() for root in roots)] == []
