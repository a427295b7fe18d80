"""Counting what an agent did."""

from __future__ import annotations

from pathlib import Path

import pytest
from nano_play import DONE, patch, play, shell

from coderepairrl.agents.tools import MONITORED, command_names, count_tool_calls


@pytest.mark.parametrize(
    ("cmd", "names"),
    [
        ("ls -la", ("ls",)),
        ("cd src && LC_ALL=C /usr/bin/grep -rn 'cat | rm' . | head -5", ("cd", "grep", "head")),
        ("git status;sed -n 1,5p a.py", ("git", "sed")),
        ("ls\ncat x", ("ls", "cat")),
        ("echo 'never closed", ("echo",)),
        ("python -c 'import os; os.system(\"rm x\")'", ("python",)),
        ("a 1 2 3 4 5 6 7 8 9 && rm x", ("a",)),
        ("", ()),
    ],
)
def test_command_names(cmd: str, names: tuple[str, ...]) -> None:
    assert command_names(cmd) == names


async def test_tally_of_an_episode(tmp_path: Path) -> None:
    run = await play(
        tmp_path, shell("cat add.py | head -3"), shell("cat gone"), patch("add.py", "a - b", "a + b"), DONE
    )
    stats = count_tool_calls(run.report.tool_calls or ())
    assert stats.calls == {"shell": 2, "apply_patch": 1}
    assert (stats.rate("shell"), stats.rate("apply_patch"), stats.rate("other")) == (0.5, 1.0, None)
    assert stats.commands == {"cat": 2, "head": 1}
    assert len(MONITORED) == 25
