"""Names of the commands that a command line starts."""

from __future__ import annotations

import pytest

from coderepairrl.agents.tools import command_names


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
