"""The one process that lives in a sandbox: it runs commands, reads and writes files, and lists what changed.

It is run there as one file, `source`, which is compiled by the interpreter inside whenever a sandbox opens. So its
parts, the modules here, use the standard library only, and of that what loads fast: the modules in C behind ``json``,
``signal`` and ``socket``, for those import ``re`` and ``enum``, which take longer than the interpreter itself, and so
half of an episode's cost. It serves requests from one inherited socket, one after another.

Trust: commands run under the same user id as this process, so it must be out of their reach. In a pid namespace
of its own it is pid 1, which no signal from inside can stop; it is not dumpable, so ``/proc/1/mem`` and
``/proc/1/fd`` are closed to them; the socket is close-on-exec, so no command ever holds it. Without one (`Confined`)
every command starts in a Landlock domain of its own, from which neither signals nor traces lead out.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

PARTS = ("kernel", "frames", "limits", "files", "walk", "service", "confined", "forked", "main")
"""Each after those that it imports; in the one file their names share a namespace."""


@cache
def source() -> str:
    """The parts one after another, without what they import of each other."""
    return "from __future__ import annotations\n\n" + "\n\n".join(map(_part, PARTS))


def _part(name: str) -> str:
    text = Path(__file__).with_name(f"{name}.py").read_text("utf-8")
    lines = text.splitlines(keepends=True)
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(("__future__", "coderepairrl.")):
            del lines[node.lineno - 1 : node.end_lineno]
    return "".join(lines)
