"""The command line as a whole: help everywhere, completion, and ``make help``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from coderepairrl.assembly.names import check_names
from coderepairrl.cli import app
from coderepairrl.config import load, shipped

ROOT = Path(__file__).parents[2]
GROUPS = {str(group.name): group.typer_instance for group in app.registered_groups}
PARTS = ["", *(command.callback.__name__ for command in app.registered_commands if command.callback), *GROUPS]
PARTS += [f"{name} {command.name}" for name, group in GROUPS.items() for command in group.registered_commands]


@pytest.fixture(scope="module")
def built() -> Callable[[Sequence[str]], Any]:
    """The command line, built once: `CliRunner` builds it for each call, which takes it longer than the call."""
    return get_command(app)


@pytest.mark.parametrize("command", PARTS)
def test_short_help(command: str, built: Callable[[Sequence[str]], Any], capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("-h", "--help"):
        with pytest.raises(SystemExit) as ended:
            built([*command.split(), flag])
        assert not ended.value.code and "Usage:" in capsys.readouterr().out


def test_the_page_of_commands_has_them_all() -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    for command in PARTS[1:]:
        assert any(all(f"`{word}`" in row for word in command.split()) for row in rows), command


@pytest.mark.parametrize("preset", sorted(shipped()))
def test_all_that_shipped_configs_name_is_there(preset: str) -> None:
    check_names(load(preset))
