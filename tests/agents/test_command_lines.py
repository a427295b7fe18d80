"""A command line is for every user of the machine to read (``ps``): no recipe's has the episode's key in it."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from programs import sandbox_or_skip

from coderepairrl.agents.command import Program
from coderepairrl.agents.recipe import Install, Recipe, list_recipes, load_recipe
from coderepairrl.types import Endpoint, Task

KEY = secrets.token_hex(16)
URL = f"http://127.0.0.1:1/s/{KEY}/v1"
IN_VIEW = Recipe(("program", "--api-base", "{base_url}"))


def list_command_lines() -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield path.read_bytes().decode(errors="replace")


async def run_stand_in(recipe: Recipe) -> tuple[list[str], str]:
    """The command lines of the host while a stand-in runs in the program's place, and what the stand-in was given."""
    argv = ("sh", "{home}/stand-in", *recipe.argv[1:])
    script = 'env; find "$HOME" -type f -exec cat {} +; sleep 0.5; exit 0\n'
    agent = Program("x", replace(recipe, install=Install(), argv=argv, files={**recipe.files, "stand-in": script}))
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder, closing(sandbox_or_skip(agent)) as backend:
        Path(folder).chmod(0o755)
        (Path(folder) / "repo").mkdir()
        task = Task("toy", "Repair it.", "python", f"dir:{folder}/repo", b"")
        async with backend.open(task) as box:
            running = asyncio.create_task(agent.run(task, box, Endpoint(URL, KEY, "policy")))
            while not running.done():
                lines += [line for line in list_command_lines() if "/stand-in" in line or KEY in line]
                await asyncio.sleep(0.05)
            return lines, (await running).log


@pytest.mark.parametrize("name", list_recipes())
async def test_no_shipped_recipe_shows_its_key(name: str) -> None:
    lines, printed = await run_stand_in(load_recipe(name))
    assert lines and not [line for line in lines if KEY in line]
    assert KEY in printed, "the program has it all the same"


async def test_a_key_among_the_arguments_would_be_seen() -> None:
    lines, _ = await run_stand_in(IN_VIEW)
    assert [line for line in lines if KEY in line]
