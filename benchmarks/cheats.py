"""Plays every cheat against the graders, in the sandbox: ``python benchmarks/cheats.py`` prints a Markdown table.

Plays those of `tests/grading/cheats.py`, each with every runner whose exit code it fools, and tasks of two commands
where the first prepares the second. A row says how a cheat is graded and, as a positive control, whether it passes by
the exit code alone.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import pytest

from coderepairrl import sandbox
from coderepairrl.grading import grade_apart
from coderepairrl.grading.reports import PARSERS, find_failed_tests
from coderepairrl.protocols import SandboxBackend
from coderepairrl.types import Task
from grading import cheats, test_attacks, test_limits
from rewards.folder import Repository


class Play(NamedTuple):
    """A cheat as a patch of a task."""

    runner: str
    name: str
    task: Task
    patch: bytes


def list_plays(folder: Path) -> Iterator[Play]:
    """Every cheat with every runner, after the two controls of each task."""

    def repository(kind: str) -> Repository:
        place = folder / kind.replace(" ", "-")
        place.mkdir()
        return Repository(place)

    for kind in test_attacks.COMMANDS:
        repo = repository(kind)
        task = test_attacks.made(repo, kind)
        yield from list_controls(kind, task, repo)
        for played, name in test_attacks.PLAYED:
            if played == kind:
                yield Play(kind, name, task, test_attacks.cheat(repo, name))
    for end, names in test_attacks.ENDED.items():
        repo = repository(f"script that ends by {end}")
        task = test_attacks.script(repo, end)
        yield from list_controls(f"script, `{end}`", task, repo)
        for name in names:
            yield Play(f"script, `{end}`", name, task, repo.edit(cheats.SCRIPT[name]))
    for ending in ("mjs", "cjs") if shutil.which("node") else ():
        repo = repository(f"node with {ending}")
        task = test_attacks.made_of_names(repo, ending)
        yield from list_controls(f"node, {ending}", task, repo)
        for played, name in test_attacks.SPOKEN:
            if played == ending:
                yield Play(f"node, {ending}", name, task, test_attacks.spoken(repo, ending, name))
    if shutil.which("javac"):
        repo = repository("junit")
        task = test_attacks.made_for_junit(repo)
        yield from list_controls("JUnit 4", task, repo)
        for name, text in cheats.JUNIT.items():
            yield Play("JUnit 4", name, task, repo.edit({"programs/Clamp.java": text}))
    for name in test_limits.PREPARED:
        repo = repository(f"prepares {name}")
        task, patch = test_limits.prepared(repo, name)
        yield from list_controls("two commands", task, repo)
        yield Play("two commands", f"the first writes {name}", task, patch)


def list_controls(runner: str, task: Task, repo: Repository) -> Iterator[Play]:
    """The reference, and a patch that repairs nothing."""
    yield Play(runner, "the reference", task, task.reference)
    yield Play(runner, "nothing", task, repo.edit({"nothing.txt": b""}))


async def row(play: Play, backend: SandboxBackend) -> str:
    """Grade a cheat, also by exit codes alone, and format both as a row."""
    passed = not (await grade_apart(backend, play.task, play.patch)).problem
    async with backend.open(play.task) as fresh:
        await fresh.exec(["git", "apply", "-"], stdin=play.patch)
        for path, text in play.task.checks.restore.items():
            await fresh.write(path, text.encode(), follow=False)
        ended = [await fresh.exec(each.argv, stdin=b"word\n") for each in play.task.checks.commands]
        alone = all(each.ok for each in ended)
        if play.runner.startswith("node"):  # its tests are named: its output decides
            alone = not find_failed_tests(PARSERS["node"](ended[0].output.decode()), play.task.checks.named)
    words = ("fails", "passes")
    earned = words[passed] if passed == (play.name == "the reference") else f"**{words[passed]}**"
    return f"| {play.runner} | {play.name} | {words[alone]} | {earned} |"


async def main() -> None:
    """Print the table."""
    packages = str(Path(pytest.__file__).parents[1])
    env = {"PYTHONPATH": packages, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    backend = sandbox.make_backend("bwrap", binds=(packages,), env=env)
    print("| runner | a patch that | by the exit code alone | graded |\n|---|---|---|---|")
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    try:
        for play in list_plays(folder):
            commands = tuple(replace(each, timeout=120.0) for each in play.task.checks.commands)
            checks = replace(play.task.checks, commands=commands)
            print(await row(play._replace(task=replace(play.task, checks=checks)), backend), flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    asyncio.run(main())
