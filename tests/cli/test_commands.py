"""The command line as a whole: help everywhere, completion, and ``make help``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coderepairrl.cli import app, main

ROOT = Path(__file__).parents[2]
GROUPS = {str(group.name): group.typer_instance for group in app.registered_groups}
PARTS = ["", *(command.callback.__name__ for command in app.registered_commands if command.callback), *GROUPS]
PARTS += [f"{name} {command.name}" for name, group in GROUPS.items() for command in group.registered_commands]


@pytest.mark.parametrize("command", PARTS)
def test_short_help(command: str) -> None:
    for flag in ("-h", "--help"):
        shown = CliRunner().invoke(app, [*command.split(), flag])
        assert shown.exit_code == 0 and "Usage:" in shown.stdout, shown.output


@pytest.mark.parametrize(("words", "expected"), [("crrl tr", "train"), ("crrl data ver", "verify")])
def test_completion(words: str, expected: str) -> None:
    """As bash asks for it."""
    asked = {"_CRRL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    script = "import sys; sys.argv[0] = 'crrl'; from coderepairrl.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, **asked}, capture_output=True, text=True)
    assert done.stdout.split() == [expected], done


def test_make_help() -> None:
    """Every target that a user may want, with what it does."""
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    for target in phony[1].split():
        assert re.search(rf"^{target} +\S", shown, re.MULTILINE), target
    assert max(map(len, shown.splitlines())) <= 120


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "coderepairrl.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() and main
