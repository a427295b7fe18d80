"""The documentation builds, its links and anchors lead somewhere, and it needs no network to be read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from markdown.extensions.toc import slugify

from workshop.docs.diagrams import DIAGRAMS

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
MENTION = re.compile(r"\bdocs/[\w/-]+\.(?:md|svg)")
LOADED = re.compile(r"<(?:script|img|link rel=\"?stylesheet)[^>]*(?:src|href)=\"?https?:[^>]*")
GENERATED = {ROOT / "docs" / "reference" / name for name in ("protocols.md", "types.md")}


def tracked(*patterns: str) -> list[Path]:
    names = subprocess.run(["git", "ls-files", "-z", "--", *patterns], cwd=ROOT, capture_output=True, check=True).stdout
    paths = [ROOT / name for name in names.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]  # one that was moved is listed until it is committed


def anchors(page: Path) -> set[str]:
    lines = FENCE.sub("", page.read_text()).splitlines()
    headings = [re.sub(r"[`*]", "", line.lstrip("# ")) for line in lines if line.startswith("#")]
    return {slugify(heading, "-") for heading in headings}


def broken(page: Path) -> list[str]:
    """Links of a page to files or headings that are not there."""
    found = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if target in GENERATED:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(f"{page.relative_to(ROOT)}: {link}")
    return found


def test_links_lead_somewhere() -> None:
    """In the repository as it is read there, so also in pages that are not of the site."""
    pages = tracked("*.md")
    assert len(pages) > 20
    assert [link for page in pages for link in broken(page)] == []


def test_the_overview_links_every_page() -> None:
    overview = ROOT / "docs" / "index.md"
    linked = {(overview.parent / link).resolve() for link in LINK.findall(overview.read_text())}
    assert [page.name for page in tracked("docs/*.md") if page != overview and page not in linked] == []


def test_pages_that_messages_and_comments_name_exist() -> None:
    sources = tracked("*.py", "*.toml", "*.sh", "*.def", "Makefile")
    named = {
        (path.relative_to(ROOT), mention)
        for path in sources
        for mention in MENTION.findall(path.read_text(errors="replace"))
        if path != Path(__file__)
    }
    assert len(named) > 30
    assert [each for each in named if not (ROOT / each[1]).exists()] == []


def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {str(page.relative_to(tmp_path / "site")): page.read_text() for page in (tmp_path / "site").rglob("*.html")}
    assert len(pages) > 20
    assert [found for text in pages.values() for found in LOADED.findall(text)] == []
    assert "--dry-run" in pages["reference/commands.html"]
    assert "SandboxBackend" in pages["reference/protocols.html"]
    assert "TokenSpan" in pages["reference/types.html"]


def test_diagrams_are_as_their_maker_draws_them() -> None:
    drawn = {path.stem: path.read_text() for path in (ROOT / "docs" / "pictures").glob("*.svg")}
    assert drawn == {name: draw().svg() for name, draw in DIAGRAMS.items()}


def test_prose_cites_no_notes_that_readers_do_not_have() -> None:
    cited = re.compile(r"\b(?:DESIGN|FINDINGS|REQUIREMENTS)\b(?: \d|\.md)")
    assert [page for page in tracked("*.md") if cited.search(page.read_text())] == []
