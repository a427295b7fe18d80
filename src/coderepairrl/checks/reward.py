"""Exam of rewards (``crrl check reward NAME``)."""

from __future__ import annotations

import math
from pathlib import Path

from coderepairrl.processes.scratch import scratch
from coderepairrl.protocols import Reward, SandboxBackend
from coderepairrl.registry import Finding
from coderepairrl.rewards import make_patched_episode
from coderepairrl.tasks.patches import format_diff
from coderepairrl.types import Checks, Command, Task

_SOURCE = '''"""Limits."""


def clamp(value, low, high):
    if value < low:
        return low
    if value > high:
        return low
    return value
'''
_CHECK = """import unittest

from limits import clamp


class Clamp(unittest.TestCase):
    def test_high(self):
        self.assertEqual(clamp(10, 0, 9), 9)

    def test_low(self):
        self.assertEqual([clamp(n, 0, 9) for n in (-1, 5)], [0, 5])
"""
_CHECKS = Checks(
    (Command(("python3", "-m", "unittest", "check"), results="unittest"),),
    {"check.py": _CHECK},
    ("check.Clamp.test_high",),
    ("check.Clamp.test_low",),
)


def _make_line_patch(number: int, new: str) -> bytes:
    """Make a diff that replaces line `number` (from 1) by `new`."""
    lines = _SOURCE.splitlines(True)
    return format_diff("limits.py", _SOURCE, "".join([*lines[: number - 1], new, *lines[number:]]))


_ORACLE = _make_line_patch(8, "        return high\n")
_NOOPS = {
    "a blank line": _make_line_patch(8, "        return low\n\n"),
    "a comment": _make_line_patch(8, "        # the upper limit\n        return low\n"),
    "a comment on the right line": _make_line_patch(8, "        return low  # the upper limit\n"),
    "white space on the right line": _make_line_patch(8, "        return  low\n"),
}
_WRONG = {
    "junk on the right line": _make_line_patch(8, "        raise KeyError\n"),
    "junk on another line": _make_line_patch(9, "    raise KeyError\n"),
}


async def examine_reward(reward: Reward, sandbox: SandboxBackend) -> list[Finding]:
    """Check properties that every reward must have, on a small repository with a bug.

    The reference earns 1, an empty patch and meaningless edits 0, junk less than 1; values lie in
    [0, 1] and repeat. Raises `RewardFault`.
    """
    with scratch("exam") as folder:
        workspace = Path(folder, "limits")
        workspace.mkdir(mode=0o755)
        Path(folder).chmod(0o755)  # a sandbox may read it as another user
        (workspace / "limits.py").write_text(_SOURCE)
        task = Task("exam/clamp", "clamp(10, 0, 9) is 0.", "python", f"dir:{workspace}", _ORACLE, _CHECKS)

        async def value(patch: bytes) -> float:
            return (await reward(task, make_patched_episode(task, patch), sandbox)).value

        oracle, repeated, empty = await value(_ORACLE), await value(_ORACLE), await value(b"")
        noops = {name: await value(patch) for name, patch in _NOOPS.items()}
        wrong = {name: await value(patch) for name, patch in _WRONG.items()}
    values = (oracle, empty, *noops.values(), *wrong.values())
    return [
        Finding("the reference earns 1", oracle == 1.0, f"{oracle:g}"),
        Finding("an empty patch earns 0", empty == 0.0, f"{empty:g}"),
        *(Finding(f"{name} earns 0", v == 0.0, f"{v:g}") for name, v in noops.items()),
        *(Finding(f"{name} earns less than the reference", v < oracle, f"{v:g}") for name, v in wrong.items()),
        Finding("values lie in [0, 1]", all(math.isfinite(v) and 0.0 <= v <= 1.0 for v in values), f"{values}"),
        Finding("the same patch earns the same", oracle == repeated, f"{oracle:g}, then {repeated:g}"),
    ]
