"""The one process of ours in a sandbox: it runs commands, reads and writes files, and lists changes.

It runs as a single file, `join_guest_source`, which containers compile at each start. So the modules use only
fast-loading parts of the standard library: ``json``, ``signal`` and ``socket`` would import ``re`` and ``enum``, half
of an episode's cost, so their C modules are used. It serves one socket, one request at a time.

Commands run under the same user id but must not control this process. In a private pid namespace it is pid 1, which no
signal from inside can stop; it is not dumpable; its socket is close-on-exec. Elsewhere (`LandlockGuest`) each command
has its own Landlock domain, which confines signals and tracing.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

PARTS = ("frames", "files", "service", "main")
"""Modules in import order; they share one namespace in the single file."""


@cache
def join_guest_source() -> str:
    """The concatenated modules, without imports of each other."""
    return "from __future__ import annotations\n\n" + "\n\n".join(map(_read_module, PARTS))


def _read_module(name: str) -> str:
    text = Path(__file__).with_name(f"{name}.py").read_text("utf-8")
    lines = text.splitlines(keepends=True)
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(("__future__", "coderepairrl.")):
            del lines[node.lineno - 1 : node.end_lineno]
    return "".join(lines)
