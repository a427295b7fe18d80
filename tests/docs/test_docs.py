"""The documentation builds, its links lead somewhere, and what it prints works: commands, configurations, examples."""

from __future__ import annotations

import doctest
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import fields
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from markdown.extensions.toc import slugify
from typer._click.exceptions import MissingParameter, UsageError
from typer.core import TyperGroup
from typer.main import get_command

from coderepairrl.agents import make_agent
from coderepairrl.checks.agent import examine_agent
from coderepairrl.checks.redteam import list_attacks
from coderepairrl.cli import app
from coderepairrl.config import load_config
from coderepairrl.config.schema import Config
from coderepairrl.rewards import PRESETS, SHIPPED
from coderepairrl.stages import jobs_file
from coderepairrl.tasks import jsonl
from coderepairrl.types import Task
from workshop.docs.diagrams import DIAGRAMS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
MENTION = re.compile(r"\bdocs/[\w/-]+\.(?:md|svg)")
LOADED = re.compile(r"<(?:script|img|link rel=\"?stylesheet)[^>]*(?:src|href)=\"?https?:[^>]*")
GENERATED = {ROOT / "docs" / "reference" / name for name in ("protocols.md", "types.md")}


def list_tracked_files(*patterns: str) -> list[Path]:
    names = subprocess.run(["git", "ls-files", "-z", "--", *patterns], cwd=ROOT, capture_output=True, check=True).stdout
    paths = [ROOT / name for name in names.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]  # one that was moved is listed until it is committed


def list_anchors(page: Path) -> set[str]:
    lines = FENCE.sub("", page.read_text()).splitlines()
    headings = [re.sub(r"[`*]", "", line.lstrip("# ")) for line in lines if line.startswith("#")]
    return {slugify(heading, "-") for heading in headings}


def find_broken_links(page: Path) -> list[str]:
    """Links of a page to files or headings that are not there."""
    found = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if target in GENERATED:
            continue
        if not target.exists() or (anchor and anchor not in list_anchors(target)):
            found.append(f"{page.relative_to(ROOT)}: {link}")
    return found


def test_links_lead_somewhere() -> None:
    """Also in pages outside the site, which are read in the repository."""
    pages = list_tracked_files("*.md")
    assert len(pages) > 20
    assert [link for page in pages for link in find_broken_links(page)] == []


def test_the_overview_links_every_page() -> None:
    overview = ROOT / "docs" / "index.md"
    linked = {(overview.parent / link).resolve() for link in LINK.findall(overview.read_text())}
    assert [page.name for page in list_tracked_files("docs/*.md") if page != overview and page not in linked] == []


def test_pages_that_messages_and_comments_name_exist() -> None:
    sources = list_tracked_files("*.py", "*.toml", "*.sh", "*.def", "Makefile")
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


def test_pages_and_sources_cite_no_notes_that_readers_do_not_have() -> None:
    name = r"\b(?:DESIGN|FINDINGS|REQUIREMENTS)\b"
    for cited, files in ((name, list_tracked_files("src/*")), (rf"{name}(?: \d|\.md)", list_tracked_files("*.md"))):
        assert [path for path in files if re.search(cited, path.read_text(errors="replace"))] == []


COMMAND = re.compile(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*crrl (.*)")
SPAN = re.compile(r"`(crrl [^`]+)`")


def find_commands(page: Path) -> list[tuple[str, bool]]:
    """Arguments of `crrl` on a page, and whether they are a command to type, not the mention of one in a sentence."""
    text = page.read_text()
    typed = [line for block in FENCE.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    lines = [(line, True) for line in typed] + [(span, False) for span in SPAN.findall(FENCE.sub("", text))]
    return [(found[1], whole) for line, whole in lines if (found := COMMAND.match(line.strip()))]


def explain_refusal(words: str, group: Any, *, whole: bool) -> str:
    """Why `crrl` does not take `words` of a shell; a mention may leave arguments out."""
    lexer = shlex.shlex(words, posix=True, punctuation_chars="|&;<>()")
    lexer.whitespace_split, lexer.commenters = True, "#"
    arguments: list[str] = []
    for word in lexer:
        if not set(word) - set("|&;<>()"):
            break
        arguments.append(word)
    while isinstance(group, TyperGroup) and arguments and not arguments[0].startswith("-"):
        if arguments[0].isupper():  # crrl COMMAND -h
            return ""
        name = arguments.pop(0)
        if (command := group.commands.get(name)) is None:
            return f"no command {name}"
        group = command
    if isinstance(group, TyperGroup) or {"-h", "--help"} & {*arguments}:
        return ""
    try:
        group.make_context("crrl", arguments)
    except MissingParameter as error:
        return str(error) if whole else ""
    except UsageError as error:
        return error.message
    return ""


def test_every_command_on_the_pages_is_one() -> None:
    """Its name, its options and its required arguments; those of the tutorials are run."""
    root = get_command(app)
    commands = [(page, *each) for page in list_tracked_files("README.md", "docs/*.md") for each in find_commands(page)]
    assert len(commands) > 300
    wrong = [
        (page.name, words, why) for page, words, whole in commands if (why := explain_refusal(words, root, whole=whole))
    ]
    assert wrong == []


BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def play_page(page: str, folder: Path) -> str:
    """Write the files of a page and run its commands; what they print."""
    printed = []
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for language, title, body in BLOCK.findall((DOCS / "start" / page).read_text()):
        if title:
            file = folder / title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(body)
        elif language == "sh":
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", body],
                cwd=folder,
                env={**os.environ, "PATH": path},
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, f"{body}\n{done.stdout}\n{done.stderr}"
            printed.append(done.stdout)
    return "\n".join(printed)


@pytest.mark.timeout(900)
def test_hello(tmp_path: Path, isolating: None) -> None:
    play_page("hello.md", tmp_path)
    assert "train-00001-000-04" in (tmp_path / "episode.html").read_text()
    assert (tmp_path / "runs" / "short" / "report" / "index.html").is_file()


@pytest.mark.timeout(900)
def test_repository_then_agent_and_reward(tmp_path: Path, isolating: None) -> None:
    printed = play_page("repository.md", tmp_path)
    assert "+    return price - price * rate // 100" in (tmp_path / "fix.patch").read_text()
    assert " 0 failed" in printed
    printed = play_page("agent-and-reward.md", tmp_path)
    assert "+    return price - price * rate // 100" in printed
    assert "as expected" in printed
    assert "small" in (tmp_path / "runs" / "own" / "metrics.jsonl").read_text()


TOML = re.compile(r"^```toml(?: title=\"([^\"]+)\")?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_configurations_in_the_documentation_can_be_loaded(tmp_path: Path) -> None:
    """Every TOML block that is one, and no recipe of an agent or jobs: with the name of a file, it is a whole one."""
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    blocks = [each for page in pages for each in TOML.findall(page.read_text())]
    found = [(title, body) for title, body in blocks if tomllib.loads(body).keys() <= {*Config.model_fields, "extends"}]
    assert len(found) >= 7 and {title for title, _ in found} == {"", "mine.toml"}
    for title, body in found:
        (tmp_path / "documented.toml").write_text(body)
        config = load_config(tmp_path / "documented.toml", [] if title else ["run.name=documented"])
        assert config.run.name == ("mine" if title else "documented")


def test_the_jobs_in_the_documentation_and_the_examples_are_sound(tmp_path: Path) -> None:
    blocks = TOML.findall((DOCS / "guides" / "jobs.md").read_text())
    for title, body in filter(itemgetter(0), blocks):
        (tmp_path / title).write_text(body)
    assert [title for title, _ in blocks if title] == ["recipe.toml", "study.toml"]
    for path in (*tmp_path.glob("*.toml"), *(DOCS.parent / "examples" / "jobs").glob("*.toml")):
        assert [job.config().run.seed for job in jobs_file.read_jobs_file(str(path)).jobs if job.kind != "command"]


@pytest.mark.parametrize(("page", "least"), [("rewards.md", 5), ("tasks.md", 5), ("library.md", 4)])
def test_examples(page: str, least: int) -> None:
    result = doctest.testfile(str(DOCS / "guides" / page), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert result.attempted >= least
    assert result.failed == 0


async def test_the_agent_in_the_documentation_passes_its_exam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (DOCS / "guides" / "agents.md").read_text()
    [code] = re.findall(r"^```python title=\"one_shell.py\"\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "one_shell.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    findings = await examine_agent(make_agent("one_shell:OneShell"))
    assert len(findings) > 10 and [finding for finding in findings if not finding.ok] == []


def test_every_shipped_reward_has_a_row() -> None:
    table = (DOCS / "guides" / "rewards.md").read_text().partition("## All rewards")[2].partition("\n\nFormula")[0]
    assert {*re.findall(r"`(\w+)`", table)} >= {*SHIPPED, *PRESETS}


def test_the_pages_count_the_attacks_of_the_code() -> None:
    table = re.findall(
        r"^\| (\w+) \| [^|]* \| (\d+) \|", (DOCS / "measurements" / "redteam.md").read_text(), re.MULTILINE
    )
    attacks = list_attacks()
    families = {attack.family for attack in attacks}
    measured = sum(int(count) for name, count in table if name in families)
    counts = re.compile(r"\[(\d+) attacks\]\(\S*redteam.md\).*?tried on (?:it|.*?, (\d+) of them)")
    [readme], [guide] = (
        counts.findall(page.read_text()) for page in (ROOT / "README.md", DOCS / "guides" / "sandbox.md")
    )
    assert (readme, guide) == ((str(len(attacks)), ""), (str(len(attacks)), str(measured)))


def test_the_table_of_fields_is_that_of_the_code() -> None:
    page = (DOCS / "guides" / "tasks.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", page.partition("## The schema of `jsonl`")[2], re.MULTILINE)
    known = jsonl._Task.model_fields
    documented = dict(rows[: len(known)])
    assert list(documented) == list(known)
    for name, default in documented.items():
        value = "required" if known[name].is_required() else known[name].default
        assert default.startswith("required" if name == "workspace" else format_default(value)), name


def format_default(value: object) -> str:
    if value == "required":
        return "required"
    return f"`{json.dumps(value)}`" if isinstance(value, str) else "none"


def test_a_line_has_the_fields_of_a_task() -> None:
    assert {field.name for field in fields(Task)} - set(jsonl._Task.model_fields) == {"verified"}
